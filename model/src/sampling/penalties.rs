//! Penalties on tokens that already occur in the text.

use super::params::SamplingParams;

/// Marks a token in [`super::SamplerState::counts`] that occurs in the text before the answer.
const BEFORE: u32 = 1 << 31;

/// The token counts of one sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    /// Each token of the text once, in ascending order, with its number of occurrences in the answer (under 2^31), and
    /// [`BEFORE`] if it occurs in the text before the answer. A list is fast to scan for every token, and grows by
    /// doubling.
    seen: Vec<(u32, u32)>,
}

impl Counts {
    fn find(&self, token: u32) -> Result<usize, usize> {
        self.seen.binary_search_by_key(&token, |(token, _)| *token)
    }

    pub(super) fn prompt(&mut self, tokens: &[u32]) {
        let mut new: Vec<u32> = Vec::new();
        for &token in tokens {
            match self.find(token) {
                Ok(place) => self.seen[place].1 |= BEFORE,
                Err(_) => new.push(token),
            }
        }
        new.sort_unstable();
        new.dedup();
        self.seen.extend(new.into_iter().map(|token| (token, BEFORE)));
        // The list is two ascending runs, which the stable sort merges.
        self.seen.sort_by_key(|(token, _)| *token);
    }

    pub(super) fn answer(&mut self, token: u32) {
        match self.find(token) {
            Ok(place) if self.seen[place].1 & !BEFORE < BEFORE - 1 => self.seen[place].1 += 1,
            Ok(_) => {}
            Err(place) => self.seen.insert(place, (token, 1)),
        }
    }

    /// Reverts one [`Self::answer`] of `token`.
    pub(super) fn take_back(&mut self, token: u32) {
        let Ok(place) = self.find(token) else { return };
        let mark = &mut self.seen[place].1;
        if *mark & !BEFORE > 0 {
            *mark -= 1;
        }
        if *mark == 0 {
            self.seen.remove(place);
        }
    }

    /// Makes the answer part of the text before it.
    pub(super) fn close_answer(&mut self) {
        self.seen.iter_mut().for_each(|(_, mark)| *mark = BEFORE);
    }

    pub(super) fn pairs(&self) -> Vec<(u32, u32)> {
        self.seen.clone()
    }

    pub(super) fn from_pairs(pairs: &[(u32, u32)]) -> Self {
        let mut seen = pairs.to_vec();
        seen.sort_by_key(|(token, _)| *token);
        Self { seen }
    }

    /// Applies the repetition penalty to all tokens of the text, frequency and presence penalties to those of the
    /// answer.
    pub(super) fn apply(&self, params: &SamplingParams, logits: &mut [f32]) {
        let repetition_penalty = params.repetition_penalty;
        for (token, taken) in self.penalties(params) {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            if *logit > 0.0 {
                *logit /= repetition_penalty;
            } else {
                *logit *= repetition_penalty;
            }
            *logit -= taken;
        }
    }

    /// The tokens whose logits the penalties change, in ascending order, with the amount to subtract from each after
    /// the repetition penalty.
    pub(super) fn penalties(&self, params: &SamplingParams) -> impl Iterator<Item = (u32, f32)> {
        let SamplingParams { repetition_penalty, frequency_penalty, presence_penalty, .. } = *params;
        let repeats = repetition_penalty != 1.0;
        let any = repeats || frequency_penalty != 0.0 || presence_penalty != 0.0;
        let seen = if any { &self.seen[..] } else { &[] };
        seen.iter().filter_map(move |&(token, mark)| {
            let times = mark & !BEFORE;
            let taken = if times > 0 { presence_penalty + frequency_penalty * times as f32 } else { 0.0 };
            (repeats || times > 0).then_some((token, taken))
        })
    }
}
