//! Aligns tokens with the text that has been sent. Text is held back while it may become a stop string or is an
//! incomplete character, and the log probabilities of its tokens wait with it.
//!
//! A token is released with the piece of text that completes it, or else at the end. If a stop string has ended the
//! text, a token whose text begins before the stop string is released, and a token whose text begins in it or after it
//! is not. So a stream and a response in one piece list the same tokens, however the stream is split.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::api::request::ValidRequest;
use crate::engine::{StopCause, TokenLogprobs, last_tokens};
use crate::session::Snapshot;
use crate::text::{Detokenizer, Tokenizer};

/// What comes before a text's own tokens.
#[derive(Clone, Debug, Default)]
pub(in crate::api) struct Carried {
    /// Number of characters in front of the text, such as those of an echoed prompt.
    pub(in crate::api) offset: usize,
    /// Text that the previous turn held back.
    pub(in crate::api) held: String,
    /// Turns the text's tokens into characters. It may hold the first bytes of a character that the conversation or the
    /// prompt left incomplete.
    pub(in crate::api) detokenizer: Detokenizer,
}

/// Returns what comes before the texts of each prompt.
pub(in crate::api) fn carried(request: &ValidRequest) -> impl Iterator<Item = Carried> {
    request.prompts.iter().map(|prompt| {
        // A translation never continues a character of its source.
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
    /// Returns what comes before a text that follows `prompt`, in the conversation `base` if there is one.
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

/// A token and the position of its text.
#[derive(Debug, PartialEq)]
pub(in crate::api) struct AlignedToken {
    pub(in crate::api) logprobs: TokenLogprobs,
    /// The index of the token's first character in the text, including the echoed prompt. A token that begins inside a
    /// character has the index of that character.
    pub(in crate::api) offset: usize,
    /// The byte range of the token's text, in whole characters.
    start: usize,
    end: usize,
}

/// Aligns the tokens of one text.
pub(in crate::api) struct TokenAligner {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    /// Bytes and characters in the text of all tokens so far.
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
        // If the text ended inside a character, more text is sent than the tokens explain. `finish` then releases the
        // rest.
        let explained = self.sent <= self.bytes;
        let complete = |token: &AlignedToken| explained && token.start < self.sent && token.end <= self.sent;
        let count = self.waiting.iter().take_while(|token| complete(token)).count();
        self.waiting.drain(..count).collect()
    }

    /// Releases the remaining tokens of a text that `stop`, or else its length, has ended.
    pub(in crate::api) fn finish(&mut self, stop: Option<&StopCause>) -> Vec<AlignedToken> {
        let cut = stop.is_some_and(StopCause::is_string);
        let sent = self.sent;
        self.waiting.drain(..).filter(|token| !cut || token.start < sent).collect()
    }
}

/// Whether `begun`, the first bytes of a character, cannot be continued by a token with these `bytes`. They have then
/// become a U+FFFD, and the token begins after it.
fn stands_alone(begun: &[u8], bytes: &[u8]) -> bool {
    let joined = [begun, bytes].concat();
    let invalid = str::from_utf8(&joined).err().filter(|error| error.valid_up_to() == 0);
    invalid.and_then(|error| error.error_len()).is_some_and(|length| length <= begun.len())
}
