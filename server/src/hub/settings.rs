//! The hub settings from the environment. The variables and defaults are those of Python's `huggingface_hub`, so that
//! both use the same cache and token.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use url::Url;

use super::error::HubError;

/// The default hub.
const HUB: &str = "https://huggingface.co";

/// Maximum length of a token in bytes.
const MOST_TOKEN: usize = 4096;

/// The settings of the hub and the cache.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The hub, or what is wrong with its variables, which matters only if the hub is used.
    pub(super) hub: Result<HubSettings, String>,
    /// The folder of the cache.
    pub(super) cache: PathBuf,
    /// Whether the network must not be used.
    pub(super) offline: bool,
    pub(super) patience: Patience,
}

/// The hub.
#[derive(Clone, Debug)]
pub(super) struct HubSettings {
    /// The hub's URL.
    pub(super) endpoint: Url,
    pub(super) token: Option<Token>,
}

/// A token, which is never logged.
#[derive(Clone)]
pub(super) struct Token(pub(super) String);

impl std::fmt::Debug for Token {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Token")
    }
}

/// How long a server may take to do something.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// To accept a connection, including TLS.
    pub(super) connect: Duration,
    /// To start its answer.
    pub(super) answer: Duration,
    /// To send more of its answer.
    pub(super) stall: Duration,
    /// To send its whole answer, if this is not a file.
    pub(super) whole: Duration,
    /// The pauses before further tries: after the first try, there is one try per pause.
    pub(super) pauses: &'static [Duration],
}

impl Default for Patience {
    fn default() -> Self {
        const PAUSES: [Duration; 5] = [
            Duration::from_millis(500),
            Duration::from_secs(1),
            Duration::from_secs(2),
            Duration::from_secs(4),
            Duration::from_secs(8),
        ];
        Self {
            connect: Duration::from_secs(10),
            answer: Duration::from_secs(30),
            stall: Duration::from_secs(30),
            whole: Duration::from_mins(2),
            pauses: &PAUSES,
        }
    }
}

impl Settings {
    /// Reads the environment variables of this process.
    pub(crate) fn read() -> Result<Self, HubError> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    pub(super) fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
        let is_on = |name: &str| text(name).is_some_and(|value| is_true(&value));
        let own = variable("HOME").map(PathBuf::from);
        let path = |name: &str| {
            let value = PathBuf::from(variable(name)?);
            match (value.strip_prefix("~"), &own) {
                (Ok(rest), Some(own)) => Some(own.join(rest)),
                _ => Some(value),
            }
        };
        let no_folder = || HubError::Settings("set HF_HOME to a folder for models: there is no HOME".into());
        let home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|base| base.join("huggingface")))
            .or_else(|| Some(own.as_ref()?.join(".cache/huggingface")))
            .ok_or_else(no_folder)?;
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).unwrap_or_else(|| home.join("hub"));
        let given = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
        let token = given.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()).or_else(|| {
            let file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
            let token = std::fs::read_to_string(file).ok()?;
            // This variable forbids sending the token from the file.
            (!is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN")).then(|| token.trim().to_owned())
        });
        let token = token.filter(|token| !token.is_empty()).map(Token);
        let hub = endpoint(text("HF_ENDPOINT").as_deref().unwrap_or(HUB)).and_then(|endpoint| {
            let wrong = token.as_ref().is_some_and(|Token(token)| !is_token(token));
            let reason = || "the token of HF_TOKEN, or of the token file, is not one".to_owned();
            (!wrong).then_some(HubSettings { endpoint, token }).ok_or_else(reason)
        });
        Ok(Self {
            hub,
            cache,
            offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"),
            patience: Patience::default(),
        })
    }
}

fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str())
}

fn is_token(text: &str) -> bool {
    text.len() <= MOST_TOKEN && text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn endpoint(text: &str) -> Result<Url, String> {
    let wrong = || "HF_ENDPOINT must be an address such as https://huggingface.co".to_owned();
    let url = Url::parse(text.trim().trim_end_matches('/')).map_err(|_| wrong())?;
    let plain =
        url.query().is_none() && url.fragment().is_none() && url.username().is_empty() && url.password().is_none();
    (["http", "https"].contains(&url.scheme()) && url.has_host() && plain).then_some(url).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Settings, String> {
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        Settings::from_variables(value).map_err(|error| error.to_string())
    }

    #[test]
    fn the_cache_is_where_python_has_it() {
        for (variables, cache) in [
            (&[("HOME", "/me")][..], "/me/.cache/huggingface/hub"),
            (&[("HOME", "/me"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/me"), ("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/hf")], "/hf/hub"),
            (&[("HOME", "/me"), ("HF_HOME", "~/hf")], "/me/hf/hub"),
            (&[("HOME", "/me"), ("HF_HOME", "")], "/me/.cache/huggingface/hub"),
            (&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/cache")], "/cache"),
            (&[("HF_HOME", "/hf"), ("HUGGINGFACE_HUB_CACHE", "/old")], "/old"),
        ] {
            assert_eq!(read(variables).unwrap().cache.to_str(), Some(cache), "{variables:?}");
        }
        assert!(read(&[]).unwrap_err().contains("HF_HOME"));
    }

    #[test]
    fn the_token_is_the_variables_or_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().to_str().unwrap();
        let token = |more: &[(&str, &str)]| {
            let hub = read(&[&[("HF_HOME", home)], more].concat()).unwrap().hub;
            hub.map(|hub| hub.token.map(|Token(token)| token))
        };
        assert_eq!(token(&[]), Ok(None));
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        assert_eq!(token(&[]), Ok(Some("hf_file".into())));
        // The location of the cache does not affect where the token is.
        assert_eq!(token(&[("HF_HUB_CACHE", "/elsewhere")]), Ok(Some("hf_file".into())));
        assert_eq!(token(&[("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), Ok(None));
        assert_eq!(token(&[("HF_TOKEN", " hf_variable\n")]), Ok(Some("hf_variable".into())));
        let other = folder.path().join("other");
        std::fs::write(&other, "hf_other").unwrap();
        assert_eq!(token(&[("HF_TOKEN_PATH", other.to_str().unwrap())]), Ok(Some("hf_other".into())));
        let error = token(&[("HF_TOKEN", "hf\nx-header: 1")]).unwrap_err();
        assert!(error.contains("HF_TOKEN") && !error.contains("x-header"), "{error}");
        assert_eq!(format!("{:?}", Token("secret".into())), "Token");
    }

    #[test]
    fn the_hub_is_an_address() {
        let endpoint = |text| {
            let hub = read(&[("HOME", "/me"), ("HF_ENDPOINT", text)]).unwrap().hub;
            hub.map(|hub| hub.endpoint.to_string())
        };
        assert_eq!(endpoint(""), Ok("https://huggingface.co/".into()));
        assert_eq!(endpoint("http://127.0.0.1:9/hub/"), Ok("http://127.0.0.1:9/hub".into()));
        for wrong in ["huggingface.co", "ftp://x", "https://", "https://a@b", "https://a?b"] {
            assert!(endpoint(wrong).unwrap_err().contains("HF_ENDPOINT"), "{wrong}");
        }
    }

    #[test]
    fn offline_is_a_word_that_python_takes() {
        let offline = |text| read(&[("HOME", "/me"), ("HF_HUB_OFFLINE", text)]).unwrap().offline;
        assert!(["1", "true", "YES", "on"].into_iter().all(offline) && !["0", "", "no"].into_iter().any(offline));
    }
}
