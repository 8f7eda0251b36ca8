//! Where a stop string takes a conversation back to, while it is not yet known whether one comes.

use super::{Sequence, TextRules};
use crate::session::{History, MAX_PENDING, Snapshot};
use crate::text::Detokenizer;

/// A moment to which a stop string takes the conversation back: it keeps what was shown, and nothing of the string.
pub(in crate::engine) struct Mark {
    pub(in crate::engine) state: Vec<f32>,
    pub(in crate::engine) read: u64,
    pub(in crate::engine) history: History,
    /// The tokens chosen since.
    pub(in crate::engine) tokens: Vec<u32>,
    /// The text shown since.
    pub(in crate::engine) shown: String,
}

impl Mark {
    /// The mark of an answer that goes on: the state that was kept, and what its pending tokens have shown. None where
    /// they alone do not explain what is held back.
    pub(super) fn before(start: &Snapshot, rules: &TextRules) -> Option<Self> {
        let answer = start.answer.as_ref()?;
        let (mut detokenizer, mut shown) = (Detokenizer::new(), String::new());
        for token in &start.pending {
            detokenizer.push(rules.vocabulary.bytes(*token), &mut shown);
        }
        let length = shown.strip_suffix(&answer.held).filter(|_| detokenizer.pending() == answer.bytes)?.len();
        shown.truncate(length);
        let (state, tokens) = (start.state.clone(), start.pending.clone());
        Some(Self { state, read: start.read, history: start.history, tokens, shown })
    }
}

impl Sequence {
    /// Whether a stop string takes back what has been chosen, or still may.
    pub(super) fn is_unsettled(&self) -> bool {
        let waits = !self.stops.held().is_empty() || !self.detokenizer.pending().is_empty();
        self.keep.end && self.stops.has_strings() && (waits || self.stops.is_stopped())
    }

    /// Keeps, or asks for, the mark to which a stop string would take the text back. The first `carried` bytes of
    /// `text` are of tokens before this one.
    pub(super) fn note(&mut self, token: u32, text: &str, carried: usize) {
        let full = self.mark.as_ref().is_some_and(|mark| mark.tokens.len() >= MAX_PENDING);
        if full || !self.is_unsettled() {
            self.mark = None;
        }
        if let Some(mark) = &mut self.mark {
            mark.tokens.push(token);
            mark.shown.push_str(text);
        } else if self.is_unsettled() {
            self.mark_wanted = Some(text[carried..].to_owned());
        }
    }

    /// Whether the slot's state, which does not have the pending token, has to be kept as a mark.
    pub(in crate::engine) fn wants_mark(&self) -> bool {
        self.mark_wanted.is_some()
    }

    /// Takes the state for which [`Self::wants_mark`] has asked.
    pub(in crate::engine) fn set_mark(&mut self, state: Vec<f32>) {
        let tokens = self.pending_token.into_iter().collect();
        let shown = self.mark_wanted.take().unwrap_or_default();
        self.mark = Some(Mark { state, read: self.read, history: self.history, tokens, shown });
    }
}
