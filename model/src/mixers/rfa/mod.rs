//! Random feature attention with a learned scalar gate per head (Peng et al., ICLR 2021, equations 5 to 7).

pub mod chunk;
pub(crate) mod features;
pub mod naive;
pub mod recurrent;
pub(crate) mod sums;
mod update;

use candle_core::{D, Device, Tensor};

use super::cross::SumsReader;
use super::layer::{Kept, Rows, SlotState, Step};
use super::matrices::Copies;
use super::mixer::{Mixer, Projected};
use crate::compute::Compute;
use crate::config::{ConfigError, DecoderConfig, FeatureMap, GivenKeys};
use crate::error;
use crate::feature_map::Features;
use crate::memory::StateType;
use crate::probe::LayerProbe;
use crate::weights::{LoadError, TensorList, Weights};
use features::Gate;

pub use sums::{Sums, SumsShape};

/// The RFA mixer of a layer: its feature map, gate and recurrence.
#[derive(Debug)]
pub(crate) struct Rfa {
    shape: recurrent::Shape,
    gate: Gate,
    features: Features,
}

/// Intermediate results of the mixer.
#[derive(Debug, Default)]
pub(crate) struct RfaBuffers {
    gate: Vec<f32>,        // (rows, time, heads)
    heads_first: Vec<f32>, // (rows, heads, time, d)
    copies: Copies,
}

impl Mixer for Rfa {
    type State = Sums;
    type Buffers = RfaBuffers;
    type Source = SumsReader;

    const SPECULATES: bool = true;

    fn name(config: &DecoderConfig) -> &'static str {
        let (gated, plain) = match config.feature_map {
            FeatureMap::Gaussian => ("rfa-gate", "rfa"),
            FeatureMap::ArcCosine => ("rfa-arccos-gate", "rfa-arccos"),
            FeatureMap::Elu => ("elu-gate", "elu"),
            FeatureMap::Favor => ("favor-gate", "favor"),
        };
        if config.gate { gated } else { plain }
    }

    fn complete(config: &mut DecoderConfig, given: &GivenKeys) -> Result<(), ConfigError> {
        features::require_proj_dim(config, given)
    }

    fn validate(config: &DecoderConfig) -> Result<(), ConfigError> {
        if let Some(window) = config.sliding_window {
            return Err(ConfigError::bound("sliding_window", "absent where attention is rfa", window));
        }
        features::validate(config)
    }

    fn features(config: &DecoderConfig) -> usize {
        features::count(config)
    }

    fn head_numbers(config: &DecoderConfig) -> usize {
        SumsShape::of(config, config.feature_map.has_maximum()).head_numbers()
    }

    fn tensors(config: &DecoderConfig, list: &mut TensorList) {
        features::tensors(config, config.proj_dim, list);
        Gate::tensors(config, list);
    }

    fn load(config: &DecoderConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let (heads, head_dim) = (config.num_attention_heads, config.head_dim);
        let eps = config.denominator_floor();
        Ok(Self {
            shape: recurrent::Shape { heads, head_dim, features: features::count(config), eps },
            gate: Gate::load(config, weights)?,
            features: features::load(config, config.proj_dim, weights)?,
        })
    }

    fn bytes(&self) -> usize {
        self.gate.bytes() + self.features.bytes()
    }

    fn greatest_maxima(&self) -> &[f32] {
        self.features.greatest_maxima()
    }

    fn new_state(&self, slots: usize, state: StateType) -> Sums {
        Sums::of_features(slots, &self.features, state)
    }

    fn mix(
        &self,
        step: &mut Step<'_>,
        Projected { x, qkv }: Projected<'_>,
        sums: &mut Sums,
        RfaBuffers { gate, heads_first, copies }: &mut RfaBuffers,
        h: &mut [f32],
    ) -> error::Result<()> {
        let rows = step.rows;
        let gate = self.gate.logits(step.cx, x, rows.slots.len() * rows.time, gate);
        if let Some(probe) = step.layer_probe() {
            return self.probed(qkv, gate, sums, rows, h, probe);
        }
        let inputs = recurrent::Inputs { qkv, gate, slots: rows.slots, positions: rows.positions, layer: rows.layer };
        let clamped = if rows.drafts {
            recurrent::scan_drafts(self.shape, &self.features, sums, inputs, (step.cx, heads_first, copies), h)?
        } else {
            recurrent::scan(self.shape, &self.features, sums, inputs, (step.cx, heads_first), h)?
        };
        step.denominators.note(h.len() / self.shape.head_dim, clamped);
        Ok(())
    }

    fn keep(&self, cx: &mut Compute, sums: &mut Sums, kept: Kept) -> error::Result<()> {
        update::keep(sums, self.shape.eps, kept, cx)
    }
}

impl Rfa {
    /// Runs the chunked form, which records its denominators and gates in `probe`.
    ///
    /// qkv: (batch, time, 3 heads d), gate: (batch, time, heads) -> out: (batch, time, heads d)
    fn probed(
        &self,
        qkv: &[f32],
        gate: Option<&[f32]>,
        sums: &mut Sums,
        rows: Rows<'_>,
        out: &mut [f32],
        probe: &mut LayerProbe,
    ) -> error::Result<()> {
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
        let mut carried = gather(sums, rows.slots)?;
        let outputs = chunk::forward(&inputs, &mut carried, eps, chunk::CHUNK)?;
        scatter(sums, rows.slots, &carried)?;
        probe.observe(&outputs.denominator, &outputs.floor, inputs.gate.as_ref())?;
        out.copy_from_slice(&outputs.h.transpose(1, 2)?.flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    }
}

/// Collects the sums of some slots in the layout of the chunked form: S with z as its last column.
fn gather(sums: &Sums, slots: &[usize]) -> error::Result<chunk::Carry> {
    let of = sums.dims().1;
    let (features, d) = (of.features, of.head_dim);
    let mut numbers = Vec::with_capacity(slots.len() * sums.numbers());
    for &slot in slots {
        sums.read(slot, &mut numbers);
    }
    let flat = Tensor::from_vec(numbers, (slots.len(), of.heads, of.matrix() + of.rest_len()), &Device::Cpu)?;
    let s = flat.narrow(2, 0, features * d)?.reshape((slots.len(), of.heads, features, d))?;
    let z = flat.narrow(2, features * d, features)?.unsqueeze(3)?;
    let number = |at: usize| flat.narrow(2, features * (d + 1) + at, 1)?.contiguous();
    Ok(chunk::Carry {
        s: Tensor::cat(&[s, z], 3)?.contiguous()?,
        c: number(0)?,
        maximum: of.maximum.then(|| number(1)).transpose()?,
    })
}

/// Writes the sums back into their slots.
fn scatter(sums: &mut Sums, slots: &[usize], carried: &chunk::Carry) -> error::Result<()> {
    let d = carried.s.dim(3)? - 1;
    let s = carried.s.narrow(3, 0, d)?.flatten(2, 3)?;
    let z = carried.s.narrow(3, d, 1)?.squeeze(3)?;
    let parts: Vec<_> = [s, z, carried.c.clone()].into_iter().chain(carried.maximum.clone()).collect();
    let flat = Tensor::cat(&parts, D::Minus1)?.flatten_all()?.to_vec1::<f32>()?;
    for (&slot, numbers) in slots.iter().zip(flat.chunks_exact(sums.numbers())) {
        sums.write(slot, numbers, 0);
    }
    Ok(())
}
