//! Continues a text that was begun elsewhere. Its tokens and the state at its end are known, so the model computes
//! nothing of it again. Everything that follows from its tokens is repeated, including its events.

use super::error::SequenceError;
use super::output::TextBuffers;
use super::prompt::Begun;
use super::rollback::{Position, Rollback};
use super::sequence::{Accepted, Sequence};
use super::text_rules::TextRules;

/// In a text with a grammar, a mask is computed after this many tokens, because each mask renews the parser's budget.
const MASK_EVERY: usize = 32;

impl Sequence {
    /// Adds the text that was begun elsewhere, if there is one. The sequence then starts from the state at the end of
    /// that text, and the tokens that this state lacks become the prompt. Must be called before the sequence has a
    /// slot.
    ///
    /// # Errors
    /// The text cannot belong to this request.
    pub(super) fn repeat_begun(&mut self, rules: &TextRules, buffers: &mut TextBuffers) -> Result<(), SequenceError> {
        let Some(Begun { end, token_ids, logprobs }) = self.prompt.begun.take() else { return Ok(()) };
        let other = || SequenceError::internal("a text that continues is not that of its request");
        let mut logprobs = logprobs.into_iter();
        for (index, token) in token_ids.into_iter().enumerate() {
            if let Some(guide) = self.generation.guide.as_mut().filter(|_| index % MASK_EVERY == 0) {
                guide.compute_mask();
            }
            let choice = self.generation.accept_again(token, logprobs.next());
            let Accepted { ending, rollback } = self.add(choice, rules, buffers)?;
            if ending.is_some() {
                return Err(other());
            }
            if let Some(shown) = rollback {
                // The state is set below, unless a later rollback point takes its place.
                self.set_rollback(Vec::new(), shown);
            }
        }
        if let Some(Rollback { state, position, tokens, .. }) = &mut self.rollback {
            if *tokens != end.pending {
                return Err(other());
            }
            (*state, *position) = (end.state.clone(), Position::of(&end));
        }
        self.position = Position::of(&end);
        let prompt = &mut self.prompt;
        (prompt.source, prompt.input, prompt.logprobs) = (Vec::new(), end.pending.clone(), None);
        prompt.start = Some(end);
        Ok(())
    }
}
