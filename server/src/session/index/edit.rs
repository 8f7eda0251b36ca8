//! Edits: what a client may change in an existing session, and how an edit changes the session's row.

use super::rows::{Listed, SessionRow};
use crate::session::error::StoreError;
use crate::session::patch::Patch;
use crate::session::tag::{TagName, VersionRef};

/// Maximum number of tags of a session. Small in tests, so that tests of the index reach it.
pub(crate) const MAX_TAGS: usize = if cfg!(test) { 2 } else { 100 };

/// A change that a client may make to a session.
#[derive(Clone, Debug)]
pub(crate) enum Edit {
    /// Changes the session's metadata, its time to live, and the label of its head.
    Patch(Patch),
    /// Tags a version that the session keeps, or moves the tag to it; by default the head.
    Tag(TagName, Option<VersionRef>),
    /// Removes a tag.
    Untag(TagName),
    /// Changes the label of a version that the session lists.
    Label(VersionRef, Option<String>),
}

/// What an [`Edit`] is about and what it changes besides the session's row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edits {
    /// The version that the edit is about. The session must list it, and must keep it if the version gets a tag.
    pub(crate) version: String,
    /// Whether the version gets a tag.
    tags: bool,
    /// The version's new label, if that changes.
    #[expect(clippy::option_option, reason = "`Patch` says it in the same way")]
    pub(crate) label: Option<Option<String>>,
}

impl Edit {
    /// Changes a session's row, and returns what else the edit changes.
    pub(crate) fn apply(&self, row: &mut SessionRow, now: u64) -> Result<Edits, StoreError> {
        row.touch(now);
        let about = |version: &str, label| Edits { version: version.to_owned(), tags: false, label };
        Ok(match self {
            Self::Patch(Patch { metadata, ttl, label }) => {
                if let Some(metadata) = metadata {
                    row.metadata.clone_from(metadata);
                }
                row.ttl = ttl.map_or(row.ttl, |ttl| ttl.map(|ttl| ttl.as_secs()));
                about(&row.head, label.clone())
            }
            Self::Tag(name, meant) => {
                let version = row.resolve(meant.as_ref())?.to_owned();
                if row.tags.len() >= MAX_TAGS && !row.tags.contains_key(name.as_str()) {
                    return Err(StoreError::TooManyTags { bound: MAX_TAGS });
                }
                row.tags.insert(name.as_str().to_owned(), version.clone());
                Edits { version, tags: true, label: None }
            }
            Self::Untag(name) => {
                row.tags.remove(name.as_str()).ok_or(StoreError::TAG)?;
                about(&row.head, None)
            }
            Self::Label(meant, label) => about(row.resolve(Some(meant))?, Some(label.clone())),
        })
    }
}

impl Edits {
    /// Checks the version. `kept` says whether the session keeps it, or is `None` if the session does not list it;
    /// returns the flag.
    pub(crate) fn check(&self, kept: Option<bool>) -> Result<bool, StoreError> {
        kept.filter(|kept| *kept || !self.tags).ok_or(StoreError::VERSION)
    }
}

/// The result of an [`Edit`]: the session, and the version that the edit is about. For a removed tag, that is the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edited {
    pub(crate) session: SessionRow,
    pub(crate) version: Listed,
}
