//! Requests to the hub. No answer of a server is trusted: redirects are limited, the token is sent only to the hub, and
//! answers are bounded in time and size.

use std::io::{ErrorKind, Read};
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tracing::info;
use ureq::config::Config;
use ureq::http::{HeaderMap, Response};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};
use url::Url;

use super::address::{is_loopback, public, redirected};
use super::error::HubError;
use super::name::{Commit, HubName};
use super::settings::{HubSettings, Patience, Settings, Token};

const MOST_REDIRECTS: usize = 5;
/// The longest pause that a server may ask for.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// A client of one hub.
pub(super) struct Client {
    agent: Agent,
    endpoint: Url,
    token: Option<Token>,
    patience: Patience,
}

impl Client {
    pub(super) fn new(settings: &Settings) -> Result<Self, HubError> {
        let HubSettings { endpoint, token } = settings.hub.clone().map_err(HubError::Settings)?;
        let Patience { connect, answer, stall, .. } = settings.patience;
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::PlatformVerifier)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()));
        let mut config = Config::builder();
        if is_loopback(&endpoint) {
            // A proxy would connect to its own loopback address, and would receive the token.
            config = config.proxy(None);
        }
        let config = config
            .tls_config(tls.build())
            .https_only(endpoint.scheme() == "https")
            .http_status_as_error(false)
            // Redirects are followed in this module.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("tidegate/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(connect))
            .timeout_connect(Some(connect))
            .timeout_send_request(Some(connect))
            .timeout_recv_response(Some(answer))
            .timeout_per_read(Some(stall))
            .build();
        Ok(Self { agent: config.new_agent(), endpoint, token, patience: settings.patience })
    }

    pub(super) fn endpoint(&self) -> &Url {
        &self.endpoint
    }

    /// Returns the URL at which the hub describes a revision of a model, with the digests of its files.
    pub(super) fn info_url(&self, name: &HubName) -> Url {
        let mut url = self.url(&["api/models", name.model(), "revision"]);
        // Slashes in the revision are not path separators.
        push(&mut url, [name.revision()]);
        url.set_query(Some("blobs=true"));
        url
    }

    /// Returns the URL of a file.
    pub(super) fn file_url(&self, name: &HubName, commit: &Commit, file: &str) -> Url {
        self.url(&[name.model(), "resolve", commit.text(), file])
    }

    fn url(&self, paths: &[&str]) -> Url {
        let mut url = self.endpoint.clone();
        push(&mut url, paths.iter().flat_map(|path| path.split('/')));
        url
    }

    /// Fetches a JSON object of at most `most` bytes.
    pub(super) fn json<T: DeserializeOwned>(&self, url: &Url, most: u64, tries: &mut Tries) -> Result<T, HubError> {
        let bytes = self.bytes(url, None, most + 1, tries)?;
        let wrong = |reason: String| HubError::Answer { url: public(url), reason };
        if bytes.len() as u64 > most {
            return Err(wrong(format!("it has more than {most} bytes")));
        }
        serde_json::from_slice(&bytes).map_err(|error| wrong(format!("it is not a hub's JSON: {error}")))
    }

    /// Fetches the first bytes of a file, at most `most`.
    pub(super) fn head(&self, url: &Url, most: u64) -> Result<Vec<u8>, HubError> {
        self.bytes(url, Some(Range { first: 0, last: Some(most.saturating_sub(1)) }), most, &mut self.tries())
    }

    fn bytes(&self, url: &Url, range: Option<Range>, most: u64, tries: &mut Tries) -> Result<Vec<u8>, HubError> {
        loop {
            let read = self.get_within(url, range, Some(self.patience.whole)).and_then(|response| {
                let mut bytes = Vec::new();
                let read = response.into_body().into_reader().take(most).read_to_end(&mut bytes);
                read.map(|_| bytes).map_err(|error| unreachable(url, error.to_string()))
            });
            match read {
                Ok(bytes) => return Ok(bytes),
                Err(error) => tries.pause(error)?,
            }
        }
    }

    /// Sends one request, and follows redirects. The response has status 200, or 206 or 416 if a range was requested.
    pub(super) fn get(&self, asked: &Url, range: Option<Range>) -> Result<Response<Body>, HubError> {
        self.get_within(asked, range, None)
    }

    fn get_within(
        &self,
        asked: &Url,
        range: Option<Range>,
        limit: Option<Duration>,
    ) -> Result<Response<Body>, HubError> {
        let mut url = asked.clone();
        for _ in 0..=MOST_REDIRECTS {
            let request = self.agent.get(url.as_str()).config().timeout_global(limit).build();
            // Without compression, the received length is the file's.
            let mut request = request.header("accept-encoding", "identity");
            if let Some(Token(token)) = self.token_for(&url) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if let Some(range) = range {
                request = request.header("range", range.header());
            }
            let response = request.call().map_err(|error| failed(asked, &error))?;
            match response.status().as_u16() {
                200 => return Ok(response),
                206 | 416 if range.is_some() => return Ok(response),
                301 | 302 | 303 | 307 | 308 => {
                    let wrong = |reason| HubError::Answer { url: public(asked), reason };
                    url = redirected(&self.endpoint, &url, header(response.headers(), "location")).map_err(wrong)?;
                }
                status => return Err(self.refused(asked, status, response.headers())),
            }
        }
        Err(HubError::Answer { url: public(asked), reason: format!("it redirects more than {MOST_REDIRECTS} times") })
    }

    /// Returns the token, if the URL has the hub's origin: the same scheme, host and port.
    fn token_for(&self, url: &Url) -> Option<&Token> {
        self.token.as_ref().filter(|_| url.origin() == self.endpoint.origin())
    }

    fn refused(&self, url: &Url, status: u16, headers: &HeaderMap) -> HubError {
        let code = header(headers, "x-error-code");
        let missing = match code {
            "EntryNotFound" => "there is no such file",
            "RevisionNotFound" => "there is no such revision",
            _ => "there is no such model or revision",
        };
        let advice = match (status, code) {
            (_, "GatedRepo") => {
                "the model's owners decide who may download it: accept its conditions on its page, and set HF_TOKEN to a \
                 token of your account"
            }
            (401 | 403, _) if self.token.is_none() => {
                "there is no such model, or it is not public: set HF_TOKEN to a token that may read it"
            }
            (401 | 403, _) => "there is no such model, or the token of HF_TOKEN may not read it",
            (404, _) => missing,
            (429 | 500.., _) => {
                let asked = header(headers, "retry-after").parse().map(Duration::from_secs);
                let again = Some(asked.unwrap_or_default().min(LONGEST_PAUSE));
                return HubError::Unreachable { url: public(url), reason: format!("status {status}"), again };
            }
            _ => "the hub refuses the request",
        };
        HubError::Status { status, url: public(url), advice: advice.into() }
    }

    /// Returns as many tries as the settings allow.
    pub(super) fn tries(&self) -> Tries {
        Tries { pauses: self.patience.pauses, next: 0 }
    }

    /// Returns a single try.
    pub(super) fn once() -> Tries {
        Tries { pauses: &[], next: 0 }
    }
}

/// A range of bytes of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) first: u64,
    /// The last byte; `None` means up to the end.
    pub(super) last: Option<u64>,
}

impl Range {
    fn header(self) -> String {
        format!("bytes={}-{}", self.first, self.last.map_or_else(String::new, |last| last.to_string()))
    }
}

/// The pauses between tries.
#[derive(Debug)]
pub(super) struct Tries {
    pauses: &'static [Duration],
    next: usize,
}

impl Tries {
    /// Waits before the next try. Returns the error if another try would be useless, or if there are no more.
    pub(super) fn pause(&mut self, error: HubError) -> Result<(), HubError> {
        let HubError::Unreachable { again: Some(asked), .. } = &error else { return Err(error) };
        let Some(pause) = self.pauses.get(self.next) else { return Err(error) };
        self.next += 1;
        let pause = (*pause).max(*asked);
        info!("trying again in {:.1} s: {error}", pause.as_secs_f64());
        sleep(pause);
        Ok(())
    }

    /// Restores all tries, because the last one made progress.
    pub(super) fn renew(&mut self) {
        self.next = 0;
    }
}

fn push<'a>(url: &mut Url, parts: impl IntoIterator<Item = &'a str>) {
    // Only URLs that cannot be a hub's have no path.
    if let Ok(mut path) = url.path_segments_mut() {
        path.pop_if_empty().extend(parts);
    }
}

/// Returns a header's value, or an empty text.
pub(super) fn header<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Returns the error for a failed connection, which another try may fix.
pub(super) fn unreachable(url: &Url, reason: String) -> HubError {
    HubError::Unreachable { url: public(url), reason, again: Some(Duration::ZERO) }
}

fn failed(url: &Url, error: &ureq::Error) -> HubError {
    let (reason, lasting) = match error {
        // An invalid certificate will not change.
        ureq::Error::Io(error) => (error.to_string(), error.kind() == ErrorKind::InvalidData),
        ureq::Error::HostNotFound => ("the host is unknown".into(), false),
        ureq::Error::Timeout(_) | ureq::Error::ConnectionFailed | ureq::Error::Protocol(_) => {
            (error.to_string(), false)
        }
        error => (error.to_string(), true),
    };
    let reason = format!("{reason}; check the network, HF_ENDPOINT and HTTPS_PROXY");
    HubError::Unreachable { url: public(url), reason, again: (!lasting).then_some(Duration::ZERO) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    fn settings(endpoint: &str) -> Settings {
        let variables = [("HF_HOME", "/nowhere"), ("HF_ENDPOINT", endpoint), ("HF_TOKEN", "hf_secret")];
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        Settings::from_variables(value).unwrap()
    }

    #[test]
    fn addresses_have_one_part_for_each_part_of_a_name() {
        let client = Client::new(&settings("https://mirror.example/hf")).unwrap();
        let name: HubName = "org/name@refs/pr/1".parse().unwrap();
        let expected = "https://mirror.example/hf/api/models/org/name/revision/refs%2Fpr%2F1?blobs=true";
        assert_eq!(client.info_url(&name).as_str(), expected);
        let commit = Commit::new(&"a".repeat(40)).unwrap();
        let expected = format!("https://mirror.example/hf/org/name/resolve/{}/q/a%20%23%3F%25.gguf", commit.text());
        assert_eq!(client.file_url(&name, &commit, "q/a #?%.gguf").as_str(), expected);
    }

    #[test]
    fn the_token_goes_to_the_hub_alone() {
        let client = Client::new(&settings("https://hub.example")).unwrap();
        for (to, sent) in [
            ("https://hub.example/x", true),
            ("https://hub.example:443/x", true),
            ("https://hub.example:8443/x", false),
            ("http://hub.example/x", false),
            ("https://cdn.hub.example/x", false),
            ("https://hub.example.org/x", false),
        ] {
            assert_eq!(client.token_for(&url(to)).is_some(), sent, "{to}");
        }
    }

    #[test]
    fn a_hub_on_this_machine_is_asked_without_a_proxy() {
        for address in ["http://127.0.0.1:9", "http://localhost/hub"] {
            assert!(Client::new(&settings(address)).unwrap().agent.config().proxy().is_none(), "{address}");
        }
    }

    /// Allows one immediate retry.
    fn short() -> Patience {
        Patience { connect: Duration::from_secs(10), pauses: &[Duration::ZERO], ..Patience::default() }
    }

    /// Returns a client with this patience, and the URL of a server that sends `sent` and then nothing.
    fn stalling(sent: &'static str, patience: Duration) -> (Client, Url) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let mut held: Vec<TcpStream> = Vec::new();
            for mut socket in listener.incoming().flatten() {
                // The client may have given up.
                let _ = socket.write_all(sent.as_bytes());
                held.push(socket);
            }
        });
        let patience = Patience { answer: patience, stall: patience, ..short() };
        let client = Client::new(&Settings { patience, ..settings(&address) }).unwrap();
        (client, url(&address))
    }

    #[test]
    fn a_server_that_sends_no_more_is_given_up() {
        for sent in ["", "HTTP/1.1 200 OK\r\ncontent-le", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"sha\""] {
            let (client, url) = stalling(sent, Duration::from_millis(50));
            let error = client.json::<serde_json::Value>(&url, 100, &mut client.tries()).unwrap_err();
            assert!(matches!(error, HubError::Unreachable { again: Some(_), .. }), "{sent:?}: {error}");
            assert!(error.to_string().contains("timeout"), "{error}");
        }
    }

    #[test]
    fn a_server_that_sends_a_byte_now_and_then_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for mut socket in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    let head = "HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n";
                    let mut sent = socket.write_all(head.as_bytes());
                    while sent.is_ok() {
                        sleep(Duration::from_millis(1));
                        sent = socket.write_all(b" ");
                    }
                });
            }
        });
        let patience = Patience { whole: Duration::from_millis(200), ..short() };
        let client = Client::new(&Settings { patience, ..settings(&address) }).unwrap();
        let error = client.json::<serde_json::Value>(&url(&address), 1 << 40, &mut client.tries()).unwrap_err();
        assert!(matches!(error, HubError::Unreachable { again: Some(_), .. }), "{error}");
        assert!(error.to_string().contains("timeout"), "{error}");
    }

    #[test]
    fn an_answer_has_a_bound() {
        let (client, url) =
            stalling("HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{\"a\": \"bcdefghijklmnopq", Duration::from_mins(1));
        let error = client.json::<serde_json::Value>(&url, 10, &mut client.tries()).unwrap_err();
        assert!(error.to_string().contains("it has more than 10 bytes"), "{error}");
    }
}
