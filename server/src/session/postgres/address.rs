//! The address of the database: a URL, which may contain a password and is never printed.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, TargetSessionAttrs};
use url::form_urlencoded;

use super::tls::Tls;

/// Time limit of one attempt to connect.
pub(super) const CONNECT: Duration = Duration::from_secs(5);

/// How long sent bytes may remain unacknowledged, and roughly how long an idle connection may remain unanswered.
const SILENCE: Duration = Duration::from_secs(10);

/// The parsed URL of a database.
#[derive(Clone)]
pub struct PostgresUrl {
    pub(super) config: Config,
    pub(super) tls: Tls,
}

impl fmt::Debug for PostgresUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PostgresUrl")
    }
}

/// Shows the hosts and the database, without user and password.
impl fmt::Display for PostgresUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts = self.config.get_hosts().iter().map(|host| match host {
            Host::Tcp(name) => name.clone(),
            Host::Unix(path) => path.display().to_string(),
        });
        let hosts: Vec<_> = hosts.collect();
        write!(f, "postgres://{}/{}", hosts.join(","), self.config.get_dbname().unwrap_or_default())
    }
}

impl FromStr for PostgresUrl {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        const FORM: &str = "must be postgres://USER:PASSWORD@HOST:PORT/DATABASE";
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err(FORM.to_owned());
        }
        let (place, parameters) = url.split_once('?').unwrap_or((url, ""));
        let (mut roots, mut rest) = (None, Vec::new());
        // PostgreSQL's own programs support this parameter, but tokio-postgres does not.
        for parameter in parameters.split('&').filter(|parameter| !parameter.is_empty()) {
            match form_urlencoded::parse(parameter.as_bytes()).next() {
                Some((name, file)) if name == "sslrootcert" => roots = Some(PathBuf::from(file.into_owned())),
                _ => rest.push(parameter),
            }
        }
        let url = if rest.is_empty() { place.to_owned() } else { format!("{place}?{}", rest.join("&")) };
        let mut config: Config =
            url.parse().map_err(|error| format!("{FORM}: {}", super::failure::described(&error)))?;
        if config.get_hosts().is_empty() {
            return Err(format!("{FORM}: it names no host"));
        }
        config.application_name("tidegate");
        config.connect_timeout(CONNECT).tcp_user_timeout(SILENCE);
        config.keepalives(true).keepalives_idle(SILENCE / 2).keepalives_interval(SILENCE / 5).keepalives_retries(3);
        // After a failover, one of several hosts is a standby.
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        Ok(Self { config, tls: Tls::new(roots.as_deref())? })
    }
}

impl PostgresUrl {
    /// Returns whether a password would leave this machine.
    pub(super) fn sends_password(&self) -> bool {
        let is_local = |host: &Host| match host {
            Host::Tcp(name) => {
                name == "localhost" || name.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
            }
            Host::Unix(_) => true,
        };
        self.config.get_password().is_some() && !self.config.get_hosts().iter().all(is_local)
    }
}
