//! Aligns tokens with the text that has been sent. Text is held back while it may become a stop string or the rest of a
//! character, and the log probabilities of its tokens wait with it.
//!
//! A token is released with the piece of text that completes it, or else at the end. If a stop string has ended the text,
//! a token whose text begins before the string is released, and one whose text begins in it or after it is not. So a
//! stream and a response in one piece list the same tokens, however the stream is cut.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::api::request::ValidRequest;
use crate::engine::{StopCause, TokenLogprobs, last_tokens};
use crate::session::Snapshot;
use crate::text::{Detokenizer, Tokenizer};

/// What a text begins with besides its own tokens.
#[derive(Clone, Debug, Default)]
pub(in crate::api) struct Carried {
    /// Characters in front of it, such as an echoed prompt's.
    pub(in crate::api) offset: usize,
    /// Text that the turn before held back.
    pub(in crate::api) held: String,
    /// What turns its tokens into characters. It may have the beginning of one that the conversation or the prompt left
    /// incomplete.
    pub(in crate::api) detokenizer: Detokenizer,
}

/// What the texts of each prompt begin with.
pub(in crate::api) fn carried(request: &ValidRequest) -> impl Iterator<Item = Carried> {
    request.prompts.iter().map(|prompt| {
        // No character of a translation begins in its source.
        let source = request.served.reads_sources() && !prompt.is_empty();
        if source {
            let detokenizer = request.served.tokenizer.vocabulary().detokenizer();
            Carried { detokenizer, ..Carried::default() }
        } else {
            Carried::new(prompt, request.base.as_deref(), &request.served.tokenizer)
        }
    })
}

impl Carried {
    /// What a text after `prompt` begins with, in the conversation `base` if there is one.
    fn new(prompt: &[u32], base: Option<&Snapshot>, tokenizer: &Tokenizer) -> Self {
        let answer = base.and_then(|base| base.answer.as_ref());
        if let Some(answer) = answer.filter(|answer| answer.open && prompt.is_empty()) {
            let detokenizer = Detokenizer::resume(&answer.bytes);
            return Self { held: answer.held.clone(), detokenizer, ..Self::default() };
        }
        let last = last_tokens(base.map_or(&[], |base| &base.pending), prompt);
        let cut = base.is_some_and(|base| base.tokens() > 0) || last.len() < prompt.len();
        Self { detokenizer: tokenizer.vocabulary().detokenizer_after(&last, cut), ..Self::default() }
    }
}

/// A token and the place of its text.
#[derive(Debug, PartialEq)]
pub(in crate::api) struct AlignedToken {
    pub(in crate::api) logprobs: TokenLogprobs,
    /// The index of its first character in the text, the echoed prompt included. A token that begins inside a
    /// character has the index of that character.
    pub(in crate::api) offset: usize,
    /// The range of its bytes in the text, in whole characters.
    start: usize,
    end: usize,
}

/// Aligns the tokens of one text.
pub(in crate::api) struct TokenAligner {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    /// Bytes and characters of the text of all tokens so far.
    bytes: usize,
    offset: usize,
    /// Bytes of text that have been sent.
    sent: usize,
    waiting: VecDeque<AlignedToken>,
}

impl TokenAligner {
    pub(in crate::api) fn new(tokenizer: Arc<Tokenizer>, carried: &Carried) -> Self {
        Self {
            tokenizer,
            detokenizer: carried.detokenizer.clone(),
            bytes: carried.held.len(),
            offset: carried.offset + carried.held.chars().count(),
            sent: 0,
            waiting: VecDeque::new(),
        }
    }

    /// Adds tokens and the text that was sent with them. Returns the tokens that can be released.
    pub(in crate::api) fn push(&mut self, text: &str, tokens: Vec<TokenLogprobs>) -> Vec<AlignedToken> {
        self.sent += text.len();
        for logprobs in tokens {
            let (bytes, mut characters) = (self.tokenizer.vocabulary().bytes(logprobs.token), String::new());
            let begun = self.detokenizer.pending().to_vec();
            self.detokenizer.push(bytes, &mut characters);
            let (mut start, mut offset) = (self.bytes, self.offset);
            if stands_alone(&begun, bytes) {
                start += char::REPLACEMENT_CHARACTER.len_utf8();
                offset += 1;
            }
            self.bytes += characters.len();
            self.offset += characters.chars().count();
            self.waiting.push_back(AlignedToken { logprobs, offset, start, end: self.bytes });
        }
        // More text is sent than the tokens explain if the text ended inside a character; its end releases the rest.
        let explained = self.sent <= self.bytes;
        let complete = |token: &AlignedToken| explained && token.start < self.sent && token.end <= self.sent;
        let count = self.waiting.iter().take_while(|token| complete(token)).count();
        self.waiting.drain(..count).collect()
    }

    /// Releases the rest of the tokens of a text that `stop` has ended, or its length.
    pub(in crate::api) fn finish(&mut self, stop: Option<&StopCause>) -> Vec<AlignedToken> {
        let cut = stop.is_some_and(StopCause::is_string);
        let sent = self.sent;
        self.waiting.drain(..).filter(|token| !cut || token.start < sent).collect()
    }
}

/// Whether the bytes before a token, the beginning of a character, are none with it: then they have become a U+FFFD, which the
/// token begins after.
fn stands_alone(begun: &[u8], bytes: &[u8]) -> bool {
    let joined = [begun, bytes].concat();
    let invalid = str::from_utf8(&joined).err().filter(|error| error.valid_up_to() == 0);
    invalid.and_then(|error| error.error_len()).is_some_and(|length| length <= begun.len())
}
