//! Why a model of a hub is not available: one line that says what was requested and what to do.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a model of a hub is not available.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HubError {
    /// The environment variables are wrong.
    #[error("{0}")]
    Settings(String),
    /// The hub cannot be reached, or is not working.
    #[error("cannot reach {url}: {reason}")]
    Unreachable {
        url: String,
        reason: String,
        /// The minimum time before another try, if another try can help.
        again: Option<Duration>,
    },
    /// The hub refused the request.
    #[error("{status} from {url}: {advice}")]
    Status { status: u16, url: String, advice: String },
    /// The answer is not what a hub should send.
    #[error("the answer of {url} is refused: {reason}")]
    Answer { url: String, reason: String },
    /// A downloaded file is not the one that the hub lists.
    #[error("{file} of {model} arrived with another digest than {expected}, and was deleted: try again")]
    Digest { model: String, file: String, expected: String },
    /// The model cannot be served, or does not exist.
    #[error("{model}: {reason}")]
    Refused { model: String, reason: String },
    /// The model has no vocabulary of its own, and none was found elsewhere.
    #[error("{model} has no vocabulary of RWKV (rwkv_vocab_v*.txt), and none is found elsewhere: {source}")]
    Vocabulary { model: String, source: Box<HubError> },
    /// The cache's disk has too little space for the model.
    #[error(
        "{model}: {missing} are to be downloaded, but {} has {free} left: free some, or set HF_HUB_CACHE to another folder",
        .cache.display()
    )]
    Full { model: String, missing: String, free: String, cache: PathBuf },
    /// A file of the cache cannot be read or written.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

impl HubError {
    /// Returns whether the error says nothing about the model, so that an older commit of it can be used.
    pub(super) fn is_passing(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Full { .. } | Self::Io { .. })
    }

    /// Adds the path to an I/O error.
    pub(super) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        |source| Self::Io { path: path.into(), source }
    }
}
