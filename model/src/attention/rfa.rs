//! Random feature attention with a learned scalar gate per head (Peng et al., ICLR 2021, equations 5 to 7).

use candle_core::{D, DType, Result, Tensor};

use super::{Mixer, Rows, rotary};
use crate::config::{DecoderConfig, PositionEmbedding};
use crate::feature_map::GaussianFeatures;
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
    rope: Option<f64>,          // base of the angles
}

impl RfaAttention {
    /// Reads `{q,k,v,o}_proj`, `gate`, `sigma`, `random_matrices`, `{q,k,v}_conv1d` and `o_norm` of one layer.
    pub(crate) fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        let (heads, d) = (config.num_attention_heads, config.head_dim);
        let projection = |name: &str| weights.get(&format!("{name}_proj.weight"), &[inner, hidden]);
        let qkv = Linear::stack(&[&projection("q")?, &projection("k")?, &projection("v")?])?;
        let gate = if config.gate {
            let bias = weights.get("gate.bias", &[heads])?;
            Some(Linear::new(&weights.get("gate.weight", &[heads, hidden])?, Some(&bias))?)
        } else {
            None
        };
        let random = weights.get("random_matrices", &[heads, config.proj_dim, d])?.to_dtype(DType::F32)?;
        let sigma = weights.get("sigma", &[heads, d])?.to_dtype(DType::F32)?;
        let conv = if config.conv_kernel > 0 {
            let taps = |name: &str| weights.get(&format!("{name}_conv1d.weight"), &[inner, 1, config.conv_kernel]);
            Some(conv::Conv::new(&[taps("q")?, taps("k")?, taps("v")?])?)
        } else {
            None
        };
        let norm = if config.output_norm {
            Some(RmsNorm::new(&weights.get("o_norm.weight", &[d])?, config.rms_norm_eps)?)
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
            out: Linear::new(&weights.get("o_proj.weight", &[hidden, inner])?, None)?,
            rope: (config.position_embedding == PositionEmbedding::Rope).then_some(config.rope_theta),
        })
    }

    /// qkv: (batch, time, 3 heads d) -> q and k rotated, where the config has rotary positions.
    fn rotated(&self, qkv: &Tensor, rows: Rows<'_>) -> Result<Tensor> {
        let Some(theta) = self.rope else { return Ok(qkv.clone()) };
        let (batch, time, width) = qkv.dims3()?;
        let recurrent::Shape { heads, head_dim, .. } = self.shape;
        let angles = rotary::angles(rows.positions, time, head_dim, theta, qkv.device())?;
        // q's and k's heads alike: (batch, 2 heads, time, d)
        let qk = qkv.narrow(2, 0, 2 * heads * head_dim)?.reshape((batch, time, 2 * heads, head_dim))?;
        let qk = rotary::rotate(&qk.transpose(1, 2)?.contiguous()?, &angles)?;
        let qk = qk.transpose(1, 2)?.reshape((batch, time, 2 * heads * head_dim))?;
        Tensor::cat(&[&qk, &qkv.narrow(2, 2 * heads * head_dim, width / 3)?], 2)
    }

    /// The chunked form, whose denominators can be seen on the way.
    ///
    /// qkv: (batch, time, 3 heads d), gate: (batch, time, heads) -> (batch, time, heads d)
    fn probed(
        &self,
        qkv: &Tensor,
        gate: Option<&Tensor>,
        state: &LayerState,
        rows: Rows<'_>,
        probe: &mut LayerProbe,
    ) -> Result<Tensor> {
        let (batch, time, _) = qkv.dims3()?;
        let recurrent::Shape { heads, head_dim, proj_dim, eps } = self.shape;
        // (3, batch, heads, time, d)
        let split = qkv.reshape((batch, time, 3, heads, head_dim))?.permute((2, 0, 3, 1, 4))?;
        let part = |i: usize| split.get(i)?.contiguous();
        let inputs = chunk::Inputs {
            phi_q: self.features.forward(&part(0)?)?,
            phi_k: self.features.forward(&part(1)?)?,
            v: part(2)?,
            gate: gate.map(|g| g.transpose(1, 2)?.contiguous()).transpose()?,
        };
        let mut memory = gather(&state.memory, rows.slots, proj_dim, head_dim)?;
        let outputs = chunk::forward(&inputs, &mut memory, eps, chunk::CHUNK)?;
        scatter(&state.memory, rows.slots, &memory)?;
        probe.observe(&outputs.denominator, &outputs.floor, inputs.gate.as_ref())?;
        outputs.h.transpose(1, 2)?.reshape((batch, time, heads * head_dim))
    }
}

/// The slots' memories as the chunked form wants them: S with z as its last column.
fn gather(pool: &Tensor, slots: &[usize], proj_dim: usize, d: usize) -> Result<chunk::Memory> {
    let index: Vec<u32> = slots.iter().map(|&s| s as u32).collect();
    let flat = pool.index_select(&Tensor::from_vec(index, slots.len(), pool.device())?, 0)?;
    let (rows, heads, _) = flat.dims3()?;
    let features = 2 * proj_dim;
    let s = flat.narrow(2, 0, features * d)?.reshape((rows, heads, features, d))?;
    let z = flat.narrow(2, features * d, features)?.unsqueeze(3)?;
    Ok(chunk::Memory {
        s: Tensor::cat(&[s, z], 3)?.contiguous()?,
        c: flat.narrow(2, features * (d + 1), 1)?.contiguous()?,
    })
}

/// Puts memories back into their slots.
fn scatter(pool: &Tensor, slots: &[usize], memory: &chunk::Memory) -> Result<()> {
    let d = memory.s.dim(3)? - 1;
    let s = memory.s.narrow(3, 0, d)?.flatten(2, 3)?;
    let z = memory.s.narrow(3, d, 1)?.squeeze(3)?;
    let flat = Tensor::cat(&[s, z, memory.c.clone()], D::Minus1)?;
    for (row, &slot) in slots.iter().enumerate() {
        pool.slice_set(&flat.narrow(0, row, 1)?.contiguous()?, 0, slot)?;
    }
    Ok(())
}

impl Mixer for RfaAttention {
    fn forward(
        &self,
        x: &Tensor,
        state: &LayerState,
        rows: Rows<'_>,
        probe: Option<&mut LayerProbe>,
    ) -> Result<Tensor> {
        let (batch, time, _) = x.dims3()?;
        let mut qkv = self.qkv.forward(x)?;
        if let (Some(conv), Some(tail)) = (&self.conv, &state.conv) {
            qkv = conv.forward(&qkv, tail, rows.slots)?;
        }
        let qkv = self.rotated(&qkv, rows)?;
        let gate = self.gate.as_ref().map(|gate| gate.forward(x)).transpose()?;
        let mut h = match probe {
            None => {
                let (gate, memory) = (gate.as_ref(), &state.memory);
                let scanned = recurrent::scan(self.shape, &self.features, memory, &qkv, gate, rows.slots)?;
                state.denominators.note(batch * time * self.shape.heads, scanned.clamped);
                scanned.h
            }
            Some(probe) => self.probed(&qkv, gate.as_ref(), state, rows, probe)?,
        };
        if let Some(norm) = &self.norm {
            let (heads, d) = (self.shape.heads, self.shape.head_dim);
            h = norm.forward(&h.reshape((batch, time, heads, d))?)?.reshape((batch, time, heads * d))?;
        }
        self.out.forward(&h)
    }
}
