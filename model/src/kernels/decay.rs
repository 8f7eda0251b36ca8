//! Decay within a chunk, from its gates: how much of token j remains when token i reads it.

use super::{activation::exp_lane, multiversion};

/// The lower bound on the logarithm of a gate: e^-1000 is 0 in f32 and f64.
const FORGOTTEN: f64 = -1e3;

/// `log sigmoid(a)`, stable at both ends.
fn log_sigmoid(a: f32) -> f64 {
    let a = f64::from(a);
    (a.min(0.0) - (-a.abs()).exp().ln_1p()).max(FORGOTTEN)
}

#[inline(always)]
fn exp_in_place(values: &mut [f32]) {
    for v in values {
        *v = if *v < -87.0 { 0.0 } else { exp_lane(*v) };
    }
}

#[inline(always)]
fn decay_body(logits: &[f32], out: &mut [f32]) {
    let len = logits.len();
    // The sums are in f64 so that the difference of two large sums keeps its small part.
    let mut sum = 0.0;
    let sums: Vec<f64> = logits
        .iter()
        .map(|&a| {
            sum += log_sigmoid(a);
            sum
        })
        .collect();
    let take: Vec<f64> = logits.iter().map(|&a| log_sigmoid(-a)).collect();
    let (m, ends) = out.split_at_mut(len * len);
    for (i, row) in m.chunks_exact_mut(len).enumerate() {
        let (past, future) = row.split_at_mut(i + 1);
        for ((out, s), take) in past.iter_mut().zip(&sums).zip(&take) {
            *out = (sums[i] - s + take) as f32;
        }
        exp_in_place(past);
        future.fill(0.0);
    }
    let (carry, tail) = ends.split_at_mut(len);
    for (((carry, tail), s), take) in carry.iter_mut().zip(tail.iter_mut()).zip(&sums).zip(&take) {
        *carry = *s as f32;
        *tail = (sum - s + take) as f32;
    }
    exp_in_place(carry);
    exp_in_place(tail);
}

multiversion! {
    /// Computes the decay of a chunk from the gate logits of its C tokens.
    ///
    /// Let b be the running sum of log g, and lam = log (1 - g). `out` holds `M_ij = exp(b_i - b_j + lam_j)` for j <=
    /// i, else 0 (C rows); then the row `exp(b_i)`, which scales the state from before the chunk; then the row
    /// `exp(b_C - b_j + lam_j)`, the share of each token in the state after the chunk.
    ///
    /// logits: (C) -> out: (C + 2, C)
    pub(crate) fn decay(logits: &[f32], out: &mut [f32]) = decay_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;

    #[test]
    fn every_entry_is_a_product_of_gates() {
        let logits = [0.3f32, -12.0, 5.0, 12.0, -1.0, 80.0, -200.0, 2.0];
        let (g, len) = (logits.map(|a| 1.0 / (1.0 + f64::from(-a).exp())), logits.len());
        let takes = logits.map(|a| 1.0 / (1.0 + f64::from(a).exp()));
        for isa in Isa::available() {
            let mut out = vec![f32::NAN; (len + 2) * len];
            decay(isa, &logits, &mut out);
            for i in 0..len {
                for j in 0..len {
                    let want = if j > i { 0.0 } else { g[j + 1..=i].iter().product::<f64>() * takes[j] };
                    assert!((f64::from(out[i * len + j]) - want).abs() < 1e-6, "{isa:?} {i} {j}");
                }
                let carry = g[..=i].iter().product::<f64>();
                assert!((f64::from(out[len * len + i]) - carry).abs() < 1e-6, "{isa:?} {i}");
                let tail = g[i + 1..].iter().product::<f64>() * takes[i];
                assert!((f64::from(out[(len + 1) * len + i]) - tail).abs() < 1e-6, "{isa:?} {i}");
            }
        }
    }
}
