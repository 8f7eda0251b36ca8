//! Positive feature maps on rows: rectified and exponential, applied to inputs or to projections.

use super::activation::exp_lane;
use super::{LANES, multiversion, plain::dot};

/// Below this exponent a feature is 0, because e^x is not a normal number.
const LEAST: f32 = -87.0;

/// Applies `f` to every number, sixteen at a time.
#[inline(always)]
pub(super) fn each(numbers: &mut [f32], f: impl Fn(f32) -> f32) {
    let (blocks, rest) = numbers.as_chunks_mut::<LANES>();
    for block in blocks {
        for v in block {
            *v = f(*v);
        }
    }
    for v in rest {
        *v = f(*v);
    }
}

#[inline(always)]
fn rectified_body(projections: &mut [f32], proj_dim: usize) {
    let scale = (1.0 / proj_dim as f32).sqrt();
    // NaN stays NaN.
    each(projections, |v| if v < 0.0 { 0.0 } else { v * scale });
}

multiversion! {
    /// Computes `sqrt(1/D) ReLU(projections)` in place. projections: (rows, D)
    pub(crate) fn rectified(projections: &mut [f32], proj_dim: usize) = rectified_body;
}

#[inline(always)]
fn elu_body(numbers: &mut [f32]) {
    each(numbers, |v| {
        let falling = if v < LEAST { 0.0 } else { exp_lane(v) };
        if v > 0.0 { v + 1.0 } else { falling }
    });
}

multiversion! {
    /// Computes `elu(x) + 1` of every number in place: `x + 1` above 0, else `exp(x)`.
    pub(crate) fn elu(numbers: &mut [f32]) = elu_body;
}

#[inline(always)]
fn scaled_body(numbers: &mut [f32], by: f32) {
    each(numbers, |v| v * by);
}

multiversion! {
    /// Multiplies every number by `by`, in place.
    pub(crate) fn scaled(numbers: &mut [f32], by: f32) = scaled_body;
}

/// Returns the largest number, ignoring NaN.
#[inline(always)]
fn greatest(numbers: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, rest) = numbers.as_chunks::<LANES>();
    for block in blocks {
        for l in 0..LANES {
            lanes[l] = if block[l] > lanes[l] { block[l] } else { lanes[l] };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |most, &v| if v > most { v } else { most })
}

#[inline(always)]
fn favor_body(y: &[f32], projections: &mut [f32], maxima: &mut [f32]) {
    let rows = maxima.len();
    let (d, proj_dim) = (y.len() / rows, projections.len() / rows);
    let scale = (1.0 / proj_dim as f32).sqrt();
    let all = y.chunks_exact(d).zip(projections.chunks_exact_mut(proj_dim)).zip(maxima);
    for ((y, projections), maximum) in all {
        let most = greatest(projections);
        let whole = most - 0.5 * dot(y, y);
        // States hold finite numbers only: -f32::MAX stands for a key whose square overflows.
        *maximum = if whole < f32::MIN { f32::MIN } else { whole };
        // |y|^2 / 2 cancels in the difference from the maximum.
        each(projections, |v| {
            let exponent = v - most;
            if exponent < LEAST { 0.0 } else { exp_lane(exponent) * scale }
        });
    }
}

multiversion! {
    /// Replaces projections by FAVOR+ features relative to the largest of each row.
    ///
    /// A feature is `sqrt(1/D) exp(W y - |y|^2 / 2 - m)` with `m = max(W y) - |y|^2 / 2`, so the largest is `sqrt(1/D)`
    /// however long y is.
    ///
    /// y: (rows, d); projections: `W y` (rows, D) -> maxima, m of each row: (rows)
    pub(crate) fn favor(y: &[f32], projections: &mut [f32], maxima: &mut [f32]) = favor_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;

    fn wave(len: usize, height: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * 0.73).sin() * height).collect()
    }

    /// Returns whether `got` equals `want` to within a part in a million plus e^-87, below which all is 0.
    fn near(got: f32, want: f64) -> bool {
        (f64::from(got) - want).abs() <= 1e-6 * want.abs() + f64::from(LEAST).exp()
    }

    #[test]
    fn rectified_and_elu_against_f64() {
        for isa in Isa::available() {
            let x = wave(101, 100.0);
            let (mut relu, mut elu_of) = (x.clone(), x.clone());
            rectified(isa, &mut relu, 7);
            elu(isa, &mut elu_of);
            for ((x, relu), elu) in x.iter().map(|&x| f64::from(x)).zip(relu).zip(elu_of) {
                assert!(near(relu, x.max(0.0) / 7f64.sqrt()), "{isa:?}: {relu} of {x}");
                assert!(near(elu, if x > 0.0 { x + 1.0 } else { x.exp() }), "{isa:?}: {elu} of {x}");
            }
        }
    }

    #[test]
    fn favor_against_f64() {
        let (rows, d, proj_dim) = (6, 19, 37);
        // As short as queries are, and so long that e to the power of half the square overflows.
        for height in [1.5, 30.0] {
            let (y, w) = (wave(rows * d, height), wave(rows * proj_dim, 30.0));
            for isa in Isa::available() {
                let (mut phi, mut maxima) = (w.clone(), vec![f32::NAN; rows]);
                favor(isa, &y, &mut phi, &mut maxima);
                for row in 0..rows {
                    let w = &w[row * proj_dim..][..proj_dim];
                    let most = f64::from(w.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                    let square: f64 = y[row * d..][..d].iter().map(|&y| f64::from(y).powi(2)).sum();
                    let whole = most - square / 2.0;
                    assert!((f64::from(maxima[row]) - whole).abs() <= 1e-6 * (most.abs() + square), "{isa:?}");
                    let own = &phi[row * proj_dim..][..proj_dim];
                    for (w, &phi) in w.iter().zip(own) {
                        let want = (f64::from(*w) - most).exp() / (proj_dim as f64).sqrt();
                        let error = (f64::from(phi) - want).abs();
                        assert!(error <= 1e-5 * want + 1e-37, "{isa:?}: {phi} {want}");
                    }
                    let greatest = own.iter().copied().fold(0.0, f32::max);
                    assert!((greatest - (1.0 / proj_dim as f32).sqrt()).abs() < 1e-7, "{isa:?}: {greatest}");
                }
            }
        }
    }

    #[test]
    fn the_maximum_of_a_row_past_all_bounds_is_a_number() {
        let (mut phi, mut maxima) = ([1.0, 2.0], [0.0]);
        favor(Isa::detect(), &[1e30], &mut phi, &mut maxima);
        assert_eq!(maxima, [f32::MIN]);
        assert!(phi[0] < phi[1] && phi[1] == 0.5f32.sqrt());
    }

    #[test]
    fn what_is_no_number_stays_none() {
        let mut x = [f32::NAN; 3];
        rectified(Isa::detect(), &mut x[..1], 1);
        elu(Isa::detect(), &mut x[1..2]);
        let mut maximum = [0.0];
        favor(Isa::detect(), &[f32::NAN], &mut x[2..], &mut maximum);
        assert!(x.iter().chain(&maximum).all(|v| v.is_nan()), "{x:?} {maximum:?}");
    }

    #[test]
    fn every_instruction_set_gives_the_plain_bits() {
        let runs: Vec<Vec<u32>> = Isa::available()
            .into_iter()
            .map(|isa| {
                let (mut a, mut b, mut c, mut maxima) = (wave(75, 3.0), wave(75, 3.0), wave(75, 9.0), vec![0.0; 3]);
                rectified(isa, &mut a, 25);
                elu(isa, &mut b);
                scaled(isa, &mut b, 0.37);
                favor(isa, &wave(57, 2.0), &mut c, &mut maxima);
                a.iter().chain(&b).chain(&c).chain(&maxima).map(|v| v.to_bits()).collect()
            })
            .collect();
        assert!(runs.iter().all(|bits| *bits == runs[0]));
    }
}
