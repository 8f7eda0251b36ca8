//! Times: how often a thing is done so that the clock sees it, medians of rounds, and what is left of the whole.

use std::time::{Duration, Instant};

use super::Result;

/// A median of rounds, and their ends; in seconds of one time that a thing is done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) most: f64,
}

impl Times {
    /// Of each list of rounds.
    pub(super) fn of(all: &[Vec<f64>]) -> Vec<Self> {
        all.iter().map(|rounds| Self::one(rounds)).collect()
    }

    pub(super) fn one(rounds: &[f64]) -> Self {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        Self { median: quantile(&sorted, 0.5), least: quantile(&sorted, 0.0), most: quantile(&sorted, 1.0) }
    }

    /// In milliseconds.
    pub(super) fn ms(self) -> [f64; 3] {
        [self.median, self.least, self.most].map(|seconds| seconds * 1e3)
    }
}

/// The value below which a share of sorted ones lies, between two of them in proportion; none of nothing.
pub(super) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = share * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// When all must be over, and how long one measurement is.
pub(super) struct Budget {
    end: Option<Instant>,
    /// Seconds of one measurement, about.
    one: f64,
}

impl Budget {
    pub(super) fn new(seconds: Option<f64>, one: f64) -> Self {
        Self { end: seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds.max(0.0))), one }
    }

    pub(super) fn is_spent(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() >= end)
    }

    /// Does a thing until a device that was idle has its full clock.
    pub(super) fn warm(&self, mut run: impl FnMut(usize) -> Result<()>) -> Result<()> {
        let clock = Instant::now();
        while clock.elapsed().as_secs_f64() < 20.0 * self.one {
            run(10)?;
        }
        Ok(())
    }

    /// How often a thing is done for one measurement; it was done once before that counts. `run` does it so many times.
    pub(super) fn pace(&self, mut run: impl FnMut(usize) -> Result<()>) -> Result<usize> {
        run(1)?;
        let seconds = once(&mut run, 2)?;
        Ok(((self.one / seconds) as usize).clamp(2, 2000))
    }

    /// Seconds of one time in each of some rounds, of a thing that stands beside no other.
    pub(super) fn repeated(&self, mut run: impl FnMut(usize) -> Result<()>, rounds: usize) -> Result<Vec<f64>> {
        let times = self.pace(&mut run)?;
        (0..rounds).map(|_| once(&mut run, times)).collect()
    }
}

/// Seconds of one of so many times.
pub(super) fn once(mut run: impl FnMut(usize) -> Result<()>, times: usize) -> Result<f64> {
    let clock = Instant::now();
    run(times)?;
    Ok(clock.elapsed().as_secs_f64() / times as f64)
}
