//! Sine and cosine together, the Gaussian feature map on rows, and unit length.
//!
//! The angles are `W x` with |x| <= 1, a few units at most. The range reduction keeps the absolute error under 1e-6 up
//! to angles of some thousands. The polynomials are the minimax ones of Cephes (`sinf`, `cosf`).

use super::{LANES, multiversion, plain::dot};

/// Added to a vector's length before the vector is divided by it.
pub(crate) const UNIT_EPS: f32 = 1e-3;

const TWO_OVER_PI: f32 = std::f32::consts::FRAC_2_PI;
// pi / 2, split in three. The first two parts have few bits, so their products with a quadrant are exact.
const HALF_PI_A: f32 = 1.570_312_5;
const HALF_PI_B: f32 = 4.837_512_969_970_703e-4;
const HALF_PI_C: f32 = 7.549_789_954_891_862e-8;

/// 1.5 * 2^23: adding and then subtracting it rounds to the nearest integer.
const ROUND: f32 = 12_582_912.0;

/// Returns the sine and cosine of one lane.
#[inline(always)]
fn sin_cos_lane(x: f32) -> (f32, f32) {
    let shifted = x.mul_add(TWO_OVER_PI, ROUND);
    let quadrant = shifted.to_bits();
    let n = shifted - ROUND;
    let r = (-n).mul_add(HALF_PI_A, x);
    let r = (-n).mul_add(HALF_PI_B, r);
    let r = (-n).mul_add(HALF_PI_C, r);
    let r2 = r * r;
    let s = r2.mul_add(-1.951_529_6e-4, 8.332_161e-3).mul_add(r2, -1.666_665_5e-1);
    let s = (s * r2).mul_add(r, r);
    let c = r2.mul_add(2.443_315_7e-5, -1.388_731_6e-3).mul_add(r2, 4.166_664_6e-2);
    let c = (c * r2).mul_add(r2, r2.mul_add(-0.5, 1.0));
    let swap = quadrant & 1 != 0;
    let (a, b) = if swap { (c, s) } else { (s, c) };
    // Bit 1 of the quadrant flips the sine's sign, bit 1 of the next quadrant the cosine's.
    let sin = f32::from_bits(a.to_bits() ^ ((quadrant & 2) << 30));
    let cos = f32::from_bits(b.to_bits() ^ ((quadrant.wrapping_add(1) & 2) << 30));
    (sin, cos)
}

#[inline(always)]
fn sin_cos_scaled(angles: &[f32], scale: f32, sin: &mut [f32], cos: &mut [f32]) {
    let (blocks, rest) = angles.as_chunks::<LANES>();
    let (sin_blocks, sin_rest) = sin.as_chunks_mut::<LANES>();
    let (cos_blocks, cos_rest) = cos.as_chunks_mut::<LANES>();
    for ((angles, sin), cos) in blocks.iter().zip(sin_blocks).zip(cos_blocks) {
        for l in 0..LANES {
            let (s, c) = sin_cos_lane(angles[l]);
            sin[l] = s * scale;
            cos[l] = c * scale;
        }
    }
    for ((angle, sin), cos) in rest.iter().zip(sin_rest).zip(cos_rest) {
        let (s, c) = sin_cos_lane(*angle);
        *sin = s * scale;
        *cos = c * scale;
    }
}

#[inline(always)]
fn features_body(angles: &[f32], proj_dim: usize, out: &mut [f32]) {
    let scale = (1.0 / proj_dim as f32).sqrt();
    for (angles, out) in angles.chunks_exact(proj_dim).zip(out.chunks_exact_mut(2 * proj_dim)) {
        let (sin, cos) = out.split_at_mut(proj_dim);
        sin_cos_scaled(angles, scale, sin, cos);
    }
}

multiversion! {
    /// Computes `sqrt(1/D) [sin(angles), cos(angles)]` for each row: angles (rows, D) -> out (rows, 2 D).
    pub(crate) fn features(angles: &[f32], proj_dim: usize, out: &mut [f32]) = features_body;
}

#[inline(always)]
fn unit_body(x: &mut [f32], len: usize) {
    for row in x.chunks_exact_mut(len) {
        let scale = 1.0 / (dot(row, row).sqrt() + UNIT_EPS);
        for v in row {
            *v *= scale;
        }
    }
}

multiversion! {
    /// Divides every row of `len` numbers by its length plus 1e-3.
    pub(crate) fn unit(x: &mut [f32], len: usize) = unit_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;

    #[test]
    fn sine_and_cosine_to_a_millionth() {
        let angles: Vec<f32> = (-200_000..200_000).map(|i| i as f32 * 5e-3).collect();
        for isa in Isa::available() {
            let mut got = vec![0.0; 2 * angles.len()];
            features(isa, &angles, 1, &mut got);
            for (x, pair) in angles.iter().zip(got.chunks_exact(2)) {
                let (sin, cos) = f64::from(*x).sin_cos();
                let error = (f64::from(pair[0]) - sin).abs().max((f64::from(pair[1]) - cos).abs());
                assert!(error < 1e-6, "{isa:?}: {error} at {x}");
            }
        }
    }

    #[test]
    fn every_instruction_set_gives_the_plain_bits() {
        let angles: Vec<f32> = (0..300).map(|i| (i as f32).sin() * 9.0).collect();
        let all: Vec<Vec<u32>> = Isa::available()
            .into_iter()
            .map(|isa| {
                let mut out = vec![0.0; 600];
                features(isa, &angles, 100, &mut out);
                unit(isa, &mut out, 60);
                out.iter().map(|v| v.to_bits()).collect()
            })
            .collect();
        assert!(all.iter().all(|bits| *bits == all[0]));
    }
}
