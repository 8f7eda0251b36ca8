//! The candidates for the next token, which processors narrow one after another.
//!
//! A candidate is a token whose logit is at most [`FURTHEST`] temperatures below the highest. Processors use this
//! distance and the weight e^-distance, which is 1 for the likeliest token. Weights are rounded to f32; their sums are
//! f64.

use super::exponential::{BLOCK, FURTHEST, sum, sum_of_products, weigh_all};
use super::select::{Scored, greedy, highest, likeliest};

/// Up to this many candidates are sorted at once.
const FEW: usize = 128;

/// Larger sets are divided into this many buckets by key, and only one bucket is sorted.
const BUCKETS: usize = 2048;

/// Number of candidates that are examined together.
const LANES: usize = 16;

/// The order of the candidates for the draw.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Order {
    /// By token.
    #[default]
    Tokens,
    /// By key, which is the difference between a candidate's distance and this one; ties by the lower token.
    Around(f32),
}

/// The candidates, ordered by token. The buffers are reused from row to row.
///
/// The lists are padded to whole chunks of [`LANES`] with entries that are not candidates.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    /// The tokens of the entries; empty if the lists have one entry per token of the vocabulary.
    tokens: Vec<u32>,
    /// The distance of each logit below the highest, divided by the temperature; from 0 to [`FURTHEST`].
    distances: Vec<f32>,
    /// The weight of each token, proportional to its probability; 0 for a token that is not a candidate.
    weights: Vec<f32>,
    /// Sums of [`BLOCK`] weights each, and the sum of all.
    sums: Vec<f64>,
    total: f64,
    order: Order,
    best: Vec<Scored>,
    best_logits: Vec<f32>,
    /// The weight in each bucket of keys, and the distance that the keys are relative to, while the buckets are valid.
    buckets: Vec<f64>,
    counted_around: Option<f32>,
    /// Keys and indices of some candidates.
    some: Vec<u64>,
}

/// The key of a distance: its difference from `center`.
#[inline]
fn key(distance: f32, center: f32) -> f32 {
    (distance - center).abs()
}

/// The bucket of a key from 0 to [`FURTHEST`]; it never decreases as the key grows.
#[inline]
fn bucket(key: f32) -> usize {
    // Adding it drops the fraction and leaves the integer in the lowest bits of the sum.
    const WHOLE: f32 = 8_388_608.0; // 2^23
    let shifted = key * ((BUCKETS - 1) as f32 / FURTHEST) + WHOLE;
    shifted.to_bits() as usize % BUCKETS
}

/// Returns one bit per lane, set if `is` holds, in a few instructions for all lanes.
#[inline]
fn bits(is: impl Fn(usize) -> bool) -> u32 {
    if (0..LANES).fold(false, |any, lane| any | is(lane)) {
        (0..LANES).fold(0, |bits, lane| bits | u32::from(is(lane)) << lane)
    } else {
        0
    }
}

/// Calls `with(index, distance, weight)` for the entries for which `is(distance, weight)` holds.
///
/// It tests a whole chunk first, because most chunks have no such entry.
#[inline]
fn each(distances: &[f32], weights: &[f32], is: impl Fn(f32, f32) -> bool, mut with: impl FnMut(usize, f32, f32)) {
    let chunks = distances.as_chunks::<LANES>().0.iter().zip(weights.as_chunks::<LANES>().0);
    for (chunk, (distances, weights)) in chunks.enumerate() {
        let mut bits = bits(|lane| is(distances[lane], weights[lane]));
        while bits != 0 {
            let lane = bits.trailing_zeros() as usize % LANES;
            with(chunk * LANES + lane, distances[lane], weights[lane]);
            bits &= bits - 1;
        }
    }
}

impl Candidates {
    /// Computes the weights of a row's tokens, or only of the `top_k` likeliest (0 for all).
    ///
    /// `None` if every logit is NaN or minus infinity.
    pub(super) fn fill(&mut self, logits: &[f32], temperature: f32, top_k: usize) -> Option<()> {
        self.tokens.clear();
        self.distances.clear();
        self.weights.clear();
        self.order = Order::Tokens;
        self.counted_around = None;
        let mut logits = logits;
        if top_k > 0 && top_k < logits.len() {
            likeliest(logits, top_k, &mut self.best);
            self.best.sort_unstable_by_key(|(token, _)| *token);
            self.tokens.extend(self.best.iter().map(|(token, _)| *token));
            self.best_logits.clear();
            self.best_logits.extend(self.best.iter().map(|(_, logit)| *logit));
            logits = &self.best_logits;
        }
        let best = highest(logits);
        if best == f32::NEG_INFINITY {
            return None;
        }
        if best == f32::INFINITY {
            // An infinite logit excludes all finite ones.
            let place = greedy(logits)?;
            let token = self.tokens.get(place as usize).copied().unwrap_or(place);
            self.tokens.clear();
            self.tokens.push(token);
            self.distances.push(0.0);
            self.weights.push(1.0);
            self.distances.resize(LANES, FURTHEST);
            self.weights.resize(LANES, 0.0);
        } else {
            weigh_all(logits, best, temperature, &mut self.distances, &mut self.weights);
        }
        self.add_up();
        Some(())
    }

    fn add_up(&mut self) {
        self.sums.clear();
        self.sums.extend(self.weights.chunks(BLOCK).map(|block| sum(block, f64::from)));
        self.total = self.sums.iter().sum();
    }

    fn token(&self, place: usize) -> u32 {
        self.tokens.get(place).copied().unwrap_or(place as u32)
    }

    /// Keeps the candidates for which `keep(index, distance, weight)` holds. Does not update the sums.
    fn retain(&mut self, keep: impl Fn(usize, f32, f32) -> bool) {
        let whole = self.tokens.is_empty();
        let mut kept = 0;
        for chunk in 0..self.weights.len() / LANES {
            let at = chunk * LANES;
            let distances = &self.distances.as_chunks::<LANES>().0[chunk];
            let weights = &self.weights.as_chunks::<LANES>().0[chunk];
            let is_kept = |lane| (weights[lane] > 0.0) & keep(at + lane, distances[lane], weights[lane]);
            let mut bits = bits(is_kept);
            if bits == 0 {
                continue;
            }
            let (distances, weights) = (*distances, *weights);
            while bits != 0 {
                let lane = bits.trailing_zeros() as usize % LANES;
                self.distances[kept] = distances[lane];
                self.weights[kept] = weights[lane];
                if whole {
                    self.tokens.push((at + lane) as u32);
                } else {
                    self.tokens[kept] = self.tokens[at + lane];
                }
                kept += 1;
                bits &= bits - 1;
            }
        }
        self.tokens.truncate(kept);
        self.distances.truncate(kept);
        self.weights.truncate(kept);
        self.distances.resize(kept.next_multiple_of(LANES), FURTHEST);
        self.weights.resize(kept.next_multiple_of(LANES), 0.0);
    }

    /// Returns the key and index of the candidate at which the sum of weights, in order of keys around `center`,
    /// satisfies `enough`, or of the last candidate. There must be at least one. Weights of `floor` or less are
    /// skipped.
    fn reach(&mut self, center: f32, floor: f32, enough: impl Fn(f64) -> bool) -> (f32, usize) {
        self.some.clear();
        let (some, weights) = (&mut self.some, &self.weights);
        let mut before = 0.0;
        // Keys are not negative, so their bits sort like integers.
        let packed = |distance, place| u64::from(key(distance, center).to_bits()) << 32 | place as u64;
        if weights.len() <= FEW {
            each(&self.distances, weights, |_, w| w > floor, |place, d, _| some.push(packed(d, place)));
        } else {
            if self.counted_around != Some(center) {
                self.buckets.clear();
                self.buckets.resize(BUCKETS, 0.0);
                let buckets = &mut self.buckets[..BUCKETS];
                each(
                    &self.distances,
                    weights,
                    |_, w| w > floor,
                    |_, d, w| {
                        buckets[bucket(key(d, center))] += f64::from(w);
                    },
                );
                self.counted_around = Some(center);
            }
            let (mut at, mut sum) = (0, 0.0);
            for (index, weight) in self.buckets.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
                (at, before) = (index, sum);
                sum += weight;
                if enough(sum) {
                    break;
                }
            }
            let inside = |d, w| (w > floor) & (bucket(key(d, center)) == at);
            each(&self.distances, weights, inside, |place, d, _| some.push(packed(d, place)));
        }
        some.sort_unstable();
        let reached = some.iter().position(|packed| {
            before += f64::from(weights[*packed as u32 as usize]);
            enough(before)
        });
        let packed = some[reached.unwrap_or(some.len() - 1)];
        (f32::from_bits((packed >> 32) as u32), packed as u32 as usize)
    }

    /// Keeps the fewest candidates, in order of keys around `center`, whose weights reach `target`. None of them may
    /// have a weight of `floor` or less.
    fn keep_around(&mut self, center: f32, floor: f32, target: f64) {
        let (furthest, last) = self.reach(center, floor, |sum| sum >= target);
        #[allow(clippy::needless_bitwise_bool, reason = "no branches: lanes are examined together")]
        self.retain(|place, distance, _| {
            let key = key(distance, center);
            (key < furthest) | ((key == furthest) & (place <= last))
        });
        // The buckets stay valid up to the last one that has a candidate.
        self.buckets.truncate(bucket(furthest) + 1);
        self.order = Order::Around(center);
        self.add_up();
    }

    /// Applies top-p, or nucleus sampling (Holtzman et al., 2020).
    pub(super) fn top_p(&mut self, share: f32) {
        if share < 1.0 {
            let target = self.total * f64::from(share);
            // Smaller weights add up to less than 1 - share of the total, so none of them is in the nucleus.
            let floor = (self.total - target) / self.weights.len() as f64 * 0.999;
            self.keep_around(0.0, floor as f32, target);
        }
    }

    /// Applies locally typical sampling (Meister et al., 2022): prefers tokens whose surprise is nearest to the
    /// entropy.
    ///
    /// A token's surprise is its distance plus the log of the sum of weights, and the entropy is the mean surprise.
    /// Their difference is therefore that between the distance and the mean distance.
    pub(super) fn typical(&mut self, share: f32) {
        if share < 1.0 {
            let mean = sum_of_products(&self.weights, &self.distances) / self.total;
            self.keep_around(mean as f32, 0.0, self.total * f64::from(share));
        }
    }

    /// Keeps candidates with at least `share` of the highest probability.
    pub(super) fn min_p(&mut self, share: f32) {
        if share > 0.0 {
            let least = highest(&self.weights) * share;
            self.retain(|_, _, weight| weight >= least);
            self.counted_around = None;
            self.add_up();
        }
    }

    /// Returns the token whose share of the weights contains `uniform`, in [0, 1).
    pub(super) fn draw(&mut self, uniform: f64) -> u32 {
        let target = uniform * self.total;
        if let Order::Around(center) = self.order {
            let (_, place) = self.reach(center, 0.0, |sum| target < sum);
            return self.token(place);
        }
        let mut sum = 0.0;
        let mut last = 0;
        for (block, (weights, weight)) in self.weights.chunks(BLOCK).zip(&self.sums).enumerate() {
            if target >= sum + weight {
                sum += weight;
                continue;
            }
            for (place, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
                sum += f64::from(*weight);
                last = block * BLOCK + place;
                if target < sum {
                    return self.token(last);
                }
            }
            return self.token(last);
        }
        // Rounding can leave the sum slightly below the total.
        let last = self.weights.iter().rposition(|weight| *weight > 0.0);
        self.token(last.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(candidates: &Candidates) -> Vec<u32> {
        let sum: f64 = candidates.weights.iter().map(|weight| f64::from(*weight)).sum();
        assert!((sum / candidates.total - 1.0).abs() < 1e-12);
        let places = 0..candidates.weights.len();
        places.filter(|place| candidates.weights[*place] > 0.0).map(|place| candidates.token(place)).collect()
    }

    fn narrowed(logits: &[f32], narrow: impl Fn(&mut Candidates)) -> Vec<u32> {
        let mut candidates = Candidates::default();
        candidates.fill(logits, 1.0, 0).unwrap();
        narrow(&mut candidates);
        tokens(&candidates)
    }

    /// ln of 0.5, 0.25, 0.125, 0.0625, 0.0625
    fn halves() -> Vec<f32> {
        [0.5f32, 0.25, 0.125, 0.0625, 0.0625].iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_it() {
        assert_eq!(narrowed(&halves(), |c| c.top_p(0.5)), [0]);
        assert_eq!(narrowed(&halves(), |c| c.top_p(0.51)), [0, 1]);
        assert_eq!(narrowed(&halves(), |c| c.top_p(0.9)), [0, 1, 2, 3]);
        assert_eq!(narrowed(&halves(), |c| c.top_p(1e-6)), [0]);
    }

    #[test]
    fn min_p_is_a_share_of_the_highest_probability() {
        assert_eq!(narrowed(&halves(), |c| c.min_p(0.2)), [0, 1, 2]);
        assert_eq!(narrowed(&halves(), |c| c.min_p(1.0)), [0]);
    }

    #[test]
    fn typical_prefers_tokens_of_expected_surprise() {
        // Entropy 1.875 bits; surprises 1, 2, 3, 4, 4 bits: the second token is nearest, then the first.
        assert_eq!(narrowed(&halves(), |c| c.typical(0.2)), [1]);
        assert_eq!(narrowed(&halves(), |c| c.typical(0.3)), [0, 1]);
    }

    #[test]
    fn a_share_over_many_equal_tokens_is_exact() {
        let kept = narrowed(&vec![0.0; 5000], |c| c.top_p(0.5));
        assert!((2500..=2501).contains(&kept.len()), "{}", kept.len());
        assert_eq!(kept, (0..kept.len() as u32).collect::<Vec<_>>());
    }

    #[test]
    fn top_k_of_equals_keeps_the_first() {
        let mut candidates = Candidates::default();
        candidates.fill(&[1.0, 3.0, 1.0, 1.0], 0.7, 2).unwrap();
        assert_eq!(tokens(&candidates), [0, 1]);
    }

    #[test]
    fn logits_that_are_all_nan_or_minus_infinity_give_no_token() {
        for bad in [&[f32::NAN; 4][..], &[f32::NEG_INFINITY; 4], &[]] {
            for top_k in [0, 2] {
                assert_eq!(Candidates::default().fill(bad, 1.0, top_k), None);
            }
            assert_eq!(greedy(bad), None);
        }
        assert_eq!(greedy(&[f32::NAN, -3.0, 2.0, f32::NAN]), Some(2));
        let infinite = [0.0, f32::INFINITY, f32::NAN];
        assert_eq!(narrowed(&infinite, |_| ()), [1]);
        assert_eq!(narrowed(&infinite, |c| c.top_p(0.5)), [1]);
        assert_eq!(narrowed(&infinite, |c| c.typical(0.5)), [1]);
        assert_eq!(narrowed(&infinite, |c| c.min_p(0.5)), [1]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let mut candidates = Candidates::default();
        candidates.fill(&halves(), 1.0, 0).unwrap();
        let mut counts = [0u32; 5];
        for i in 0..1600 {
            counts[candidates.draw((f64::from(i) + 0.5) / 1600.0) as usize] += 1;
        }
        assert_eq!(counts, [800, 400, 200, 100, 100]);
    }
}
