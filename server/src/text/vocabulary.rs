//! The bytes that each token id adds to a text.
//!
//! The bytes of a character may be spread over several byte-level tokens, so only
//! [`Detokenizer`](super::Detokenizer) may turn these bytes into characters.

use super::detokenizer::Detokenizer;

/// The bytes of every token; none for special tokens and unused ids.
#[derive(Debug)]
pub struct Vocabulary {
    tokens: Vec<Box<[u8]>>,
    /// Whether the tokenizer adds a space at the beginning of a text.
    adds_space: bool,
}

impl Vocabulary {
    /// Creates a vocabulary in which token `id` has the bytes `tokens[id]`.
    pub fn new(tokens: Vec<Box<[u8]>>) -> Self {
        Self { tokens, adds_space: false }
    }

    /// Marks the vocabulary as that of a tokenizer that adds a space at the beginning of a text.
    #[must_use]
    pub fn with_added_space(self) -> Self {
        Self { adds_space: true, ..self }
    }

    /// Creates a detokenizer for what follows `last`, the last tokens of a text. `cut` says whether the text has tokens
    /// before them.
    pub fn detokenizer_after(&self, last: &[u32], cut: bool) -> Detokenizer {
        if !cut && self.is_beginning(last) { self.detokenizer() } else { Detokenizer::resume(&self.unfinished(last)) }
    }

    /// Creates a detokenizer at the start of a text.
    pub fn detokenizer(&self) -> Detokenizer {
        if self.adds_space { Detokenizer::without_space() } else { Detokenizer::new() }
    }

    /// Whether the tokens `before` add no bytes, so that the text begins after them.
    pub fn is_beginning(&self, before: &[u32]) -> bool {
        before.iter().all(|id| self.bytes(*id).is_empty())
    }

    /// Returns the first bytes of an incomplete character at the end of the text of `ids`.
    pub fn unfinished(&self, ids: &[u32]) -> Vec<u8> {
        // A character has at most 4 bytes, and its beginning does not depend on what precedes it.
        let mut last: Vec<u8> = ids.iter().rev().flat_map(|id| self.bytes(*id).iter().rev()).take(3).copied().collect();
        last.reverse();
        let mut detokenizer = Detokenizer::new();
        detokenizer.push(&last, &mut String::new());
        detokenizer.pending().to_vec()
    }

    /// Returns the bytes that `id` adds to a text.
    pub fn bytes(&self, id: u32) -> &[u8] {
        // The model's vocabulary may be larger than the tokenizer's. Ids in between add nothing.
        self.tokens.get(id as usize).map_or(&[], AsRef::as_ref)
    }

    /// Returns the bytes of a text.
    pub fn bytes_of(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|id| self.bytes(*id)).copied().collect()
    }

    /// Returns the bytes of a part of a text. If this part `begins` the text, the space that the tokenizer adds there
    /// is left out.
    pub fn text_of(&self, ids: &[u32], begins: bool) -> Vec<u8> {
        let bytes = self.bytes_of(ids);
        if begins { self.without_added_space(bytes) } else { bytes }
    }

    /// Returns `text` without the space that the tokenizer adds before it.
    pub fn without_added_space(&self, mut text: Vec<u8>) -> Vec<u8> {
        if self.adds_space && text.first() == Some(&b' ') {
            text.remove(0);
        }
        text
    }

    /// Returns the bytes of each token, in order of ids.
    pub fn tokens(&self) -> impl Iterator<Item = &[u8]> {
        self.tokens.iter().map(AsRef::as_ref)
    }
}

/// Returns the byte for a character of byte-level BPE's printable alphabet: printable Latin-1 characters represent
/// themselves, and the characters from U+0100 on represent the other 68 bytes in order.
pub(super) fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    if code < 256 {
        return u8::try_from(code).ok().filter(|byte| represents_itself(*byte));
    }
    (0..=u8::MAX).filter(|byte| !represents_itself(*byte)).nth(code as usize - 256)
}

fn represents_itself(byte: u8) -> bool {
    matches!(byte, 33..=126 | 161..=172 | 174..=255)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_one_to_one() {
        let mut characters: Vec<(u8, char)> =
            (0..0x200).filter_map(char::from_u32).filter_map(|c| byte_of(c).map(|b| (b, c))).collect();
        characters.sort_unstable();
        let bytes: Vec<u8> = characters.iter().map(|pair| pair.0).collect();
        assert_eq!(bytes, (0..=u8::MAX).collect::<Vec<_>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
        assert_eq!(byte_of('A'), Some(b'A'));
        assert_eq!(byte_of(' '), None);
    }

    #[test]
    fn an_id_past_the_end_adds_nothing() {
        let vocabulary = Vocabulary::new(vec![b"a".as_slice().into()]);
        assert_eq!(vocabulary.bytes(0), b"a");
        assert!(vocabulary.bytes(u32::MAX).is_empty());
    }
}
