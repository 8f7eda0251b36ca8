//! Which tokens belong to the text that has been shown: text is held back where it may become a stop string or the
//! rest of a character, and what is said of its tokens waits with it.
//!
//! A token is told of with the piece of text that shows the last of it, and where none does with the end. Where a
//! stop string has ended the text, a token whose text begins before the string is told of whole, and one whose text
//! begins in it, or after it, is not. So an answer in one piece and a stream tell the same, wherever its pieces end.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::engine::{StopCause, TokenLogprobs, last_tokens};
use crate::session::Snapshot;
use crate::text::{Detokenizer, Tokenizer};

/// What a text begins with that is not of its own tokens.
#[derive(Clone, Debug, Default)]
pub(in crate::api) struct Opening {
    /// Characters of the text that stand before it, as an echoed prompt does.
    pub(in crate::api) offset: usize,
    /// Text that the turn before has held back.
    pub(in crate::api) held: String,
    /// The beginning of a character that the conversation, or the prompt, has left open.
    pub(in crate::api) bytes: Vec<u8>,
}

impl Opening {
    /// That of a text after `prompt`, which goes on with the conversation `base` where there is one.
    pub(in crate::api) fn new(prompt: &[u32], base: Option<&Snapshot>, tokenizer: &Tokenizer) -> Self {
        let answer = base.and_then(|base| base.answer.as_ref());
        if let Some(answer) = answer.filter(|answer| answer.open && prompt.is_empty()) {
            return Self { held: answer.held.clone(), bytes: answer.bytes.clone(), ..Self::default() };
        }
        let last = last_tokens(base.map_or(&[], |base| &base.pending), prompt);
        Self { bytes: tokenizer.vocabulary().unfinished(&last), ..Self::default() }
    }
}

/// A token and where its text begins.
#[derive(Debug, PartialEq)]
pub(in crate::api) struct Placed {
    pub(in crate::api) logprobs: TokenLogprobs,
    /// Its first character's place in the text, the echoed prompt included. A token that begins inside a character
    /// has that character's.
    pub(in crate::api) offset: usize,
    /// The bytes of text before it and up to its end, in whole characters.
    start: usize,
    end: usize,
}

/// Follows one text.
pub(in crate::api) struct Aligner {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    /// Bytes and characters of the text of all tokens so far.
    bytes: usize,
    offset: usize,
    /// Bytes of text that have been shown.
    shown: usize,
    waiting: VecDeque<Placed>,
}

impl Aligner {
    pub(in crate::api) fn new(tokenizer: Arc<Tokenizer>, opening: &Opening) -> Self {
        Self {
            tokenizer,
            detokenizer: Detokenizer::resume(&opening.bytes),
            bytes: opening.held.len(),
            offset: opening.offset + opening.held.chars().count(),
            shown: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Takes the next tokens and the text that was shown with them; the tokens that can be told of by now.
    pub(in crate::api) fn push(&mut self, text: &str, tokens: Vec<TokenLogprobs>) -> Vec<Placed> {
        self.shown += text.len();
        for logprobs in tokens {
            let mut characters = String::new();
            self.detokenizer.push(self.tokenizer.vocabulary().bytes(logprobs.token), &mut characters);
            let (start, offset) = (self.bytes, self.offset);
            self.bytes += characters.len();
            self.offset += characters.chars().count();
            self.waiting.push_back(Placed { logprobs, offset, start, end: self.bytes });
        }
        // More is shown than the tokens say where the text has ended inside a character: the end tells the rest.
        let explained = self.shown <= self.bytes;
        let told = |placed: &Placed| explained && placed.start < self.shown && placed.end <= self.shown;
        let count = self.waiting.iter().take_while(|placed| told(placed)).count();
        self.waiting.drain(..count).collect()
    }

    /// The rest of the tokens that are told of, the text having ended by `stop`, or by its length.
    pub(in crate::api) fn finish(&mut self, stop: Option<&StopCause>) -> Vec<Placed> {
        let cut = matches!(stop, Some(StopCause::String(_)));
        let shown = self.shown;
        self.waiting.drain(..).filter(|placed| !cut || placed.start < shown).collect()
    }
}
