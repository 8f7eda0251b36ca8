//! The byte format of a text row. It begins with a format version byte. Numbers are LEB128: a token takes up to two
//! bytes with a vocabulary of up to 16,384, and up to three with one of up to two million.
//!
//! Head: number of tokens kept from the parent's text, number of added tokens, number of messages at the end of the
//! text, length of the parent's id, the id, number of bytes of the tokens. Then the tokens. Then the messages until the
//! end of the row, each as a byte of flags (role; bit 3: it continues the previous message; bits 4 and 5: the kind of
//! content; bit 6: it has further fields), the content (two numbers, or length and bytes), and length and bytes of the
//! further fields.

use bytes::Bytes;

use crate::session::error::StoreError;
use crate::session::text::{AddedMessage, AddedText, Content, Role};

/// The reason why a row cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DamagedText(pub(crate) String);

impl From<DamagedText> for StoreError {
    fn from(DamagedText(reason): DamagedText) -> Self {
        Self::Unavailable { reason: format!("index error: {reason}") }
    }
}

/// Bytes that a text takes in the index, in addition to its row.
const TEXT_ROW: u64 = 128;

/// Returns what a text with a row of `row` bytes counts toward the budgets.
pub(crate) fn text_bytes(row: u64) -> u64 {
    row + TEXT_ROW
}

/// The format version that is written; a row of any other version cannot be read.
const VERSION: u8 = 1;

const CONTINUES: u8 = 1 << 3;
const KIND: u8 = 4;
const MORE: u8 = 1 << 6;

/// Maximum number of messages of a row: twice as many as a request or a file may have.
const MOST_MESSAGES: usize = 20_000;

/// Maximum bytes of one number.
const LONGEST: usize = 10;

fn push(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Returns the number of bytes that `number` takes.
const fn length(number: u64) -> u64 {
    (number | 1).ilog2() as u64 / 7 + 1
}

fn push_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    push(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Returns the maximum bytes of a row with `tokens` tokens below `vocab_size` and `messages` bytes of messages.
pub(crate) fn most_bytes(tokens: u64, vocab_size: u64, messages: u64) -> u64 {
    tokens.saturating_mul(length(vocab_size.saturating_sub(1))).saturating_add(messages).saturating_add(HEAD)
}

/// Maximum bytes of a row besides its tokens and messages.
const HEAD: u64 = 128;

/// The tokens and messages of a text, encoded before the transaction that adds them.
#[derive(Clone, Debug)]
pub(crate) struct EncodedText {
    pub(crate) kept: u64,
    count: u64,
    /// Number of added messages that do not continue the previous one.
    messages: u64,
    /// The bytes of the tokens, followed by those of the messages. Clones share them.
    bytes: Bytes,
    tokens: usize,
}

impl EncodedText {
    pub(crate) fn new(text: &AddedText) -> Self {
        let mut bytes = Vec::with_capacity(2 * text.tokens.len());
        text.tokens.iter().for_each(|token| push(&mut bytes, (*token).into()));
        let tokens = bytes.len();
        let mut messages = 0;
        for (at, message) in text.messages.iter().enumerate() {
            // At the beginning of a text there is nothing to continue.
            let continues = message.continues && (text.kept > 0 || at > 0);
            push_message(&mut bytes, message, continues);
            messages += u64::from(!continues);
        }
        Self { kept: text.kept, count: text.tokens.len() as u64, messages, bytes: bytes.into(), tokens }
    }

    /// Returns the maximum bytes of its row.
    pub(crate) fn most_bytes(&self) -> u64 {
        self.bytes.len() as u64 + HEAD
    }

    /// Returns the row, given the parent's id and number of messages.
    pub(crate) fn row(&self, parent: Option<(&str, u64)>) -> Vec<u8> {
        let (parent, before) = parent.unwrap_or_default();
        let mut row = Vec::with_capacity(self.bytes.len() + parent.len() + 5 * LONGEST + 1);
        row.push(VERSION);
        for number in [self.kept, self.count, before + self.messages] {
            push(&mut row, number);
        }
        push_bytes(&mut row, parent.as_bytes());
        push(&mut row, self.tokens as u64);
        row.extend_from_slice(&self.bytes);
        row
    }
}

fn push_message(out: &mut Vec<u8>, message: &AddedMessage, continues: bool) {
    let kind = match message.content {
        Content::Tokens(..) => 0,
        Content::Bytes(..) => 1,
        Content::Text(_) => 2,
        Content::None => 3,
    };
    let continues = if continues { CONTINUES } else { 0 };
    out.push(message.role as u8 | continues | kind << KIND | if message.more.is_some() { MORE } else { 0 });
    match &message.content {
        Content::Tokens(start, end) | Content::Bytes(start, end) => {
            push(out, *start);
            push(out, *end);
        }
        Content::Text(text) => push_bytes(out, text.as_bytes()),
        Content::None => {}
    }
    if let Some(more) = &message.more {
        push_bytes(out, more.as_bytes());
    }
}

/// A row whose head is parsed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextRow<'r> {
    pub(crate) kept: u64,
    /// Number of added tokens.
    pub(crate) count: u64,
    /// Number of messages at the end of the text.
    pub(crate) messages: u64,
    /// The version whose text it continues; `None` if it keeps none of that text.
    pub(crate) parent: Option<&'r str>,
    tokens: &'r [u8],
    rest: &'r [u8],
}

/// Reads numbers and byte strings from the front of a slice.
struct Reader<'r>(&'r [u8]);

impl<'r> Reader<'r> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let part = u64::from(byte & 0x7f);
            if part << shift >> shift != part {
                return None;
            }
            number |= part << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    fn bytes(&mut self) -> Option<&'r [u8]> {
        let length = usize::try_from(self.number()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn text(&mut self) -> Option<&'r str> {
        std::str::from_utf8(self.bytes()?).ok()
    }
}

impl<'r> TextRow<'r> {
    pub(crate) fn parse(row: &'r [u8]) -> Result<Self, DamagedText> {
        let parse = || {
            let mut reader = Reader(row);
            reader.byte().filter(|version| *version == VERSION)?;
            let (kept, count, messages) = (reader.number()?, reader.number()?, reader.number()?);
            let parent = Some(reader.text()?).filter(|parent| !parent.is_empty());
            let tokens = reader.bytes()?;
            kept.checked_add(count)?;
            // A token takes at least one byte, so no more is allocated than the row can contain.
            (count <= tokens.len() as u64 && parent.is_some() == (kept > 0)).then_some(())?;
            Some(Self { kept, count, messages, parent, tokens, rest: reader.0 })
        };
        parse().ok_or_else(|| DamagedText("the text of a version cannot be parsed".to_owned()))
    }

    /// Returns the number of tokens at the end of the text.
    pub(crate) fn total(&self) -> u64 {
        self.kept + self.count
    }

    /// Returns the added tokens from index `from` to index `to` among them.
    pub(crate) fn tokens(&self, from: u64, to: u64) -> Result<Vec<u32>, DamagedText> {
        let mut reader = Reader(self.tokens);
        let mut tokens = Vec::with_capacity(to.min(self.count).saturating_sub(from) as usize);
        for at in 0..to.min(self.count) {
            let token = reader.number().and_then(|token| u32::try_from(token).ok());
            let token = token.ok_or_else(|| DamagedText("a token of a text cannot be parsed".to_owned()))?;
            if at >= from {
                tokens.push(token);
            }
        }
        Ok(tokens)
    }

    /// Returns the added messages, parsed one at a time.
    pub(crate) fn messages(&self) -> impl Iterator<Item = Result<AddedMessage, DamagedText>> + use<'r> {
        let mut reader = Reader(self.rest);
        std::iter::from_fn(move || {
            if reader.0.is_empty() {
                return None;
            }
            let message = read_message(&mut reader);
            if message.is_none() {
                // Nothing can be parsed after it.
                reader.0 = &[];
            }
            Some(message.ok_or_else(|| DamagedText("a message of a text cannot be parsed".to_owned())))
        })
    }

    /// Returns the added messages.
    pub(crate) fn added_messages(&self) -> Result<Vec<AddedMessage>, DamagedText> {
        // A message may take only one byte in the row, but much more in memory.
        let messages = self.messages().take(MOST_MESSAGES + 1).collect::<Result<Vec<_>, _>>()?;
        if messages.len() > MOST_MESSAGES {
            return Err(DamagedText(format!("a text adds more than {MOST_MESSAGES} messages")));
        }
        Ok(messages)
    }

    /// Returns everything that the row adds.
    pub(crate) fn added(&self) -> Result<AddedText, DamagedText> {
        let (tokens, messages) = (self.tokens(0, self.count)?, self.added_messages()?);
        Ok(AddedText { kept: self.kept, tokens, messages })
    }
}

fn read_message(reader: &mut Reader<'_>) -> Option<AddedMessage> {
    let flags = reader.byte()?;
    let content = match flags >> KIND & 3 {
        0 => Content::Tokens(reader.number()?, reader.number()?),
        1 => Content::Bytes(reader.number()?, reader.number()?),
        2 => Content::Text(reader.text()?.to_owned()),
        _ => Content::None,
    };
    let more = if flags & MORE > 0 { Some(reader.text()?.to_owned()) } else { None };
    Some(AddedMessage { role: Role::from_byte(flags & 7)?, continues: flags & CONTINUES > 0, content, more })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> AddedText {
        let message = |role, continues, content, more: Option<&str>| AddedMessage {
            role,
            continues,
            content,
            more: more.map(str::to_owned),
        };
        AddedText {
            kept: 300,
            tokens: vec![0, 127, 128, 16_383, 16_384, u32::MAX],
            messages: vec![
                message(Role::Assistant, true, Content::Tokens(0, 2), None),
                message(Role::User, false, Content::Bytes(5, 1 << 40), None),
                message(Role::Tool, false, Content::Text("é".to_owned()), Some(r#"{"a":1}"#)),
                message(Role::Developer, false, Content::None, Some("{}")),
            ],
        }
    }

    #[test]
    fn a_text_survives_encoding_and_decoding() {
        let encoded = EncodedText::new(&text());
        let row = encoded.row(Some(("ver_1", 7)));
        let parsed = TextRow::parse(&row).unwrap();
        assert_eq!((parsed.parent, parsed.messages, parsed.total()), (Some("ver_1"), 10, 306));
        assert_eq!(parsed.added().unwrap(), text());
        assert_eq!(parsed.tokens(2, 4).unwrap(), [128, 16_383]);
        assert_eq!(parsed.tokens(5, 900).unwrap(), [u32::MAX]);
        assert!(row.len() as u64 <= encoded.most_bytes());
    }

    #[test]
    fn the_bound_of_a_row_holds_for_every_vocabulary() {
        for vocab_size in [1, 2, 128, 129, 16_384, 16_385, 1 << 21, (1 << 21) + 1] {
            let tokens = vec![vocab_size as u32 - 1; 1000];
            let encoded = EncodedText::new(&AddedText { kept: u64::MAX / 2, tokens, messages: Vec::new() });
            let row = encoded.row(Some((&"v".repeat(36), u64::MAX / 2)));
            let most = most_bytes(1000, vocab_size, 0);
            assert!(row.len() as u64 <= most && most <= row.len() as u64 + HEAD, "{vocab_size}: {} {most}", row.len());
        }
    }

    #[test]
    fn a_damaged_row_is_an_error() {
        let row = EncodedText::new(&text()).row(Some(("ver_1", 7)));
        for length in 0..row.len() {
            drop(TextRow::parse(&row[..length]).and_then(|row| row.added()));
            for byte in [0, 0x7f, 0xff] {
                let mut changed = row.clone();
                changed[length] = byte;
                drop(TextRow::parse(&changed).and_then(|row| row.added()));
            }
        }
        // A row with too many messages to read into memory is refused.
        let mut many = EncodedText::new(&AddedText::default()).row(None);
        many.resize(many.len() + MOST_MESSAGES, 3 << KIND);
        assert_eq!(TextRow::parse(&many).unwrap().added_messages().unwrap().len(), MOST_MESSAGES);
        many.push(3 << KIND);
        assert!(TextRow::parse(&many).unwrap().added_messages().is_err());
        // The declared number of tokens is far larger than the row.
        let mut huge = vec![VERSION, 0];
        push(&mut huge, u64::MAX / 2);
        huge.extend([0, 0, 0]);
        assert!(TextRow::parse(&huge).is_err());
    }
}
