//! The projections around a mixer: q, k and v, with their short convolution and rotary positions, and the output
//! projection, with the norm of each head's output.

use super::conv::Conv;
use super::last_inputs::LastInputs;
use super::layer::Step;
use crate::compute::{Compute, sized};
use crate::config::DecoderConfig;
use crate::error;
use crate::nn::{Linear, RmsNorm};
use crate::weights::{LoadError, TensorList, Weights};

/// The projections of one layer.
#[derive(Debug)]
pub(super) struct Projections {
    inner: usize,          // heads d
    qkv: Linear,           // (3 heads d, hidden)
    conv: Option<Conv>,    // (conv_kernel, 3 heads d)
    norm: Option<RmsNorm>, // (d)
    out: Linear,           // (hidden, heads d)
}

/// Intermediate results of the projections.
#[derive(Debug, Default)]
pub(super) struct ProjectionBuffers {
    qkv: Vec<f32>,       // (rows, time, 3 heads d)
    convolved: Vec<f32>, // (rows, time, 3 heads d)
    normed: Vec<f32>,    // (rows, time, heads d)
}

impl Projections {
    /// The tensors that [`Self::load`] reads.
    pub(super) fn tensors(config: &DecoderConfig, list: &mut TensorList) {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        list.stack(&["q_proj.weight", "k_proj.weight", "v_proj.weight"], inner, hidden);
        list.matrix("o_proj.weight", hidden, inner);
        if config.conv_kernel > 0 {
            for name in ["q", "k", "v"] {
                list.floats(&format!("{name}_conv1d.weight"), &[inner, 1, config.conv_kernel]);
            }
        }
        if config.output_norm {
            list.floats("o_norm.weight", &[config.head_dim]);
        }
    }

    /// Loads `{q,k,v,o}_proj`, `{q,k,v}_conv1d` and `o_norm` of one layer.
    pub(super) fn load(config: &DecoderConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        let projection = |name: &str| weights.matrix(&format!("{name}_proj.weight"), inner, hidden);
        let conv = || -> Result<_, LoadError> {
            let taps = |name: &str| weights.numbers(&format!("{name}_conv1d.weight"), &[inner, 1, config.conv_kernel]);
            Ok(Conv::new(&[taps("q")?, taps("k")?, taps("v")?].concat(), Vec::new(), config.conv_kernel))
        };
        let norm = || RmsNorm::load(weights, "o_norm", config.head_dim, config.rms_norm_eps);
        Ok(Self {
            inner,
            qkv: Linear::stack(&[projection("q")?, projection("k")?, projection("v")?])?,
            conv: (config.conv_kernel > 0).then(conv).transpose()?,
            norm: config.output_norm.then(norm).transpose()?,
            out: Linear::new(&weights.matrix("o_proj.weight", hidden, inner)?, None)?,
        })
    }

    /// Bytes of the matrices.
    pub(super) fn bytes(&self) -> usize {
        self.qkv.bytes() + self.conv.as_ref().map_or(0, Conv::bytes) + self.out.bytes()
    }

    /// The convolution's last inputs for `slots` empty texts.
    pub(super) fn new_tails(&self, slots: usize) -> LastInputs {
        Conv::new_tails(self.conv.as_ref(), slots)
    }

    /// x: (rows, time, hidden) -> q, k and v of each token (rows, time, 3 heads d), stored in `buffers`
    pub(super) fn enter<'a>(
        &self,
        step: &mut Step<'_>,
        x: &[f32],
        tails: &mut LastInputs,
        buffers: &'a mut ProjectionBuffers,
    ) -> error::Result<&'a [f32]> {
        let rows = step.rows;
        let mut qkv = sized(&mut buffers.qkv, rows.slots.len() * rows.time * 3 * self.inner);
        self.qkv.forward(step.cx, x, qkv);
        if let Some(conv) = &self.conv {
            let convolved = sized(&mut buffers.convolved, qkv.len());
            conv.forward((qkv, 0, conv.channels()), tails, rows, convolved)?;
            qkv = convolved;
        }
        if let Some(angles) = rows.angles {
            angles.rotate(qkv, 3 * self.inner, 2 * self.inner);
        }
        Ok(qkv)
    }

    /// h: (rows, time, heads d) -> out: (rows, time, hidden)
    pub(super) fn leave(&self, cx: &mut Compute, h: &[f32], buffers: &mut ProjectionBuffers, out: &mut [f32]) {
        let h = self.norm.as_ref().map_or(h, |norm| {
            let normed = sized(&mut buffers.normed, h.len());
            norm.forward(cx, h, normed);
            normed
        });
        self.out.forward(cx, h, out);
    }
}
