//! Log probabilities of the model's own distribution. They choose no token: sampling has its own arithmetic.

use super::select::{by_logit, highest, likeliest};
use crate::kernels::{Isa, exponentials};

/// What stands for less than can happen: no log probability is lower, so that each is a number.
pub const LEAST_LOGPROB: f64 = -9999.0;

/// The log-softmax of a row of logits, in f64: log p(token) = logit(token) - ln sum exp(logits).
///
/// A logit that is no number has no probability.
#[derive(Clone, Copy, Debug)]
pub struct LogSoftmax<'a> {
    logits: &'a [f32], // (vocab)
    /// The highest logit, and the logarithm of what all sum up to where it is taken from each.
    highest: f64,
    log_sum: f64,
}

impl<'a> LogSoftmax<'a> {
    /// Of a row of logits (vocab), before anything is done to them.
    pub fn new(logits: &'a [f32]) -> Self {
        let highest = highest(logits);
        let mut sum = 0.0;
        exponentials::sum_exponentials(Isa::detect(), logits, highest, &mut sum);
        let highest = f64::from(highest);
        Self { logits, highest, log_sum: sum.ln() }
    }

    /// The natural logarithm of a token's probability; [`LEAST_LOGPROB`] for one that cannot be.
    pub fn logprob(&self, token: u32) -> f64 {
        let logit = self.logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let logprob = distance(logit, self.highest) - self.log_sum;
        if logprob.is_nan() { LEAST_LOGPROB } else { logprob.clamp(LEAST_LOGPROB, 0.0) }
    }

    /// The `count` likeliest tokens, the likeliest first, of equals the lower token: fewer where there are no more.
    ///
    /// One pass with a short list beside it: the vocabulary is not sorted.
    pub fn likeliest(&self, count: usize) -> Vec<u32> {
        let mut best = Vec::new();
        likeliest(self.logits, count, &mut best);
        best.sort_unstable_by(|a, b| by_logit(*a, *b));
        best.into_iter().map(|(token, _)| token).collect()
    }
}

/// How far a logit lies from the highest; an infinite one does not lie far from itself.
fn distance(logit: f32, highest: f64) -> f64 {
    let logit = f64::from(logit);
    if logit == highest { 0.0 } else { logit - highest }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition: every probability, all of them sorted.
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
            // Few values: ties are common.
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
    fn logits_that_no_exponential_can_hold_have_probabilities_all_the_same() {
        let row = [3000.0, 2999.0, -3000.0];
        let row = LogSoftmax::new(&row);
        let log_sum = (1.0 + (-1f64).exp()).ln();
        assert_eq!((row.logprob(0), row.logprob(1)), (-log_sum, -1.0 - log_sum));
        assert!((row.logprob(2) + 6000.0 + log_sum).abs() < 1e-9);
    }

    #[test]
    fn what_is_no_number_and_what_cannot_be_is_the_least_and_never_among_the_likeliest() {
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
