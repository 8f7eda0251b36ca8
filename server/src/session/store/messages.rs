//! Reads the messages of a conversation back.

use std::ops::Range;
use std::sync::Arc;

use super::inner::{Inner, Store, version_id};
use super::texts::within;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::TextRow;
use crate::session::text::{AddedMessage, Content, KeptMessage, MessagesPart, Role};
use crate::text::Vocabulary;

/// Maximum number of messages in one read.
pub(super) const MAX_MESSAGES: u64 = 10_000;

/// Maximum bytes of messages in one read.
const MAX_BYTES: usize = 32 << 20;

/// Number of tokens before an answer in which the answer's first character may have begun: each token, except special
/// ones, has at least one byte.
const BEFORE: u64 = 8;

impl Store {
    /// Returns the messages from number `start` to `end` of a version that the session lists; of the head if `version`
    /// is `None`. At most 10,000 messages.
    ///
    /// # Errors
    /// The session or version does not exist, its text was not kept, the range is outside the messages or too long, or
    /// the disk fails.
    pub async fn messages(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
        range: (Option<u64>, Option<u64>),
        vocabulary: Arc<Vocabulary>,
    ) -> Result<(VersionId, MessagesPart), StoreError> {
        self.inner.use_session(owner, id).await?;
        let (version, tokens, total) = self.inner.totals(owner, id, version).await?;
        let (start, end) = within(range, total, MAX_MESSAGES)?;
        let messages = self.inner.messages_of(&version, (tokens, start..end), vocabulary, MAX_BYTES).await?;
        Ok((version, MessagesPart { total, start, end, messages }))
    }
}

impl Inner {
    /// Returns a range of the messages of a version whose text has `tokens` tokens. Refuses more than `most` bytes.
    pub(super) async fn messages_of(
        &self,
        version: &VersionId,
        (tokens, range): (u64, Range<u64>),
        vocabulary: Arc<Vocabulary>,
        most: usize,
    ) -> Result<Vec<KeptMessage>, StoreError> {
        let mut reader = Reader { vocabulary, range, most, bytes: 0, later: Vec::new(), found: Vec::new() };
        if !reader.range.is_empty() {
            reader = self.visit_text(version, tokens, reader, Reader::visit).await?;
        }
        reader.found.reverse();
        Ok(reader.found)
    }
}

/// A part of a message.
struct Piece {
    /// The content; `None` if there is none.
    content: Option<Vec<u8>>,
    /// The positions of the tokens that make up the content, if it is stored as tokens.
    tokens: Option<Range<u64>>,
}

/// What has been decoded of a row; each part is decoded once for all of the row's messages.
#[derive(Default)]
struct RowText {
    tokens: Option<Vec<u32>>,
    bytes: Option<Vec<u8>>,
}

impl RowText {
    fn tokens(&mut self, row: &TextRow<'_>) -> Result<&[u32], StoreError> {
        if self.tokens.is_none() {
            self.tokens = Some(row.tokens(0, row.count)?);
        }
        Ok(self.tokens.as_deref().unwrap_or_default())
    }
}

/// Collects the messages of a range, from the last one backward.
struct Reader {
    vocabulary: Arc<Vocabulary>,
    range: Range<u64>,
    /// Maximum bytes of messages.
    most: usize,
    bytes: usize,
    /// The later parts of the message whose beginning has not been visited yet, last part first.
    later: Vec<Piece>,
    found: Vec<KeptMessage>,
}

impl Reader {
    /// Adds the messages of a row, of whose text only the part up to position `end` is used; returns whether the
    /// previous row is needed.
    fn visit(&mut self, version: &str, row: &TextRow<'_>, end: u64) -> Result<bool, StoreError> {
        let (mut number, mut text) = (row.messages, RowText::default());
        for message in row.added_messages()?.into_iter().rev() {
            let (of, continues) = (number.saturating_sub(1), message.continues);
            if self.range.contains(&of) {
                let piece = self.piece(row, &message, end, &mut text)?;
                let more = message.more.as_ref().map_or(0, String::len);
                self.bytes += piece.content.as_ref().map_or(0, Vec::len) + more;
                if self.bytes > self.most {
                    return Err(StoreError::LongMessages { bound: self.most });
                }
                self.later.push(piece);
                if !continues {
                    let found = self.message(version, message)?;
                    self.found.push(found);
                }
            }
            if !continues {
                number = of;
            }
        }
        Ok(number > self.range.start)
    }

    /// Returns the message that begins with the last of the collected parts.
    fn message(&mut self, version: &str, first: AddedMessage) -> Result<KeptMessage, StoreError> {
        let pieces = std::mem::take(&mut self.later);
        let ranges: Option<Vec<_>> = pieces.iter().map(|piece| piece.tokens.clone()).collect();
        let tokens = ranges.and_then(|ranges| Some((ranges.last()?.start, ranges.first()?.end)));
        let content: Vec<Vec<u8>> = pieces.into_iter().rev().filter_map(|piece| piece.content).collect();
        let text = || String::from_utf8_lossy(&content.concat()).into_owned();
        Ok(KeptMessage {
            role: first.role,
            content: (!content.is_empty()).then(text),
            version: version_id(version)?,
            more: first.more,
            tokens,
        })
    }

    /// Returns a part of a message, limited to tokens before position `end`. `text` caches what has been decoded of the
    /// row.
    fn piece(
        &self,
        row: &TextRow<'_>,
        message: &AddedMessage,
        end: u64,
        text: &mut RowText,
    ) -> Result<Piece, StoreError> {
        let of_text = |content| Piece { content, tokens: None };
        Ok(match &message.content {
            Content::Tokens(from, to) => {
                let (from, to) = (*from, (*to).min(end.saturating_sub(row.kept)));
                let to = to.max(from);
                let tokens = text.tokens(row)?;
                let part = |from: u64, to: u64| {
                    let last = tokens.len() as u64;
                    &tokens[from.min(last) as usize..to.min(last) as usize]
                };
                let mut bytes = Vec::new();
                if message.role == Role::Assistant && !message.continues {
                    // The answer includes the start of a character that the text before it has begun.
                    bytes = self.vocabulary.unfinished(part(from.saturating_sub(BEFORE), from));
                }
                let begins = row.kept == 0 && self.vocabulary.is_beginning(part(0, from));
                bytes.extend(self.vocabulary.text_of(part(from, to), begins));
                let at = |position: u64| row.kept.saturating_add(position).min(end);
                Piece { content: Some(bytes), tokens: Some(at(from)..at(to)) }
            }
            Content::Bytes(from, to) => {
                if text.bytes.is_none() {
                    text.bytes = Some(self.vocabulary.bytes_of(text.tokens(row)?));
                }
                let bytes = text.bytes.as_deref().unwrap_or_default();
                of_text(Some(bytes.get(*from as usize..*to as usize).unwrap_or_default().to_vec()))
            }
            Content::Text(text) => of_text(Some(text.clone().into_bytes())),
            Content::None => of_text(None),
        })
    }
}
