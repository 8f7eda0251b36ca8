//! The position of a text, and the point that a stop string may roll it back to.

use super::text_rules::TextRules;
use crate::session::{History, MAX_PENDING, Snapshot};
use crate::text::Detokenizer;

/// How much text a slot's state has read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Position {
    /// Number of tokens, including those of a source and of earlier requests.
    pub(super) read: u64,
    pub(super) history: History,
}

impl Position {
    pub(super) fn of(snapshot: &Snapshot) -> Self {
        Self { read: snapshot.read, history: snapshot.history }
    }

    pub(super) fn advance(&mut self, tokens: &[u32]) {
        self.read += tokens.len() as u64;
        self.history = self.history.extended(tokens);
    }
}

/// The last state before text that may be the beginning of a stop string. Rolling back keeps the text shown since then
/// and drops the stop string.
pub(super) struct Rollback {
    pub(super) state: Vec<f32>,
    pub(super) position: Position,
    /// The tokens sampled since that state.
    pub(super) tokens: Vec<u32>,
    /// The text shown since that state.
    pub(super) shown: String,
}

impl Rollback {
    /// Creates the rollback point of an answer that continues: its starting state, and the text of its pending tokens.
    /// Returns `None` if that text does not end with what the answer holds back.
    pub(super) fn before(start: &Snapshot, rules: &TextRules) -> Option<Self> {
        let answer = start.answer.as_ref()?;
        let (mut detokenizer, mut shown) = (Detokenizer::new(), String::new());
        for token in &start.pending {
            detokenizer.push(rules.vocabulary.bytes(*token), &mut shown);
        }
        let length = shown.strip_suffix(&answer.held).filter(|_| detokenizer.pending() == answer.bytes)?.len();
        shown.truncate(length);
        Some(Self { state: start.state.clone(), position: Position::of(start), tokens: start.pending.clone(), shown })
    }

    /// Whether it has as many tokens as a snapshot may have pending.
    pub(super) fn is_full(&self) -> bool {
        self.tokens.len() >= MAX_PENDING
    }
}
