//! The channel mix: `value(max(key(x'), 0)^2)`, where x' is the input mixed with the previous token's input.

use super::shift::Shift;
use crate::compute::sized;
use crate::config::DecoderConfig;
use crate::error;
use crate::kernels::elementwise;
use crate::mixers::last_inputs::LastInputs;
use crate::mixers::layer::Step;
use crate::nn::Linear;
use crate::weights::{LoadError, TensorList, Weights};

/// The index of the channel mix's input among those that a layer keeps.
const INPUT: usize = 1;

/// The weights.
#[derive(Debug)]
pub(super) struct ChannelMix {
    mix: Vec<f32>, // (hidden)
    key: Linear,   // (intermediate, hidden)
    value: Linear, // (hidden, intermediate)
}

/// Intermediate results.
#[derive(Debug, Default)]
pub(super) struct ChannelBuffers {
    before: Vec<f32>, // (rows, hidden)
    mixed: Vec<f32>,  // (rows, time, hidden)
    inner: Vec<f32>,  // (rows, time, intermediate)
}

impl ChannelMix {
    /// The tensors that [`Self::load`] reads.
    pub(super) fn tensors(config: &DecoderConfig, list: &mut TensorList) {
        list.floats("x_k", &[config.hidden_size]);
        list.matrix("key.weight", config.intermediate_size, config.hidden_size);
        list.matrix("value.weight", config.hidden_size, config.intermediate_size);
    }

    /// Loads `x_k`, `key` and `value`.
    pub(super) fn load(config: &DecoderConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            mix: weights.numbers("x_k", &[hidden])?,
            key: Linear::new(&weights.matrix("key.weight", inner, hidden)?, None)?,
            value: Linear::new(&weights.matrix("value.weight", hidden, inner)?, None)?,
        })
    }

    /// Elements of one token's input.
    pub(super) fn width(&self) -> usize {
        self.mix.len()
    }

    /// Bytes of the matrices.
    pub(super) fn bytes(&self) -> usize {
        self.key.bytes() + self.value.bytes()
    }

    /// x: (rows, time, hidden) -> out: the same shape
    pub(super) fn forward(
        &self,
        step: &mut Step<'_>,
        x: &[f32],
        inputs: &mut LastInputs,
        ChannelBuffers { before, mixed, inner }: &mut ChannelBuffers,
        out: &mut [f32],
    ) -> error::Result<()> {
        let (isa, width) = (step.cx.isa, self.width());
        let shift = Shift::new((inputs, INPUT), step.rows, x, width, before)?;
        let mixed = sized(mixed, x.len());
        shift.mix(step.cx, &self.mix, mixed);
        let inner = sized(inner, x.len() / width * self.key.width());
        self.key.forward(step.cx, mixed, inner);
        step.cx.each(inner, self.key.width(), &|_, inner| elementwise::squared_relu(isa, inner));
        self.value.forward(step.cx, inner, out);
        Ok(())
    }
}
