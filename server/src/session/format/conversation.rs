//! What a version 2 file contains besides the snapshot: label, metadata, ancestors and text.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::codec::Codec;
use super::error::{FormatError, shown};
use crate::session::conversation::{Ancestor, Conversation, shorten};
use crate::session::id::VersionId;
use crate::session::index::{EncodedText, TextRow};
use crate::session::snapshot::{History, Snapshot};
use crate::session::text::{AddedMessage, AddedText, Content};

/// Maximum size of the description in bytes.
pub(super) const MAX_DESCRIPTION: usize = 256 << 10;

/// Maximum size of the text in bytes.
pub(super) const MAX_TEXT: usize = 16 << 20;

/// Maximum number of messages of a text. A writer omits a text with more.
const MAX_MESSAGES: u64 = 10_000;

/// Maximum bytes of a message's further fields. Reading them back parses them, which may take many times the memory. A
/// writer omits a text that exceeds this.
const MAX_MORE: usize = 1 << 20;

/// Maximum number of characters of a label.
const MAX_LABEL: usize = 256;

/// The description, as it is in the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    #[serde(deserialize_with = "Option::deserialize")]
    label: Option<String>,
    metadata: BTreeMap<String, String>,
    lineage: Vec<Ancestor>,
}

/// Returns the description and the text. A text that is too long is omitted.
pub(super) fn write(conversation: &Conversation) -> (Vec<u8>, Vec<u8>) {
    let Conversation { label, metadata, lineage, text } = conversation;
    let mut lineage = lineage.clone();
    shorten(&mut lineage);
    let description = Description { label: label.clone(), metadata: metadata.clone(), lineage };
    let description = serde_json::to_vec(&description).expect("strings and numbers become JSON");
    let fits = |text: &&AddedText| text.messages.iter().all(|message| more_bytes(message) <= MAX_MORE);
    let text = text.as_ref().filter(fits).map(|text| EncodedText::new(text).row(None)).unwrap_or_default();
    (description, if text.len() > MAX_TEXT { Vec::new() } else { text })
}

/// Reads both parts, and checks that the text is what `snapshot` has read. If `source` is not 0, the text begins with a
/// source of that many tokens.
pub(super) fn read(
    (description, text): (&[u8], &[u8]),
    codec: &Codec,
    snapshot: &Snapshot,
    source: usize,
) -> Result<Conversation, FormatError> {
    let invalid = |reason: &str| FormatError::Description(shown(reason));
    let Description { label, metadata, lineage } =
        serde_json::from_slice(description).map_err(|error| invalid(&error.to_string()))?;
    let mut bounded = lineage.clone();
    shorten(&mut bounded);
    if bounded.len() != lineage.len() {
        return Err(invalid("the ancestors are too many"));
    }
    for ancestor in &lineage {
        if VersionId::parse(&ancestor.version).is_none() {
            return Err(invalid("an ancestor must have the id of a version"));
        }
        if ancestor.label.as_ref().is_some_and(|label| label.chars().count() > MAX_LABEL) {
            return Err(invalid("a label must have at most 256 characters"));
        }
    }
    let text = if text.is_empty() { None } else { Some(checked_text(text, codec, snapshot, source)?) };
    Ok(Conversation { label, metadata, lineage, text })
}

fn checked_text(row: &[u8], codec: &Codec, snapshot: &Snapshot, source: usize) -> Result<AddedText, FormatError> {
    let refused = |reason: &'static str| FormatError::Text { reason };
    let row = TextRow::parse(row).ok().filter(|row| row.parent.is_none()).ok_or(refused("has an unknown form"))?;
    if row.total() != snapshot.tokens() {
        return Err(refused("has another number of tokens than the snapshot"));
    }
    let messages = checked_messages(&row)?;
    let tokens = row.tokens(0, row.count).map_err(|_| refused("has an unknown form"))?;
    if tokens.iter().any(|token| *token as usize >= codec.vocab_size) {
        return Err(refused("has a token that the vocabulary does not have"));
    }
    let text = AddedText { kept: 0, tokens, messages };
    let (read, pending) = text.tokens.split_at(text.tokens.len() - snapshot.pending.len());
    let Some((source, rest)) = read.split_at_checked(source) else {
        return Err(refused("is shorter than its source"));
    };
    let start = if source.is_empty() { History::default() } else { History::of_source(source) };
    if pending != snapshot.pending || start.extended(rest) != snapshot.history {
        return Err(refused("is not the text that the state has read"));
    }
    Ok(text)
}

/// Reads the messages one by one, because each may take one byte in the file but much more in memory.
fn checked_messages(row: &TextRow<'_>) -> Result<Vec<AddedMessage>, FormatError> {
    let refused = |reason: &'static str| FormatError::Text { reason };
    if row.messages > MAX_MESSAGES {
        return Err(refused("has more than 10,000 messages"));
    }
    let mut messages = Vec::new();
    // Where the next range may begin, in tokens and in bytes.
    let (mut next_token, mut next_byte) = (0, 0);
    for message in row.messages() {
        let message = message.map_err(|_| refused("has an unknown form"))?;
        if messages.len() as u64 == row.messages {
            return Err(refused("has more messages than it says"));
        }
        if message.continues {
            return Err(refused("has a message that continues another"));
        }
        let in_order = match message.content {
            Content::Tokens(from, to) => {
                let in_order = next_token <= from && from <= to && to <= row.count;
                next_token = to;
                in_order
            }
            Content::Bytes(from, to) => {
                let in_order = next_byte <= from && from <= to;
                next_byte = to;
                in_order
            }
            Content::Text(_) | Content::None => true,
        };
        if !in_order {
            return Err(refused("has messages whose ranges overlap, descend, or are not in the text"));
        }
        if more_bytes(&message) > MAX_MORE {
            return Err(refused("has a message with more than 1 MiB of further fields"));
        }
        if message.more.as_deref().is_some_and(|more| !is_object(more)) {
            return Err(refused("has a message whose further fields are not a JSON object"));
        }
        messages.push(message);
    }
    if messages.len() as u64 == row.messages { Ok(messages) } else { Err(refused("has fewer messages than it says")) }
}

/// Returns the bytes of a message's further fields.
fn more_bytes(message: &AddedMessage) -> usize {
    message.more.as_ref().map_or(0, String::len)
}

fn is_object(json: &str) -> bool {
    json.starts_with('{') && serde_json::from_str::<IgnoredAny>(json).is_ok()
}
