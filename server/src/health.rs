//! Asks a server on this machine whether it is ready: the health check for container images without a shell.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cli::HealthArgs;

/// Time limit for connecting, and for each read.
const PATIENCE: Duration = Duration::from_secs(2);

/// Fails, with the reason, unless the server answers `/ready` with status 200.
pub(crate) fn check(args: &HealthArgs) -> Result<()> {
    let target = reachable(match args.admin() {
        Some(admin) => first(admin).with_context(|| format!("--admin-addr {admin} must be ADDRESS:PORT"))?,
        None => first((args.host.as_str(), args.port)).with_context(|| format!("--host {} is unknown", args.host))?,
    });
    let asked = || format!("the server at {target} does not answer");
    let mut socket = TcpStream::connect_timeout(&target, PATIENCE).with_context(asked)?;
    socket.set_read_timeout(Some(PATIENCE)).with_context(asked)?;
    socket.write_all(b"GET /ready HTTP/1.0\r\nhost: localhost\r\n\r\n").with_context(asked)?;
    let mut answer = Vec::new();
    // The first line is enough, and the rest is short.
    socket.take(4096).read_to_end(&mut answer).with_context(asked)?;
    let answer = String::from_utf8_lossy(&answer);
    match answer.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1)) {
        Some("200") => Ok(()),
        Some(status) => bail!("the server at {target} is not ready: status {}", status.escape_default()),
        None => bail!("the server at {target} does not speak HTTP; if it uses TLS, give it an --admin-addr"),
    }
}

fn first(address: impl ToSocketAddrs) -> std::io::Result<SocketAddr> {
    address.to_socket_addrs()?.next().ok_or_else(|| std::io::Error::other("the name has no address"))
}

/// Replaces an address that means all interfaces by the loopback address.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(of) if of.ip().is_unspecified() => address.set_ip([127, 0, 0, 1].into()),
        SocketAddr::V6(of) if of.ip().is_unspecified() => address.set_ip([0, 0, 0, 0, 0, 0, 0, 1].into()),
        _ => {}
    }
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_interfaces_are_reached_on_the_loopback_one() {
        for (given, asked) in [
            ("0.0.0.0:9090", "127.0.0.1:9090"),
            ("[::]:9090", "[::1]:9090"),
            ("10.0.0.7:80", "10.0.0.7:80"),
            ("127.0.0.1:8080", "127.0.0.1:8080"),
        ] {
            assert_eq!(reachable(given.parse().unwrap()), asked.parse().unwrap(), "{given}");
        }
    }
}
