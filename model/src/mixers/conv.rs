//! The short causal convolution on q, k and v, and the inputs that it keeps.

use super::layer::SlotState;
use crate::error::{ModelError, Result};
use crate::kernels::{Isa, activation};

/// Depthwise taps of q, k and v side by side, followed by SiLU.
#[derive(Clone, Debug)]
pub(crate) struct Conv {
    weight: Vec<f32>, // (kernel, channels)
    channels: usize,  // 3 heads d
}

/// The last inputs of a convolution, oldest first: (slots, kernel - 1, channels); empty without a convolution
#[derive(Debug)]
pub(crate) struct ConvTails {
    inputs: Vec<f32>,
    len: usize, // (kernel - 1) channels
}

impl SlotState for ConvTails {
    fn bytes(&self) -> usize {
        self.len * size_of::<f32>()
    }

    fn reset(&mut self, slot: usize) {
        self.inputs[slot * self.len..][..self.len].fill(0.0);
    }

    fn read(&self, slot: usize, out: &mut Vec<f32>) {
        out.extend_from_slice(&self.inputs[slot * self.len..][..self.len]);
    }

    fn write(&mut self, slot: usize, numbers: &[f32], _: u64) {
        self.inputs[slot * self.len..][..self.len].copy_from_slice(numbers);
    }
}

impl Conv {
    /// taps: of q, k and v, each (channels, kernel)
    pub(crate) fn new(taps: &[Vec<f32>; 3], kernel: usize) -> Self {
        let all = taps.concat();
        let channels = all.len() / kernel;
        let weight = (0..kernel).flat_map(|tap| all.iter().skip(tap).step_by(kernel).copied()).collect();
        Self { weight, channels }
    }

    /// Bytes of the taps.
    pub(crate) fn bytes(&self) -> usize {
        self.weight.len() * size_of::<f32>()
    }

    /// The inputs of `slots` empty texts.
    pub(crate) fn new_tails(convolution: Option<&Self>, slots: usize) -> ConvTails {
        let len = convolution.map_or(0, |conv| conv.weight.len() - conv.channels);
        ConvTails { inputs: vec![0.0; slots * len], len }
    }

    /// x: (rows, time, channels), one slot for each row -> out: (rows, time, channels)
    pub(crate) fn forward(&self, x: &[f32], tails: &mut ConvTails, slots: &[usize], out: &mut [f32]) -> Result<()> {
        let (row, len) = (x.len() / slots.len().max(1), tails.len);
        let there = tails.inputs.len() / len.max(1);
        for (&slot, (x, out)) in slots.iter().zip(x.chunks_exact(row).zip(out.chunks_exact_mut(row))) {
            ModelError::check_slot(slot, there)?;
            let tail = &mut tails.inputs[slot * len..][..len];
            activation::conv_silu(Isa::detect(), tail, x, &self.weight, self.channels, out);
        }
        Ok(())
    }
}
