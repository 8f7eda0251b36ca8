//! The host names that the server accepts. A page of another site can point its own name at this machine (DNS
//! rebinding). The browser then takes the server for a part of that site, but still sends the site's name as the host.

use std::net::IpAddr;
use std::str::FromStr;

use axum::http::uri::Authority;

/// A host name in lower case, without a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostName(String);

/// The text is not a host name.
#[derive(Debug, thiserror::Error)]
#[error("must be a host name such as tidegate.example.org, without a scheme, a port and a path")]
pub struct HostNameError;

impl FromStr for HostName {
    type Err = HostNameError;

    fn from_str(text: &str) -> Result<Self, HostNameError> {
        let text = text.trim();
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_[]:".contains(c);
        match text.parse::<Authority>() {
            Ok(authority) if authority.host() == text && text.chars().all(plain) => Ok(Self(comparable(text))),
            _ => Err(HostNameError),
        }
    }
}

/// The hosts that one listener accepts. The default has no restriction.
#[derive(Clone, Debug, Default)]
pub struct AllowedHosts {
    names: Vec<HostName>,
    bound: Option<IpAddr>,
}

impl AllowedHosts {
    /// Creates the hosts of a listener bound to `bound`, with further `names`.
    pub fn new(names: Vec<HostName>, bound: IpAddr) -> Self {
        Self { names, bound: Some(bound.to_canonical()) }
    }

    /// Returns the same names for a listener bound to another address.
    pub(in crate::api) fn bound_to(&self, bound: IpAddr) -> Self {
        Self::new(self.names.clone(), bound)
    }

    /// Whether some hosts are refused. Without names, only a loopback address without API keys needs this: a page that
    /// reached any other address by rebinding could reach it directly, and with API keys a page without one gets
    /// nothing.
    pub(super) fn restricted(&self, has_keys: bool) -> bool {
        !self.names.is_empty() || (!has_keys && self.bound.is_some_and(|bound| bound.is_loopback()))
    }

    /// Whether a request to `authority`, a host with or without a port, is accepted if hosts are restricted.
    pub(super) fn allows(&self, authority: &str) -> bool {
        let Ok(authority) = authority.parse::<Authority>() else { return false };
        let host = comparable(authority.host());
        match host.parse::<IpAddr>() {
            Ok(address) => self.allows_address(address.to_canonical()),
            Err(_) => host == "localhost" || self.names.iter().any(|name| name.0 == host),
        }
    }

    fn allows_address(&self, address: IpAddr) -> bool {
        // A server that is bound to all interfaces does not know its own addresses. Rebinding needs a name, so all
        // addresses are accepted.
        let own = self.bound.is_some_and(|bound| bound == address || bound.is_unspecified());
        own || address.is_loopback() || self.names.iter().any(|name| name.0 == address.to_string())
    }
}

/// Converts a host to lower case, without the brackets of an IPv6 address and the dot that ends a fully qualified name.
fn comparable(host: &str) -> String {
    let host = host.trim_matches(['[', ']']);
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(bound: &str, names: &[&str]) -> AllowedHosts {
        AllowedHosts::new(names.iter().map(|name| name.parse().unwrap()).collect(), bound.parse().unwrap())
    }

    #[test]
    fn only_host_names_parse() {
        for name in ["localhost", "Tide.example.org", "10.0.0.7", "[::1]", "under_score"] {
            assert!(name.parse::<HostName>().is_ok(), "{name}");
        }
        for other in ["", "a:80", "http://a", "a/b", "user@a", "a b", "*"] {
            assert!(other.parse::<HostName>().is_err(), "{other}");
        }
    }

    #[test]
    fn hosts_are_restricted_on_loopback_without_keys_and_where_names_are_given() {
        for (bound, names, has_keys, restricted) in [
            ("127.0.0.1", &[][..], false, true),
            ("::1", &[], false, true),
            ("::ffff:127.0.0.1", &[], false, true),
            ("127.0.0.1", &[], true, false),
            ("0.0.0.0", &[], false, false),
            ("192.0.2.7", &[], false, false),
            ("192.0.2.7", &["tide.example"], true, true),
        ] {
            assert_eq!(hosts(bound, names).restricted(has_keys), restricted, "{bound} {names:?} {has_keys}");
        }
        assert!(!AllowedHosts::default().restricted(false));
    }

    #[test]
    fn loopback_the_bound_address_and_the_names_are_allowed() {
        let local = hosts("127.0.0.5", &["tide.example"]);
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "localhost.",
            "127.0.0.1:8080",
            "127.9.9.9",
            "[::1]:8080",
            "Tide.Example:1",
            "[::ffff:127.0.0.1]",
        ] {
            assert!(local.allows(host), "{host}");
        }
        for host in
            ["", "evil.example", "evil.example:8080", "localhost.evil.example", "192.0.2.7", "[2001:db8::1]", "a b"]
        {
            assert!(!local.allows(host), "{host}");
        }
        assert!(hosts("192.0.2.7", &["tide.example"]).allows("192.0.2.7:80"));
        assert!(!hosts("192.0.2.7", &["tide.example"]).allows("192.0.2.8:80"));
        assert!(hosts("0.0.0.0", &["tide.example"]).allows("10.1.2.3:8080"));
        assert!(!hosts("0.0.0.0", &["tide.example"]).allows("evil.example"));
    }
}
