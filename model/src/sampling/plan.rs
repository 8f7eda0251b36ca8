//! Sampling plans, by which a device that has the logits but no sampler chooses the tokens of a step's rows. Plans are
//! words in the layout of its kernel (model/cuda/choose.cuh).

use super::{Sampler, SamplingParams, TokenSet};

/// 32-bit words per row.
pub(crate) const ROW_WORDS: usize = 16;

/// The value that means no offset or no token.
pub(crate) const NOBODY: u32 = u32::MAX;

/// The operation on a row, like `Choosing` in model/cuda/choose.cuh.
const NOT: u32 = 0;
const BEST: u32 = 1;
const DRAW: u32 = 2;

/// The sampling plans of a step's rows.
#[derive(Debug, Default)]
pub struct Plans {
    vocab_size: usize,
    /// The maximum number of words in all lists.
    room: usize,
    rows: Vec<[u32; ROW_WORDS]>,
    /// The lists of all rows: biases, penalties, ends, masks.
    words: Vec<u32>,
    /// A buffer for one row.
    biases: Vec<(u32, f32)>,
}

/// Limits on a row's token, in addition to those of its sampler.
#[derive(Clone, Copy, Debug, Default)]
pub struct Permitted<'a> {
    /// The tokens that are allowed; `None` for all.
    pub allowed: Option<&'a TokenSet>,
    /// Tokens that are chosen only if no other is possible.
    pub last_resort: &'a [u32],
}

/// The outcome of a sampling step for one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// The chosen token, to be passed to [`Sampler::take`].
    Token(u32),
    /// No token: every logit is NaN or minus infinity.
    Nothing {
        /// Whether a token was possible before the limits applied.
        possible: bool,
    },
    /// The row's logits are returned, after those of earlier rows.
    Logits,
}

impl Plans {
    /// Creates plans for rows of `vocab_size` logits, with at most `room` words of lists.
    pub fn new(vocab_size: usize, room: usize) -> Self {
        Self { vocab_size, room, ..Self::default() }
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Appends rows that return their logits, until there are `rows` rows.
    pub fn skip_to(&mut self, rows: usize) {
        let mut row = [0; ROW_WORDS];
        row[2] = NOT;
        self.rows.resize(rows.max(self.len()), row);
    }

    /// Removes all rows.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.words.clear();
    }

    /// Whether a row returns its logits instead of a token.
    pub fn wants_logits(&self, row: usize) -> bool {
        self.rows[row][2] == NOT
    }

    /// All rows, sixteen words each, and their lists, in the kernel's layout.
    pub fn words(&self) -> [&[u32]; 2] {
        [self.rows.as_flattened(), &self.words]
    }

    /// Adds a list -> its offset; `None` if it does not fit.
    fn list(&mut self, words: impl Iterator<Item = u32>) -> Option<u32> {
        let place = self.words.len();
        self.words.extend(words.take(self.room.saturating_sub(place) + 1));
        (self.words.len() <= self.room).then_some(place as u32)
    }

    /// Adds a list of tokens, each with a number -> its offset and length.
    fn numbers(&mut self, of: impl Iterator<Item = (u32, f32)>) -> Option<[u32; 2]> {
        let vocab = self.vocab_size;
        let inside = of.filter(|(token, _)| (*token as usize) < vocab);
        let place = self.list(inside.flat_map(|(token, number)| [token, number.to_bits()]))?;
        Some([place, (self.words.len() as u32 - place) / 2])
    }

    fn row(&mut self, sampler: &mut Sampler, permitted: Permitted<'_>) -> Option<[u32; ROW_WORDS]> {
        let SamplingParams { temperature, top_k, top_p, min_p, typical_p, repetition_penalty, .. } = sampler.params;
        if temperature > 0.0 && typical_p < 1.0 {
            return None;
        }
        let mut biases = std::mem::take(&mut self.biases);
        biases.clone_from(&sampler.params.logit_bias);
        // The sort is stable, so biases of the same token keep their order.
        biases.sort_by_key(|(token, _)| *token);
        let places = self.numbers(biases.iter().copied());
        self.biases = biases;
        let [biases, bias_count] = places?;
        let [penalties, penalty_count] = self.numbers(sampler.counts.penalties(&sampler.params))?;
        let mut ends: Vec<u32> = permitted.last_resort.to_vec();
        ends.retain(|token| (*token as usize) < self.vocab_size);
        ends.sort_unstable();
        ends.dedup();
        let end_count = ends.len() as u32;
        let ends = self.list(ends.into_iter())?;
        let mask = match permitted.allowed {
            Some(allowed) => self.list(allowed.words().iter().copied())?,
            None => NOBODY,
        };
        let (kind, uniform) = if temperature == 0.0 { (BEST, 0) } else { (DRAW, sampler.uniform() << 11) };
        let inverse = 1.0 / temperature.max(f32::MIN_POSITIVE);
        Some([
            uniform as u32,
            (uniform >> 32) as u32,
            kind,
            u32::try_from(top_k).unwrap_or(u32::MAX),
            inverse.to_bits(),
            top_p.to_bits(),
            min_p.to_bits(),
            repetition_penalty.to_bits(),
            biases,
            bias_count,
            penalties,
            penalty_count,
            ends,
            end_count,
            mask,
            0,
        ])
    }
}

impl Sampler {
    /// Adds a row to `plans` -> whether the device can choose its token. If it cannot, the row returns its logits, from
    /// which [`Self::sample`] chooses the same token.
    ///
    /// The device does not support `typical_p`, or more biases and penalties than fit into the lists.
    pub fn plan(&mut self, permitted: Permitted<'_>, plans: &mut Plans) -> bool {
        let start = plans.words.len();
        let Some(row) = plans.row(self, permitted) else {
            plans.words.truncate(start);
            plans.skip_to(plans.len() + 1);
            return false;
        };
        plans.rows.push(row);
        true
    }

    /// Counts the token that the device has chosen according to the last [`Self::plan`].
    pub fn take(&mut self, token: u32) {
        if self.params.temperature > 0.0 {
            // The step consumes the draw, whether it was needed or not.
            self.uniform();
            self.drawn = None;
            self.draws += 1;
        }
        self.counts.answer(token);
    }
}

#[cfg(all(test, feature = "cuda-emulator"))]
impl Sampler {
    /// Makes the next draw use this 53-bit number.
    pub(crate) fn draw_next(&mut self, uniform: u64) {
        self.drawn = Some(uniform);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(params, 40).unwrap()
    }

    #[test]
    fn rows_that_a_device_cannot_sample_return_their_logits() {
        let mut plans = Plans::new(40, 4);
        let mut plan = |params| sampler(params).plan(Permitted::default(), &mut plans);
        assert!(plan(SamplingParams::default()));
        assert!(!plan(SamplingParams { typical_p: 0.5, ..SamplingParams::default() }));
        // A greedy row needs no typical_p.
        assert!(plan(SamplingParams { typical_p: 0.5, temperature: 0.0, ..SamplingParams::default() }));
        let biases = |count| SamplingParams { logit_bias: vec![(1, 2.0); count], ..SamplingParams::default() };
        assert!(plan(biases(1)));
        assert!(!plan(biases(2)), "the lists have two free words");
        assert!(plan(biases(1)), "a refused list uses no words");
        plans.skip_to(7);
        let wanted: Vec<bool> = (0..plans.len()).map(|row| plans.wants_logits(row)).collect();
        assert_eq!(wanted, [false, true, false, false, true, false, true]);
        assert_eq!(plans.words().map(<[u32]>::len), [7 * ROW_WORDS, 4]);
        plans.clear();
        assert!(plans.is_empty() && plans.words().concat().is_empty());
    }

    #[test]
    fn an_unused_plan_does_not_advance_the_random_numbers() {
        let params = SamplingParams { seed: 5, ..SamplingParams::default() };
        let (mut plain, mut planned) = (sampler(params.clone()), sampler(params));
        let mut plans = Plans::new(40, 0);
        let logits = || vec![0.0; 40];
        assert!(planned.plan(Permitted::default(), &mut plans));
        assert_eq!(planned.state(), plain.state());
        assert!(planned.plan(Permitted::default(), &mut plans));
        let [rows, _] = plans.words();
        assert_eq!(rows[..ROW_WORDS], rows[ROW_WORDS..], "the same draw");
        // The logits were returned instead.
        let token = plain.sample(&mut logits()).unwrap();
        assert_eq!(planned.sample(&mut logits()), Some(token));
        // A consumed draw counts once.
        planned.plan(Permitted::default(), &mut plans);
        let next = plain.sample(&mut logits()).unwrap();
        planned.take(next);
        assert_eq!(planned.state(), plain.state());
        assert_eq!(planned.sample(&mut logits()), plain.sample(&mut logits()));
    }
}
