//! Weights of a row's tokens, and sums over rows, as loops over independent lanes that the compiler vectorizes.
//!
//! The order of rounding is fixed, so the bits are the same on every machine, unlike those of the system's exponential.

use crate::kernels::{Isa, exponentials};

/// How far a candidate can be below the likeliest token, in powers of e: 60 ln 2. A token further below has less than
/// 2^-60 of the highest probability and is not a candidate. A vocabulary of 2^15 tokens thereby loses less than 2^-45
/// of its probability.
pub(super) const FURTHEST: f32 = 41.588_83;

/// Number of candidates that are weighted and summed together.
pub(super) const BLOCK: usize = 256;

/// Number of lanes of an f64 sum.
const LANES: usize = 8;

/// Appends the distances and weights of `logits`, whose highest, `best`, is finite. The last block is padded with
/// entries that are not candidates.
pub(super) fn weigh_all(logits: &[f32], best: f32, temperature: f32, distances: &mut Vec<f32>, weights: &mut Vec<f32>) {
    // The inverse must be finite, so that the distance of the best token is 0.
    let inverse = 1.0 / temperature.max(f32::MIN_POSITIVE);
    let (blocks, rest) = logits.as_chunks::<BLOCK>();
    let mut last = [f32::NEG_INFINITY; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let last = if rest.is_empty() { &[][..] } else { std::slice::from_ref(&last) };
    let isa = Isa::detect();
    let mut block_distances = [0.0; BLOCK];
    let mut block_weights = [0.0; BLOCK];
    for block in blocks.iter().chain(last) {
        exponentials::weigh(isa, block, inverse, (best, FURTHEST), (&mut block_distances, &mut block_weights));
        distances.extend_from_slice(&block_distances);
        weights.extend_from_slice(&block_weights);
    }
}

/// The sum of `term` over `row`, in lanes, so that its bits depend only on the terms.
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

/// The sum of the products of two rows, in lanes.
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
