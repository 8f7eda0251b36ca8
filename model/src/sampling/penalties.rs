//! Penalties on tokens that the text has already.

use std::collections::BTreeMap;

use super::SamplingParams;

/// What one sequence's text holds; at most one entry for each token of the vocabulary.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    seen: BTreeMap<u32, u32>, // token -> times in the answer; 0 for one that only the prompt has
}

impl Counts {
    pub(super) fn prompt(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.seen.entry(token).or_insert(0);
        }
    }

    pub(super) fn answer(&mut self, token: u32) {
        *self.seen.entry(token).or_insert(0) += 1;
    }

    /// Repetition penalty on all that was seen, frequency and presence penalties on what the answer has.
    pub(super) fn apply(&self, params: &SamplingParams, logits: &mut [f32]) {
        let SamplingParams { repetition_penalty, frequency_penalty, presence_penalty, .. } = *params;
        if repetition_penalty == 1.0 && frequency_penalty == 0.0 && presence_penalty == 0.0 {
            return;
        }
        for (&token, &times) in &self.seen {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            if *logit > 0.0 {
                *logit /= repetition_penalty;
            } else {
                *logit *= repetition_penalty;
            }
            if times > 0 {
                *logit -= presence_penalty + frequency_penalty * times as f32;
            }
        }
    }
}
