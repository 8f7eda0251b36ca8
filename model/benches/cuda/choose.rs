//! Sampling as the server does it: each row's own sampler plans while the step runs, the device samples, ids come back.

use std::ops::Range;

use tidegate_model::Backend;
use tidegate_model::cuda::{CudaDecoder, CudaPool};
use tidegate_model::sampling::{Permitted, Plans, Sampled, Sampler, SamplingParams};

use super::Result;

/// The rows' samplers, and the outcome of a step.
pub(super) struct Chooser {
    samplers: Vec<Sampler>,
    sampled: Vec<Sampled>,
    logits: Vec<f32>,
}

impl Chooser {
    /// For so many rows, with common parameters: a temperature of 0.8 and a top_p of 0.95.
    pub(super) fn new(rows: usize, vocab: usize) -> Result<Self> {
        let params = |row: usize| SamplingParams {
            temperature: 0.8,
            top_p: 0.95,
            seed: row as u64,
            ..SamplingParams::default()
        };
        let samplers = (0..rows).map(|row| Sampler::new(params(row), vocab)).collect::<std::result::Result<_, _>>()?;
        Ok(Self { samplers, sampled: Vec::new(), logits: Vec::new() })
    }

    /// Makes a step of the slots, and samples the next token of each.
    pub(super) fn step(
        &mut self,
        decoder: &CudaDecoder,
        pool: &mut CudaPool,
        ids: &[u32],
        slots: &[usize],
    ) -> Result<()> {
        let Self { samplers, sampled, logits } = self;
        let mut plan = |rows: Range<usize>, plans: &mut Plans| {
            for sampler in &mut samplers[rows] {
                sampler.plan(Permitted::default(), plans);
            }
        };
        decoder.decode_and_sample(ids, pool, slots, &mut plan, (sampled, logits))?;
        for (sampler, sampled) in samplers.iter_mut().zip(sampled) {
            let Sampled::Token(token) = *sampled else { return Err("a step chose no token".into()) };
            // Forgets tokens, so that the penalties see a text of some length and not all steps.
            sampler.take(token);
            sampler.take_back(token);
        }
        Ok(())
    }
}
