//! From logits to a token: each processor small, one draw of a seeded generator for each sampled token.
//!
//! Order: bias, penalties, temperature, top-k, typical-p, top-p, min-p, draw. Hugging Face's generation has
//! typical-p last.

mod exponential;
mod logprobs;
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
#[cfg(feature = "cuda")]
pub(crate) use plan::{NOBODY, ROW_WORDS};
pub use plan::{Permitted, Plans, Sampled};
pub use token_set::TokenSet;

/// A sampling parameter out of its bounds.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{parameter} must be {bound}, found {found}")]
pub struct SamplingError {
    parameter: &'static str,
    bound: String,
    found: String,
}

impl SamplingError {
    /// The parameter's name as the API has it.
    pub fn parameter(&self) -> &'static str {
        self.parameter
    }
}

/// How tokens are chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 takes the most likely token always; up to 2.
    pub temperature: f32,
    /// Only this many of the most likely tokens; 0 for all.
    pub top_k: usize,
    /// Only the most likely tokens that together have this probability (Holtzman et al., 2020); in (0, 1].
    pub top_p: f32,
    /// Only tokens at least this share of the most likely one's probability; in [0, 1].
    pub min_p: f32,
    /// Only the tokens nearest the expected surprise that together have this probability (Meister et al., 2022).
    pub typical_p: f32,
    /// Divides the logits of tokens seen in prompt or answer where positive, multiplies where negative (Keskar
    /// et al., 2019); 1 does nothing; in (0, 10].
    pub repetition_penalty: f32,
    /// Taken from a logit for every time that the answer has the token; in [-2, 2].
    pub frequency_penalty: f32,
    /// Taken from a logit if the answer has the token; in [-2, 2].
    pub presence_penalty: f32,
    /// Added to single logits; each in [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// The same seed and text give the same tokens.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// Checks every bound; NaN is out of all of them.
    ///
    /// # Errors
    /// [`SamplingError`] names the first parameter out of its bound.
    pub fn validate(&self, vocab_size: usize) -> Result<(), SamplingError> {
        let check = |parameter, value: f32, inside: bool, bound: &str| {
            let error = || SamplingError { parameter, bound: bound.into(), found: value.to_string() };
            inside.then_some(()).ok_or_else(error)
        };
        let share = |v: f32| v > 0.0 && v <= 1.0;
        let penalty = |v: f32| (-2.0..=2.0).contains(&v);
        check("temperature", self.temperature, (0.0..=2.0).contains(&self.temperature), "between 0 and 2")?;
        check("top_p", self.top_p, share(self.top_p), "above 0 and at most 1")?;
        check("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "between 0 and 1")?;
        check("typical_p", self.typical_p, share(self.typical_p), "above 0 and at most 1")?;
        let repetition = self.repetition_penalty;
        check("repetition_penalty", repetition, repetition > 0.0 && repetition <= 10.0, "above 0 and at most 10")?;
        check("frequency_penalty", self.frequency_penalty, penalty(self.frequency_penalty), "between -2 and 2")?;
        check("presence_penalty", self.presence_penalty, penalty(self.presence_penalty), "between -2 and 2")?;
        for &(id, bias) in &self.logit_bias {
            check("logit_bias", bias, (-100.0..=100.0).contains(&bias), "between -100 and 100")?;
            if id as usize >= vocab_size {
                let bound = format!("of tokens below {vocab_size}");
                return Err(SamplingError { parameter: "logit_bias", bound, found: id.to_string() });
            }
        }
        Ok(())
    }
}

/// Where a sampler is in its stream and what it has counted: with the parameters, all that it goes on from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SamplerState {
    /// The seed of its stream of random numbers.
    pub seed: u64,
    /// Draws taken from it.
    pub draws: u64,
    /// Tokens of the text, each once, in ascending order, with how often the answer has it, and with the highest bit
    /// set where the text before the answer has it.
    pub counts: Vec<(u32, u32)>,
}

/// Chooses one sequence's tokens. Depends on its own parameters and text alone, not on who else is served.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    counts: Counts,
    generator: ChaCha8Rng,
    draws: u64,
    /// What the next draw takes, where it is known already.
    drawn: Option<u64>,
}

thread_local! {
    /// Memory for a row's candidates; nothing in it is of the row before.
    static CANDIDATES: RefCell<Candidates> = RefCell::default();
}

impl Sampler {
    /// A sampler at the start of its seed's stream.
    ///
    /// # Errors
    /// [`SamplingError`] names the first parameter out of its bound.
    pub fn new(params: SamplingParams, vocab_size: usize) -> Result<Self, SamplingError> {
        params.validate(vocab_size)?;
        let state = SamplerState { seed: params.seed, ..SamplerState::default() };
        Self::resume(params, &state, vocab_size)
    }

    /// A sampler that goes on where another with this state was; the state's seed counts, not the parameters'.
    ///
    /// # Errors
    /// [`SamplingError`] names the first parameter out of its bound.
    pub fn resume(mut params: SamplingParams, state: &SamplerState, vocab_size: usize) -> Result<Self, SamplingError> {
        params.validate(vocab_size)?;
        params.seed = state.seed;
        let mut generator = ChaCha8Rng::seed_from_u64(state.seed);
        // A draw takes two words of 32 bits.
        generator.set_word_pos(u128::from(state.draws) * 2);
        let counts = Counts::from_pairs(&state.counts);
        Ok(Self { params, counts, generator, draws: state.draws, drawn: None })
    }

    /// What [`Self::resume`] goes on from.
    pub fn state(&self) -> SamplerState {
        SamplerState { seed: self.params.seed, draws: self.draws, counts: self.counts.pairs() }
    }

    /// Begins the stream of another seed; the counts stay.
    pub fn reseed(&mut self, seed: u64) {
        self.params.seed = seed;
        self.generator = ChaCha8Rng::seed_from_u64(seed);
        self.draws = 0;
        self.drawn = None;
    }

    /// What the next draw takes: a whole number of 53 bits, which says how many 2^-53 of all weights come before it.
    fn uniform(&mut self) -> u64 {
        // Every f64 step in [0, 1) equally likely.
        *self.drawn.get_or_insert_with(|| self.generator.next_u64() >> 11)
    }

    /// Tells of the prompt's tokens, which the repetition penalty counts.
    pub fn observe_prompt(&mut self, tokens: &[u32]) {
        self.counts.prompt(tokens);
    }

    /// Makes the answer so far a part of the prompt: a new answer begins.
    pub fn close_answer(&mut self) {
        self.counts.close_answer();
    }

    /// Uncounts a token that [`Self::sample`] has chosen and that the text does not keep.
    pub fn take_back(&mut self, token: u32) {
        self.counts.take_back(token);
    }

    /// Chooses a token and counts it; none where no logit is a number above minus infinity.
    ///
    /// logits: (vocab), left changed by biases and penalties.
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
                // One draw a token keeps the stream's place exact.
                Some(candidates.draw(self.uniform() as f64 / (1u64 << 53) as f64))
            })?
        };
        self.take(token);
        Some(token)
    }
}

#[cfg(test)]
mod plain;
