//! API keys: how they are configured, and how the server keeps only their digests.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use super::quota::{Quota, QuotaState};
use super::scope::{ModelScope, Scope};

/// Shortest key in bytes; shorter ones can be guessed.
const SHORTEST: usize = 16;

/// Longest name of a key in bytes.
const LONGEST_NAME: usize = 64;

/// Largest weight of a key.
const HEAVIEST: u32 = 1000;

/// Most keys. The number is limited because every request compares with each of them.
const MOST: usize = 10_000;

/// Why keys cannot be used. No message repeats any part of a key.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// The file cannot be read.
    #[error("cannot read the keys file {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        error: std::io::Error,
    },
    /// The file is not valid.
    #[error("keys file: {message} (line {line})")]
    File {
        /// The field, and what is wrong with it.
        message: String,
        /// Line in the file, from 1.
        line: usize,
    },
    /// A key is not valid.
    #[error("{place}: {message}")]
    Key {
        /// Where the key is given: an entry of the file, or a flag.
        place: String,
        /// What is wrong with it.
        message: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeysFile {
    keys: Vec<KeyEntry>,
}

/// A key in the file. The fields of the quota are repeated here because serde cannot refuse unknown fields beside
/// flattened ones.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyEntry {
    name: String,
    key: Option<String>,
    sha256: Option<String>,
    scopes: Option<Vec<Scope>>,
    models: Option<ModelScope>,
    requests_per_minute: Option<NonZeroU32>,
    tokens_per_minute: Option<NonZeroU32>,
    concurrent_requests: Option<NonZeroU32>,
    weight: Option<NonZeroU32>,
}

/// An API key.
#[derive(Clone)]
pub(super) struct Key {
    name: String,
    digest: [u8; 32],
    scopes: Vec<Scope>,
    /// The models that the key may use.
    pub(super) models: ModelScope,
    quota: Arc<QuotaState>,
    /// Its share of the engine, relative to other keys.
    weight: NonZeroU32,
}

impl Key {
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn has(&self, scope: Scope) -> bool {
        self.scopes.contains(&scope)
    }

    pub(super) fn quota(&self) -> &QuotaState {
        &self.quota
    }

    pub(super) fn weight(&self) -> NonZeroU32 {
        self.weight
    }
}

/// The API keys of a server, at least one.
pub struct Keys(Vec<Arc<Key>>);

/// The keys in force. Without any, all requests are allowed.
#[derive(Default)]
pub(in crate::api) struct ActiveKeys(RwLock<Option<Arc<Keys>>>);

impl ActiveKeys {
    /// Replaces the keys; those whose name and quota stay the same keep their counts.
    pub(in crate::api) fn set(&self, keys: Keys) {
        let mut current = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let keys = match current.as_deref() {
            Some(old) => keys.keeping_counts(old),
            None => keys,
        };
        *current = Some(Arc::new(keys));
    }

    pub(in crate::api) fn get(&self) -> Option<Arc<Keys>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Keys {
    /// Loads the keys of a JSON file, and those in `given`, which have every scope and no quota; `None` without either.
    ///
    /// # Errors
    /// The file cannot be read, or one of the keys is not valid.
    pub fn load(file: Option<&Path>, given: &[String]) -> Result<Option<Self>, KeysError> {
        if file.is_none() && given.is_empty() {
            return Ok(None);
        }
        let text = file
            .map(|path| std::fs::read(path).map_err(|error| KeysError::Read { path: path.to_owned(), error }))
            .transpose()?;
        Self::read(text.as_deref(), given).map(Some)
    }

    fn read(file: Option<&[u8]>, given: &[String]) -> Result<Self, KeysError> {
        let mut keys = Vec::new();
        for (at, key) in given.iter().enumerate() {
            let (name, place) = (format!("api-key-{}", at + 1), format!("--api-key (number {})", at + 1));
            let digest = digest(Some(key), None).map_err(|message| KeysError::Key { place, message })?;
            let (scopes, models) = (vec![Scope::Generate, Scope::Sessions, Scope::Metrics], ModelScope::default());
            let quota = Arc::new(QuotaState::new(Quota::default()));
            keys.push(Key { name, digest, scopes, models, quota, weight: NonZeroU32::MIN });
        }
        for (at, form) in file.map(parse).transpose()?.unwrap_or_default().into_iter().enumerate() {
            let place = format!("keys[{at}]");
            keys.push(form.key().map_err(|message| KeysError::Key { place, message })?);
        }
        let refuse = |place: &str, message: String| Err(KeysError::Key { place: place.into(), message });
        // A file without keys is a mistake even when `given` has some.
        if (keys.len() == given.len() && file.is_some()) || keys.len() > MOST {
            return refuse("keys", format!("there must be 1 to {MOST} keys, found {}", keys.len() - given.len()));
        }
        let (mut names, mut digests) = (HashSet::new(), HashSet::new());
        for key in &keys {
            if !names.insert(key.name.as_str()) {
                return refuse(&key.name, "duplicate name".into());
            }
            if !digests.insert(key.digest) {
                return refuse(&key.name, "duplicate key".into());
            }
        }
        Ok(Self(keys.into_iter().map(Arc::new).collect()))
    }

    /// Returns the number of keys.
    #[expect(clippy::len_without_is_empty, reason = "there is at least one")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether these include `key`: the same secret under the same name, with at least the same scopes and models.
    pub(super) fn has(&self, key: &Key) -> bool {
        let same = |other: &Arc<Key>| other.name == key.name && other.digest == key.digest;
        let may = |it: &Arc<Key>| key.scopes.iter().all(|scope| it.has(*scope)) && it.models.include(&key.models);
        self.0.iter().any(|other| same(other) && may(other))
    }

    /// Returns the number of keys that may generate text.
    pub(in crate::api) fn generating(&self) -> usize {
        self.0.iter().filter(|key| key.has(Scope::Generate)).count()
    }

    /// Returns these keys, with the counts of the keys in `old` that have the same name and quota.
    pub(super) fn keeping_counts(self, old: &Self) -> Self {
        let known: HashMap<&str, &Arc<Key>> = old.0.iter().map(|key| (key.name.as_str(), key)).collect();
        let same = |key: &Arc<Key>| {
            let before = known.get(key.name.as_str())?;
            (before.quota.limits() == key.quota.limits()).then(|| Arc::clone(&before.quota))
        };
        let keep = |key: Arc<Key>| match same(&key) {
            None => key,
            Some(quota) => Arc::new(Key { quota, ..Key::clone(&key) }),
        };
        Self(self.0.into_iter().map(keep).collect())
    }

    /// Finds the key `given`, comparing with all keys in constant time.
    pub(super) fn find(&self, given: &[u8]) -> Option<&Arc<Key>> {
        let given: [u8; 32] = Sha256::digest(given).into();
        let (mut known, mut found) = (Choice::from(0), 0u64);
        for (at, key) in self.0.iter().enumerate() {
            let same = key.digest.ct_eq(&given);
            found.conditional_assign(&(at as u64), same);
            known |= same;
        }
        bool::from(known).then(|| self.0.get(found as usize)).flatten()
    }
}

impl KeyEntry {
    fn key(self) -> Result<Key, String> {
        let plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
        if !(1..=LONGEST_NAME).contains(&self.name.len()) || !self.name.bytes().all(plain) {
            return Err(format!("name must be 1 to {LONGEST_NAME} letters, digits, dots, dashes or underscores"));
        }
        let scopes = self.scopes.unwrap_or_else(|| vec![Scope::Generate, Scope::Sessions]);
        if scopes.is_empty() {
            return Err("scopes must not be empty: without it they are generate and sessions".into());
        }
        let quota = Quota {
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            concurrent_requests: self.concurrent_requests,
        };
        let weight = self.weight.unwrap_or(NonZeroU32::MIN);
        if weight.get() > HEAVIEST {
            return Err(format!("weight must be from 1 to {HEAVIEST}, found {weight}"));
        }
        let digest = digest(self.key.as_deref(), self.sha256.as_deref())?;
        let quota = Arc::new(QuotaState::new(quota));
        Ok(Key { name: self.name, digest, scopes, models: self.models.unwrap_or_default(), quota, weight })
    }
}

/// Returns the digest of a key that is given in plain text or as a digest.
fn digest(key: Option<&str>, sha256: Option<&str>) -> Result<[u8; 32], String> {
    match (key, sha256) {
        (Some(key), None) if key.len() < SHORTEST => {
            Err(format!("key must have at least {SHORTEST} characters, found {}", key.len()))
        }
        (Some(key), None) if key.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(Sha256::digest(key).into()),
        (Some(_), None) => Err("key must be printable ASCII without spaces, which a header can carry".into()),
        (None, Some(hex)) => {
            let pair = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok();
            let digits = hex.bytes().all(|byte| byte.is_ascii_hexdigit());
            let bytes = digits.then(|| hex.as_bytes().chunks(2).map(pair).collect::<Option<Vec<u8>>>()).flatten();
            bytes
                .and_then(|bytes| bytes.try_into().ok())
                .ok_or_else(|| "sha256 must be 64 hexadecimal digits, as sha256sum prints them".into())
        }
        _ => Err("exactly one of key and sha256 must be given".into()),
    }
}

fn parse(text: &[u8]) -> Result<Vec<KeyEntry>, KeysError> {
    let mut json = serde_json::Deserializer::from_slice(text);
    let form: KeysFile = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let (path, line) = (error.path().to_string(), error.inner().line());
        // serde's message may quote the value.
        let secret = error.path().iter().any(|segment| match segment {
            serde_path_to_error::Segment::Map { key } => key == "key" || key == "sha256",
            _ => false,
        });
        let words = if secret { "must be a string".into() } else { without_position(error.inner()) };
        let message = if path == "." { words } else { format!("{path}: {words}") };
        KeysError::File { message, line }
    })?;
    json.end().map_err(|error| KeysError::File { message: without_position(&error), line: error.line() })?;
    Ok(form.keys)
}

/// Returns an error's message without its line and column.
fn without_position(error: &serde_json::Error) -> String {
    let words = error.to_string();
    words.rsplit_once(" at line ").map_or(words.as_str(), |(words, _)| words).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::hex;

    const KEY: &str = "sk-0123456789abcdef";

    fn refused(file: &str) -> String {
        let error = Keys::read(Some(file.as_bytes()), &[]).err().unwrap_or_else(|| panic!("taken: {file}"));
        let text = error.to_string();
        assert!(!text.contains("0123456789"), "the key is in the error: {text}");
        text
    }

    #[test]
    fn a_key_is_found_by_itself_or_its_digest_and_by_nothing_else() {
        let sum: String = hex(&Sha256::digest("sk-hashed-0123456789"));
        let file = format!(
            r#"{{"keys": [
                {{"name": "plain", "key": "{KEY}"}},
                {{"name": "hashed", "sha256": "{}", "scopes": ["metrics"]}},
                {{"name": "last", "key": "sk-last-0123456789ab", "requests_per_minute": 5}}
            ]}}"#,
            sum.to_uppercase(),
        );
        let keys = Keys::read(Some(file.as_bytes()), &["sk-given-0123456789".into()]).unwrap();
        let name = |key: &str| keys.find(key.as_bytes()).map(|key| key.name().to_owned());
        for (key, found) in [
            (KEY, "plain"),
            ("sk-hashed-0123456789", "hashed"),
            ("sk-last-0123456789ab", "last"),
            ("sk-given-0123456789", "api-key-1"),
        ] {
            assert_eq!(name(key).as_deref(), Some(found));
            assert_eq!(name(&key[1..]), None);
            assert_eq!(name(&format!("{key}x")), None);
            assert_eq!(name(&key.to_uppercase()), None);
        }
        assert_eq!(name(""), None);
        assert_eq!(name(&sum), None, "the digest is no key");
        let scopes = |key: &str| keys.find(key.as_bytes()).unwrap().scopes.clone();
        assert_eq!(scopes(KEY), [Scope::Generate, Scope::Sessions]);
        assert_eq!(scopes("sk-hashed-0123456789"), [Scope::Metrics]);
        assert_eq!(keys.len(), 4);
    }

    #[test]
    fn keys_that_cannot_be_used_are_refused_without_a_word_of_them() {
        for (file, words) in [
            (r"{}", "missing field `keys`"),
            (r#"{"keys": []}"#, "1 to 10000 keys"),
            (
                "{\"keys\": [\n{\"name\": \"a\", \"key\": \"sk-0123456789abcdef\", \"colour\": 1}]}",
                "keys[0].colour: unknown field `colour`",
            ),
            ("{\"keys\": [\n{\"name\": \"a\", \"key\": \"sk-0123456789abcdef\", \"colour\": 1}]}", "(line 2)"),
            (
                r#"{"keys": [{"name": "a", "key": "sk-0123456789ab"}]}"#,
                "keys[0]: key must have at least 16 characters, found 15",
            ),
            (r#"{"keys": [{"name": "a", "key": "sk-0123456789 abcdef"}]}"#, "printable ASCII"),
            (r#"{"keys": [{"name": "a"}]}"#, "exactly one of key and sha256"),
            (r#"{"keys": [{"name": "a", "key": 12345678901234567890}]}"#, "keys[0].key: must be a string"),
            (r#"{"keys": [{"name": "a", "sha256": "0123456789"}]}"#, "64 hexadecimal digits"),
            (r#"{"keys": [{"name": "two words", "key": "sk-0123456789abcdef"}]}"#, "name must be"),
            (r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef", "scopes": []}]}"#, "scopes must not be empty"),
            (
                r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef", "scopes": ["root"]}]}"#,
                "keys[0].scopes[0]: unknown variant `root`",
            ),
            (
                r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef", "tokens_per_minute": 0}]}"#,
                "keys[0].tokens_per_minute",
            ),
            (
                r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef", "weight": 1001}]}"#,
                "keys[0]: weight must be from 1 to 1000, found 1001",
            ),
            (r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef", "weight": 0}]}"#, "keys[0].weight"),
            (
                r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef"}, {"name": "a", "key": "sk-0123456789abcdeg"}]}"#,
                "a: duplicate name",
            ),
            (
                r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef"}, {"name": "b", "key": "sk-0123456789abcdef"}]}"#,
                "b: duplicate key",
            ),
            (r#"{"keys": [{"name": "a", "key": "sk-0123456789abcdef"}]} more"#, "trailing characters"),
        ] {
            let refused = refused(file);
            assert!(refused.contains(words), "{file} gives {refused:?}, not {words:?}");
        }
        assert!(Keys::load(None, &[]).unwrap().is_none());
        assert!(Keys::load(Some(Path::new("/nothing/here")), &[]).is_err());
        assert!(Keys::load(None, &["short".into()]).is_err());
    }

    #[test]
    fn keys_that_stay_the_same_go_on_counting() {
        let file = |quota: &str| {
            let file = format!(r#"{{"keys": [{{"name": "a", "key": "{KEY}", {quota}}}]}}"#);
            Keys::read(Some(file.as_bytes()), &[]).unwrap()
        };
        let old = file(r#""requests_per_minute": 1"#);
        assert!(old.0[0].quota.admit(false).is_ok());
        let same = file(r#""requests_per_minute": 1"#).keeping_counts(&old);
        assert!(same.0[0].quota.admit(false).is_err());
        let other = file(r#""requests_per_minute": 2"#).keeping_counts(&old);
        assert!(other.0[0].quota.admit(false).is_ok());
    }
}
