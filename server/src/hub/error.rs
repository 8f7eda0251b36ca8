//! Why a model of a hub cannot be had: in one line, with what was asked and what to do.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a model of a hub cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HubError {
    /// The environment.
    #[error("{0}")]
    Settings(String),
    /// The hub cannot be reached, or is out of order.
    #[error("cannot reach {url}: {reason}")]
    Unreachable {
        url: String,
        reason: String,
        /// The least time after which it may be tried again, if that can help.
        again: Option<Duration>,
    },
    /// The hub refuses the request.
    #[error("{status} from {url}: {advice}")]
    Status { status: u16, url: String, advice: String },
    /// The hub's answer is not what a hub answers.
    #[error("the answer of {url} is refused: {reason}")]
    Answer { url: String, reason: String },
    /// A downloaded file is not the one that the hub lists.
    #[error("{file} of {model} arrived with another digest than {expected}, and was deleted: try again")]
    Digest { model: String, file: String, expected: String },
    /// The model cannot be served, or is not there.
    #[error("{model}: {reason}")]
    Refused { model: String, reason: String },
    /// A model without a vocabulary of its own, and none elsewhere.
    #[error("{model} has no vocabulary of RWKV (rwkv_vocab_v*.txt), and none is found elsewhere: {source}")]
    Vocabulary { model: String, source: Box<HubError> },
    /// The cache has no room for the model.
    #[error(
        "{model}: {missing} are to be downloaded, but {} has {free} left: free some, or set HF_HUB_CACHE to another folder",
        .cache.display()
    )]
    Full { model: String, missing: String, free: String, cache: PathBuf },
    /// The cache.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

impl HubError {
    /// Whether it says nothing about the model: an older commit of it can be used.
    pub(super) fn is_passing(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Full { .. } | Self::Io { .. })
    }

    /// Puts the path before an error of the file system.
    pub(super) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self + '_ {
        |source| Self::Io { path: path.into(), source }
    }
}
