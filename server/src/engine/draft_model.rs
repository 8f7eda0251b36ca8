//! A draft model: a small model with the same tokens as the served model.
//!
//! It proposes the tokens that the request's own sampler chooses from the draft model's logits, with the random numbers
//! that the request is about to use. The more alike the two models are, the more draft tokens the served model
//! confirms.

use tidegate_model::sampling::Sampler;
use tidegate_model::{LanguageModel, ModelError};

use super::row_drafts::RowDrafts;

/// How many texts a draft model serves in one call, and how many slots it must have.
pub const DRAFT_SLOTS: usize = 8;

/// Most tokens of a text that the draft model reads before it proposes. If a text is longer, or the draft model is
/// further behind, it reads only the end: reading everything would take longer than the draft tokens save.
const CONTEXT: usize = 256;

/// Proposes draft tokens for the served model.
pub struct DraftModel {
    model: Box<dyn LanguageModel>,
    /// Vocabulary size of the served model.
    vocab_size: usize,
    /// The state of each slot.
    states: Vec<TextState>,
    /// Calls so far. Shows which state has gone unused for longest.
    calls: u64,
    logits: Vec<f32>,
}

/// What a slot knows of a text: the state before the draft tokens that the slot has read since.
#[derive(Clone, Default)]
struct TextState {
    text: u64,
    /// The text's length in tokens, up to which the state has read.
    length: u64,
    /// How many of these tokens the state has read: of a long text, only the last ones.
    read: u64,
    state: Vec<f32>,
    used: u64,
}

/// A text that needs draft tokens.
pub(super) struct DraftRow<'a> {
    pub(super) drafts: &'a mut RowDrafts,
    /// A copy of the request's sampler.
    pub(super) sampler: Sampler,
}

impl DraftModel {
    /// Creates the draft model of a model with `vocab_size` tokens. Ids that both vocabularies have must mean the same
    /// token.
    ///
    /// # Errors
    /// The model has too few slots, or is an encoder-decoder.
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

    /// Makes each kind of call once, as the engine does with the served model.
    ///
    /// # Errors
    /// The model failed.
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
        // Marks the slots of these texts as used now, so that no other text of this step takes them.
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

    /// Returns the slot that knows `text`. If there is none, takes the slot that has gone unused for longest, whose
    /// text is forgotten.
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

    /// Makes a slot read the tokens of a text that it lacks, after discarding the draft tokens that it has read.
    /// Returns false if it has nothing that it can read; otherwise the logits are those after the last token.
    fn catch_up(&mut self, slot: usize, drafts: &RowDrafts) -> Result<bool, ModelError> {
        let (recent, state) = (drafts.recent(), &self.states[slot]);
        let unread = drafts.length().saturating_sub(state.length) as usize;
        let knows = !state.state.is_empty() && unread <= CONTEXT.min(recent.len());
        let ids =
            if knows { &recent[recent.len() - unread..] } else { &recent[recent.len().saturating_sub(CONTEXT)..] };
        // If the served model's vocabulary is larger, the text may contain tokens that this model does not have.
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

    /// Reads at least one token. The logits are then those after the last token.
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

    /// Samples from row `at` of the logits, among the tokens that both models have.
    fn choose(&mut self, sampler: &mut Sampler, at: usize) -> u32 {
        let row = self.model.vocab_size();
        let logits = self.logits.get_mut(at * row..).unwrap_or_default();
        let logits = &mut logits[..row.min(self.vocab_size)];
        // If no logit is a number, any token will do: it is only a proposal.
        sampler.sample(logits).unwrap_or(0)
    }
}
