//! What the engine needs from a language model, and nothing about how one works.

use std::ops::Range;
use std::sync::Arc;

use tidegate_model::Denominators;
use tidegate_model::sampling::{Drawn, Plans};

use crate::session::Snapshot;

/// Why a model could not do a step.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ModelError(String);

impl ModelError {
    /// An error with the words of `reason`.
    pub fn new(reason: impl std::fmt::Display) -> Self {
        Self(reason.to_string())
    }
}

/// How far a move of a slot's state is.
#[derive(Debug)]
pub enum Move {
    /// It has ended; with the numbers of the state where that was to leave the slot, and with none where one was to come.
    Done(Vec<f32>),
    /// It is under way, and [`LanguageModel::moved`] tells of its end. Meanwhile the slot must be named in nothing else,
    /// and what is asked of the other slots does not wait for it.
    Coming,
}

/// A model with a fixed number of slots, each holding the state of one conversation.
pub trait LanguageModel: Send {
    /// Tokens in the vocabulary: the length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Conversations that can be held at once.
    fn slots(&self) -> usize;

    /// Bytes that a slot takes where the states are held; none where it holds none.
    fn slot_bytes(&self) -> usize {
        0
    }

    /// The denominators that it has divided by since it was made; none where it has no such thing.
    fn denominators(&self) -> Denominators {
        Denominators::default()
    }

    /// Whether its device has failed for good, so that nothing can be computed in this process any more.
    fn is_lost(&self) -> bool {
        false
    }

    /// Empties a slot.
    ///
    /// # Errors
    /// The device failed.
    fn reset(&mut self, slot: usize) -> Result<(), ModelError>;

    /// The numbers of a slot's state, copied; [`Self::import`] takes them.
    ///
    /// # Errors
    /// The device failed, or a step that failed has left the slot half way.
    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError>;

    /// Puts a state into a slot, which then has read `tokens` tokens.
    ///
    /// # Errors
    /// The device failed, or the state is not one of this model's.
    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError>;

    /// Begins what [`Self::export`] does. Where a state does not move at once, the other slots go on meanwhile.
    ///
    /// # Errors
    /// As for [`Self::export`]; then nothing is under way.
    fn begin_export(&mut self, slot: usize) -> Result<Move, ModelError> {
        self.export(slot).map(Move::Done)
    }

    /// Begins what [`Self::import`] does with the state of `start`. Where that does not move at once, the other slots go
    /// on meanwhile.
    ///
    /// # Errors
    /// As for [`Self::import`]; then nothing is under way.
    fn begin_import(&mut self, slot: usize, start: &Arc<Snapshot>) -> Result<Move, ModelError> {
        self.import(slot, &start.state, start.read).map(|()| Move::Done(Vec::new()))
    }

    /// How far the move is that is under way in `slot`; never waits.
    ///
    /// # Errors
    /// As for what was begun; then the move has ended.
    fn moved(&mut self, _slot: usize) -> Result<Move, ModelError> {
        Err(ModelError::new("no move is under way: this model's states move at once"))
    }

    /// Has `wake` called, on any thread, when a move that was under way has ended. Said once, before anything is asked
    /// for. A model whose states move at once has no use for it.
    fn on_arrival(&mut self, _wake: Arc<dyn Fn() + Send + Sync>) {}

    /// The token that every text begins with, where each answers a source, which is read before it: an encoder-decoder.
    /// Then only a slot with a source reads text. None where a text begins with a prompt.
    fn source_start(&self) -> Option<u32> {
        None
    }

    /// Reads a source (at least one token) into a slot, in place of all that was there. The text comes after, from
    /// its first token on.
    ///
    /// # Errors
    /// The device failed, the source is too long, or the model reads none.
    fn read_source(&mut self, _ids: &[u32], _slot: usize) -> Result<(), ModelError> {
        Err(ModelError::new("the model reads no source: it is a decoder alone"))
    }

    /// Reads `ids` (at least one) into a slot without computing logits. Where a text is cut into calls, and whether it
    /// is read here or by [`Self::decode`], must change nothing.
    ///
    /// # Errors
    /// The device failed.
    fn absorb(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError>;

    /// Reads one token into each of `slots`, which are distinct and ascend. `logits` becomes (rows, vocab), row by row,
    /// whatever was in it: it is kept from step to step for its memory.
    ///
    /// # Errors
    /// The device failed.
    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError>;

    /// Whether it chooses tokens where the logits are, by [`Self::decode_choosing`].
    fn chooses(&self) -> bool {
        false
    }

    /// Reads one token into each of `slots`, as [`Self::decode`], and chooses the rows' next tokens by their plans.
    /// `outcome` becomes what each row has come to, and the logits of those that have none planned (rows, vocab).
    ///
    /// `plan` is called while the step is under way, for some of the rows at a time, in their order; it adds as many to
    /// the [`Plans`].
    ///
    /// # Errors
    /// The device failed.
    fn decode_choosing(
        &mut self,
        ids: &[u32],
        slots: &[usize],
        plan: &mut dyn FnMut(Range<usize>, &mut Plans),
        (drawn, logits): (&mut Vec<Drawn>, &mut Vec<f32>),
    ) -> Result<(), ModelError> {
        let _ = plan;
        drawn.clear();
        drawn.resize(slots.len(), Drawn::Logits);
        self.decode(ids, slots, logits)
    }
}
