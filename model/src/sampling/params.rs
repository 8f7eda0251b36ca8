//! Sampling parameters and their bounds.

/// A sampling parameter is out of bounds.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{parameter} must be {bound}, found {found}")]
pub struct SamplingError {
    parameter: &'static str,
    bound: String,
    found: String,
}

impl SamplingError {
    /// The name of the parameter in the API.
    pub fn parameter(&self) -> &'static str {
        self.parameter
    }
}

/// The parameters of a sampler. The defaults sample from the full distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 picks the most likely token; up to 2.
    pub temperature: f32,
    /// Keeps only this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps only the most likely tokens that together have this probability (Holtzman et al., 2020); in (0, 1].
    pub top_p: f32,
    /// Keeps only tokens with at least this share of the most likely one's probability; in [0, 1].
    pub min_p: f32,
    /// Keeps only the tokens nearest the expected surprise that together have this probability (Meister et al., 2022).
    pub typical_p: f32,
    /// Divides positive logits, and multiplies negative ones, of tokens in the prompt or the answer (Keskar et al.,
    /// 2019); 1 is off; in (0, 10].
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit once for every occurrence in the answer; in [-2, 2].
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it occurs in the answer; in [-2, 2].
    pub presence_penalty: f32,
    /// Token ids and the biases added to their logits; each bias in [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// The seed; with the same text, the same seed gives the same tokens.
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
    /// Checks every bound; NaN is always rejected.
    ///
    /// # Errors
    /// [`SamplingError`] names the first parameter that is out of bounds.
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
