//! Weights and sums over rows, as loops of independent lanes of which the compiler makes vectors.
//!
//! Products and sums are rounded one by one and in a fixed order: the bits are the same on every machine, which those
//! of a system's own exponential are not.

/// The unlikeliest candidate, in powers of e under the likeliest one: 60 ln 2. What lies further below has a
/// probability under 2^-60 of the best one's and is no candidate, so that a vocabulary of 2^15 tokens loses less than
/// 2^-45 of its probability.
pub(super) const FURTHEST: f32 = 41.588_83;

/// Candidates that are weighed and summed up together.
pub(super) const BLOCK: usize = 256;

/// Lanes of a sum in f64.
const LANES: usize = 8;

/// 1/0! to 1/7!: within half of ln 2, the series to here differs from e^x by less than f32 can hold.
const SHORT_SERIES: [f32; 8] = [1.0, 1.0, 0.5, 1.0 / 6.0, 1.0 / 24.0, 1.0 / 120.0, 1.0 / 720.0, 1.0 / 5040.0];

/// e^-distance for distances from 0 to [`FURTHEST`]; anything for others.
#[inline]
fn falling(distance: f32) -> f32 {
    // Adding it leaves no place for a fraction: the whole powers of two are the lowest bits of the sum.
    const WHOLE: f32 = 12_582_912.0; // 1.5 * 2^23
    // ln 2 in two parts: the first has so few bits that its products with 0 to 60 are exact.
    const HIGH: f32 = 0.693_359_4;
    const LOW: f32 = -2.121_944_4e-4;
    let shifted = WHOLE - distance * std::f32::consts::LOG2_E;
    let power = shifted - WHOLE;
    let rest = (-distance - power * HIGH) - power * LOW;
    let near_one = SHORT_SERIES.iter().rev().fold(0.0, |sum, factor| sum * rest + factor);
    // Into the exponent: times 2^power, exactly, for the result is a normal number.
    f32::from_bits(near_one.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// How far one logit lies under the best, over the temperature, and its weight: e to the power of minus that. What is
/// no candidate has the weight 0, and so has what is no number.
#[inline]
fn weigh(logit: f32, best: f32, inverse_temperature: f32) -> (f32, f32) {
    let distance = (best - logit) * inverse_temperature;
    if distance <= FURTHEST { (distance, falling(distance)) } else { (FURTHEST, 0.0) }
}

/// Appends the distances and the weights of `logits`, of which `best`, a finite number, is the highest; whole blocks,
/// of which the last is filled up with what is no candidate.
pub(super) fn weigh_all(logits: &[f32], best: f32, temperature: f32, distances: &mut Vec<f32>, weights: &mut Vec<f32>) {
    // Finite, so that the best one's distance is 0.
    let inverse = 1.0 / temperature.max(f32::MIN_POSITIVE);
    let (blocks, rest) = logits.as_chunks::<BLOCK>();
    let mut last = [f32::NEG_INFINITY; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let last = if rest.is_empty() { &[][..] } else { std::slice::from_ref(&last) };
    let mut block_distances = [0.0; BLOCK];
    let mut block_weights = [0.0; BLOCK];
    for block in blocks.iter().chain(last) {
        for ((logit, distance), weight) in block.iter().zip(&mut block_distances).zip(&mut block_weights) {
            (*distance, *weight) = weigh(*logit, best, inverse);
        }
        distances.extend_from_slice(&block_distances);
        weights.extend_from_slice(&block_weights);
    }
}

/// The sum of `term` over `row`, in lanes: its bits depend on the terms alone.
#[inline]
pub(super) fn sum(row: &[f32], term: impl Fn(f32) -> f64) -> f64 {
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for chunk in chunks {
        for (sum, value) in lanes.iter_mut().zip(chunk) {
            *sum += term(*value);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|value| term(*value)).sum::<f64>()
}

/// The sum of the products of two rows, likewise.
pub(super) fn sum_of_products(a: &[f32], b: &[f32]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let product = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b);
    let mut lanes = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for (sum, pair) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *sum += product(pair);
        }
    }
    lanes.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(product).sum::<f64>()
}

/// 1/0! to 1/13!: the same in f64.
const LONG_SERIES: [f64; 14] = {
    let mut series = [1.0; 14];
    let mut n = 1;
    while n < series.len() {
        series[n] = series[n - 1] / n as f64;
        n += 1;
    }
    series
};

/// e^x for x up to 0, within 2^-52 of it; 0 where it is under e^-700, and of what is no number.
#[inline]
pub(super) fn exponential(x: f64) -> f64 {
    const WHOLE: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    const HIGH: f64 = 0.693_147_180_369_123_8;
    const LOW: f64 = 1.908_214_929_270_587_7e-10;
    let shifted = x * std::f64::consts::LOG2_E + WHOLE;
    let power = shifted - WHOLE;
    let rest = (x - power * HIGH) - power * LOW;
    let near_one = LONG_SERIES.iter().rev().fold(0.0, |sum, factor| sum * rest + factor);
    let result = f64::from_bits(near_one.to_bits().wrapping_add(shifted.to_bits() << 52));
    if x >= -700.0 { result } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_the_definition_within_a_few_steps_of_f32() {
        let logits: Vec<f32> = (0..10_000).map(|i| 3.0 - i as f32 * 0.004_321).collect();
        let (mut distances, mut weights) = (Vec::new(), Vec::new());
        weigh_all(&logits, 3.0, 1.0, &mut distances, &mut weights);
        assert_eq!((weights.len(), weights[0]), (logits.len().next_multiple_of(BLOCK), 1.0));
        let mut furthest = 0.0;
        for (logit, weight) in logits.iter().zip(weights) {
            let distance = 3.0 - f64::from(*logit);
            let cut = distance > f64::from(FURTHEST);
            assert_eq!(weight == 0.0, cut, "{distance}");
            if !cut {
                furthest = f64::max(furthest, (f64::from(weight) / (-distance).exp() - 1.0).abs());
            }
        }
        // The distance itself is rounded to 2^-24 of up to 42.
        assert!(furthest < 3e-6, "{furthest}");
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
}
