//! What every mixer begins and ends with: projections, the short convolution, rotary positions; the norm of each
//! head's output, and the projection back.

use candle_core::Result;

use super::Rows;
use crate::compute::{Compute, sized};
use crate::config::DecoderConfig;
use crate::nn::{Linear, RmsNorm};
use crate::ops::conv;
use crate::weights::{LoadError, Weights};

/// The layers around a mixer's own.
#[derive(Debug)]
pub(super) struct Projections {
    inner: usize,             // heads d
    qkv: Linear,              // (3 heads d, hidden)
    conv: Option<conv::Conv>, // weight (conv_kernel, 3 heads d)
    norm: Option<RmsNorm>,    // (d)
    out: Linear,              // (hidden, heads d)
}

impl Projections {
    /// Reads `{q,k,v,o}_proj`, `{q,k,v}_conv1d` and `o_norm` of one layer.
    pub(super) fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        let projection = |name: &str| weights.matrix(&format!("{name}_proj.weight"), inner, hidden);
        let qkv = Linear::stack(&[projection("q")?, projection("k")?, projection("v")?])?;
        let conv = if config.conv_kernel > 0 {
            let taps = |name: &str| weights.numbers(&format!("{name}_conv1d.weight"), &[inner, 1, config.conv_kernel]);
            Some(conv::Conv::new(&[taps("q")?, taps("k")?, taps("v")?], config.conv_kernel))
        } else {
            None
        };
        let norm = if config.output_norm {
            Some(RmsNorm::new(weights.numbers("o_norm.weight", &[config.head_dim])?, config.rms_norm_eps))
        } else {
            None
        };
        let out = Linear::new(&weights.matrix("o_proj.weight", hidden, inner)?, None)?;
        Ok(Self { inner, qkv, conv, norm, out })
    }

    /// x: (rows, time, hidden) -> q, k and v of each token (rows, time, 3 heads d); the convolution's inputs `tails`
    /// are moved on.
    pub(super) fn enter<'a>(
        &self,
        cx: &mut Compute,
        x: &[f32],
        tails: &mut [f32],
        rows: Rows<'_>,
        (qkv, convolved): (&'a mut Vec<f32>, &'a mut Vec<f32>),
    ) -> Result<&'a mut [f32]> {
        let mut qkv = sized(qkv, rows.slots.len() * rows.time * 3 * self.inner);
        self.qkv.forward(cx, x, qkv);
        if let Some(conv) = &self.conv {
            let convolved = sized(convolved, qkv.len());
            conv.forward(qkv, tails, rows.slots, convolved)?;
            qkv = convolved;
        }
        if let Some(angles) = rows.angles {
            angles.rotate(qkv, 3 * self.inner, 2 * self.inner);
        }
        Ok(qkv)
    }

    /// h: (rows, time, heads d) -> out: (rows, time, hidden)
    pub(super) fn leave<'a>(&self, cx: &mut Compute, h: &'a [f32], normed: &'a mut Vec<f32>, out: &mut [f32]) {
        let h = self.norm.as_ref().map_or(h, |norm| {
            let normed = sized(normed, h.len());
            norm.forward(cx, h, normed);
            normed
        });
        self.out.forward(cx, h, out);
    }

    /// Bytes of the matrices.
    pub(super) fn bytes(&self) -> usize {
        self.qkv.bytes() + self.conv.as_ref().map_or(0, conv::Conv::bytes) + self.out.bytes()
    }
}
