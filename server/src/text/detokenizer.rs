//! Incremental decoding: turns the bytes of tokens into complete characters.

/// Decodes the bytes of a growing text, never returning part of a character.
///
/// In total, the output equals [`String::from_utf8_lossy`] of the whole input. Bytes that may still become a character
/// are held back; bytes that cannot become one turn into U+FFFD.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    /// The beginning of a character; at most 3 bytes between calls.
    pending: Vec<u8>,
    /// Whether to drop the next byte if it is a space.
    drops_space: bool,
}

impl Detokenizer {
    /// Creates a detokenizer at the start of a text.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a detokenizer at the start of a text whose first space is not part of it, because the tokenizer added
    /// it.
    pub fn without_space() -> Self {
        Self { drops_space: true, ..Self::default() }
    }

    /// Continues where another detokenizer stopped with these [`Self::pending`] bytes.
    pub fn resume(pending: &[u8]) -> Self {
        Self { pending: pending.into(), drops_space: false }
    }

    /// Returns the bytes that wait for the rest of their character.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }

    /// Adds `bytes` and appends the characters that they complete to `out`.
    pub fn push(&mut self, mut bytes: &[u8], out: &mut String) {
        if self.drops_space && !bytes.is_empty() {
            self.drops_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        let mut start = 0;
        loop {
            match std::str::from_utf8(&self.pending[start..]) {
                Ok(text) => {
                    out.push_str(text);
                    self.pending.clear();
                    return;
                }
                Err(error) => {
                    let end = start + error.valid_up_to();
                    out.push_str(&String::from_utf8_lossy(&self.pending[start..end]));
                    let Some(invalid) = error.error_len() else {
                        self.pending.drain(..end);
                        return;
                    };
                    out.push(char::REPLACEMENT_CHARACTER);
                    start = end + invalid;
                }
            }
        }
    }

    /// Ends the text. An incomplete character becomes one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<String>, String) {
        let mut detokenizer = Detokenizer::new();
        let mut steps = Vec::new();
        for piece in pieces {
            let mut out = String::new();
            detokenizer.push(piece, &mut out);
            steps.push(out);
        }
        let mut rest = String::new();
        detokenizer.finish(&mut rest);
        (steps, rest)
    }

    #[test]
    fn a_character_split_over_tokens_is_returned_whole() {
        let snowman = "☃".as_bytes();
        let (steps, rest) = run([b"a".as_slice(), &snowman[..1], &snowman[1..2], &snowman[2..], b"b"]);
        assert_eq!(steps, ["a", "", "", "☃", "b"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn an_incomplete_character_is_replaced_at_the_end() {
        let (steps, rest) = run(["é".as_bytes(), &"🦀".as_bytes()[..3]]);
        assert_eq!(steps, ["é", ""]);
        assert_eq!(rest, "\u{FFFD}");
    }

    #[test]
    fn the_space_that_a_tokenizer_puts_before_a_text_is_left_out() {
        for (pieces, text) in
            [(&["", " a", " b"][..], "a b"), (&["  a"], " a"), (&["a", " b"], "a b"), (&[" ", " "], " ")]
        {
            let (mut detokenizer, mut out) = (Detokenizer::without_space(), String::new());
            for piece in pieces {
                detokenizer.push(piece.as_bytes(), &mut out);
            }
            assert_eq!(out, text, "{pieces:?}");
        }
    }

    #[test]
    fn invalid_bytes_do_not_hold_back_what_follows() {
        let (steps, rest) = run([b"\xFFok".as_slice(), b"\xC3", b"("]);
        assert_eq!(steps, ["\u{FFFD}ok", "", "\u{FFFD}("]);
        assert_eq!(rest, "");
    }

    proptest! {
        #[test]
        fn any_split_gives_the_lossy_text(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5), 0..40)) {
            let (steps, rest) = run(pieces.iter().map(Vec::as_slice));
            let whole = pieces.concat();
            prop_assert_eq!(steps.concat() + &rest, String::from_utf8_lossy(&whole).into_owned());
        }

        #[test]
        fn valid_text_in_any_split_never_contains_a_replacement(text in "\\PC{0,60}", cut in 1usize..4) {
            let (steps, rest) = run(text.as_bytes().chunks(cut));
            prop_assert_eq!(steps.concat(), text);
            prop_assert_eq!(rest, "");
        }
    }
}
