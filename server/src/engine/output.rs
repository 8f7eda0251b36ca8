//! Turns sampled tokens into the text that is shown: completes characters, finds stop strings, and holds back the rest.

use crate::session::Answer;
use crate::text::{Detokenizer, StopMatcher, StopStrings};

/// The text of one request.
#[derive(Debug)]
pub(super) struct TextOutput {
    pub(super) detokenizer: Detokenizer,
    pub(super) stops: StopMatcher,
    /// Text to show before that of the first token.
    carried: String,
}

/// Buffers for the text of a token, reused from token to token.
#[derive(Default)]
pub(super) struct TextBuffers {
    /// The text that the token shows.
    pub(super) text: String,
    /// The characters that the token completes; some may be held back.
    characters: String,
}

impl TextOutput {
    /// Continues `answer`. `may_end` says whether a stop string may end the text with the first token.
    pub(super) fn new(strings: StopStrings, answer: &Answer, may_end: bool) -> Self {
        let mut carried = String::new();
        let stops = if may_end {
            StopMatcher::resume(strings, &answer.held, &mut carried)
        } else {
            let mut matcher = StopMatcher::new(strings);
            matcher.pass(&answer.held, &mut carried);
            matcher
        };
        Self { detokenizer: Detokenizer::resume(&answer.bytes), stops, carried }
    }

    /// Starts a token's text in `buffers` with the text carried over from before, and returns the length of that text.
    pub(super) fn start_token(&mut self, buffers: &mut TextBuffers) -> usize {
        buffers.text.clear();
        buffers.text.push_str(&self.carried);
        self.carried.clear();
        buffers.text.len()
    }

    /// Adds the bytes of a token. Returns whether a stop string ends the text, which is possible only if `may_end`.
    pub(super) fn push(&mut self, bytes: &[u8], may_end: bool, buffers: &mut TextBuffers) -> bool {
        let TextBuffers { text, characters } = buffers;
        characters.clear();
        self.detokenizer.push(bytes, characters);
        self.show(characters, may_end, text)
    }

    fn show(&mut self, characters: &str, may_end: bool, text: &mut String) -> bool {
        if may_end {
            return self.stops.push(characters, text);
        }
        self.stops.pass(characters, text);
        false
    }

    /// Shows what is held back, at the end of the text. Returns whether a stop string ends it.
    pub(super) fn close(&mut self, may_end: bool, buffers: &mut TextBuffers) -> bool {
        let mut rest = String::new();
        self.detokenizer.finish(&mut rest);
        let stopped = self.show(&rest, may_end, &mut buffers.text);
        if !stopped {
            self.stops.finish(&mut buffers.text);
        }
        stopped
    }

    /// Whether a stop string has ended the text, or the text that is held back may still become one.
    pub(super) fn is_unsettled(&self) -> bool {
        let held = !self.stops.held().is_empty() || !self.detokenizer.pending().is_empty();
        self.stops.has_strings() && (held || self.stops.is_stopped())
    }

    /// Returns the state of the answer at this point; if it is not `open`, it cannot be continued and the state is
    /// empty.
    pub(super) fn answer(&self, open: bool) -> Answer {
        if !open {
            return Answer::default();
        }
        let held = self.carried.clone() + self.stops.held();
        Answer { open, held, bytes: self.detokenizer.pending().into() }
    }
}
