//! Statistics for `inspect`: clamped denominators, and how fast each head forgets.

use candle_core::Tensor;

use crate::error::Result;

/// Statistics of one layer, with one entry per head.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerProbe {
    /// Number of tokens.
    pub tokens: u64,
    /// Denominators per head: one per token; for the hybrid, only for tokens with others before their window.
    pub denominators: u64,
    /// Denominators that were clamped: (heads)
    pub clamped: Vec<u64>,
    /// Sums of log g: (heads), or empty without a gate. The mean half-life of a head is `tokens * ln(1/2) / log_gate`.
    pub log_gate: Vec<f64>,
}

/// Statistics of all layers.
pub type Probe = Vec<LayerProbe>;

impl LayerProbe {
    /// denominator, floor: (batch, heads, time, 1); gate logits: (batch, heads, time)
    pub(crate) fn observe(&mut self, denominator: &Tensor, floor: &Tensor, gate: Option<&Tensor>) -> Result<()> {
        let (batch, heads, time, _) = denominator.dims4()?;
        self.tokens += (batch * time) as u64;
        self.denominators += (batch * time) as u64;
        self.clamped.resize(heads, 0);
        let held = denominator.lt(floor)?.flatten_all()?.to_vec1::<u8>()?;
        for (i, row) in held.chunks_exact(time).enumerate() {
            self.clamped[i % heads] += row.iter().map(|&h| u64::from(h)).sum::<u64>();
        }
        if let Some(gate) = gate {
            self.log_gate.resize(heads, 0.0);
            let logits = gate.flatten_all()?.to_vec1::<f32>()?;
            for (i, row) in logits.chunks_exact(time).enumerate() {
                self.log_gate[i % heads] += row.iter().copied().map(log_gate).sum::<f64>();
            }
        }
        Ok(())
    }

    /// Adds the statistics of some tokens, `far` of which had others before their window. clamped: (heads); gate
    /// logits: (tokens, heads)
    pub(crate) fn count(
        &mut self,
        (tokens, far): (usize, usize),
        clamped: impl ExactSizeIterator<Item = u64>,
        gate: Option<&[f32]>,
    ) {
        self.tokens += tokens as u64;
        self.denominators += far as u64;
        self.clamped.resize(clamped.len(), 0);
        self.clamped.iter_mut().zip(clamped).for_each(|(sum, held)| *sum += held);
        if let Some(gate) = gate {
            let heads = gate.len() / tokens;
            self.log_gate.resize(heads, 0.0);
            for (i, &logit) in gate.iter().enumerate() {
                self.log_gate[i % heads] += log_gate(logit);
            }
        }
    }
}

/// Computes log sigmoid(a). It only takes the exponential of a negative number, which cannot overflow.
fn log_gate(a: f32) -> f64 {
    f64::from(a.min(0.0)) - (-f64::from(a.abs())).exp().ln_1p()
}
