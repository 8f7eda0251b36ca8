//! Applies the sampling parameters of a request over the model's recommended ones.

use rand::Rng;
use tidegate_model::SamplingParams;

use crate::api::error::ApiError;

/// What a request says about sampling; the model's recommendation applies to everything else.
#[derive(Clone, Debug, Default)]
pub(in crate::api) struct SamplingOverrides {
    pub(in crate::api) temperature: Option<f64>,
    pub(in crate::api) top_p: Option<f64>,
    /// -1 and 0 both mean all tokens.
    pub(in crate::api) top_k: Option<i64>,
    pub(in crate::api) min_p: Option<f64>,
    pub(in crate::api) typical_p: Option<f64>,
    pub(in crate::api) repetition_penalty: Option<f64>,
    pub(in crate::api) frequency_penalty: Option<f64>,
    pub(in crate::api) presence_penalty: Option<f64>,
    /// Token ids, each once, and what to add to their logits.
    pub(in crate::api) logit_bias: Vec<(u32, f64)>,
    /// Drawn at random if absent.
    pub(in crate::api) seed: Option<u64>,
}

impl SamplingOverrides {
    /// Returns the parameters to sample with. The engine checks their bounds.
    pub(super) fn apply(self, recommended: &SamplingParams) -> Result<SamplingParams, ApiError> {
        let mut sampling = recommended.clone();
        let set = |target: &mut f32, value: Option<f64>| {
            if let Some(value) = value {
                *target = value as f32;
            }
        };
        set(&mut sampling.temperature, self.temperature);
        set(&mut sampling.top_p, self.top_p);
        set(&mut sampling.min_p, self.min_p);
        set(&mut sampling.typical_p, self.typical_p);
        set(&mut sampling.repetition_penalty, self.repetition_penalty);
        set(&mut sampling.frequency_penalty, self.frequency_penalty);
        set(&mut sampling.presence_penalty, self.presence_penalty);
        match self.top_k {
            None => {}
            Some(-1 | 0) => sampling.top_k = 0,
            Some(top_k) => {
                let negative =
                    |_| ApiError::invalid(Some("top_k"), format!("top_k must be at least -1, found {top_k}"));
                sampling.top_k = usize::try_from(top_k).map_err(negative)?;
            }
        }
        sampling.logit_bias.extend(self.logit_bias.iter().map(|(id, bias)| (*id, *bias as f32)));
        sampling.seed = self.seed.unwrap_or_else(|| rand::rng().random());
        Ok(sampling)
    }
}
