//! Random feature attention with a learned scalar gate per head (Peng et al., ICLR 2021, equations 5 to 7).

pub mod chunk;
pub(crate) mod features;
pub mod naive;
pub mod recurrent;
pub(crate) mod sums;

use candle_core::{D, Device, Result, Tensor, bail};

use crate::mixers::projections::Projections;
use crate::mixers::{Buffers, LayerMemory, LayerState, Mixer, Rows};
use crate::compute::{Compute, sized};
use crate::config::DecoderConfig;
use crate::feature_map::Features;


use crate::nn::Linear;

use crate::probe::LayerProbe;
use crate::weights::{LoadError, Weights};

pub use sums::{HeadSums, Memory};

/// Projections; feature map, gate and recurrence between them.
#[derive(Debug)]
pub(crate) struct RfaAttention {
    shape: recurrent::Shape,
    projections: Projections,
    gate: Option<Linear>, // (heads, hidden), with a bias
    features: Features,
}

impl RfaAttention {
    /// Reads `gate`, `sigma` and `random_matrices` of one layer, where its feature map has them, and what every mixer
    /// has.
    pub(crate) fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (heads, d) = (config.num_attention_heads, config.head_dim);
        let eps = if config.feature_map.has_floor() { config.denominator_eps } else { 0.0 };
        Ok(Self {
            shape: recurrent::Shape { heads, head_dim: d, features: config.features(), eps },
            projections: Projections::new(config, weights)?,
            gate: features::gate(config, weights)?,
            features: features::of(config, weights)?,
        })
    }

    /// The chunked form, whose denominators can be seen on the way.
    ///
    /// qkv: (batch, time, 3 heads d), gate: (batch, time, heads) -> out: (batch, time, heads d)
    fn probed(
        &self,
        qkv: &[f32],
        gate: Option<&[f32]>,
        memory: &mut Memory,
        rows: Rows<'_>,
        out: &mut [f32],
        probe: &mut LayerProbe,
    ) -> Result<()> {
        let (batch, time) = (rows.slots.len(), rows.time);
        let recurrent::Shape { heads, head_dim, eps, .. } = self.shape;
        // (3, batch, heads, time, d)
        let split =
            Tensor::from_slice(qkv, (batch, time, 3, heads, head_dim), &Device::Cpu)?.permute((2, 0, 3, 1, 4))?;
        let part = |i: usize| split.get(i)?.contiguous();
        let gate = gate
            .map(|gate| Tensor::from_slice(gate, (batch, time, heads), &Device::Cpu)?.transpose(1, 2)?.contiguous());
        let inputs = chunk::Inputs {
            phi_q: self.features.queries(&part(0)?)?,
            keys: self.features.keys(&part(1)?)?,
            v: part(2)?,
            gate: gate.transpose()?,
        };
        let mut carried = gather(memory, rows.slots)?;
        let outputs = chunk::forward(&inputs, &mut carried, eps, chunk::CHUNK)?;
        scatter(memory, rows.slots, &carried)?;
        probe.observe(&outputs.denominator, &outputs.floor, inputs.gate.as_ref())?;
        out.copy_from_slice(&outputs.h.transpose(1, 2)?.flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    }
}

/// The slots' memories as the chunked form wants them: S with z as its last column.
fn gather(memory: &Memory, slots: &[usize]) -> Result<chunk::Memory> {
    let of = memory.dims().1;
    let (features, d) = (of.features, of.head_dim);
    let mut numbers = Vec::with_capacity(slots.len() * memory.numbers());
    for &slot in slots {
        memory.read(slot, &mut numbers);
    }
    let flat = Tensor::from_vec(numbers, (slots.len(), of.heads, of.matrix() + of.beside()), &Device::Cpu)?;
    let s = flat.narrow(2, 0, features * d)?.reshape((slots.len(), of.heads, features, d))?;
    let z = flat.narrow(2, features * d, features)?.unsqueeze(3)?;
    let number = |at: usize| flat.narrow(2, features * (d + 1) + at, 1)?.contiguous();
    Ok(chunk::Memory {
        s: Tensor::cat(&[s, z], 3)?.contiguous()?,
        c: number(0)?,
        maximum: of.maximum.then(|| number(1)).transpose()?,
    })
}

/// Puts memories back into their slots.
fn scatter(memory: &mut Memory, slots: &[usize], carried: &chunk::Memory) -> Result<()> {
    let d = carried.s.dim(3)? - 1;
    let s = carried.s.narrow(3, 0, d)?.flatten(2, 3)?;
    let z = carried.s.narrow(3, d, 1)?.squeeze(3)?;
    let parts: Vec<_> = [s, z, carried.c.clone()].into_iter().chain(carried.maximum.clone()).collect();
    let flat = Tensor::cat(&parts, D::Minus1)?.flatten_all()?.to_vec1::<f32>()?;
    for (&slot, numbers) in slots.iter().zip(flat.chunks_exact(memory.numbers())) {
        memory.write(slot, numbers);
    }
    Ok(())
}

impl Mixer for RfaAttention {
    fn forward(
        &self,
        cx: &mut Compute,
        x: &[f32],
        state: &mut LayerState,
        rows: Rows<'_>,
        buffers: &mut Buffers,
        out: &mut [f32],
        probe: Option<&mut LayerProbe>,
    ) -> Result<()> {
        let recurrent::Shape { heads, head_dim: d, .. } = self.shape;
        let (tokens, inner) = (rows.slots.len() * rows.time, heads * d);
        let Buffers { qkv, convolved, gate, h, normed, scan, .. } = buffers;
        let LayerMemory::Sums(memory) = &mut state.memory else { bail!("attention: the memory is no sums") };
        let qkv = self.projections.enter(cx, x, &mut state.conv, rows, (qkv, convolved))?;
        let gate = features::logits(self.gate.as_ref(), cx, x, gate, tokens * heads);
        let h = sized(h, tokens * inner);
        match probe {
            None => {
                let (slots, positions, layer) = (rows.slots, rows.positions, rows.layer);
                let inputs = recurrent::Inputs { qkv, gate, slots, positions, layer };
                let clamped = recurrent::scan(self.shape, &self.features, memory, inputs, (cx, scan), h)?;
                state.denominators.note(tokens * heads, clamped);
            }
            Some(probe) => self.probed(qkv, gate, memory, rows, h, probe)?,
        }
        self.projections.leave(cx, h, normed, out);
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.projections.bytes() + self.gate.as_ref().map_or(0, Linear::bytes) + self.features.bytes()
    }

    fn greatest(&self) -> &[f32] {
        self.features.greatest()
    }
}
