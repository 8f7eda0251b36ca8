//! One token of the generalized delta rule (RWKV-7) for one head: decays each key, removes one direction, adds a rank-1
//! update and reads out.
//!
//! A head's memory is S (d, d), stored row by row: one row per key dimension, one column per value dimension. Columns
//! map to lanes, so no sum crosses lanes and all instruction sets give the same bits. Columns are independent: the
//! kernel takes a few at a time and keeps their sums in registers from the first row to the last.

use super::recurrence::{Number, noise};
use super::vector::{self, Vector};
use super::{Isa, LANES};

/// The inputs of one head for one token; each slice has length d, a multiple of sixteen.
#[derive(Clone, Copy)]
pub(crate) struct Token<'a> {
    /// The query.
    pub(crate) r: &'a [f32],
    /// The decay: the share of each row of S that remains.
    pub(crate) w: &'a [f32],
    /// The key.
    pub(crate) k: &'a [f32],
    /// The value.
    pub(crate) v: &'a [f32],
    /// The direction to remove, of unit length.
    pub(crate) kappa: &'a [f32],
    /// How much of this direction is removed from each row: the in-context learning rate.
    pub(crate) a: &'a [f32],
    /// The seed for rounding a 16-bit state; depends only on the text, the token's position, the layer and the head.
    pub(crate) seed: u64,
}

/// Advances `R` registers of columns of S, from column `at` on, through all rows.
///
/// s, out: start at that column
///
/// # Safety
/// The machine has the instruction set of `V`; every row and `out` have that many columns; all slices of the token have
/// d numbers.
#[inline(always)]
unsafe fn columns<V: Vector, S: Number, const R: usize>(s: *mut S, token: &Token<'_>, at: usize, out: *mut f32) {
    // SAFETY: the caller's promise; every pointer stays in the columns.
    unsafe {
        let d = token.v.len();
        let group = LANES / V::LANES;
        let zero = V::splat(0.0);
        let mut removed = [zero; R];
        for (row, &kappa) in token.kappa.iter().enumerate() {
            let (s, kappa) = (s.add(row * d), V::splat(kappa));
            for r in 0..R {
                removed[r] = kappa.mul_add(S::load::<V>(s.add(r * V::LANES)), removed[r]);
            }
        }
        let (mut values, mut sums, mut random) = ([zero; R], [zero; R], [zero; R]);
        for r in 0..R {
            values[r] = V::load(token.v.as_ptr().add(at + r * V::LANES));
            if S::NOISY {
                let lanes = noise(token.seed, at / LANES + r / group);
                random[r] = V::load(lanes.as_ptr().add(r % group * V::LANES));
            }
        }
        let decays = token.w.iter().zip(token.k).zip(token.r);
        let rates = token.kappa.iter().zip(token.a);
        for (row, (((&w, &k), &query), (&kappa, &a))) in decays.zip(rates).enumerate() {
            let s = s.add(row * d);
            let (w, k, query, rate) = (V::splat(w), V::splat(k), V::splat(query), V::splat(-(kappa * a)));
            for r in 0..R {
                let place = s.add(r * V::LANES);
                let kept = rate.mul_add(removed[r], w.mul(S::load::<V>(place)));
                let new = k.mul_add(values[r], kept);
                if S::NOISY {
                    random[r] = random[r].xorshift();
                }
                S::store(new, random[r], place);
                sums[r] = query.mul_add(new, sums[r]);
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            sum.store(out.add(r * V::LANES));
        }
    }
}

/// Advances all columns of S. `WIDE`: the registers of several groups of sixteen columns; `GROUP`: those of one group.
///
/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
unsafe fn matrix<V: Vector, S: Number, const WIDE: usize, const GROUP: usize>(
    s: &mut [S],
    token: &Token<'_>,
    out: &mut [f32],
) {
    let d = token.v.len();
    let slices = [token.r, token.w, token.k, token.kappa, token.a];
    assert!(d.is_multiple_of(LANES) && s.len() == d * d && out.len() == d && slices.iter().all(|x| x.len() == d));
    let mut at = 0;
    while at < d {
        let wide = d - at >= WIDE * V::LANES;
        // SAFETY: that many columns remain from `at` on, in every row: d is a multiple of a group.
        unsafe {
            let (s, out) = (s.as_mut_ptr().add(at), out.as_mut_ptr().add(at));
            if wide {
                columns::<V, S, WIDE>(s, token, at, out);
            } else {
                columns::<V, S, GROUP>(s, token, at, out);
            }
        }
        at += if wide { WIDE * V::LANES } else { LANES };
    }
}

/// Advances one head by one token and reads it out: `S <- diag(w) S - (a kappa) (kappa^T S) + k v^T`, then
/// `out = r^T S` (Peng et al., 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution", whose S is the transpose
/// of this one); a bf16 S is read out before it is rounded.
///
/// s: (d, d); out: (d)
pub(crate) fn step<S: Number>(isa: Isa, s: &mut [S], token: &Token<'_>, out: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields it only where the machine has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2(s, token, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields these only where the machine has AVX-512 F, BW, DQ and VL.
        Isa::Avx512 | Isa::Avx512Vnni => unsafe { avx512(s, token, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::available` yields these only where the machine has NEON.
        Isa::Neon | Isa::NeonDot => unsafe { neon(s, token, out) },
        // SAFETY: plain lanes need no instruction set.
        Isa::Plain => unsafe { matrix::<vector::plain::V, S, 2, 1>(s, token, out) },
    }
}

/// # Safety
/// The machine has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<S: Number>(s: &mut [S], token: &Token<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { matrix::<vector::avx2::V, S, 4, 2>(s, token, out) };
}

/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn avx512<S: Number>(s: &mut [S], token: &Token<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { matrix::<vector::avx512::V, S, 4, 1>(s, token, out) };
}

/// # Safety
/// The machine has NEON.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn neon<S: Number>(s: &mut [S], token: &Token<'_>, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { matrix::<vector::neon::V, S, 8, 4>(s, token, out) };
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    fn wave(len: usize, f: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * f).sin()).collect()
    }

    /// Returns r, w, k, v, kappa and a for one token.
    fn inputs(d: usize) -> [Vec<f32>; 6] {
        let kappa = wave(d, 1.7);
        let length = kappa.iter().map(|v| v * v).sum::<f32>().sqrt();
        let between = |f: f32| wave(d, f).iter().map(|v| 0.75 + 0.2 * v).collect();
        [
            wave(d, 0.9),
            between(0.3),
            wave(d, 1.3),
            wave(d, 0.7),
            kappa.iter().map(|v| v / length).collect(),
            between(0.8),
        ]
    }

    fn token(inputs: &[Vec<f32>; 6], seed: u64) -> Token<'_> {
        let [r, w, k, v, kappa, a] = inputs;
        Token { r, w, k, v, kappa, a, seed }
    }

    #[test]
    fn every_instruction_set_gives_the_plain_bits_and_the_sums_in_f64() {
        for d in [16, 32, 48, 64, 80, 128] {
            let (inputs, before) = (inputs(d), wave(d * d, 0.37));
            let [r, w, k, v, kappa, a] = &inputs;
            let run = |isa| {
                let (mut s, mut out, mut other) = (before.clone(), vec![f32::NAN; d], vec![f32::NAN; d]);
                let mut half: Vec<bf16> = before.iter().map(|&v| bf16::from_f32(v)).collect();
                step(isa, &mut s, &token(&inputs, 77), &mut out);
                step(isa, &mut half, &token(&inputs, 77), &mut other);
                (s, out, other, half)
            };
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let (s, out, other, half) = run(Isa::Plain);
            for isa in Isa::available() {
                let got = run(isa);
                assert_eq!((bits(&got.0), bits(&got.1)), (bits(&s), bits(&out)), "{isa:?} {d}");
                assert_eq!((bits(&got.2), &got.3), (bits(&other), &half), "{isa:?} {d}");
            }
            let at = |x: &[f32], i: usize| f64::from(x[i]);
            for column in 0..d {
                let removed: f64 = (0..d).map(|row| at(kappa, row) * at(&before, row * d + column)).sum();
                let mut read = 0.0;
                for row in 0..d {
                    let place = row * d + column;
                    let kept = at(w, row) * at(&before, place) - at(kappa, row) * at(a, row) * removed;
                    let want = kept + at(k, row) * at(v, column);
                    read += at(r, row) * want;
                    assert!((at(&s, place) - want).abs() < 1e-6, "{d}: S at {row}, {column}");
                    assert!((half[place].to_f64() - want).abs() < 0.02, "{d}: half of S at {row}, {column}");
                }
                assert!((at(&out, column) - read).abs() < 1e-4, "{d}: {column}");
            }
        }
    }

    #[test]
    fn a_bf16_state_is_rounded_by_chance_without_a_drift() {
        // The exact result always lies between two bf16 numbers: rounding to nearest would pick the same one every
        // time.
        let d = 32;
        let mut inputs = inputs(d);
        inputs[1] = vec![1.0; d];
        inputs[4] = vec![0.0; d];
        inputs[5] = vec![0.0; d];
        inputs[2] = vec![1.0; d];
        inputs[3] = vec![1.0 / 1024.0; d];
        let (mut s, mut out) = (vec![bf16::ONE; d * d], vec![0.0; d]);
        for seed in 0..512 {
            step(Isa::detect(), &mut s, &token(&inputs, seed), &mut out);
        }
        let mean = s.iter().map(|v| v.to_f64()).sum::<f64>() / s.len() as f64;
        assert!((mean - 1.5).abs() < 0.01, "{mean}");
    }
}
