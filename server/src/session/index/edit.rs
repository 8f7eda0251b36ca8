//! What a client may change of a session that exists, and what that does to the session's row.

use super::rows::{Listed, SessionRow};
use crate::session::error::StoreError;
use crate::session::patch::Patch;
use crate::session::tag::{TagName, VersionRef};

/// Most tags of a session: few in the tests of the index, so that they reach it.
pub(crate) const MAX_TAGS: usize = if cfg!(test) { 2 } else { 100 };

/// A change that a client may make to a session.
#[derive(Clone, Debug)]
pub(crate) enum Edit {
    /// Its metadata, its time to live, and the label of its head.
    Patch(Patch),
    /// Gives a version that it keeps a tag, or moves the tag to it; by default its head.
    Tag(TagName, Option<VersionRef>),
    /// Removes a tag.
    Untag(TagName),
    /// Changes the label of a version that it lists.
    Label(VersionRef, Option<String>),
}

/// What an [`Edit`] changes beside the session's row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edits {
    /// The version that the edit is about. The session must list it; if the version gets a tag, the session must keep it.
    pub(crate) version: String,
    /// Whether it gets a tag.
    tags: bool,
    /// The version's new label, if that changes.
    #[expect(clippy::option_option, reason = "`Patch` says it in the same way")]
    pub(crate) label: Option<Option<String>>,
}

impl Edit {
    /// Changes a session's row, and says what else the edit changes.
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
    /// Checks the version, given whether the session keeps it (`None`: it does not list it), and returns that.
    pub(crate) fn check(&self, kept: Option<bool>) -> Result<bool, StoreError> {
        kept.filter(|kept| *kept || !self.tags).ok_or(StoreError::VERSION)
    }
}

/// The result of an [`Edit`]: the session, and the version that the edit is about; of a removed tag, the session's head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edited {
    pub(crate) session: SessionRow,
    pub(crate) version: Listed,
}
