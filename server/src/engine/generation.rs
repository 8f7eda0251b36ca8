//! How a request's tokens are chosen: the sampler, the grammar, and the conditions that end the text.

use tidegate_model::sampling::{Permitted, Plans, Sampler};

use super::error::SequenceError;
use super::event::{FinishReason, StopCause, TokenLogprobs};
use super::guide::Guide;
use super::logprobs::Logprobs;
use crate::text::StopMatcher;

/// How a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// An end-of-text token.
    Eos(u32),
    /// One of the request's `stop_token_ids`.
    StopToken(u32),
    StopString,
    /// The grammar allows nothing more.
    Grammar,
    /// `max_tokens` tokens have been generated.
    Length,
    Interrupted,
}

impl Ending {
    pub(super) fn reason(self) -> FinishReason {
        match self {
            Self::Eos(_) | Self::StopToken(_) | Self::StopString | Self::Grammar => FinishReason::Stop,
            Self::Length => FinishReason::Length,
            Self::Interrupted => FinishReason::Interrupted,
        }
    }

    /// What stopped the text; `stops` has searched it for stop strings.
    pub(super) fn cause(self, stops: &StopMatcher) -> Option<StopCause> {
        match self {
            Self::Eos(token) => Some(StopCause::Eos(token)),
            Self::StopToken(token) => Some(StopCause::Token(token)),
            Self::StopString if stops.found_turn() => Some(StopCause::Turn),
            Self::StopString => stops.found().map(|found| StopCause::String(found.into())),
            Self::Grammar => Some(StopCause::Grammar),
            Self::Length | Self::Interrupted => None,
        }
    }
}

/// The tokens that end a text, and how many tokens must come first.
#[derive(Debug)]
pub(super) struct StopConditions {
    ignore_eos: bool,
    stop_token_ids: Vec<u32>,
    min_tokens: usize,
}

impl StopConditions {
    pub(super) fn new(ignore_eos: bool, stop_token_ids: Vec<u32>, min_tokens: usize) -> Self {
        Self { ignore_eos, stop_token_ids, min_tokens }
    }

    /// Whether the text may end with token number `tokens`, counted from 1.
    pub(super) fn may_end_at(&self, tokens: usize) -> bool {
        tokens > self.min_tokens
    }

    /// The ending that `token` causes, if any.
    pub(super) fn ending(&self, token: u32, eos: &[u32]) -> Option<Ending> {
        if !self.ignore_eos && eos.contains(&token) {
            Some(Ending::Eos(token))
        } else {
            self.stop_token_ids.contains(&token).then_some(Ending::StopToken(token))
        }
    }

    /// All tokens that end the text; `eos` are the model's end-of-text tokens.
    fn tokens<'a>(&'a self, eos: &'a [u32]) -> impl Iterator<Item = u32> + use<'a> {
        let eos = if self.ignore_eos { &[] } else { eos };
        eos.iter().chain(&self.stop_token_ids).copied()
    }

    /// Rules out every token that ends the text, unless no other token is possible. logits: (vocab).
    fn forbid(&self, eos: &[u32], logits: &mut [f32]) {
        let ends = |token: u32| self.tokens(eos).any(|end| end == token);
        if !(0..).zip(&*logits).any(|(token, logit)| *logit > f32::NEG_INFINITY && !ends(token)) {
            return;
        }
        for id in self.tokens(eos) {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

/// A sampled token, with its log probabilities if they were requested.
pub(super) struct Choice {
    pub(super) token: u32,
    pub(super) logprobs: Option<TokenLogprobs>,
}

impl Choice {
    pub(super) fn without_logprobs(token: u32) -> Self {
        Self { token, logprobs: None }
    }
}

/// How one request's tokens are chosen, and how many have been generated.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) sampler: Sampler,
    pub(super) stop: StopConditions,
    pub(super) max_tokens: usize,
    pub(super) generated: usize,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) guide: Option<Guide>,
}

impl Generation {
    /// Whether more tokens are to be generated.
    pub(super) fn wants_tokens(&self) -> bool {
        self.generated < self.max_tokens
    }

    /// Samples the next token from `logits` (vocab), which are overwritten. May run on any thread.
    ///
    /// # Errors
    /// No logit is a number, because the weights or the state are broken; or the grammar has no mask.
    pub(super) fn sample(&mut self, logits: &mut [f32], eos: &[u32]) -> Result<Choice, SequenceError> {
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.keep(logits);
        }
        let possible = logits.iter().any(|logit| *logit > f32::NEG_INFINITY);
        if let Some(guide) = &self.guide {
            guide.allowed()?.apply(logits);
        }
        if !self.stop.may_end_at(self.generated + 1) {
            self.stop.forbid(eos, logits);
        }
        let token = match self.sampler.sample(logits) {
            Some(token) => token,
            None => self.end_by_grammar(possible, eos)?,
        };
        Ok(Choice { token, logprobs: self.logprobs.as_mut().map(|logprobs| logprobs.score(token)) })
    }

    /// Chooses the token at a later position of the same step: the one that the grammar forces, or else what
    /// [`Self::sample`] chooses.
    ///
    /// # Errors
    /// As for [`Self::sample`].
    pub(super) fn choose(&mut self, logits: &mut [f32], eos: &[u32]) -> Result<Choice, SequenceError> {
        if let Some(token) = self.next_forced() {
            return Ok(self.accept_known(token));
        }
        if let Some(guide) = &mut self.guide {
            guide.compute_mask();
        }
        self.sample(logits, eos)
    }

    /// Adds to `plans` how a device samples the next token. Adds nothing if the logits are needed for log
    /// probabilities.
    ///
    /// # Errors
    /// The grammar has no mask.
    pub(super) fn plan(&mut self, plans: &mut Plans, eos: &[u32]) -> Result<(), SequenceError> {
        if self.logprobs.is_none() {
            let allowed = self.guide.as_ref().map(Guide::allowed).transpose()?;
            let waits = !self.stop.may_end_at(self.generated + 1);
            let last_resort: Vec<u32> = self.stop.tokens(eos).filter(|_| waits).collect();
            self.sampler.plan(Permitted { allowed, last_resort: &last_resort }, plans);
        }
        Ok(())
    }

    /// Returns the token that the grammar forces next, if it is known without a step of the model: sampling would
    /// choose it unless the model rules it out. Returns `None` if log probabilities are requested.
    pub(super) fn next_forced(&self) -> Option<u32> {
        if self.logprobs.is_some() { None } else { self.guide.as_ref()?.next_forced() }
    }

    /// Accepts a known token: a device has sampled it as planned, or the grammar forces it.
    pub(super) fn accept_known(&mut self, token: u32) -> Choice {
        self.sampler.take(token);
        Choice::without_logprobs(token)
    }

    /// Accepts a token that was chosen elsewhere, with its log probabilities if they were requested.
    pub(super) fn accept_again(&mut self, token: u32, logprobs: Option<TokenLogprobs>) -> Choice {
        if let (Some(all), Some(logprobs)) = (&mut self.logprobs, &logprobs) {
            all.add(logprobs);
        }
        Choice { logprobs, ..self.accept_known(token) }
    }

    /// Returns the end-of-text token for a text whose grammar allows only tokens that the model rules out, if the
    /// grammar allows the text to end here. `possible` says whether the model allowed any token.
    ///
    /// # Errors
    /// The grammar allows no end-of-text token here, or the model allowed no token.
    pub(super) fn end_by_grammar(&self, possible: bool, eos: &[u32]) -> Result<u32, SequenceError> {
        let mut eos = eos.iter().copied().filter(|_| possible);
        let allowed = eos.find(|token| self.guide.as_ref().is_some_and(|guide| guide.allows(*token)));
        allowed.ok_or_else(|| SequenceError::internal("no token can be sampled: no logit is a number"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_forbidden_unless_nothing_else_is_possible() {
        let stop = StopConditions::new(false, vec![2], 0);
        let after = |mut logits: [f32; 4]| {
            stop.forbid(&[3, 70], &mut logits);
            logits
        };
        let none = f32::NEG_INFINITY;
        assert_eq!(after([0.0, 1.0, 2.0, 3.0]), [0.0, 1.0, none, none]);
        assert_eq!(after([none, none, 2.0, 3.0]), [none, none, 2.0, 3.0]);
    }
}
