//! Log probabilities of the model's own distribution, for reporting. Sampling does not use them.

use super::select::{by_logit, highest, likeliest};
use crate::kernels::{Isa, exponentials};

/// The lowest log probability that is reported. It stands in for minus infinity, which JSON cannot express.
pub const LEAST_LOGPROB: f64 = -9999.0;

/// The log-softmax of a row of logits, in f64: log p(token) = logit(token) - ln sum exp(logits).
///
/// A NaN logit has no probability.
#[derive(Clone, Copy, Debug)]
pub struct LogSoftmax<'a> {
    logits: &'a [f32], // (vocab)
    /// The highest logit, and the log of the sum of exponentials relative to it.
    highest: f64,
    log_sum: f64,
}

impl<'a> LogSoftmax<'a> {
    /// The log-softmax of a row of unmodified logits (vocab).
    pub fn new(logits: &'a [f32]) -> Self {
        let highest = highest(logits);
        let mut sum = 0.0;
        exponentials::sum_exponentials(Isa::detect(), logits, highest, &mut sum);
        let highest = f64::from(highest);
        Self { logits, highest, log_sum: sum.ln() }
    }

    /// The natural logarithm of a token's probability; [`LEAST_LOGPROB`] if it is 0.
    pub fn logprob(&self, token: u32) -> f64 {
        let logit = self.logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let logprob = distance(logit, self.highest) - self.log_sum;
        if logprob.is_nan() { LEAST_LOGPROB } else { logprob.clamp(LEAST_LOGPROB, 0.0) }
    }

    /// The `count` likeliest tokens, or all if there are fewer, likeliest first. Ties are ordered by token id.
    ///
    /// It makes one pass over the logits and does not sort the vocabulary.
    pub fn likeliest(&self, count: usize) -> Vec<u32> {
        let mut best = Vec::new();
        likeliest(self.logits, count, &mut best);
        best.sort_unstable_by(|a, b| by_logit(*a, *b));
        best.into_iter().map(|(token, _)| token).collect()
    }
}

/// The difference between a logit and the highest; 0 between equal infinities.
fn distance(logit: f32, highest: f64) -> f64 {
    let logit = f64::from(logit);
    if logit == highest { 0.0 } else { logit - highest }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition: every probability, sorted.
    fn plain(logits: &[f32]) -> Vec<(u32, f64)> {
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        let all = logits.iter().enumerate().map(|(token, logit)| (token as u32, (f64::from(*logit).exp() / sum).ln()));
        let mut all: Vec<(u32, f64)> = all.collect();
        all.sort_by(|(a, p), (b, q)| q.total_cmp(p).then(a.cmp(b)));
        all
    }

    proptest! {
        #[test]
        fn log_probabilities_are_those_of_the_definition(
            // Few distinct values, so that ties are common.
            logits in prop::collection::vec((-40i8..40).prop_map(|n| f32::from(n) / 2.0), 1..200),
            count in 0usize..25,
        ) {
            let (row, expected) = (LogSoftmax::new(&logits), plain(&logits));
            let top: Vec<u32> = expected.iter().take(count).map(|(token, _)| *token).collect();
            prop_assert_eq!(row.likeliest(count), top);
            for (token, logprob) in expected {
                prop_assert!((row.logprob(token) - logprob).abs() < 1e-9, "{} {}", token, logprob);
            }
        }
    }

    #[test]
    fn logits_whose_exponentials_overflow_have_probabilities() {
        let row = [3000.0, 2999.0, -3000.0];
        let row = LogSoftmax::new(&row);
        let log_sum = (1.0 + (-1f64).exp()).ln();
        assert_eq!((row.logprob(0), row.logprob(1)), (-log_sum, -1.0 - log_sum));
        assert!((row.logprob(2) + 6000.0 + log_sum).abs() < 1e-9);
    }

    #[test]
    fn nan_and_minus_infinity_have_the_lowest_log_probability_and_are_never_among_the_likeliest() {
        let row = [f32::NAN, 1.0, f32::NEG_INFINITY, 1.0];
        let row = LogSoftmax::new(&row);
        assert_eq!(row.likeliest(3), [1, 3, 2]);
        assert_eq!(
            [0, 1, 2, 9].map(|token| row.logprob(token)),
            [LEAST_LOGPROB, -2f64.ln(), LEAST_LOGPROB, LEAST_LOGPROB]
        );
        let row = [0.0, f32::INFINITY];
        let row = LogSoftmax::new(&row);
        assert_eq!((row.logprob(0), row.logprob(1)), (LEAST_LOGPROB, 0.0));
        for hopeless in [&[][..], &[f32::NAN; 2], &[f32::NEG_INFINITY; 2]] {
            assert!(LogSoftmax::new(hopeless).logprob(0).is_finite());
        }
    }
}
