//! Weights of a row's tokens, and sums over rows, as loops of independent lanes of which the compiler makes vectors.
//!
//! All is rounded in a fixed order: the bits are the same on every machine, which those of a system's own exponential
//! are not.

use crate::kernels::{Isa, exponentials};

/// The unlikeliest candidate, in powers of e under the likeliest one: 60 ln 2. What lies further below has a
/// probability under 2^-60 of the best one's and is no candidate, so that a vocabulary of 2^15 tokens loses less than
/// 2^-45 of its probability.
pub(super) const FURTHEST: f32 = 41.588_83;

/// Candidates that are weighed and summed up together.
pub(super) const BLOCK: usize = 256;

/// Lanes of a sum in f64.
const LANES: usize = 8;

/// Appends the distances and the weights of `logits`, of which `best`, a finite number, is the highest; whole blocks,
/// of which the last is filled up with what is no candidate.
pub(super) fn weigh_all(logits: &[f32], best: f32, temperature: f32, distances: &mut Vec<f32>, weights: &mut Vec<f32>) {
    // Finite, so that the best one's distance is 0.
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
