//! The sampler: turns logits into a token, with one draw from a seeded generator per token.
//!
//! Order: bias, penalties, temperature, top-k, typical-p, top-p, min-p, draw. In Hugging Face's generation, typical-p
//! comes last.

mod exponential;
mod logprobs;
mod params;
mod penalties;
mod plan;
mod processors;
mod select;
mod token_set;

use std::cell::RefCell;

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

use penalties::Counts;
use processors::Candidates;

pub use logprobs::{LEAST_LOGPROB, LogSoftmax};
pub use params::{SamplingError, SamplingParams};
#[cfg(feature = "cuda")]
pub(crate) use plan::{NOBODY, ROW_WORDS};
pub use plan::{Permitted, Plans, Sampled};
pub use token_set::TokenSet;

/// The state of a sampler: together with the parameters, all that [`Sampler::resume`] needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SamplerState {
    /// The seed of the random generator.
    pub seed: u64,
    /// Number of draws so far.
    pub draws: u64,
    /// Each token of the text once, in ascending order, with the number of times that it occurs in the answer. The
    /// highest bit is set if it occurs in the text before the answer.
    pub counts: Vec<(u32, u32)>,
}

/// Chooses the tokens of one sequence. It depends only on its own parameters and text, not on the rest of the batch.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    counts: Counts,
    generator: ChaCha8Rng,
    draws: u64,
    /// The random number for the next draw, if it is already known.
    drawn: Option<u64>,
}

thread_local! {
    /// Buffers for candidates; they carry nothing from row to row.
    static CANDIDATES: RefCell<Candidates> = RefCell::default();
}

impl Sampler {
    /// Creates a sampler at the start of its seed's stream.
    ///
    /// # Errors
    /// [`SamplingError`] names the first parameter that is out of bounds.
    pub fn new(params: SamplingParams, vocab_size: usize) -> Result<Self, SamplingError> {
        params.validate(vocab_size)?;
        let state = SamplerState { seed: params.seed, ..SamplerState::default() };
        Self::resume(params, &state, vocab_size)
    }

    /// Creates a sampler that continues from a state. It uses the state's seed, not that of the parameters.
    ///
    /// # Errors
    /// [`SamplingError`] names the first parameter that is out of bounds.
    pub fn resume(mut params: SamplingParams, state: &SamplerState, vocab_size: usize) -> Result<Self, SamplingError> {
        params.validate(vocab_size)?;
        params.seed = state.seed;
        let mut generator = ChaCha8Rng::seed_from_u64(state.seed);
        // A draw consumes two 32-bit words.
        generator.set_word_pos(u128::from(state.draws) * 2);
        let counts = Counts::from_pairs(&state.counts);
        Ok(Self { params, counts, generator, draws: state.draws, drawn: None })
    }

    /// Returns the state for [`Self::resume`].
    pub fn state(&self) -> SamplerState {
        SamplerState { seed: self.params.seed, draws: self.draws, counts: self.counts.pairs() }
    }

    /// Switches to the stream of another seed; the counts stay.
    pub fn reseed(&mut self, seed: u64) {
        self.params.seed = seed;
        self.generator = ChaCha8Rng::seed_from_u64(seed);
        self.draws = 0;
        self.drawn = None;
    }

    /// The random number for the next draw, 53 bits: the share of the weights before the chosen token, in units of
    /// 2^-53.
    fn uniform(&mut self) -> u64 {
        // Every multiple of 2^-53 in [0, 1) is equally likely.
        *self.drawn.get_or_insert_with(|| self.generator.next_u64() >> 11)
    }

    /// Counts the tokens of the prompt, for the repetition penalty.
    pub fn observe_prompt(&mut self, tokens: &[u32]) {
        self.counts.prompt(tokens);
    }

    /// Starts a new answer; the previous one becomes part of the prompt.
    pub fn close_answer(&mut self) {
        self.counts.close_answer();
    }

    /// Uncounts a token that [`Self::sample`] has chosen but that is not kept in the text.
    pub fn take_back(&mut self, token: u32) {
        self.counts.take_back(token);
    }

    /// Chooses a token and counts it; `None` if every logit is NaN or minus infinity.
    ///
    /// logits: (vocab), changed in place by biases and penalties
    pub fn sample(&mut self, logits: &mut [f32]) -> Option<u32> {
        for &(id, bias) in &self.params.logit_bias {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        self.counts.apply(&self.params, logits);
        let token = if self.params.temperature == 0.0 {
            select::greedy(logits)?
        } else {
            CANDIDATES.with_borrow_mut(|candidates| {
                let params = &self.params;
                candidates.fill(logits, params.temperature, params.top_k)?;
                candidates.typical(params.typical_p);
                candidates.top_p(params.top_p);
                candidates.min_p(params.min_p);
                // Exactly one draw per token keeps the position in the stream exact.
                Some(candidates.draw(self.uniform() as f64 / (1u64 << 53) as f64))
            })?
        };
        self.take(token);
        Some(token)
    }
}

#[cfg(test)]
mod plain;
