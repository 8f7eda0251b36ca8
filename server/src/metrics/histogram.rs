//! Histograms of durations and counts, which threads update without locks, and their bucket bounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use crate::session::{LATENCY_BOUNDS, Latency};

/// Buckets for the time to the first token in seconds; the same as in vLLM.
pub(super) const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];

/// Buckets for the time between tokens in seconds: vLLM's, and three smaller ones for fast models.
pub(super) const INTER_TOKEN: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
];

/// Buckets for whole requests and their parts, in seconds: vLLM's, and three smaller ones.
pub(super) const REQUEST: &[f64] = &[
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// Buckets for the number of engine steps that a text waits: 0, and powers of 4.
pub(super) const STEPS: &[f64] = &[0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0];

/// A histogram of durations or of counts. Clones share the same counts.
#[derive(Clone, Debug)]
pub(super) struct Histogram(Arc<Values>);

/// The values of a histogram. The sum is a whole number, so that adding to it is one atomic operation.
#[derive(Debug)]
struct Values {
    bounds: &'static [f64],
    /// Units of the sum per unit of the bounds: a duration's sum is in nanoseconds.
    scale: f64,
    /// One count per bucket: one per bound, and one for larger values.
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    /// Creates a histogram of durations, with bounds in seconds.
    pub(super) fn new(bounds: &'static [f64]) -> Self {
        Self::scaled(bounds, 1e9)
    }

    /// Creates a histogram of counts.
    pub(super) fn of_counts(bounds: &'static [f64]) -> Self {
        Self::scaled(bounds, 1.0)
    }

    fn scaled(bounds: &'static [f64], scale: f64) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Values { bounds, scale, counts, sum: AtomicU64::new(0) }))
    }

    /// Records a value in a histogram of counts.
    pub(super) fn observe_count(&self, count: u64) {
        self.add(count as f64, 1, count);
    }

    pub(super) fn observe(&self, duration: Duration) {
        self.observe_shared(duration, 1);
    }

    /// Records `count` values, which are equal parts of `duration`.
    pub(super) fn observe_shared(&self, duration: Duration, count: usize) {
        if count == 0 {
            return;
        }
        self.add(duration.as_secs_f64() / count as f64, count as u64, duration.as_nanos() as u64);
    }

    /// Records `count` equal values whose sum is `sum`.
    fn add(&self, value: f64, count: u64, sum: u64) {
        let values = &*self.0;
        values.counts[values.bounds.partition_point(|bound| *bound < value)].fetch_add(count, Relaxed);
        values.sum.fetch_add(sum, Relaxed);
    }
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let Values { bounds, scale, counts, sum } = &*self.0;
        let bounds = bounds.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).map(|(bound, count)| (bound, count.load(Relaxed))).collect();
        let sum = sum.load(Relaxed) as f64 / scale;
        // The total is computed from the buckets, because a separate counter could be ahead of them.
        let count = buckets.iter().map(|bucket| bucket.1).sum();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// A histogram of counts that were collected elsewhere.
#[derive(Debug)]
pub(super) struct Counted {
    /// The upper bound and the count of each bucket; the last bound is infinite.
    pub(super) buckets: Vec<(f64, u64)>,
    pub(super) sum: f64,
}

impl EncodeMetric for Counted {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let count = self.buckets.iter().map(|bucket| bucket.1).sum();
        encoder.encode_histogram::<NoLabelSet>(self.sum, count, &self.buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Histograms of the latencies of operations, one per kind of operation.
#[derive(Debug)]
pub(super) struct Times(pub(super) Vec<Latency>);

impl EncodeMetric for Times {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        for Latency { operation, counts, nanoseconds, .. } in &self.0 {
            let bounds = LATENCY_BOUNDS.iter().copied().chain([f64::INFINITY]);
            let (buckets, sum) = (bounds.zip(*counts).collect(), *nanoseconds as f64 / 1e9);
            Counted { buckets, sum }.encode(encoder.encode_family(&[("operation", *operation)])?)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn buckets_are_cumulative_and_include_their_bound() {
        let mut registry = Registry::default();
        let histogram = Histogram::new(&[0.5, 2.0]);
        for milliseconds in [500, 501, 2000, 9000] {
            histogram.observe(Duration::from_millis(milliseconds));
        }
        histogram.observe_shared(Duration::from_secs(3), 10);
        histogram.observe_shared(Duration::from_secs(3), 0);
        registry.register("h", "Help", histogram.clone());
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let lines = ["h_sum 15.001", "h_count 14", "le=\"0.5\"} 11", "le=\"2.0\"} 13", "le=\"+Inf\"} 14"];
        for line in lines {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn counts_are_summed_as_they_are() {
        let mut registry = Registry::default();
        let histogram = Histogram::of_counts(&[0.0, 4.0]);
        for count in [0, 0, 3, 4, 5] {
            histogram.observe_count(count);
        }
        registry.register("h", "Help", histogram);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in ["h_sum 12", "h_count 5", "le=\"0.0\"} 2", "le=\"4.0\"} 4", "le=\"+Inf\"} 5"] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn bounds_ascend() {
        for bounds in [FIRST_TOKEN, INTER_TOKEN, REQUEST, STEPS] {
            assert!(bounds.is_sorted_by(|a, b| a < b));
        }
    }
}
