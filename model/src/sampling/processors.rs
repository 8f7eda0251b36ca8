//! Candidates for the next token, narrowed by one processor after another.

use std::cmp::Ordering;

/// The most likely token; of equals the first. None where no logit is a number above minus infinity.
pub(super) fn greedy(logits: &[f32]) -> Option<u32> {
    let mut best = (None, f32::NEG_INFINITY);
    for (token, &logit) in logits.iter().enumerate() {
        if logit > best.1 {
            best = (Some(token as u32), logit);
        }
    }
    best.0
}

/// A token that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    token: u32,
    p: f64,
}

/// More likely first, of equals the lower token: a total order, so that nothing depends on a sort's choices.
fn by_probability(a: &Candidate, b: &Candidate) -> Ordering {
    b.p.total_cmp(&a.p).then(a.token.cmp(&b.token))
}

/// The tokens still in question with their probabilities, which sum to 1. Kept from token to token for its memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Candidates {
    list: Vec<Candidate>,
}

impl Candidates {
    /// Softmax of the logits over the temperature, of the `top_k` most likely only (0 for all).
    ///
    /// None where no logit is a number above minus infinity.
    pub(super) fn fill(&mut self, logits: &[f32], temperature: f32, top_k: usize) -> Option<()> {
        self.list.clear();
        let likeliest = greedy(logits)?;
        let best = logits[likeliest as usize];
        for (token, &logit) in logits.iter().enumerate() {
            let p = (f64::from(logit - best) / f64::from(temperature)).exp();
            // A subnormal could become 0 when normalised, and the entropy's 0 ln 0 is no number.
            if p >= f64::MIN_POSITIVE {
                self.list.push(Candidate { token: token as u32, p });
            }
        }
        if self.list.is_empty() {
            // An infinite logit leaves nothing beside it.
            self.list.push(Candidate { token: likeliest, p: 1.0 });
        }
        if top_k > 0 && top_k < self.list.len() {
            self.list.select_nth_unstable_by(top_k, by_probability);
            self.list.truncate(top_k);
        }
        self.normalise();
        Some(())
    }

    fn normalise(&mut self) {
        let sum: f64 = self.list.iter().map(|c| c.p).sum();
        for candidate in &mut self.list {
            candidate.p /= sum;
        }
    }

    /// Keeps the fewest candidates, the first in `order`, that together have the probability `share`.
    fn keep_share(&mut self, share: f32, order: impl Fn(&Candidate, &Candidate) -> Ordering) {
        // Sorting a growing front is cheaper than sorting all: most of the probability lies in a few tokens.
        let mut front = 64;
        loop {
            if front < self.list.len() {
                self.list.select_nth_unstable_by(front, &order);
            }
            let end = front.min(self.list.len());
            self.list[..end].sort_unstable_by(&order);
            let mut sum = 0.0;
            let enough = self.list[..end].iter().position(|c| {
                sum += c.p;
                sum >= f64::from(share)
            });
            match enough {
                Some(last) => self.list.truncate(last + 1),
                None if end < self.list.len() => {
                    front *= 4;
                    continue;
                }
                None => {}
            }
            return self.normalise();
        }
    }

    /// Nucleus sampling (Holtzman et al., 2020).
    pub(super) fn top_p(&mut self, share: f32) {
        if share < 1.0 {
            self.keep_share(share, by_probability);
        }
    }

    /// Locally typical sampling (Meister et al., 2022): tokens whose surprise is nearest the entropy first.
    pub(super) fn typical(&mut self, share: f32) {
        if share < 1.0 {
            let entropy: f64 = self.list.iter().map(|c| -c.p * c.p.ln()).sum();
            let distance = |c: &Candidate| (-c.p.ln() - entropy).abs();
            self.keep_share(share, |a, b| distance(a).total_cmp(&distance(b)).then(a.token.cmp(&b.token)));
        }
    }

    /// Only candidates with at least `share` of the most likely one's probability.
    pub(super) fn min_p(&mut self, share: f32) {
        if share > 0.0 {
            let best = self.list.iter().map(|c| c.p).fold(0.0, f64::max);
            self.list.retain(|c| c.p >= best * f64::from(share));
            self.normalise();
        }
    }

    /// The candidate under whose share `uniform` in [0, 1) falls.
    pub(super) fn draw(&self, uniform: f64) -> u32 {
        let mut sum = 0.0;
        for candidate in &self.list {
            sum += candidate.p;
            if uniform < sum {
                return candidate.token;
            }
        }
        // Rounding may leave the sum a little under 1.
        self.list.last().map_or(0, |c| c.token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(logits: &[f32], narrow: impl Fn(&mut Candidates)) -> Vec<u32> {
        let mut candidates = Candidates::default();
        candidates.fill(logits, 1.0, 0).unwrap();
        narrow(&mut candidates);
        let sum: f64 = candidates.list.iter().map(|c| c.p).sum();
        assert!((sum - 1.0).abs() < 1e-12);
        let mut tokens: Vec<u32> = candidates.list.iter().map(|c| c.token).collect();
        tokens.sort_unstable();
        tokens
    }

    /// ln of 0.5, 0.25, 0.125, 0.0625, 0.0625
    fn halves() -> Vec<f32> {
        [0.5f32, 0.25, 0.125, 0.0625, 0.0625].iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_it() {
        assert_eq!(kept(&halves(), |c| c.top_p(0.5)), [0]);
        assert_eq!(kept(&halves(), |c| c.top_p(0.51)), [0, 1]);
        assert_eq!(kept(&halves(), |c| c.top_p(0.9)), [0, 1, 2, 3]);
        assert_eq!(kept(&halves(), |c| c.top_p(1e-6)), [0]);
    }

    #[test]
    fn min_p_is_a_share_of_the_best() {
        assert_eq!(kept(&halves(), |c| c.min_p(0.2)), [0, 1, 2]);
        assert_eq!(kept(&halves(), |c| c.min_p(1.0)), [0]);
    }

    #[test]
    fn typical_prefers_tokens_of_expected_surprise() {
        // Entropy 1.875 bits; surprises 1, 2, 3, 4, 4 bits: the second token is nearest, then the first.
        assert_eq!(kept(&halves(), |c| c.typical(0.2)), [1]);
        assert_eq!(kept(&halves(), |c| c.typical(0.3)), [0, 1]);
    }

    #[test]
    fn a_share_over_many_equal_tokens_is_exact() {
        let kept = kept(&vec![0.0; 5000], |c| c.top_p(0.5));
        assert!((2500..=2501).contains(&kept.len()), "{}", kept.len());
        assert_eq!(kept, (0..kept.len() as u32).collect::<Vec<_>>());
    }

    #[test]
    fn top_k_of_equals_keeps_the_first() {
        let mut candidates = Candidates::default();
        candidates.fill(&[1.0, 3.0, 1.0, 1.0], 0.7, 2).unwrap();
        let mut tokens: Vec<u32> = candidates.list.iter().map(|c| c.token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1]);
    }

    #[test]
    fn logits_without_a_number_give_no_token() {
        for bad in [&[f32::NAN; 4][..], &[f32::NEG_INFINITY; 4], &[]] {
            assert_eq!(Candidates::default().fill(bad, 1.0, 0), None);
            assert_eq!(greedy(bad), None);
        }
        assert_eq!(greedy(&[f32::NAN, -3.0, 2.0, f32::NAN]), Some(2));
        assert_eq!(kept(&[0.0, f32::INFINITY, f32::NAN], |_| ()), [1]);
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
