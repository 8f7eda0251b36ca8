//! Penalties on tokens that the text has already.

use std::collections::BTreeMap;

use super::SamplingParams;

/// Marks a token in [`super::SamplerState::counts`] that the text before the answer has.
const BEFORE: u32 = 1 << 31;

/// What one sequence's text holds; at most one entry for each token of the vocabulary.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    seen: BTreeMap<u32, Seen>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Whether the text before the answer has the token.
    before: bool,
    /// How often the answer has it; under 2^31.
    times: u32,
}

impl Counts {
    pub(super) fn prompt(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.seen.entry(token).or_default().before = true;
        }
    }

    pub(super) fn answer(&mut self, token: u32) {
        let seen = self.seen.entry(token).or_default();
        seen.times = (seen.times + 1).min(BEFORE - 1);
    }

    /// Takes back one [`Self::answer`] of `token`.
    pub(super) fn take_back(&mut self, token: u32) {
        let Some(seen) = self.seen.get_mut(&token) else { return };
        seen.times = seen.times.saturating_sub(1);
        if seen.times == 0 && !seen.before {
            self.seen.remove(&token);
        }
    }

    /// Makes the answer a part of the text before.
    pub(super) fn close_answer(&mut self) {
        self.seen.values_mut().for_each(|seen| *seen = Seen { before: true, times: 0 });
    }

    pub(super) fn pairs(&self) -> Vec<(u32, u32)> {
        self.seen.iter().map(|(&token, seen)| (token, seen.times | if seen.before { BEFORE } else { 0 })).collect()
    }

    pub(super) fn from_pairs(pairs: &[(u32, u32)]) -> Self {
        let seen = |mark: u32| Seen { before: mark & BEFORE != 0, times: mark & !BEFORE };
        Self { seen: pairs.iter().map(|&(token, mark)| (token, seen(mark))).collect() }
    }

    /// Repetition penalty on all that was seen, frequency and presence penalties on what the answer has.
    pub(super) fn apply(&self, params: &SamplingParams, logits: &mut [f32]) {
        let SamplingParams { repetition_penalty, frequency_penalty, presence_penalty, .. } = *params;
        if repetition_penalty == 1.0 && frequency_penalty == 0.0 && presence_penalty == 0.0 {
            return;
        }
        for (&token, &Seen { times, .. }) in &self.seen {
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
