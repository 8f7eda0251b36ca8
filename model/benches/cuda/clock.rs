//! Times: repetitions long enough to measure, medians of rounds, and the time left of the whole run.

use std::time::{Duration, Instant};

use super::Result;

/// The median, least and greatest of rounds, in seconds of one repetition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) most: f64,
}

impl Times {
    /// One for each list of rounds.
    pub(super) fn of(all: &[Vec<f64>]) -> Vec<Self> {
        all.iter().map(|rounds| Self::one(rounds)).collect()
    }

    pub(super) fn one(rounds: &[f64]) -> Self {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        Self { median: quantile(&sorted, 0.5), least: quantile(&sorted, 0.0), most: quantile(&sorted, 1.0) }
    }

    /// The same in milliseconds.
    pub(super) fn ms(self) -> [f64; 3] {
        [self.median, self.least, self.most].map(|seconds| seconds * 1e3)
    }
}

/// A quantile of sorted values, interpolated; NaN if there are none.
pub(super) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = share * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// The deadline of the whole run, and the length of one measurement.
pub(super) struct Budget {
    end: Option<Instant>,
    /// Approximate seconds of one measurement.
    one: f64,
}

impl Budget {
    pub(super) fn new(seconds: Option<f64>, one: f64) -> Self {
        Self { end: seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds.max(0.0))), one }
    }

    pub(super) fn is_spent(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() >= end)
    }

    /// Repeats work until an idle device has reached its full clock rate.
    pub(super) fn warm(&self, mut run: impl FnMut(usize) -> Result<()>) -> Result<()> {
        let clock = Instant::now();
        while clock.elapsed().as_secs_f64() < 20.0 * self.one {
            run(10)?;
        }
        Ok(())
    }

    /// The repetitions of one measurement, after a first one that does not count. `run` repeats the work so many times.
    pub(super) fn pace(&self, mut run: impl FnMut(usize) -> Result<()>) -> Result<usize> {
        run(1)?;
        let seconds = once(&mut run, 2)?;
        Ok(((self.one / seconds) as usize).clamp(2, 2000))
    }

    /// Seconds for one repetition, measured in each of `rounds` rounds.
    pub(super) fn repeated(&self, mut run: impl FnMut(usize) -> Result<()>, rounds: usize) -> Result<Vec<f64>> {
        let times = self.pace(&mut run)?;
        (0..rounds).map(|_| once(&mut run, times)).collect()
    }
}

/// Mean seconds for one of `times` repetitions.
pub(super) fn once(mut run: impl FnMut(usize) -> Result<()>, times: usize) -> Result<f64> {
    let clock = Instant::now();
    run(times)?;
    Ok(clock.elapsed().as_secs_f64() / times as f64)
}
