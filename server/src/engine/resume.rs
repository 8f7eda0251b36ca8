//! A text that has begun elsewhere, and goes on here. Its tokens are known, and so is the state at its end: nothing of it is
//! computed again, but everything that follows from its tokens is repeated, its events too.

use super::error::SequenceError;
use super::output::TextBuffers;
use super::prompt::Begun;
use super::rollback::{Position, Rollback};
use super::sequence::{Accepted, Sequence};
use super::text_rules::TextRules;

/// Tokens of a text that follows a grammar after which a mask is computed: each mask renews what the parser may spend.
const MASK_EVERY: usize = 32;

impl Sequence {
    /// Adds the text that has begun elsewhere, if there is one. The state at its end is then what the sequence starts from,
    /// and the tokens that it lacks are the prompt, which has not been read. To be called before the sequence has a slot.
    ///
    /// # Errors
    /// It cannot be the text of this request.
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
                // Its state is added below, unless another point takes its place.
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
