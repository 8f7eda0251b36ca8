//! One request in a slot: how far its prompt has been read, and what has been made of it so far.

use std::ops::Range;
use std::time::Instant;

use tidegate_model::sampling::Sampler;
use tracing::Span;

use super::event::{Finish, FinishReason, Timings};
use super::inbox::Submission;
use super::model::ModelError;
use super::outlet::Outlet;
use crate::text::{Detokenizer, StopMatcher, Vocabulary};

/// Tokens of a prompt that are read between two decode steps. Chunks are cut from the prompt's start, whoever else
/// is being served, so that their sums are the same alone and in company.
const PROMPT_CHUNK: usize = 256;

/// What the engine knows about text.
pub struct TextRules {
    /// The bytes of each token.
    pub vocabulary: std::sync::Arc<Vocabulary>,
    /// Tokens that end a text.
    pub eos: std::sync::Arc<[u32]>,
}

/// One running request.
pub(super) struct Sequence {
    prompt: Vec<u32>,
    /// Tokens of the prompt that are in the state.
    read: usize,
    /// The last token chosen: it is not in the state yet. `None` until the prompt has been read.
    pending_token: Option<u32>,
    generated: usize,
    max_tokens: usize,
    ignore_eos: bool,
    sampler: Sampler,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    clock: Clock,
    pub(super) outlet: Outlet,
    pub(super) span: Span,
}

struct Clock {
    submitted: Instant,
    admitted: Instant,
    first_token: Option<Instant>,
}

impl Sequence {
    pub(super) fn new(submission: Submission) -> Self {
        let Submission { request, sender, submitted, span } = submission;
        Self {
            prompt: request.prompt,
            read: 0,
            pending_token: None,
            generated: 0,
            max_tokens: request.max_tokens,
            ignore_eos: request.ignore_eos,
            sampler: request.sampler,
            detokenizer: Detokenizer::new(),
            stops: StopMatcher::new(request.stops),
            clock: Clock { submitted, admitted: Instant::now(), first_token: None },
            outlet: Outlet::new(sender),
            span,
        }
    }

    /// The next piece of the prompt, and whether it is the last.
    pub(super) fn next_chunk(&self) -> (&[u32], bool) {
        let Range { start, end } = self.read..self.prompt.len().min(self.read + PROMPT_CHUNK);
        (&self.prompt[start..end], end == self.prompt.len())
    }

    /// Notes that the chunk of [`Self::next_chunk`] is in the state; returns its length.
    pub(super) fn chunk_was_read(&mut self) -> usize {
        let length = self.next_chunk().0.len();
        self.read += length;
        length
    }

    /// The token to decode next; `None` where the prompt is still being read or the reader is too far behind.
    pub(super) fn decodable(&self) -> Option<u32> {
        self.pending_token.filter(|_| !self.outlet.is_full())
    }

    /// Chooses a token from `logits` (vocab), adds its text, and says whether that ends the text.
    ///
    /// # Errors
    /// No logit is a number: the weights or the state are broken, and any token would be a lie.
    pub(super) fn accept(&mut self, logits: &mut [f32], rules: &TextRules) -> Result<Option<FinishReason>, ModelError> {
        let token = self.sampler.sample(logits).ok_or_else(|| ModelError::new("no logit is a number"))?;
        self.pending_token = Some(token);
        self.generated += 1;
        self.clock.first_token.get_or_insert_with(Instant::now);

        let mut text = String::new();
        let reason = if rules.eos.contains(&token) && !self.ignore_eos {
            Some(self.close(FinishReason::Stop, &mut text))
        } else {
            let mut characters = String::new();
            self.detokenizer.push(rules.vocabulary.bytes(token), &mut characters);
            if self.stops.push(&characters, &mut text) {
                Some(FinishReason::Stop)
            } else if self.generated == self.max_tokens {
                Some(self.close(FinishReason::Length, &mut text))
            } else {
                None
            }
        };
        self.outlet.push(token, &text);
        Ok(reason)
    }

    /// Ends a text that no stop string has ended, and lets out what was held back.
    fn close(&mut self, reason: FinishReason, text: &mut String) -> FinishReason {
        let mut rest = String::new();
        self.detokenizer.finish(&mut rest);
        if self.stops.push(&rest, text) {
            return FinishReason::Stop;
        }
        self.stops.finish(text);
        reason
    }

    /// The account of a text that has ended.
    pub(super) fn finish(&self, reason: FinishReason) -> Finish {
        let now = Instant::now();
        let first_token = self.clock.first_token.unwrap_or(now);
        Finish {
            reason,
            prompt_tokens: self.prompt.len(),
            completion_tokens: self.generated,
            timings: Timings {
                queue: self.clock.admitted - self.clock.submitted,
                prefill: first_token - self.clock.admitted,
                decode: now - first_token,
            },
        }
    }
}
