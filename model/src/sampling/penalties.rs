//! Penalties on tokens that the text has already.

use std::collections::BTreeMap;

use super::SamplingParams;

/// What one sequence's text holds; at most one entry for each token of the vocabulary.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    seen: BTreeMap<u32, u32>, // token -> times in the answer; 0 for one that only the prompt has
    last: Option<(u32, Option<u32>)>, // the answer's last token, and its entry before
}

impl Counts {
    pub(super) fn prompt(&mut self, tokens: &[u32]) {
        for &token in tokens {
            self.seen.entry(token).or_insert(0);
        }
    }

    pub(super) fn answer(&mut self, token: u32) {
        let before = self.seen.get(&token).copied();
        self.seen.insert(token, before.unwrap_or(0).saturating_add(1));
        self.last = Some((token, before));
    }

    /// Makes the answer a part of the prompt.
    pub(super) fn close_answer(&mut self) {
        self.seen.values_mut().for_each(|times| *times = 0);
    }

    pub(super) fn pairs(&self) -> Vec<(u32, u32)> {
        self.seen.iter().map(|(&token, &times)| (token, times)).collect()
    }

    /// [`Self::pairs`] as they were before the last [`Self::answer`].
    pub(super) fn pairs_before_last(&self) -> Vec<(u32, u32)> {
        let mut seen = self.seen.clone();
        match self.last {
            None => {}
            Some((token, Some(times))) => _ = seen.insert(token, times),
            Some((token, None)) => _ = seen.remove(&token),
        }
        seen.into_iter().collect()
    }

    pub(super) fn from_pairs(pairs: &[(u32, u32)]) -> Self {
        Self { seen: pairs.iter().copied().collect(), last: None }
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
