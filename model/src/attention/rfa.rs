//! Random feature attention with a learned scalar gate per head (Peng et al., ICLR 2021, equations 5 to 7).

use candle_core::{D, Device, Result, Tensor};

use super::{Buffers, Mixer, Rows};
use crate::compute::{Compute, sized};
use crate::config::DecoderConfig;
use crate::feature_map::GaussianFeatures;
use crate::memory::Memory;
use crate::nn::{Linear, RmsNorm};
use crate::ops::{chunk, conv, recurrent};
use crate::probe::LayerProbe;
use crate::state::LayerState;
use crate::weights::{LoadError, Weights};

/// Projections, short convolution, feature map, recurrence, norm of each head's output, projection back.
#[derive(Debug)]
pub(crate) struct RfaAttention {
    shape: recurrent::Shape,
    qkv: Linear,                // (3 heads d, hidden)
    conv: Option<conv::Conv>,   // weight (conv_kernel, 3 heads d)
    gate: Option<Linear>,       // (heads, hidden), with a bias
    features: GaussianFeatures, // (heads, D, d)
    norm: Option<RmsNorm>,      // (d)
    out: Linear,                // (hidden, heads d)
}

impl RfaAttention {
    /// Reads `{q,k,v,o}_proj`, `gate`, `sigma`, `random_matrices`, `{q,k,v}_conv1d` and `o_norm` of one layer.
    pub(crate) fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        let (heads, d) = (config.num_attention_heads, config.head_dim);
        let projection = |name: &str| weights.matrix(&format!("{name}_proj.weight"), inner, hidden);
        let qkv = Linear::stack(&[projection("q")?, projection("k")?, projection("v")?])?;
        let gate = if config.gate {
            let bias = weights.numbers("gate.bias", &[heads])?;
            Some(Linear::new(&weights.matrix("gate.weight", heads, hidden)?, Some(bias))?)
        } else {
            None
        };
        let tensor = |name: &str, shape: &[usize]| -> std::result::Result<Tensor, LoadError> {
            Ok(Tensor::from_vec(weights.numbers(name, shape)?, shape, &Device::Cpu)?)
        };
        let random = tensor("random_matrices", &[heads, config.proj_dim, d])?;
        let sigma = tensor("sigma", &[heads, d])?;
        let conv = if config.conv_kernel > 0 {
            let taps = |name: &str| weights.numbers(&format!("{name}_conv1d.weight"), &[inner, 1, config.conv_kernel]);
            Some(conv::Conv::new(&[taps("q")?, taps("k")?, taps("v")?], config.conv_kernel))
        } else {
            None
        };
        let norm = if config.output_norm {
            Some(RmsNorm::new(weights.numbers("o_norm.weight", &[d])?, config.rms_norm_eps))
        } else {
            None
        };
        Ok(Self {
            shape: recurrent::Shape { heads, head_dim: d, proj_dim: config.proj_dim, eps: config.denominator_eps },
            qkv,
            conv,
            gate,
            features: GaussianFeatures::new(&random, &sigma)?,
            norm,
            out: Linear::new(&weights.matrix("o_proj.weight", hidden, inner)?, None)?,
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
        let recurrent::Shape { heads, head_dim, proj_dim, eps } = self.shape;
        // (3, batch, heads, time, d)
        let split =
            Tensor::from_slice(qkv, (batch, time, 3, heads, head_dim), &Device::Cpu)?.permute((2, 0, 3, 1, 4))?;
        let part = |i: usize| split.get(i)?.contiguous();
        let gate = gate
            .map(|gate| Tensor::from_slice(gate, (batch, time, heads), &Device::Cpu)?.transpose(1, 2)?.contiguous());
        let inputs = chunk::Inputs {
            phi_q: self.features.forward(&part(0)?)?,
            phi_k: self.features.forward(&part(1)?)?,
            v: part(2)?,
            gate: gate.transpose()?,
        };
        let mut carried = gather(memory, rows.slots, (heads, 2 * proj_dim, head_dim))?;
        let outputs = chunk::forward(&inputs, &mut carried, eps, chunk::CHUNK)?;
        scatter(memory, rows.slots, &carried)?;
        probe.observe(&outputs.denominator, &outputs.floor, inputs.gate.as_ref())?;
        out.copy_from_slice(&outputs.h.transpose(1, 2)?.flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    }
}

/// The slots' memories as the chunked form wants them: S with z as its last column.
fn gather(memory: &Memory, slots: &[usize], (heads, features, d): (usize, usize, usize)) -> Result<chunk::Memory> {
    let mut numbers = Vec::with_capacity(slots.len() * memory.numbers());
    for &slot in slots {
        memory.read(slot, &mut numbers);
    }
    let flat = Tensor::from_vec(numbers, (slots.len(), heads, features * (d + 1) + 1), &Device::Cpu)?;
    let s = flat.narrow(2, 0, features * d)?.reshape((slots.len(), heads, features, d))?;
    let z = flat.narrow(2, features * d, features)?.unsqueeze(3)?;
    Ok(chunk::Memory {
        s: Tensor::cat(&[s, z], 3)?.contiguous()?,
        c: flat.narrow(2, features * (d + 1), 1)?.contiguous()?,
    })
}

/// Puts memories back into their slots.
fn scatter(memory: &mut Memory, slots: &[usize], carried: &chunk::Memory) -> Result<()> {
    let d = carried.s.dim(3)? - 1;
    let s = carried.s.narrow(3, 0, d)?.flatten(2, 3)?;
    let z = carried.s.narrow(3, d, 1)?.squeeze(3)?;
    let flat = Tensor::cat(&[s, z, carried.c.clone()], D::Minus1)?.flatten_all()?.to_vec1::<f32>()?;
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
        let Buffers { qkv, convolved, gate, h, normed, scan } = buffers;
        let mut qkv = sized(qkv, tokens * 3 * inner);
        self.qkv.forward(cx, x, qkv);
        if let Some(conv) = &self.conv {
            let convolved = sized(convolved, qkv.len());
            conv.forward(qkv, &mut state.conv, rows.slots, convolved)?;
            qkv = convolved;
        }
        if let Some(angles) = rows.angles {
            angles.rotate(qkv, 3 * inner, 2 * inner);
        }
        let gate = self.gate.as_ref().map(|layer| {
            let gate = sized(gate, tokens * heads);
            layer.forward(cx, x, gate);
            &*gate
        });
        let mut h = sized(h, tokens * inner);
        match probe {
            None => {
                let (slots, positions, layer) = (rows.slots, rows.positions, rows.layer);
                let inputs = recurrent::Inputs { qkv, gate, slots, positions, layer };
                let clamped = recurrent::scan(self.shape, &self.features, &mut state.memory, inputs, (cx, scan), h)?;
                state.denominators.note(tokens * heads, clamped);
            }
            Some(probe) => self.probed(qkv, gate, &mut state.memory, rows, h, probe)?,
        }
        if let Some(norm) = &self.norm {
            let normed = sized(normed, h.len());
            norm.forward(cx, h, normed);
            h = normed;
        }
        self.out.forward(cx, h, out);
        Ok(())
    }

    fn bytes(&self) -> usize {
        let conv = self.conv.as_ref().map_or(0, conv::Conv::bytes);
        let gate = self.gate.as_ref().map_or(0, Linear::bytes);
        self.qkv.bytes() + conv + gate + self.features.bytes() + self.out.bytes()
    }
}
