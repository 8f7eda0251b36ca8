//! Measures the texts of one request, from the arrival of the request to the end of each text.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::labels::Cancelled;
use super::registry::Metrics;
use crate::engine::{FinishReason, Timings};

/// The progress of one text.
#[derive(Clone, Copy, Debug)]
enum Progress {
    /// No token has been delivered.
    Waiting,
    /// The time at which the last token was delivered.
    Streaming(Instant),
    Ended,
}

/// The texts of one request. Texts that have not ended when this is dropped count as canceled.
#[derive(Debug)]
pub(crate) struct Meter {
    metrics: Arc<Metrics>,
    arrived: Instant,
    texts: Vec<Progress>,
    /// The text whose tokens are being delivered, and how many they are.
    delivering: Option<(usize, usize)>,
    cancelled: Cancelled,
}

impl Meter {
    /// Creates a meter for a request for `texts` texts.
    pub(crate) fn new(metrics: Arc<Metrics>, arrived: Instant, texts: usize) -> Self {
        Self {
            metrics,
            arrived,
            texts: vec![Progress::Waiting; texts],
            delivering: None,
            cancelled: Cancelled::Disconnected,
        }
    }

    /// Records that tokens of a text are about to be delivered to the client.
    pub(crate) fn delivering(&mut self, text: usize, tokens: usize) {
        self.delivering = Some((text, tokens));
    }

    /// Records that these tokens have been delivered.
    pub(crate) fn delivered(&mut self) {
        let Some((text, tokens)) = self.delivering.take().filter(|(_, tokens)| *tokens > 0) else { return };
        let now = Instant::now();
        match self.texts[text] {
            Progress::Waiting => {
                self.metrics.first_token.observe(now - self.arrived);
                // The other tokens arrived together with the first one.
                self.metrics.inter_token.observe_shared(Duration::ZERO, tokens - 1);
            }
            Progress::Streaming(before) => self.metrics.inter_token.observe_shared(now - before, tokens),
            Progress::Ended => return,
        }
        self.texts[text] = Progress::Streaming(now);
    }

    /// Records that a text has finished and its state is stored.
    pub(crate) fn ended(&mut self, text: usize, reason: FinishReason, timings: Timings) {
        self.texts[text] = Progress::Ended;
        let metrics = &self.metrics;
        metrics.finished(reason);
        metrics.queue_time.observe(timings.queue);
        metrics.queue_steps.observe_count(timings.queue_steps);
        metrics.prefill_time.observe(timings.prefill);
        metrics.decode_time.observe(timings.decode);
        metrics.whole_time.observe(self.arrived.elapsed());
    }

    /// Records that all remaining texts have failed with this error code.
    pub(crate) fn failed(&mut self, code: &'static str) {
        let open = self.end_all();
        self.metrics.failed(code, open);
    }

    /// Records that the client has stopped reading, which is the cause of cancellations from now on.
    pub(crate) fn stalled(&mut self) {
        self.cancelled = Cancelled::Stalled;
    }

    /// Gives up the remaining texts, so that another server can continue them.
    pub(crate) fn released(mut self) {
        self.cancelled = Cancelled::Released;
    }

    /// Marks all texts as ended, and returns how many had not ended yet.
    fn end_all(&mut self) -> usize {
        let open = self.texts.iter_mut().filter(|text| !matches!(text, Progress::Ended));
        open.map(|text| *text = Progress::Ended).count()
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return self.failed("internal");
        }
        let open = self.end_all();
        self.metrics.cancelled(self.cancelled, open);
    }
}
