//! Encodes texts of any length in pieces, up to a limit on tokens.

use super::encoder::{Encoded, Pace};
use super::error::TextError;
use super::tokenizer::Tokenizer;

/// Length of a piece in bytes. The tokenizer takes about 150 bytes of memory for each byte of a piece.
const PIECE_BYTES: usize = 64 << 10;

/// Which special tokens are added around a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Around {
    /// Those before and after every text, as [`Tokenizer::encode`] adds them.
    Both,
    /// Those before every text, unless the text has them, as [`Tokenizer::encode_chat`] adds them.
    Begin,
    /// None; nothing comes before the text.
    Nothing,
    /// None; the text continues another text, as with [`Tokenizer::encode_more`].
    More,
    /// Those before and after every text. Special tokens within the text count as plain text, as with
    /// [`Tokenizer::encode_plain`].
    PlainBoth,
    /// None. Special tokens within the text count as plain text, as with [`Tokenizer::encode_plain`].
    PlainNothing,
}

impl Tokenizer {
    /// Encodes `text`. Gives the same ids as encoding it in one piece, but needs bounded memory and reads little more
    /// than `pace.most` tokens.
    ///
    /// # Errors
    /// The text is too long, has too few places to cut it, or is refused by the tokenizer.
    pub fn encode_within(&self, text: &str, around: Around, pace: &mut Pace<'_>) -> Result<Vec<u32>, TextError> {
        self.encode_in_pieces(text, around, pace, PIECE_BYTES)
    }

    fn encode_in_pieces(
        &self,
        text: &str,
        around: Around,
        pace: &mut Pace<'_>,
        target: usize,
    ) -> Result<Vec<u32>, TextError> {
        let plain = matches!(around, Around::PlainBoth | Around::PlainNothing);
        let encoder = if around == Around::More { self.encoder.more() } else { &*self.encoder };
        let Some(Encoded { ids, before, after }) = encoder.encode_in_pieces(text, plain, pace, target)? else {
            return self.encode_whole(text, around);
        };
        match around {
            Around::Both | Around::PlainBoth => Ok([before, &ids, after].concat()),
            Around::Begin if !ids.starts_with(self.begin()) => Ok([self.begin(), &ids].concat()),
            Around::Begin | Around::Nothing | Around::More | Around::PlainNothing => Ok(ids),
        }
    }

    fn encode_whole(&self, text: &str, around: Around) -> Result<Vec<u32>, TextError> {
        match around {
            Around::Both => self.encode(text),
            Around::Begin => self.encode_chat(text),
            Around::Nothing => self.encoder.encode(text, false, false),
            Around::More => self.encode_more(text),
            Around::PlainBoth => self.encode_plain(text, true),
            Around::PlainNothing => self.encode_plain(text, false),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::text::split::{self, Cuts};

    fn tokenizer() -> Tokenizer {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/checkpoints/tidegate-tiny");
        Tokenizer::load(&folder, 4096, &[]).unwrap()
    }

    fn pieces(text: &str, target: usize) -> Vec<&str> {
        split::pieces(text, target, &Cuts::Words)
    }

    #[test]
    fn a_text_in_pieces_gets_the_tokens_of_the_whole_and_pauses_between_them() {
        let tokenizer = tokenizer();
        let text = "<|endoftext|>Once upon a time, there was <|endoftext|> a fox.\n".repeat(20);
        for around in
            [Around::Both, Around::Begin, Around::Nothing, Around::More, Around::PlainBoth, Around::PlainNothing]
        {
            for text in [text.as_str(), &text[13..], ""] {
                let mut pauses = 0;
                let mut pace = Pace { most: usize::MAX, pause: &mut || pauses += 1 };
                let ids = tokenizer.encode_in_pieces(text, around, &mut pace, 40).unwrap();
                assert_eq!(ids, tokenizer.encode_whole(text, around).unwrap(), "{around:?}");
                assert_eq!(pauses, pieces(text, 40).len() - 1);
            }
        }
    }

    #[test]
    fn encoding_ends_soon_after_the_last_token_that_is_wanted() {
        let tokenizer = tokenizer();
        let text = "x y ".repeat(100_000);
        let mut pauses = 0;
        let mut pace = Pace { most: 40_000, pause: &mut || pauses += 1 };
        let error = tokenizer.encode_within(&text, Around::Nothing, &mut pace).unwrap_err();
        assert!(matches!(error, TextError::Tokens { most: 40_000, read: 40_001..120_000 }), "{error:?}");
        assert!(pauses < pieces(&text, PIECE_BYTES).len() - 1);
        // Even with the longest possible tokens there would be more than the limit, so nothing is read.
        let mut pace = Pace { most: 1000, pause: &mut || () };
        let error = tokenizer.encode_within(&text, Around::Nothing, &mut pace).unwrap_err();
        assert!(matches!(error, TextError::Tokens { most: 1000, read: 0 }), "{error:?}");
    }

    #[test]
    fn a_text_that_cannot_be_cut_is_refused_before_it_is_read() {
        let tokenizer = tokenizer();
        let mut pace = Pace { most: 10_000_000, pause: &mut || panic!("nothing is read") };
        let error = tokenizer.encode_within(&"1".repeat(4 << 20), Around::Nothing, &mut pace).unwrap_err();
        assert!(matches!(error, TextError::Uncut { .. }), "{error:?}");
        let long = "1".repeat(256 << 10);
        assert_eq!(tokenizer.encode_within(&long, Around::Nothing, &mut pace).unwrap().len(), long.len());
    }
}
