//! What the engine's passes cost. The cost depends on the model, the device and the machine's other load, so it is
//! estimated from the passes themselves.

use std::time::Duration;

/// The cost of a pass as a function of its number of tokens: the rows of a decode step, or the tokens of a prompt
/// chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassCost {
    /// The fixed cost of a pass: reading the weights.
    pub base: f64,
    /// The additional cost of each token.
    pub each: f64,
}

impl PassCost {
    /// The cost of a pass over `count` tokens.
    pub(super) fn of(self, count: usize) -> f64 {
        self.base + self.each * count as f64
    }

    /// Returns the most tokens of a pass that costs at most `cost`. If they would cost less than the pass's fixed cost,
    /// returns the number of tokens that cost as much as it: shorter passes would be mostly overhead.
    pub(super) fn affords(self, cost: f64) -> usize {
        // A division by zero gives infinity, and the cast saturates.
        ((cost - self.base).max(self.base) / self.each).max(1.0) as usize
    }

    /// Returns the fewest tokens of an efficient pass: several such passes cost about as much as one long pass.
    pub(super) fn efficient(self) -> usize {
        (EFFICIENT * self.base / self.each).max(LEAST_EFFICIENT) as usize
    }
}

/// A pass is efficient if its tokens cost at least this many times its fixed cost,
const EFFICIENT: f64 = 8.0;
/// and if it has at least this many tokens, since the estimate may be wrong.
const LEAST_EFFICIENT: f64 = 32.0;

/// The costs of both kinds of passes, in the same unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassCosts {
    /// Decode steps, by number of rows.
    pub step: PassCost,
    /// Prompt chunks, by number of tokens.
    pub chunk: PassCost,
}

/// Where costs come from: fixed values, or measurements.
#[derive(Default)]
pub(super) struct CostSource {
    fixed: Option<PassCosts>,
    steps: PassTimes,
    chunks: PassTimes,
    /// Steps by number of tokens read, with or without draft tokens.
    with_drafts: PassTimes,
    /// Calls of a draft model, by number of tokens proposed.
    draft_model: PassTimes,
    /// Steps without draft tokens since the last step with some.
    since_drafts: u32,
}

/// After this many steps without draft tokens, the costs of steps with draft tokens are forgotten. They are measured
/// again when the next draft tokens are proposed: the old costs may date from a time when the machine was busy.
const FORGET: u32 = 4096;

/// Most tokens that a draft model proposes for a text while its cost is unknown.
const FEW: usize = 4;

impl CostSource {
    /// Uses `fixed`, or else what is measured from now on.
    pub(super) fn new(fixed: Option<PassCosts>) -> Self {
        Self { fixed, ..Self::default() }
    }

    /// Notes how long a decode step took.
    pub(super) fn stepped(&mut self, rows: usize, time: Duration) {
        self.steps.observe(rows, time.as_secs_f64());
        self.since_drafts += 1;
        if self.since_drafts == FORGET {
            (self.with_drafts, self.draft_model) = (PassTimes::default(), PassTimes::default());
            self.since_drafts = 0;
        }
        self.with_drafts.observe(rows, time.as_secs_f64());
    }

    /// Notes how long a step with draft tokens took; its rows have read `tokens` tokens together, draft tokens
    /// included.
    pub(super) fn drafted(&mut self, tokens: usize, time: Duration) {
        self.since_drafts = 0;
        self.with_drafts.observe(tokens, time.as_secs_f64());
    }

    /// Notes how long a draft model took to propose `tokens` tokens.
    pub(super) fn proposed(&mut self, tokens: usize, time: Duration) {
        self.draft_model.observe(tokens, time.as_secs_f64());
    }

    /// Notes how long a chunk took.
    pub(super) fn read(&mut self, tokens: usize, time: Duration) {
        self.chunks.observe(tokens, time.as_secs_f64());
    }

    /// Returns the cost of a step by the tokens that its rows read, draft tokens included. Draft tokens count as free
    /// until some have been measured.
    pub(super) fn with_drafts(&self) -> PassCost {
        let measured = || self.with_drafts.cost().filter(|_| self.with_drafts.known().count() > 1);
        let fixed = self.fixed.map(|costs| costs.step);
        fixed.or_else(measured).unwrap_or(PassCost { base: 1.0, each: 0.0 })
    }

    /// Returns how many tokens, at most `most`, a draft model should propose for a text: none until steps without draft
    /// tokens have been measured, and few until steps with draft tokens and the draft model itself have been measured.
    pub(super) fn worth_asking(&self, most: usize) -> usize {
        match (self.with_drafts.known().count(), self.draft_model.known().count()) {
            _ if self.fixed.is_some() => most,
            (0, _) => 0,
            (1, _) | (_, 0) => most.min(FEW),
            _ => most,
        }
    }

    /// Returns the cost of a draft model's call by the tokens that it proposes; the fixed cost is catching up with the
    /// text. Zero until the draft model and steps with draft tokens have been measured.
    pub(super) fn of_proposals(&self) -> PassCost {
        let measured = || self.draft_model.cost().filter(|_| self.with_drafts.known().count() > 1);
        let measured = if self.fixed.is_some() { None } else { measured() };
        measured.unwrap_or(PassCost { base: 0.0, each: 0.0 })
    }

    /// Returns the costs; `None` until a step has been measured. Until a chunk has been measured, its tokens cost as
    /// much as rows.
    pub(super) fn costs(&self) -> Option<PassCosts> {
        let measured = || {
            let step = self.steps.cost()?;
            Some(PassCosts { step, chunk: self.chunks.cost().unwrap_or(step) })
        };
        self.fixed.or_else(measured)
    }
}

/// How many sizes of passes are measured separately for each doubling of the size.
const PER_OCTAVE: f64 = 4.0;
/// The number of sizes: up to 2^12 tokens. Larger passes count as passes of that size.
const SIZES: usize = 49;
/// Passes of one size before their time counts: the first passes may have found a cold cache.
const SAMPLES: u32 = 3;
/// The fraction by which the estimate for a size moves toward the time of a slower pass.
const DRIFT: f64 = 1.0 / 64.0;

/// The times of one kind of pass, by size.
pub(super) struct PassTimes {
    sizes: [Typical; SIZES],
}

/// The passes of about the same size.
#[derive(Clone, Copy, Default)]
struct Typical {
    tokens: f64,
    seconds: f64,
    samples: u32,
}

impl Default for PassTimes {
    fn default() -> Self {
        Self { sizes: [Typical::default(); SIZES] }
    }
}

impl PassTimes {
    /// Notes a pass. The estimate follows the fastest passes of a size: slow passes had to wait for a core.
    pub(super) fn observe(&mut self, tokens: usize, seconds: f64) {
        let tokens = tokens.max(1) as f64;
        let size = ((tokens.log2() * PER_OCTAVE) as usize).min(SIZES - 1);
        let typical = &mut self.sizes[size];
        if typical.samples == 0 || seconds < typical.seconds {
            (typical.tokens, typical.seconds) = (tokens, seconds);
        } else {
            // One very slow pass changes the estimate only a little.
            let slower = seconds.min(2.0 * typical.seconds);
            typical.seconds += (slower - typical.seconds) * DRIFT;
            typical.tokens += (tokens - typical.tokens) * DRIFT;
        }
        typical.samples = typical.samples.saturating_add(1);
    }

    /// The sizes with enough samples.
    fn known(&self) -> impl Iterator<Item = &Typical> {
        self.sizes.iter().filter(|typical| typical.samples >= SAMPLES && typical.seconds > 0.0)
    }

    /// Fits a line through the times of all sizes, with least squares of the relative errors; `None` if there are no
    /// times.
    pub(super) fn cost(&self) -> Option<PassCost> {
        // Weighted sums of 1, n, n^2, t and n t.
        let (mut sizes, mut sums) = (0, [0.0; 5]);
        for Typical { tokens, seconds, .. } in self.known() {
            let weight = 1.0 / (seconds * seconds);
            let terms = [1.0, *tokens, tokens * tokens, *seconds, tokens * seconds];
            sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += weight * term);
            sizes += 1;
        }
        let [w, n, nn, t, nt] = sums;
        match sizes {
            0 => None,
            1 => Some(PassCost { base: 0.0, each: t / n }),
            _ => {
                let each = ((w * nt - n * t) / (w * nn - n * n)).max(0.0);
                let base = ((t - each * n) / w).max(0.0);
                // If the fitted base is zero, fits a line through the origin.
                Some(PassCost { base, each: if base > 0.0 { each } else { nt / nn } })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: PassCost, expected: PassCost) -> bool {
        (found.base - expected.base).abs() < 0.05 * expected.base.max(expected.each)
            && (found.each - expected.each).abs() < 0.05 * expected.each.max(1e-9)
    }

    #[test]
    fn the_costs_are_those_of_the_undisturbed_passes() {
        let true_cost = PassCost { base: 5e-4, each: 3e-4 };
        let mut times = PassTimes::default();
        assert_eq!(times.cost(), None);
        for pass in 0..2000 {
            let tokens = [1, 2, 5, 30, 60][pass % 5];
            // Every third pass is disturbed, and about one in a hundred heavily.
            let factor = if pass % 101 == 0 {
                300.0
            } else if pass % 3 == 0 {
                2.5
            } else {
                1.0
            };
            times.observe(tokens, true_cost.of(tokens) * factor);
        }
        let found = times.cost().unwrap();
        assert!(close(found, true_cost), "{found:?}");
    }

    #[test]
    fn what_drafts_cost_is_measured_and_forgotten_when_none_are_read_for_long() {
        let mut costs = CostSource::new(None);
        let (one, nine) = (Duration::from_millis(10), Duration::from_millis(90));
        let free = PassCost { base: 1.0, each: 0.0 };
        for _ in 0..SAMPLES {
            costs.stepped(1, one);
            assert_eq!(costs.with_drafts(), free);
        }
        (0..SAMPLES).for_each(|_| costs.drafted(9, nine));
        let measured = costs.with_drafts();
        assert!((measured.of(9) / measured.of(1) - 9.0).abs() < 0.5, "{measured:?}");
        (1..FORGET).for_each(|_| costs.stepped(1, one));
        assert_ne!(costs.with_drafts(), free);
        costs.stepped(1, one);
        assert_eq!(costs.with_drafts(), free);
    }

    #[test]
    fn a_draft_model_is_asked_as_far_as_costs_are_known() {
        let mut costs = CostSource::new(None);
        let [one, three, five] = [10, 13, 16].map(Duration::from_millis);
        let nothing = PassCost { base: 0.0, each: 0.0 };
        assert_eq!((costs.worth_asking(16), costs.of_proposals()), (0, nothing));
        (0..SAMPLES).for_each(|_| costs.stepped(1, one));
        assert_eq!((costs.worth_asking(16), costs.worth_asking(3)), (FEW, 3));
        (0..SAMPLES).for_each(|_| costs.drafted(5, five));
        assert_eq!(costs.worth_asking(16), FEW, "the draft model is yet to be measured");
        for (tokens, time) in [(1, one), (2, three)] {
            (0..SAMPLES).for_each(|_| costs.proposed(tokens, time));
        }
        assert_eq!(costs.worth_asking(16), 16);
        assert!(close(costs.of_proposals(), PassCost { base: 0.007, each: 0.003 }), "{:?}", costs.of_proposals());
        let each = PassCost { base: 1.0, each: 0.0 };
        let fixed = CostSource::new(Some(PassCosts { step: each, chunk: each }));
        assert_eq!((fixed.worth_asking(16), fixed.of_proposals()), (16, nothing));
    }

    #[test]
    fn the_costs_follow_a_machine_that_becomes_slower() {
        let mut times = PassTimes::default();
        for factor in [1.0, 4.0] {
            for pass in 0..1000 {
                let tokens = [1, 8, 32][pass % 3];
                times.observe(tokens, factor * (0.002 + 0.001 * tokens as f64));
            }
        }
        let found = times.cost().unwrap();
        assert!(close(found, PassCost { base: 0.008, each: 0.004 }), "{found:?}");
    }

    #[test]
    fn passes_of_one_size_show_no_base_and_equal_ones_no_cost_of_rows() {
        let mut times = PassTimes::default();
        (0..2).for_each(|_| times.observe(10, 0.5));
        assert_eq!(times.cost(), None, "too few");
        times.observe(10, 0.5);
        let found = times.cost().unwrap();
        assert!(close(found, PassCost { base: 0.0, each: 0.05 }), "{found:?}");
        // As on a GPU, where more rows take no longer.
        (0..3).for_each(|_| times.observe(20, 0.5));
        let found = times.cost().unwrap();
        assert!((found.base - 0.5).abs() < 1e-9 && found.each < 1e-9, "{found:?}");
        assert_eq!(found.affords(0.6), usize::MAX);
        let cost = PassCost { base: 2.0, each: 0.5 };
        assert_eq!([1.0, 4.2, 4.6].map(|limit| cost.affords(limit)), [4, 4, 5]);
        assert_eq!(cost.efficient(), 32);
        let cost = PassCost { base: 0.2, each: 0.01 };
        assert_eq!((cost.affords(0.1), cost.efficient()), (20, 160));
    }
}
