//! One token of one head: decay, rank-1 update, readout and normaliser in one pass over the state.
//!
//! A head's memory is one slice: S (2D, d) row by row, then z (2D), then c. z is a column of S in the
//! mathematics; it lies apart so that the rows of S stay whole vectors.

use super::{LANES, multiversion, plain::dot};

/// `v`'s sigmoid, by the exponential of a negative number only, so that nothing overflows.
#[inline(always)]
fn sigmoid(v: f32) -> f32 {
    let e = (-v.abs()).exp();
    if v >= 0.0 { 1.0 / (1.0 + e) } else { e / (1.0 + e) }
}

/// How much is kept and how much is taken in: (g, 1 - g), or (1, 1) without a gate.
pub(crate) fn gate_weights(logit: Option<f32>) -> (f32, f32) {
    // Two sigmoids, not 1 - g: near g = 1 the difference would lose all its bits.
    logit.map_or((1.0, 1.0), |a| (sigmoid(a), sigmoid(-a)))
}

#[allow(clippy::too_many_arguments, reason = "slices and lengths of one kernel")]
#[expect(clippy::too_many_arguments, reason = "slices and lengths of one kernel")]
#[inline(always)]
fn step_body(
    memory: &mut [f32],
    phi_q: &[f32],
    phi_k: &[f32],
    v: &[f32],
    (keep, take): (f32, f32),
    eps: f32,
    out: &mut [f32],
    clamped: &mut u64,
) {
    let (d, features) = (v.len(), phi_q.len());
    let (s, rest) = memory.split_at_mut(features * d);
    let (z, c) = rest.split_at_mut(features);
    out.fill(0.0);
    for ((row, &q), &k) in s.chunks_exact_mut(d).zip(phi_q).zip(phi_k) {
        let weight = take * k;
        let (row_blocks, row_rest) = row.as_chunks_mut::<LANES>();
        let (v_blocks, v_rest) = v.as_chunks::<LANES>();
        let (out_blocks, out_rest) = out.as_chunks_mut::<LANES>();
        for ((row, v), out) in row_blocks.iter_mut().zip(v_blocks).zip(out_blocks) {
            for l in 0..LANES {
                row[l] = weight.mul_add(v[l], keep * row[l]);
                out[l] = q.mul_add(row[l], out[l]);
            }
        }
        for ((row, v), out) in row_rest.iter_mut().zip(v_rest).zip(out_rest) {
            *row = weight.mul_add(*v, keep * *row);
            *out = q.mul_add(*row, *out);
        }
    }
    for (z, k) in z.iter_mut().zip(phi_k) {
        *z = take.mul_add(*k, keep * *z);
    }
    let denominator = dot(phi_q, z);
    c[0] = keep.mul_add(c[0], take);
    // A gate so near 1 that nothing was ever taken in leaves 0 / 0, or a subnormal whose reciprocal overflows.
    let floor = (eps * c[0]).max(f32::MIN_POSITIVE);
    *clamped += u64::from(denominator < floor);
    let scale = 1.0 / denominator.max(floor);
    for out in out {
        *out *= scale;
    }
}

multiversion! {
    /// Takes one head one token further and reads it out (Peng et al., 2021, equations 5 to 7, with a signed
    /// denominator that is clamped).
    ///
    /// memory: S (2D, d), z (2D), c (1); phi_q, phi_k: (2D); v, out: (d); weights: what is kept and what is
    /// taken in; the denominator is held at or above `eps * c`, and `clamped` counts where it would have been below.
    pub(crate) fn step(
        memory: &mut [f32],
        phi_q: &[f32],
        phi_k: &[f32],
        v: &[f32],
        weights: (f32, f32),
        eps: f32,
        out: &mut [f32],
        clamped: &mut u64,
    ) = step_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;

    #[test]
    fn gate_weights_are_right_at_both_ends() {
        for a in [-80.0f32, -12.0, -1.0, 0.0, 0.5, 12.0, 80.0] {
            let (keep, take) = gate_weights(Some(a));
            let want = 1.0 / (1.0 + (-f64::from(a)).exp());
            let other = 1.0 / (1.0 + f64::from(a).exp());
            assert!((f64::from(keep) - want).abs() <= 1e-6 * want, "{a}");
            assert!((f64::from(take) - other).abs() <= 1e-6 * other, "{a}");
        }
        assert_eq!(gate_weights(None), (1.0, 1.0));
    }

    #[test]
    fn a_gate_that_takes_nothing_in_leaves_no_nan() {
        // At 90 the weight is subnormal, at 200 it is 0.
        for logit in [90.0f32, 200.0] {
            let (mut memory, mut out) = (vec![0.0; 2 * (4 + 1) + 1], vec![f32::NAN; 4]);
            let phi = [0.6, 0.8];
            step(Isa::detect(), &mut memory, &phi, &phi, &[1.0; 4], gate_weights(Some(logit)), 0.02, &mut out, &mut 0);
            assert!(out.iter().all(|h| (0.0..=1.0).contains(h)), "{logit}: {out:?}");
        }
    }

    #[test]
    fn a_denominator_that_is_held_is_counted() {
        let mut clamped = 0;
        for (sign, want) in [(1.0f32, 0), (-1.0, 1), (-1.0, 2), (1.0, 2)] {
            let (mut memory, mut out) = (vec![0.0; 2 * (4 + 1) + 1], vec![f32::NAN; 4]);
            let (phi_q, phi_k) = ([0.6 * sign, 0.8 * sign], [0.6, 0.8]);
            step(Isa::detect(), &mut memory, &phi_q, &phi_k, &[1.0; 4], (1.0, 1.0), 0.02, &mut out, &mut clamped);
            assert_eq!(clamped, want, "{sign}");
        }
    }

    #[test]
    fn every_instruction_set_gives_the_plain_bits() {
        let wave = |n: usize, f: f32| (0..n).map(|i| (i as f32 * f).sin()).collect::<Vec<_>>();
        let (features, d) = (22, 37);
        let runs: Vec<Vec<u32>> = Isa::available()
            .into_iter()
            .map(|isa| {
                let mut memory = wave(features * (d + 1) + 1, 0.37);
                let mut out = vec![f32::NAN; d];
                let (q, k, v) = (wave(features, 0.9), wave(features, 1.3), wave(d, 0.7));
                step(isa, &mut memory, &q, &k, &v, gate_weights(Some(1.5)), 0.02, &mut out, &mut 0);
                memory.iter().chain(&out).map(|v| v.to_bits()).collect()
            })
            .collect();
        assert!(runs.iter().all(|bits| *bits == runs[0]));
    }
}
