//! Where a conversation is, and the point that a stop string may roll it back to.

use super::text_rules::TextRules;
use crate::session::{History, MAX_PENDING, Snapshot};
use crate::text::Detokenizer;

/// The text that a slot's state has read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Position {
    /// Tokens, those of a source and of earlier requests included.
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

/// The last state before a text that may be the beginning of a stop string. Rolling back keeps the text that was shown
/// since, and nothing of the stop string.
pub(super) struct Rollback {
    pub(super) state: Vec<f32>,
    pub(super) position: Position,
    /// The tokens sampled since.
    pub(super) tokens: Vec<u32>,
    /// The text shown since.
    pub(super) shown: String,
}

impl Rollback {
    /// For an answer that continues: its starting state, and the text of its pending tokens. `None` if that text does not
    /// account for what is held back.
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

    /// Whether it has as many tokens as a snapshot may have.
    pub(super) fn is_full(&self) -> bool {
        self.tokens.len() >= MAX_PENDING
    }
}
