//! The store's errors.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::id::VersionId;

/// An error of the store: it refused a request or could not carry it out. Such a request has changed nothing, with one
/// exception: if the index fails during the commit, the whole request may have taken effect.
#[allow(missing_docs, reason = "the messages explain the fields")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The id does not exist or belongs to another owner; the error does not say which.
    #[error("no {what} has this id")]
    NotFound { what: &'static str },
    /// Another turn is running on the session.
    #[error("the session is in use; try again in {} s", retry_after.as_secs())]
    Busy { retry_after: Duration },
    /// The text of the version was not kept.
    #[error(
        "the text of version {version} is not kept: the server ran with --keep-text off, or was older, when it or a version \
         before it was created, or it is from a snapshot without text"
    )]
    TextNotKept { version: VersionId },
    /// The requested part of a text does not exist, or is too long to be read at once.
    #[error("{parameter} must be from {least} to {most}, found {found}")]
    Range { parameter: &'static str, least: u64, most: u64, found: u64 },
    /// The requested messages are too long to be read at once.
    #[error("the messages from start to end must have at most {bound} bytes; ask for fewer, or read the text")]
    LongMessages { bound: usize },
    /// The texts have too little in common to be compared.
    #[error("the text of version {version} must have at most {bound} tokens after what both texts share")]
    FarApart { version: VersionId, bound: u64 },
    /// The session's head is not the version that the caller expected.
    #[error("the session's head is {head}, not the expected version")]
    Stale { head: VersionId },
    /// Another server has moved the session's head since the request began. The request was not carried out.
    #[error(
        "the session was changed while this request ran, and its head is {head} now: nothing of the request was stored; read \
         the session, and send the request again"
    )]
    Conflict { head: VersionId },
    /// Another server has meanwhile answered a request with the same idempotency key.
    #[error("a request with this idempotency-key has been answered meanwhile; send it again to get that answer")]
    Answered,
    /// The request would exceed one of the owner's quotas.
    #[error("{quota} per owner must be at most {bound}; this request would make it {found}")]
    Quota { quota: &'static str, bound: u64, found: u64 },
    /// There is no space, and nothing can be evicted to free some.
    #[error("the store is full ({reason}); nothing was lost: delete sessions or try again later")]
    Full { reason: String },
    /// One transaction would write too many rows: a fork writes one for each version that the session lists.
    #[error("n must be at most {} for a session of {versions} versions, found {n}", bound / versions)]
    TooManyForks { n: usize, versions: usize, bound: usize },
    /// The session would have too many tags.
    #[error("a session may have at most {bound} tags")]
    TooManyTags { bound: usize },
    /// Finding the common ancestor of two versions would read too many rows.
    #[error("the common ancestor is more than {bound} versions back")]
    FarAncestor { bound: usize },
    /// The snapshot could not be read back after storing it, so it was not stored.
    #[error("the conversation's state cannot be stored: {reason}")]
    Unstorable { reason: String },
    /// The disk or object store failed.
    #[error("the store is unavailable ({reason}); the request has had no effect, or all of it")]
    Unavailable { reason: String },
    /// The stored bytes differ from those that were written.
    #[error("version {version} is damaged: {reason}")]
    Corrupt { version: VersionId, reason: String },
    /// The index cannot be opened.
    #[error("the index {} cannot be used: {reason}", path.display())]
    Index { path: PathBuf, reason: String },
    /// The index in PostgreSQL cannot be opened.
    #[error("the index in PostgreSQL cannot be used: {reason}")]
    Database { reason: String },
    /// Another process uses the folder.
    #[error("the index {} cannot be used: another process has it open", path.display())]
    InUse { path: PathBuf },
    /// An option is out of range.
    #[error("{name} must be at least {bound}, found {found}")]
    Option { name: &'static str, found: u64, bound: u64 },
}

impl StoreError {
    pub(crate) const SESSION: Self = Self::NotFound { what: "session" };
    pub(crate) const VERSION: Self = Self::NotFound { what: "version" };
    pub(crate) const RESPONSE: Self = Self::NotFound { what: "response" };
    pub(crate) const TAG: Self = Self::NotFound { what: "tag" };
    pub(crate) const STREAM: Self = Self::NotFound { what: "stream" };

    /// Converts an error that may be caused by an I/O error: a full disk becomes [`Self::Full`].
    pub(crate) fn from_io(what: &str, error: &(dyn Error + 'static)) -> Self {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if error.downcast_ref::<io::Error>().is_some_and(full) {
                return Self::Full { reason: "no space left on the device".to_owned() };
            }
            cause = error.source();
        }
        Self::Unavailable { reason: format!("{what}: {}", without_secrets(&error.to_string())) }
    }
}

/// Returns the text of an error without possible secrets: user names, passwords and queries of URLs, and the bodies of
/// an S3 server's answers, of which only the code is kept, because they may quote a token or the signed request.
fn without_secrets(text: &str) -> String {
    let body = text.find('<').into_iter().chain(text.find("error response: ")).min();
    let code = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
    // A status may be followed by a body of any kind.
    let status = text.find("status code: ").and_then(|at| Some(at + 13 + text[at + 13..].find(": ")?));
    let end = body.into_iter().chain(status).min().unwrap_or(text.len());
    let words = text[..end].split(' ').map(|word| match word.split_once("://") {
        Some((scheme, rest)) => {
            let rest = rest.split(['?', '#']).next().unwrap_or_default();
            let host = rest.find('/').unwrap_or(rest.len());
            let from = rest[..host].rfind('@').map_or(0, |at| at + 1);
            format!("{scheme}://{}", &rest[from..])
        }
        None => word.to_owned(),
    });
    let mut told = words.collect::<Vec<_>>().join(" ").trim_end_matches([':', ' ']).to_owned();
    if let Some(code) = code.filter(|code| end < text.len() && code.chars().all(char::is_alphanumeric)) {
        told.extend([" (", code, ")"]);
    }
    told
}

fn full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_an_object_store_tell_no_secrets() {
        let told = |text: &str| without_secrets(text);
        let refused = "Generic S3 error: Error performing PUT http://key:pass@127.0.0.1:9000/bucket/a?X-Amz-Signature=s \
                       in 12ms, after 3 retries - Server returned non-2xx status code: 403 Forbidden: <?xml version=\"1.0\"?>\
                       <Error><Code>InvalidToken</Code><Token-0>session</Token-0></Error>";
        let safe = "Generic S3 error: Error performing PUT http://127.0.0.1:9000/bucket/a in 12ms, after 3 retries - Server \
                    returned non-2xx status code: 403 Forbidden (InvalidToken)";
        assert_eq!(told(refused), safe);
        let other = "Server returned non-2xx status code: 502 Bad Gateway: the token session has expired";
        assert_eq!(told(other), "Server returned non-2xx status code: 502 Bad Gateway");
        let hidden = "Server returned error response: InternalError session";
        assert_eq!(told(hidden), "Server returned");
        let plain = "No such file or directory (os error 2)";
        assert_eq!(told(plain), plain);
        let failed = StoreError::from_io("writing an object failed", &io::Error::other(refused));
        assert_eq!(failed, StoreError::Unavailable { reason: format!("writing an object failed: {safe}") });
    }
}
