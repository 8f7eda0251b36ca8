//! One token of one head: decay, rank-1 update, readout and normalizer in one pass over the state.
//!
//! A head's memory is S (F, d), stored row by row, and the sums z (F) and c. Mathematically z is a column of S. It is
//! stored apart so that the rows of S stay whole vectors, and in f32 even where S is bf16, because results are divided
//! by it.

use half::bf16;

use super::activation::exp_lane;
use super::element::Element;
use super::vector::{self, Vector};
use super::{Isa, LANES, plain::dot};

/// Returns the sigmoid of `v`, computed from the exponential of a negative number, which cannot overflow.
#[inline(always)]
fn sigmoid(v: f32) -> f32 {
    // Our own exponential, because the system's result differs between machines.
    let e = exp_lane(-v.abs());
    if v >= 0.0 { 1.0 / (1.0 + e) } else { e / (1.0 + e) }
}

/// Returns the weights of the old state and of the new token: (g, 1 - g), or (1, 1) without a gate.
pub(crate) fn gate_weights(logit: Option<f32>) -> (f32, f32) {
    // Two sigmoids, not 1 - g: near g = 1 the difference would lose its bits.
    logit.map_or((1.0, 1.0), |a| (sigmoid(a), sigmoid(-a)))
}

/// Raises a head's maximum to that of a new key, if larger, and returns the weights for S and z.
///
/// Features are relative to a maximum, so either the old state shrinks, or the key if its own maximum is lower. Where c
/// is 0 the state is empty, and the key's maximum replaces any other.
///
/// (keep, take): the weights of the old state and of the new token without a maximum.
pub(crate) fn raise(maximum: &mut f32, c: f32, key: f32, (keep, take): (f32, f32)) -> (f32, f32) {
    let power = |exponent: f32| if exponent < -87.0 { 0.0 } else { exp_lane(exponent) };
    let old = *maximum;
    if c == 0.0 {
        *maximum = key;
        (0.0, take)
    } else if key > old {
        *maximum = key;
        (keep * power(old - key), take)
    } else {
        (keep, take * power(key - old))
    }
}

/// A number of S in its stored form.
pub(crate) trait Number: Element + Default {
    /// Whether storing needs noise.
    const NOISY: bool;
    /// Stores the nearest numbers, or, by `noise` (16 random bits), one of the two nearest: the nearer, the likelier.
    ///
    /// # Safety
    /// As many numbers as `V` has lanes are writable, and the machine has the instruction set of `V`.
    unsafe fn store<V: Vector>(value: V, noise: V, at: *mut Self);
}

impl Number for f32 {
    const NOISY: bool = false;

    #[inline(always)]
    unsafe fn store<V: Vector>(value: V, _: V, at: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { value.store(at) };
    }
}

/// Rounds stochastically: a slow gate often adds less than half a step of bf16, which rounding to nearest would lose
/// every time. NaN need not stay NaN: no sum of numbers makes one.
impl Number for bf16 {
    const NOISY: bool = true;

    #[inline(always)]
    unsafe fn store<V: Vector>(value: V, noise: V, at: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { value.store_bf16(noise, at) };
    }
}

/// Columns that share a stream of noise: the first sixteen use the lower half of each number, the others the upper
/// half.
const PAIR: usize = 2 * LANES;

/// Returns random bits for rounding some columns in one step: sixteen streams, seeded by the token's position in its
/// text, so that a state depends only on the text.
#[inline]
pub(super) fn noise(seed: u64, pair: usize) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    for l in 0..LANES {
        // The output function of SplitMix64, with another input for every lane.
        let place = (pair * LANES + l) as u64;
        let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(place);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // Not 0, which xorshift never leaves.
        lanes[l] = f32::from_bits((x ^ (x >> 31)) as u32 | 1);
    }
    lanes
}

/// Advances `R` registers of columns, from column `at` on, through all rows of S: decay, rank-1 update and readout,
/// with the sums in registers from the first row to the last.
///
/// s: S from that column on, its rows `stride` apart; v, out: those columns. For bf16, `R` registers hold whole pairs
/// of groups, or one group.
///
/// # Safety
/// The machine has the instruction set of `V`; every row, `v` and `out` have that many columns.
#[inline(always)]
unsafe fn columns<V: Vector, S: Number, const R: usize>(
    s: *mut S,
    stride: usize,
    token: &Token<'_>,
    at: usize,
    v: *const f32,
    out: *mut f32,
) {
    // SAFETY: the caller's promise; every pointer stays in the columns.
    unsafe {
        let (keep, take) = token.weights;
        let keep = V::splat(keep);
        let group = LANES / V::LANES;
        let mut values = [keep; R];
        let mut sums = [V::splat(0.0); R];
        let mut random = [keep; R];
        for r in 0..R {
            values[r] = V::load(v.add(r * V::LANES));
            if S::NOISY {
                // The registers of a pair's second group use the streams of the first.
                let lanes = noise(token.seed, (at + r * V::LANES) / PAIR);
                random[r] = V::load(lanes.as_ptr().add(r % group * V::LANES));
            }
        }
        for row in 0..token.phi_q.len() {
            let s = s.add(row * stride);
            let (weight, q) = (V::splat(take * token.phi_k[row]), V::splat(token.phi_q[row]));
            for r in 0..R {
                let place = s.add(r * V::LANES);
                let new = weight.mul_add(values[r], keep.mul(S::load::<V>(place)));
                let mut bits = keep;
                if S::NOISY {
                    let second = (at + r * V::LANES) % PAIR >= LANES;
                    if second && r >= group {
                        bits = random[r - group].upper();
                    } else {
                        random[r] = random[r].xorshift();
                        bits = if second { random[r].upper() } else { random[r] };
                    }
                }
                S::store(new, bits, place);
                sums[r] = q.mul_add(new, sums[r]);
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            sum.store(out.add(r * V::LANES));
        }
    }
}

/// Advances all columns of S. `WIDE`: registers of one or two pairs of groups; `GROUP`: registers of one group.
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
    assert!(s.len() == token.phi_q.len() * d && token.phi_k.len() == token.phi_q.len() && out.len() == d);
    let mut at = 0;
    while at < d {
        let left = d - at;
        if left >= WIDE * V::LANES {
            // SAFETY: that many columns remain from `at` on, in every row.
            unsafe {
                let (s, v, out) = (s.as_mut_ptr().add(at), token.v.as_ptr().add(at), out.as_mut_ptr().add(at));
                columns::<V, S, WIDE>(s, d, token, at, v, out);
            }
            at += WIDE * V::LANES;
        } else if left >= LANES {
            // SAFETY: as above, a group of them.
            unsafe {
                let (s, v, out) = (s.as_mut_ptr().add(at), token.v.as_ptr().add(at), out.as_mut_ptr().add(at));
                columns::<V, S, GROUP>(s, d, token, at, v, out);
            }
            at += LANES;
        } else {
            // A partial group is padded row by row: where speed matters, head widths are multiples of sixteen.
            let (mut v, mut sums) = ([0.0; LANES], [0.0f32; LANES]);
            v[..left].copy_from_slice(&token.v[at..]);
            let mut rows = [S::default(); LANES];
            let mut state = if S::NOISY { noise(token.seed, at / PAIR) } else { [0.0; LANES] };
            for (row, (&q, &k)) in s.chunks_exact_mut(d).zip(token.phi_q.iter().zip(token.phi_k)) {
                rows[..left].copy_from_slice(&row[at..]);
                // SAFETY: the arrays are a group.
                unsafe { padded::<V, S>(&mut rows, (q, k), token.weights, &v, at, &mut state, &mut sums) };
                row[at..].copy_from_slice(&rows[..left]);
            }
            out[at..].copy_from_slice(&sums[..left]);
            at = d;
        }
    }
}

/// Does one row of [`columns`] for a group of columns.
///
/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
unsafe fn padded<V: Vector, S: Number>(
    row: &mut [S; LANES],
    (q, k): (f32, f32),
    (keep, take): (f32, f32),
    v: &[f32; LANES],
    at: usize,
    state: &mut [f32; LANES],
    sums: &mut [f32; LANES],
) {
    for l in (0..LANES).step_by(V::LANES) {
        // SAFETY: that many lanes remain from `l` on.
        unsafe {
            let place = row.as_mut_ptr().add(l);
            let kept = V::splat(keep).mul(S::load::<V>(place));
            let new = V::splat(take * k).mul_add(V::load(v.as_ptr().add(l)), kept);
            let mut bits = kept;
            if S::NOISY {
                bits = V::load(state.as_ptr().add(l)).xorshift();
                bits.store(state.as_mut_ptr().add(l));
                bits = if at % PAIR >= LANES { bits.upper() } else { bits };
            }
            S::store(new, bits, place);
            let sum = V::splat(q).mul_add(new, V::load(sums.as_ptr().add(l)));
            sum.store(sums.as_mut_ptr().add(l));
        }
    }
}

/// The inputs of one head for one token.
#[derive(Clone, Copy)]
pub(crate) struct Token<'a> {
    /// (F)
    pub(crate) phi_q: &'a [f32],
    /// (F)
    pub(crate) phi_k: &'a [f32],
    /// (d)
    pub(crate) v: &'a [f32],
    /// The weights of the old S and z, and of this token.
    pub(crate) weights: (f32, f32),
    /// The weights for c, which counts tokens; they differ from `weights` where a maximum has risen.
    pub(crate) counted: (f32, f32),
    /// The denominator is at least this share of c.
    pub(crate) eps: f32,
    /// The seed for rounding a 16-bit state; depends only on the text, the token's position, the layer and the head.
    pub(crate) seed: u64,
}

/// Advances z and c and returns the denominator, at or above its floor; returns 1 where there are no sums.
#[inline(always)]
fn divisor(sums: &mut [f32], token: &Token<'_>, clamped: &mut u64) -> f32 {
    let Token { phi_q, phi_k, weights: (keep, take), counted, eps, .. } = *token;
    if sums.is_empty() {
        return 1.0;
    }
    let (z, c) = sums.split_at_mut(phi_q.len());
    for (z, k) in z.iter_mut().zip(phi_k) {
        *z = take.mul_add(*k, keep * *z);
    }
    let denominator = dot(phi_q, z);
    c[0] = counted.0.mul_add(c[0], counted.1);
    // A gate so near 1 that it let nothing in leaves 0 / 0, or a subnormal whose reciprocal overflows.
    let floor = (eps * c[0]).max(f32::MIN_POSITIVE);
    *clamped += u64::from(denominator < floor);
    denominator.max(floor)
}

/// Advances one head by one token and reads it out (Peng et al., 2021, equations 5 to 7, with a signed, clamped
/// denominator); a bf16 S is read out before it is rounded.
///
/// s: (F, d); sums: z (F), then c (1); out: (d); `clamped` counts the denominators that were raised to their floor.
pub(crate) fn step<S: Number>(
    isa: Isa,
    s: &mut [S],
    sums: &mut [f32],
    token: &Token<'_>,
    out: &mut [f32],
    clamped: &mut u64,
) {
    let scale = 1.0 / advance(isa, s, sums, token, out, clamped);
    for out in out {
        *out *= scale;
    }
}

/// Does a [`step`] without the division: writes `phi_q S` to out (d) and returns the denominator, at or above its
/// floor. Where `sums` is empty there is no normalizer, as in Mamba-2.
pub(crate) fn advance<S: Number>(
    isa: Isa,
    s: &mut [S],
    sums: &mut [f32],
    token: &Token<'_>,
    out: &mut [f32],
    clamped: &mut u64,
) -> f32 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields it only where the machine has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2(s, sums, token, out, clamped) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields these only where the machine has AVX-512 F, BW, DQ and VL.
        Isa::Avx512 | Isa::Avx512Vnni => unsafe { avx512(s, sums, token, out, clamped) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::available` yields these only where the machine has NEON.
        Isa::Neon | Isa::NeonDot => unsafe { neon(s, sums, token, out, clamped) },
        Isa::Plain => {
            // SAFETY: plain lanes need no instruction set.
            unsafe { matrix::<vector::plain::V, S, 2, 1>(s, token, out) };
            divisor(sums, token, clamped)
        }
    }
}

/// # Safety
/// The machine has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<S: Number>(s: &mut [S], sums: &mut [f32], token: &Token<'_>, out: &mut [f32], clamped: &mut u64) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { matrix::<vector::avx2::V, S, 4, 2>(s, token, out) };
    divisor(sums, token, clamped)
}

/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn avx512<S: Number>(
    s: &mut [S],
    sums: &mut [f32],
    token: &Token<'_>,
    out: &mut [f32],
    clamped: &mut u64,
) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { matrix::<vector::avx512::V, S, 4, 1>(s, token, out) };
    divisor(sums, token, clamped)
}

/// # Safety
/// The machine has NEON.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn neon<S: Number>(s: &mut [S], sums: &mut [f32], token: &Token<'_>, out: &mut [f32], clamped: &mut u64) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { matrix::<vector::neon::V, S, 8, 4>(s, token, out) };
    divisor(sums, token, clamped)
}

#[cfg(test)]
mod tests;
