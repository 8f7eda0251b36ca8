//! What a snapshot file contains besides the state: the text, and the versions it comes from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::text::AddedText;

/// An earlier version of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ancestor {
    /// The version's id.
    pub version: String,
    /// The client's label for the version.
    #[serde(deserialize_with = "Option::deserialize")]
    pub label: Option<String>,
    /// Creation time in unix milliseconds.
    pub time: u64,
}

/// What a file contains besides the snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    /// The label of the version.
    pub label: Option<String>,
    /// The client's metadata on the session.
    pub metadata: BTreeMap<String, String>,
    /// The version's ancestors, oldest first.
    pub lineage: Vec<Ancestor>,
    /// The whole text, if it was kept.
    pub text: Option<AddedText>,
}

/// Maximum bytes of ancestors in a file.
const MAX_LINEAGE: usize = 64 << 10;

/// Bytes that an ancestor takes besides its id and label.
const ANCESTOR: usize = 128;

/// Removes the oldest ancestors if a file cannot hold all of them.
pub(crate) fn shorten(lineage: &mut Vec<Ancestor>) {
    let mut bytes = 0;
    let fits = |ancestor: &&Ancestor| {
        // A byte of a label takes up to 6 bytes of JSON.
        bytes += ANCESTOR + ancestor.version.len() + 6 * ancestor.label.as_ref().map_or(0, String::len);
        bytes <= MAX_LINEAGE
    };
    let kept = lineage.iter().rev().take_while(fits).count();
    lineage.drain(..lineage.len() - kept);
}
