//! The short causal convolution on q, k and v: one window of inputs for each slot, moved in place.

use std::sync::Mutex;

use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Result, Tensor, bail};

use crate::kernels::{Isa, activation};
use crate::nn::floats;

/// Depthwise taps of q, k and v side by side, with SiLU after them.
#[derive(Clone, Debug)]
pub(crate) struct Conv {
    weight: Vec<f32>, // (kernel, channels)
    channels: usize,  // 3 heads d
}

impl Conv {
    /// taps: of q, k and v, each (channels, 1, kernel).
    pub(crate) fn new(taps: &[Tensor; 3]) -> Result<Self> {
        let taps = taps.iter().map(|t| t.to_dtype(DType::F32)).collect::<Result<Vec<_>>>()?;
        let all = Tensor::cat(&taps, 0)?.squeeze(1)?; // (3 channels, kernel)
        let weight = all.t()?.flatten_all()?.to_vec1()?;
        Ok(Self { weight, channels: all.dim(0)? })
    }

    /// x: (rows, time, channels); tails: (slots, kernel - 1, channels), moved on in place; one slot a row.
    /// -> (rows, time, channels)
    pub(crate) fn forward(&self, x: &Tensor, tails: &Tensor, slots: &[usize]) -> Result<Tensor> {
        let op = ConvStep { conv: self, slots, out: Mutex::default() };
        tails.inplace_op2(&x.contiguous()?, &op)?;
        let out = op.out.into_inner().map_err(|_| candle_core::Error::msg("convolution: a worker panicked"))?;
        Tensor::from_vec(out, x.shape(), x.device())
    }
}

struct ConvStep<'a> {
    conv: &'a Conv,
    slots: &'a [usize],
    out: Mutex<Vec<f32>>, // an in-place op returns nothing: the outputs leave by here
}

impl InplaceOp2 for ConvStep<'_> {
    fn name(&self) -> &'static str {
        "causal-convolution"
    }

    fn cpu_fwd(&self, tails: &mut CpuStorage, tl: &Layout, x: &CpuStorage, xl: &Layout) -> Result<()> {
        let (rows, time, channels) = xl.shape().dims3()?;
        let CpuStorage::F32(tails) = tails else { bail!("convolution: the state must be f32") };
        let Some((start, end)) = tl.contiguous_offsets() else { bail!("convolution: the state must be contiguous") };
        if rows != self.slots.len() || channels != self.conv.channels {
            bail!("convolution: x is {:?}, expected {} rows of {}", xl.dims(), self.slots.len(), self.conv.channels);
        }
        let x = floats(x, xl, "convolution: x")?;
        let len = self.conv.weight.len() - channels;
        let mut out = vec![0.0; x.len()];
        let pairs = x.chunks_exact(time * channels).zip(out.chunks_exact_mut(time * channels));
        for (&slot, (x, out)) in self.slots.iter().zip(pairs) {
            let Some(tail) = tails[start..end].get_mut(slot * len..(slot + 1) * len) else {
                bail!("convolution: slot {slot} is out of range");
            };
            activation::conv_silu(Isa::detect(), tail, x, &self.conv.weight, channels, out);
        }
        *self.out.lock().map_err(|_| candle_core::Error::msg("convolution: a worker panicked"))? = out;
        Ok(())
    }
}
