//! The short causal convolution on q, k and v, or on Mamba-2's x, B and C.

use super::last_inputs::LastInputs;
use super::layer::Rows;
use crate::error::Result;
use crate::kernels::{Isa, activation};

/// A depthwise convolution of all channels, followed by SiLU.
#[derive(Clone, Debug)]
pub(crate) struct Conv {
    weight: Vec<f32>, // (kernel, channels)
    bias: Vec<f32>,   // (channels), or empty
    channels: usize,
}

impl Conv {
    /// taps: (channels, kernel); bias: (channels), or empty
    pub(crate) fn new(taps: &[f32], bias: Vec<f32>, kernel: usize) -> Self {
        let channels = taps.len() / kernel;
        let weight = (0..kernel).flat_map(|tap| taps.iter().skip(tap).step_by(kernel).copied()).collect();
        Self { weight, bias, channels }
    }

    fn kernel(&self) -> usize {
        self.weight.len() / self.channels
    }

    /// Number of channels.
    pub(crate) fn channels(&self) -> usize {
        self.channels
    }

    /// Bytes of the taps.
    pub(crate) fn bytes(&self) -> usize {
        (self.weight.len() + self.bias.len()) * size_of::<f32>()
    }

    /// The last inputs for `slots` empty texts, oldest first: (slots, kernel - 1, channels)
    pub(crate) fn new_tails(convolution: Option<&Self>, slots: usize) -> LastInputs {
        LastInputs::zeros(slots, 1, convolution.map_or((0, 0), |conv| (conv.kernel() - 1, conv.channels)))
    }

    /// x: (rows, time, stride), whose channels start at `from` -> out: (rows, time, channels)
    pub(crate) fn forward(
        &self,
        (x, from, stride): (&[f32], usize, usize),
        tails: &mut LastInputs,
        rows: Rows<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        let inputs = x.chunks_exact(stride).map(|token| &token[from..][..self.channels]);
        tails.step(0, rows, inputs, |tails| {
            let texts = x.chunks_exact(rows.time * stride).zip(out.chunks_exact_mut(rows.time * self.channels));
            for (&slot, (x, out)) in rows.slots.iter().zip(texts) {
                let (inputs, taps) = ((&x[from..], stride), (&*self.weight, &*self.bias));
                activation::conv_silu(Isa::detect(), tails.of(slot, 0)?, inputs, taps, self.channels, out);
            }
            Ok(())
        })
    }
}
