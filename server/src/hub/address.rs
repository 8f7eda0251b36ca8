//! URLs of the hub: following redirects, recognizing this machine, and showing URLs without secrets.

use url::{Host, Url};

use super::name::shown;

/// Returns a URL without its possible secrets: the query and the password.
pub(super) fn public(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    // This fails only for URLs that cannot have a password.
    let _ = url.set_username("").and_then(|()| url.set_password(None));
    url.to_string()
}

/// Returns whether a URL points to this machine.
pub(super) fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    }
}

/// Returns the target of a redirect, if it may be followed.
pub(super) fn redirected(endpoint: &Url, from: &Url, location: &str) -> Result<Url, String> {
    let mut to = from.join(location).map_err(|error| format!("it redirects to what is no address: {error}"))?;
    let secure = endpoint.scheme() == "https" || from.scheme() == "https";
    if !to.has_host() || !(to.scheme() == "https" || to.scheme() == "http" && !secure) {
        return Err(format!("it redirects to {:?}, which is not secure", shown(&public(&to))));
    }
    // Otherwise, they would be sent as credentials.
    if to.set_username("").and_then(|()| to.set_password(None)).is_err() {
        return Err(format!("it redirects to {:?}", shown(&public(&to))));
    }
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn an_address_may_be_this_machine() {
        for (address, own) in [
            ("http://127.0.0.1:9", true),
            ("http://[::1]:9/hub", true),
            ("http://localhost", true),
            ("http://localhost.example", false),
            ("http://10.0.0.1", false),
            ("https://huggingface.co", false),
        ] {
            assert_eq!(is_loopback(&url(address)), own, "{address}");
        }
    }

    #[test]
    fn a_redirect_stays_as_secure_as_the_hub() {
        let (secure, plain) = (url("https://hub.example/a"), url("http://127.0.0.1:9/a"));
        let to = |from: &Url, location: &str| redirected(from, from, location).map(|url| url.to_string());
        assert_eq!(to(&secure, "/b?c").unwrap(), "https://hub.example/b?c");
        assert_eq!(to(&secure, "https://cdn.example/b").unwrap(), "https://cdn.example/b");
        assert_eq!(to(&secure, "//me:word@cdn.example/b").unwrap(), "https://cdn.example/b", "no password");
        assert_eq!(to(&plain, "http://other.example/b").unwrap(), "http://other.example/b");
        assert_eq!(to(&plain, "https://other.example/b").unwrap(), "https://other.example/b");
        for location in ["http://hub.example/b", "http://cdn.example/b?secret", "file:///etc/passwd", "ftp://a/b"] {
            let error = to(&secure, location).unwrap_err();
            assert!(error.ends_with("which is not secure") && !error.contains("?secret"), "{error}");
        }
        // A detour by way of another server is no exception.
        assert!(redirected(&plain, &secure, "http://127.0.0.1:9/b").is_err());
        assert!(redirected(&secure, &plain, "http://127.0.0.1:9/b").is_err());
        for location in ["https://", "https://cdn.example:x/b?secret", "http://a:secret@cdn.example/b"] {
            let error = to(&secure, location).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn an_address_is_shown_without_what_may_be_secret() {
        assert_eq!(public(&url("https://me:secret@a.example/b?secret#secret")), "https://a.example/b");
    }
}
