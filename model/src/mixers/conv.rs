//! The short causal convolution on q, k and v: one window of inputs for each slot, moved in place.

use candle_core::{Result, bail};

use crate::kernels::{Isa, activation};

/// Depthwise taps of q, k and v side by side, with SiLU after them.
#[derive(Clone, Debug)]
pub(crate) struct Conv {
    weight: Vec<f32>, // (kernel, channels)
    channels: usize,  // 3 heads d
}

impl Conv {
    /// taps: of q, k and v, each (channels, kernel).
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

    /// x: (rows, time, channels); tails: (slots, kernel - 1, channels), moved on in place; one slot a row.
    /// -> out: (rows, time, channels)
    pub(crate) fn forward(&self, x: &[f32], tails: &mut [f32], slots: &[usize], out: &mut [f32]) -> Result<()> {
        let len = self.weight.len() - self.channels;
        let row = x.len() / slots.len().max(1);
        for (&slot, (x, out)) in slots.iter().zip(x.chunks_exact(row).zip(out.chunks_exact_mut(row))) {
            let Some(tail) = tails.get_mut(slot * len..(slot + 1) * len) else {
                bail!("convolution: slot {slot} is out of range");
            };
            activation::conv_silu(Isa::detect(), tail, x, &self.weight, self.channels, out);
        }
        Ok(())
    }
}
