//! Random feature attention on the device: projections, convolution, rotary positions, gate, recurrence.

use super::device::{Buffer, CudaDevice};
use super::gpu::Result;
use super::ops::{Linear, Mode, RmsNorm, Rows};
use super::pool::{Layer, Step, Workspace};
use super::recurrence::{Addresses, Recurrence, conv_silu, rotate};
use super::weights::Kind;
use crate::config::{Attention, DecoderConfig, FeatureMap};
use crate::cuda_error::CudaError;
use crate::weights::{LoadError, Weights};

/// Checks that there are kernels for a decoder.
pub(super) fn supported(config: &DecoderConfig) -> Result<()> {
    let refused = |why: String| Err(CudaError::Unsupported(why));
    if config.attention != Attention::Rfa {
        return refused(format!("attention must be rfa, found {}", config.mixer()));
    }
    if config.feature_map == FeatureMap::Favor {
        return refused("feature_map must be gaussian, arc_cosine or elu, found favor".into());
    }
    if config.source().is_some() {
        return refused("model_type must be rfa_gate, found an encoder-decoder".into());
    }
    let (d, features) = (config.head_dim, config.features());
    if !d.is_multiple_of(8) || d > 128 {
        return refused(format!("head_dim must be a multiple of 8 up to 128, found {d}"));
    }
    let most = if d > 64 { 128 } else { 256 };
    if features > most {
        return refused(format!(
            "the features of a head must be at most {most} with a head_dim of {d}, found {features}"
        ));
    }
    Ok(())
}

/// One layer's mixer.
#[derive(Debug)]
pub(super) struct Mixer {
    recurrence: Recurrence,
    rope: bool,
    qkv: Linear,
    gate: Option<Linear>,
    w: Option<Buffer>,             // scaled by sigma: (heads, d, D)
    conv: Option<(Buffer, usize)>, // (taps, 3 heads d), taps
    norm: Option<RmsNorm>,         // (d)
    out: Linear,
}

impl Mixer {
    /// Loads the tensors of `self_attn`.
    pub(super) fn new(
        device: &CudaDevice,
        config: &DecoderConfig,
        weights: &Weights<'_>,
        layer: usize,
    ) -> std::result::Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        let (heads, d, proj_dim) = (config.num_attention_heads, config.head_dim, config.proj_dim);
        let projection = |name: &str| weights.matrix(&format!("{name}_proj.weight"), inner, hidden);
        let gate = if config.gate {
            let (weight, bias) =
                (weights.numbers("gate.weight", &[heads, hidden])?, weights.numbers("gate.bias", &[heads])?);
            Some(Linear::plain(device, &weight, &bias)?)
        } else {
            None
        };
        let w = if config.feature_map.has_random_matrices() {
            let matrices = weights.numbers("random_matrices", &[heads, proj_dim, d])?;
            let sigma = weights.numbers("sigma", &[heads, d])?;
            let at = |i: usize| {
                let (head, column, vector) = (i / (d * proj_dim), i / proj_dim % d, i % proj_dim);
                matrices[(head * proj_dim + vector) * d + column] * sigma[head * d + column]
            };
            Some(device.floats("random matrices", &(0..matrices.len()).map(at).collect::<Vec<_>>())?)
        } else {
            None
        };
        let conv = if config.conv_kernel > 0 {
            let taps = config.conv_kernel;
            let of = |name: &str| weights.numbers(&format!("{name}_conv1d.weight"), &[inner, 1, taps]);
            let all = [of("q")?, of("k")?, of("v")?].concat();
            let weight: Vec<f32> = (0..taps).flat_map(|tap| all.iter().skip(tap).step_by(taps).copied()).collect();
            Some((device.floats("a convolution", &weight)?, taps))
        } else {
            None
        };
        let norm = if config.output_norm {
            Some(RmsNorm::new(device, &weights.numbers("o_norm.weight", &[d])?, config.rms_norm_eps)?)
        } else {
            None
        };
        Ok(Self {
            recurrence: Recurrence::new(config, layer),
            rope: config.position_embedding == crate::config::PositionEmbedding::Rope,
            qkv: Linear::new(device, &[&projection("q")?, &projection("k")?, &projection("v")?], Mode::Store)?,
            gate,
            w,
            conv,
            norm,
            out: Linear::new(device, &[&weights.matrix("o_proj.weight", hidden, inner)?], Mode::Add)?,
        })
    }

    /// Returns the type of the normed input of q, k and v.
    pub(super) fn kind(&self) -> Kind {
        self.qkv.kind
    }

    pub(super) fn has_gate(&self) -> bool {
        self.gate.is_some()
    }

    pub(super) fn bytes(&self) -> usize {
        let gate = self.gate.as_ref().map_or(0, Linear::bytes);
        let w = self.w.as_ref().map_or(0, |w| w.bytes);
        self.qkv.bytes() + gate + w + self.conv.as_ref().map_or(0, |(conv, _)| conv.bytes) + self.out.bytes()
    }

    /// Computes the mixer's output from the normed input (the gate reads it as f32) and adds it to the residual stream.
    pub(super) fn forward(&self, device: &CudaDevice, step: Step, work: &Workspace, layer: Layer) -> Result<()> {
        let tokens = step.rows * step.time;
        let Recurrence { heads, d, .. } = self.recurrence;
        let inner = heads * d;
        let hidden = |at| Rows { at, stride: work.hidden };
        let mut qkv = work.qkv.at;
        self.qkv.forward(device, tokens, work.normed.rows(self.qkv.kind), Rows { at: qkv, stride: 3 * inner })?;
        if let Some(gate) = &self.gate {
            gate.forward(device, tokens, work.normed.rows(Kind::F32), Rows { at: work.gate.at, stride: heads })?;
        }
        if let Some((weight, taps)) = &self.conv {
            let tails = (layer.tails, layer.tails_stride);
            conv_silu(device, step, (weight.at, *taps), (qkv, work.convolved.at), 3 * inner, tails)?;
            qkv = work.convolved.at;
        }
        if self.rope {
            rotate(device, tokens, qkv, step.angles, (heads, d))?;
        }
        let padded = work.h.rows(self.out.kind);
        // With an output norm, the readout is first stored as f32.
        let (to, kind) = match &self.norm {
            Some(_) => (Rows { at: work.convolved.at, stride: inner }, Kind::F32),
            None => (padded, self.out.kind),
        };
        // `to` is written while the convolved q, k and v are read: the norm's input reuses the memory of the
        // unconvolved ones.
        let to = if self.norm.is_some() && qkv == work.convolved.at { Rows { at: work.qkv.at, ..to } } else { to };
        let addresses = Addresses {
            qkv,
            gate: self.gate.as_ref().map_or(0, |_| work.gate.at),
            w: self.w.as_ref().map_or(0, |w| w.at),
            phi: work.phi.at,
            sums: work.sums.at,
            clamped: work.clamped(),
            out: to,
            kind,
        };
        self.recurrence.forward(device, step, layer, addresses)?;
        if let Some(norm) = &self.norm {
            norm.heads(device, tokens, heads, to.at, padded, self.out.kind)?;
        }
        self.out.forward(device, tokens, padded, hidden(work.x.at))
    }
}
