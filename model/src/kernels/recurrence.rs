//! One token of one head: decay, rank-1 update, readout and normaliser in one pass over the state.
//!
//! A head's memory is S (2D, d) row by row, and the sums z (2D) and c beside it. z is a column of S in the
//! mathematics; it lies apart so that the rows of S stay whole vectors, and stays f32 where S is bf16: it is what is
//! divided by.

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

/// A number of the state as it is stored.
pub(crate) trait Number: Copy + Send + Sync + Default + 'static {
    /// The value in f32, exact.
    fn widen(self) -> f32;
    /// The nearest number, or by `noise` (16 random bits) one of the two nearest: the nearer, the likelier.
    fn narrow(value: f32, noise: u32) -> Self;
    /// Whether `narrow` asks for noise.
    const NOISY: bool;
}

impl Number for f32 {
    const NOISY: bool = false;

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32, _: u32) -> Self {
        value
    }
}

impl Number for half::bf16 {
    const NOISY: bool = true;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// Rounded by chance: what a slow gate adds is often less than half a step of bf16, and rounding to the nearest
    /// would lose it every time. A NaN stays one unless it is all ones, and no sum makes that one.
    #[inline(always)]
    fn narrow(value: f32, noise: u32) -> Self {
        Self::from_bits((value.to_bits().wrapping_add(noise & 0xffff) >> 16) as u16)
    }
}

/// Random bits for the rounding of one head's step: Marsaglia's xorshift in sixteen lanes, seeded by the token's place
/// in its text, so that a state depends on the text alone.
#[derive(Clone, Copy)]
struct Noise([u32; LANES]);

impl Noise {
    #[inline(always)]
    fn new(seed: u64) -> Self {
        let mut lanes = [0; LANES];
        for (l, lane) in lanes.iter_mut().enumerate() {
            // SplitMix64's finish, of which no two lanes have the same input.
            let mut x = seed.wrapping_mul(LANES as u64).wrapping_add(l as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            *lane = (x ^ (x >> 31)) as u32 | 1;
        }
        Self(lanes)
    }

    #[inline(always)]
    fn next(&mut self) -> [u32; LANES] {
        for x in &mut self.0 {
            *x ^= *x << 13;
            *x ^= *x >> 17;
            *x ^= *x << 5;
        }
        self.0
    }
}

/// `C` lanes of columns of all rows of S: decay, rank-1 update and readout, the sums in registers.
#[inline(always)]
fn columns<S: Number, const C: usize>(
    s: &mut [S],
    (at, stride): (usize, usize),
    (phi_q, phi_k): (&[f32], &[f32]),
    v: &[f32],
    (keep, take): (f32, f32),
    seed: u64,
    out: &mut [f32],
) {
    let len = v.len();
    let mut values = [[0.0f32; LANES]; C];
    values.as_flattened_mut()[..len].copy_from_slice(v);
    let mut sums = [[0.0f32; LANES]; C];
    let mut noise = Noise(if S::NOISY { Noise::new(seed).0 } else { [0; LANES] });
    for ((row, &q), &k) in s.chunks_exact_mut(stride).zip(phi_q).zip(phi_k) {
        let weight = take * k;
        let row = &mut row[at..at + len];
        let mut bits = [0u32; LANES];
        if len == C * LANES {
            let (blocks, _) = row.as_chunks_mut::<LANES>();
            for c in 0..C {
                if S::NOISY {
                    bits = if c % 2 == 0 { noise.next() } else { bits.map(|b| b >> 16) };
                }
                for l in 0..LANES {
                    let new = weight.mul_add(values[c][l], keep * blocks[c][l].widen());
                    blocks[c][l] = S::narrow(new, bits[l]);
                    sums[c][l] = q.mul_add(new, sums[c][l]);
                }
            }
        } else {
            for (c, block) in row.chunks_mut(LANES).enumerate() {
                if S::NOISY {
                    bits = if c % 2 == 0 { noise.next() } else { bits.map(|b| b >> 16) };
                }
                for (l, number) in block.iter_mut().enumerate() {
                    let new = weight.mul_add(values[c][l], keep * number.widen());
                    *number = S::narrow(new, bits[l]);
                    sums[c][l] = q.mul_add(new, sums[c][l]);
                }
            }
        }
    }
    out.copy_from_slice(&sums.as_flattened()[..len]);
}

/// What one head takes in and is asked at one token.
#[derive(Clone, Copy)]
pub(crate) struct Token<'a> {
    /// (2D)
    pub(crate) phi_q: &'a [f32],
    /// (2D)
    pub(crate) phi_k: &'a [f32],
    /// (d)
    pub(crate) v: &'a [f32],
    /// What is kept and what is taken in.
    pub(crate) weights: (f32, f32),
    /// The denominator is held at or above this share of c.
    pub(crate) eps: f32,
    /// For the rounding of a 16-bit state: of the text, the token's place in it, layer and head alone.
    pub(crate) seed: u64,
}

#[inline(always)]
fn step_body<S: Number>(s: &mut [S], sums: &mut [f32], token: &Token<'_>, out: &mut [f32], clamped: &mut u64) {
    let Token { phi_q, phi_k, v, weights: (keep, take), eps, seed } = *token;
    let (d, features) = (v.len(), phi_q.len());
    let phi = (phi_q, phi_k);
    for (at, out) in (0..d).step_by(4 * LANES).zip(out.chunks_mut(4 * LANES)) {
        let (v, place, seed) = (&v[at..at + out.len()], (at, d), seed.wrapping_add((at as u64) << 48));
        match v.len().div_ceil(LANES) {
            1 => columns::<S, 1>(s, place, phi, v, (keep, take), seed, out),
            2 => columns::<S, 2>(s, place, phi, v, (keep, take), seed, out),
            3 => columns::<S, 3>(s, place, phi, v, (keep, take), seed, out),
            _ => columns::<S, 4>(s, place, phi, v, (keep, take), seed, out),
        }
    }
    let (z, c) = sums.split_at_mut(features);
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
    /// s: (2D, d); sums: z (2D), then c (1); out: (d); `clamped` counts the denominators that were held at their floor.
    pub(crate) fn step_f32(s: &mut [f32], sums: &mut [f32], token: &Token<'_>, out: &mut [f32], clamped: &mut u64) =
        step_body;
}
multiversion! {
    /// [`step_f32`] on an S of bf16, read out before it is rounded; z and c stay f32.
    pub(crate) fn step_bf16(
        s: &mut [half::bf16],
        sums: &mut [f32],
        token: &Token<'_>,
        out: &mut [f32],
        clamped: &mut u64,
    ) = step_body;
}

#[cfg(test)]
mod tests {
    use half::bf16;

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

    fn small<'a>(phi_q: &'a [f32], phi_k: &'a [f32], v: &'a [f32], weights: (f32, f32)) -> Token<'a> {
        Token { phi_q, phi_k, v, weights, eps: 0.02, seed: 0 }
    }

    #[test]
    fn a_gate_that_takes_nothing_in_leaves_no_nan() {
        // At 90 the weight is subnormal, at 200 it is 0.
        for logit in [90.0f32, 200.0] {
            let (mut s, mut sums, mut out) = (vec![0.0; 2 * 4], vec![0.0; 3], vec![f32::NAN; 4]);
            let phi = [0.6, 0.8];
            let token = small(&phi, &phi, &[1.0; 4], gate_weights(Some(logit)));
            step_f32(Isa::detect(), &mut s, &mut sums, &token, &mut out, &mut 0);
            assert!(out.iter().all(|h| (0.0..=1.0).contains(h)), "{logit}: {out:?}");
        }
    }

    #[test]
    fn a_denominator_that_is_held_is_counted() {
        let mut clamped = 0;
        for (sign, want) in [(1.0f32, 0), (-1.0, 1), (-1.0, 2), (1.0, 2)] {
            let (mut s, mut sums, mut out) = (vec![0.0; 2 * 4], vec![0.0; 3], vec![f32::NAN; 4]);
            let (phi_q, phi_k) = ([0.6 * sign, 0.8 * sign], [0.6, 0.8]);
            let token = small(&phi_q, &phi_k, &[1.0; 4], (1.0, 1.0));
            step_f32(Isa::detect(), &mut s, &mut sums, &token, &mut out, &mut clamped);
            assert_eq!(clamped, want, "{sign}");
        }
    }

    fn wave(n: usize, f: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * f).sin()).collect()
    }

    #[test]
    fn every_instruction_set_gives_the_plain_bits() {
        for d in [1usize, 16, 37, 64, 100, 128] {
            let features = 22;
            let runs: Vec<Vec<u32>> = Isa::available()
                .into_iter()
                .map(|isa| {
                    let mut s = wave(features * d, 0.37);
                    let mut half: Vec<bf16> = s.iter().map(|&v| bf16::from_f32(v)).collect();
                    let mut sums = wave(features + 1, 0.11);
                    let (mut out, mut other) = (vec![f32::NAN; d], vec![f32::NAN; d]);
                    let (q, k, v) = (wave(features, 0.9), wave(features, 1.3), wave(d, 0.7));
                    let token = Token { seed: 77, ..small(&q, &k, &v, gate_weights(Some(1.5))) };
                    step_bf16(isa, &mut half, &mut sums.clone(), &token, &mut other, &mut 0);
                    step_f32(isa, &mut s, &mut sums, &token, &mut out, &mut 0);
                    let numbers = s.iter().chain(&sums).chain(&out).chain(&other).map(|v| v.to_bits());
                    numbers.chain(half.iter().map(|v| u32::from(v.to_bits()))).collect()
                })
                .collect();
            assert!(runs.iter().all(|bits| *bits == runs[0]), "{d}");
        }
    }

    #[test]
    fn a_state_of_bf16_keeps_what_a_slow_gate_takes_in() {
        // From 0 towards 1 by steps of a thousandth: rounding to the nearest would stop where a step is half a bf16's.
        let (d, features) = (16, 2);
        let (mut s, mut sums) = (vec![bf16::ZERO; features * d], vec![0.0; features + 1]);
        let (q, k, v) = (vec![0.5; features], vec![1.0; features], vec![1.0; d]);
        let mut out = vec![0.0; d];
        for seed in 0..20_000 {
            let token = Token { seed, ..small(&q, &k, &v, (0.999, 0.001)) };
            step_bf16(Isa::detect(), &mut s, &mut sums, &token, &mut out, &mut 0);
        }
        let mean = s.iter().map(|v| f64::from(v.to_f32())).sum::<f64>() / s.len() as f64;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        assert!(s.iter().all(|v| (v.to_f32() - 1.0).abs() < 0.15), "{s:?}");
    }
}
