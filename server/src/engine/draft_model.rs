//! A draft model: a small model with the tokens of the served one. It proposes what a request's own sampler chooses from its
//! logits, with the random numbers that the request is about to use: the more alike the models are, the more of that is what
//! the served model chooses.

use tidegate_model::sampling::Sampler;
use tidegate_model::{LanguageModel, ModelError};

use super::row_drafts::RowDrafts;

/// Texts that a draft model proposes for at a time, and slots that it must have.
pub const DRAFT_SLOTS: usize = 8;

/// Most tokens that it reads before it proposes something. Of a longer text, or of one for which it has proposed nothing for
/// long, it reads the end alone: reading everything would take longer than drafts save.
const CONTEXT: usize = 256;

/// Proposes tokens for the served model.
pub struct DraftModel {
    model: Box<dyn LanguageModel>,
    /// Tokens that the served model has.
    vocab_size: usize,
    /// By slot.
    states: Vec<TextState>,
    /// Drafts so far, to find the state that has not been used for the longest time.
    calls: u64,
    logits: Vec<f32>,
}

/// What a slot has read of a text, before the drafts that it has read itself.
#[derive(Clone, Default)]
struct TextState {
    text: u64,
    /// The text's length in tokens.
    length: u64,
    /// Those of them that the state has read: of a long text, the end alone.
    read: u64,
    state: Vec<f32>,
    used: u64,
}

/// A text that needs drafts.
pub(super) struct DraftRow<'a> {
    pub(super) drafts: &'a mut RowDrafts,
    /// A copy of the request's.
    pub(super) sampler: Sampler,
}

impl DraftModel {
    /// A draft model for a model of `vocab_size` tokens, of which those that both have are the same.
    ///
    /// # Errors
    /// It has too few slots, or reads a source before its text.
    pub fn new(model: Box<dyn LanguageModel>, vocab_size: usize) -> Result<Self, ModelError> {
        if model.slots() < DRAFT_SLOTS {
            return Err(ModelError::other(format!(
                "a draft model needs {DRAFT_SLOTS} slots, it has {}",
                model.slots()
            )));
        }
        if model.source_start().is_some() {
            return Err(ModelError::other("a draft model cannot be an encoder-decoder"));
        }
        let states = vec![TextState::default(); DRAFT_SLOTS];
        Ok(Self { model, vocab_size, states, calls: 0, logits: Vec::new() })
    }

    /// Makes one call of each kind, as the engine does for the served model.
    ///
    /// # Errors
    /// The model fails.
    pub(super) fn warm_up(&mut self) -> Result<(), ModelError> {
        self.model.reset(0)?;
        self.read(0, &[0; 2])?;
        self.model.decode(&[0], &[0], &mut self.logits)?;
        self.model.export(0).map(drop)
    }

    /// Proposes `count` tokens (at least one) for each of at most [`DRAFT_SLOTS`] texts.
    ///
    /// # Errors
    /// The model failed.
    pub(super) fn draft(&mut self, rows: Vec<DraftRow<'_>>, count: usize) -> Result<(), ModelError> {
        self.calls += 1;
        // Another text of this step must not take their slots.
        let texts: Vec<u64> = rows.iter().map(|row| row.drafts.text()).collect();
        let wanted = self.states.iter_mut().filter(|state| state.used > 0 && texts.contains(&state.text));
        wanted.for_each(|state| state.used = self.calls);
        let mut placed = Vec::with_capacity(rows.len());
        for mut row in rows {
            let slot = self.slot_of(row.drafts.text());
            if self.catch_up(slot, row.drafts)? {
                let ids = vec![self.choose(&mut row.sampler, 0)];
                placed.push((slot, row, ids));
            }
        }
        placed.sort_by_key(|(slot, ..)| *slot);
        let slots: Vec<usize> = placed.iter().map(|(slot, ..)| *slot).collect();
        for _ in 1..if placed.is_empty() { 0 } else { count } {
            let last: Vec<u32> = placed.iter().filter_map(|(.., ids)| ids.last().copied()).collect();
            self.model.decode(&last, &slots, &mut self.logits)?;
            for (at, (_, row, ids)) in placed.iter_mut().enumerate() {
                ids.push(self.choose(&mut row.sampler, at));
            }
        }
        for (_, row, ids) in placed {
            row.drafts.propose(&ids);
        }
        Ok(())
    }

    /// The slot that has read of `text`, or that of another one, which is then forgotten.
    fn slot_of(&mut self, text: u64) -> usize {
        let known = self.states.iter().position(|state| state.used > 0 && state.text == text);
        let oldest = || (0..self.states.len()).min_by_key(|slot| self.states[*slot].used).unwrap_or(0);
        let slot = known.unwrap_or_else(oldest);
        if known.is_none() {
            self.states[slot] = TextState { text, ..TextState::default() };
        }
        self.states[slot].used = self.calls;
        slot
    }

    /// Lets a slot read what it has not read of a text, in place of the drafts that it has read. Returns whether there was
    /// anything that it can read; then the logits are those after it.
    fn catch_up(&mut self, slot: usize, drafts: &RowDrafts) -> Result<bool, ModelError> {
        let (recent, state) = (drafts.recent(), &self.states[slot]);
        let unread = drafts.length().saturating_sub(state.length) as usize;
        let knows = !state.state.is_empty() && unread <= CONTEXT.min(recent.len());
        let ids =
            if knows { &recent[recent.len() - unread..] } else { &recent[recent.len().saturating_sub(CONTEXT)..] };
        // Of a larger vocabulary, the served model may have read tokens that this one does not have.
        if ids.is_empty() || ids.iter().any(|id| *id as usize >= self.model.vocab_size()) {
            return Ok(false);
        }
        let read = if knows { state.read } else { 0 } + ids.len() as u64;
        if knows {
            self.model.import(slot, &state.state, state.read)?;
        } else {
            self.model.reset(slot)?;
        }
        self.read(slot, ids)?;
        let state = &mut self.states[slot];
        state.state = self.model.export(slot)?;
        (state.length, state.read) = (drafts.length(), read);
        Ok(true)
    }

    /// Reads tokens (at least one); the logits are those after them.
    fn read(&mut self, slot: usize, ids: &[u32]) -> Result<(), ModelError> {
        let Self { model, logits, .. } = self;
        let Some((last, before)) = ids.split_last() else { return Ok(()) };
        if before.is_empty() {
            return model.decode(&[*last], &[slot], logits);
        }
        if model.scores_chunks() {
            return model.prefill_logits(ids, slot, logits);
        }
        model.prefill(before, slot)?;
        model.decode(&[*last], &[slot], logits)
    }

    /// What a sampler chooses from row `at` of the logits, of the tokens that both models have.
    fn choose(&mut self, sampler: &mut Sampler, at: usize) -> u32 {
        let row = self.model.vocab_size();
        let logits = self.logits.get_mut(at * row..).unwrap_or_default();
        let logits = &mut logits[..row.min(self.vocab_size)];
        // Without a number among the logits, any token will do: it is a proposal.
        sampler.sample(logits).unwrap_or(0)
    }
}
