//! Exponentials of a row of logits: weights for sampling, and the sum for log probabilities.

use super::activation::exp_lane;
use super::multiversion;

/// Lanes of the sum: eight f64 fill one AVX-512 register.
const SUM_LANES: usize = 8;

#[inline(always)]
fn weigh_body(logits: &[f32], inverse_temperature: f32, bounds: (f32, f32), out: (&mut [f32], &mut [f32])) {
    let ((best, furthest), (distances, weights)) = (bounds, out);
    for ((logit, distance), weight) in logits.iter().zip(distances).zip(weights) {
        let found = (best - logit) * inverse_temperature;
        // False for NaN.
        let inside = found <= furthest;
        *distance = if inside { found } else { furthest };
        let falling = exp_lane(-*distance);
        *weight = if inside { falling } else { 0.0 };
    }
}

multiversion! {
    /// Computes the distance of each logit from the best one, divided by the temperature and at most `furthest`, and
    /// its weight: `exp(-distance)`, or 0 beyond `furthest` and for NaN.
    ///
    /// logits: (n), bounds: the best logit and `furthest` -> out: distances (n) and weights (n)
    pub(crate) fn weigh(
        logits: &[f32],
        inverse_temperature: f32,
        bounds: (f32, f32),
        out: (&mut [f32], &mut [f32]),
    ) = weigh_body;
}

/// 1/0! to 1/13!: for |x| <= ln 2 / 2 the rest of the series for e^x is below the precision of f64.
const SERIES: [f64; 14] = {
    let mut series = [1.0; 14];
    let mut n = 1;
    while n < series.len() {
        series[n] = series[n - 1] / n as f64;
        n += 1;
    }
    series
};

/// Returns e^x for x <= 0 with a relative error of at most 2^-52; 0 for x < -700 and for NaN.
#[inline(always)]
fn exponential(x: f64) -> f64 {
    // Adding this leaves no bits for a fraction: the lowest bits of the sum hold the integer.
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    // ln 2, split in two. The first part has few bits, so its product with an integer is exact.
    const LN_2_A: f64 = 0.693_147_180_369_123_8;
    const LN_2_B: f64 = 1.908_214_929_270_587_7e-10;
    let shifted = x.mul_add(std::f64::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = (-n).mul_add(LN_2_B, (-n).mul_add(LN_2_A, x));
    let y = SERIES.iter().rev().fold(0.0f64, |sum, factor| sum.mul_add(r, *factor));
    // Adding n to the exponent multiplies by 2^n, exactly for normal results.
    let result = f64::from_bits(y.to_bits().wrapping_add(shifted.to_bits() << 52));
    if x >= -700.0 { result } else { 0.0 }
}

/// Returns `exp(logit - highest)`; 1 where both are the same infinity.
#[inline(always)]
fn share(logit: f32, highest: f32) -> f64 {
    let distance = f64::from(logit) - f64::from(highest);
    exponential(if logit == highest { 0.0 } else { distance })
}

#[inline(always)]
fn sum_body(logits: &[f32], highest: f32, sum: &mut f64) {
    let (chunks, rest) = logits.as_chunks::<SUM_LANES>();
    let mut lanes = [0.0; SUM_LANES];
    for chunk in chunks {
        for l in 0..SUM_LANES {
            lanes[l] += share(chunk[l], highest);
        }
    }
    let rest: f64 = rest.iter().map(|logit| share(*logit, highest)).sum();
    *sum = lanes.iter().sum::<f64>() + rest;
}

multiversion! {
    /// Sums `exp(logit - highest)` over all logits except NaN, in [`SUM_LANES`] partial sums.
    ///
    /// logits: (n) -> sum
    pub(crate) fn sum_exponentials(logits: &[f32], highest: f32, sum: &mut f64) = sum_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Isa;

    const FURTHEST: f32 = 41.588_83;

    #[test]
    fn weights_are_those_of_the_definition_and_the_same_for_all_sets() {
        let mut logits: Vec<f32> = (0..10_003).map(|i| 3.0 - i as f32 * 0.004_321).collect();
        logits.extend([f32::NAN, f32::NEG_INFINITY, f32::MIN]);
        let mut found = Vec::new();
        for isa in Isa::available() {
            let (mut distances, mut weights) = (vec![f32::NAN; logits.len()], vec![f32::NAN; logits.len()]);
            weigh(isa, &logits, 1.0, (3.0, FURTHEST), (&mut distances, &mut weights));
            assert_eq!(weights[0], 1.0);
            for ((logit, distance), weight) in logits.iter().zip(&distances).zip(&weights) {
                let expected = 3.0 - f64::from(*logit);
                let inside = expected <= f64::from(FURTHEST);
                assert_eq!((*weight > 0.0, *distance == FURTHEST), (inside, !inside), "{isa:?} {logit}");
                // The distance, up to 42, is itself rounded, with a relative error of 2^-24.
                let error = f64::from(*weight) / (-expected).exp() - 1.0;
                assert!(!inside || error.abs() < 3e-6, "{isa:?} {logit}: {error}");
            }
            found.push((distances, weights));
        }
        assert!(found.iter().all(|bits| *bits == found[0]));
    }

    #[test]
    fn the_exponential_is_the_definitions_to_the_last_bit_but_one() {
        for i in 0..200_000 {
            let x = f64::from(i) * -0.003_512_3;
            let expected = if x >= -700.0 { x.exp() } else { 0.0 };
            let error = (exponential(x) - expected).abs();
            assert!(error <= expected * f64::EPSILON, "e^{x}: {} {expected}", exponential(x));
        }
        assert_eq!((exponential(0.0), exponential(f64::NEG_INFINITY), exponential(f64::NAN)), (1.0, 0.0, 0.0));
    }

    #[test]
    fn sums_are_the_same_for_all_sets() {
        let mut logits: Vec<f32> = (0..1003).map(|i| (i * 7919 % 1009) as f32 * 0.037).collect();
        logits[5] = f32::NAN;
        let expected: f64 = logits.iter().filter(|l| !l.is_nan()).map(|l| (f64::from(*l) - 40.0).exp()).sum();
        let of = |isa| {
            let mut sum = f64::NAN;
            sum_exponentials(isa, &logits, 40.0, &mut sum);
            sum
        };
        let plain = of(Isa::Plain);
        assert!((plain / expected - 1.0).abs() < 1e-13, "{plain} {expected}");
        assert!(Isa::available().into_iter().all(|isa| of(isa) == plain));
    }
}
