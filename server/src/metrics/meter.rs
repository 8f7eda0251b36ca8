//! Measures the texts of one request, from its arrival to each text's end, however that comes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Cancelled, Metrics};
use crate::engine::{FinishReason, Timings};

/// What one text has done so far.
#[derive(Clone, Copy, Debug)]
enum Text {
    /// Nothing.
    Silent,
    /// Said something at that moment.
    Said(Instant),
    Ended,
}

/// One request's texts; those that have not ended when it is dropped were cancelled.
#[derive(Debug)]
pub(crate) struct Meter {
    metrics: Arc<Metrics>,
    arrived: Instant,
    texts: Vec<Text>,
    /// The text and the number of its tokens that are on their way to the reader.
    leaving: Option<(usize, usize)>,
    cancelled: Cancelled,
}

impl Meter {
    /// A request that arrived at that moment, for so many texts.
    pub(crate) fn new(metrics: Arc<Metrics>, arrived: Instant, texts: usize) -> Self {
        Self { metrics, arrived, texts: vec![Text::Silent; texts], leaving: None, cancelled: Cancelled::Disconnected }
    }

    /// So many tokens of a text are about to be handed to the reader.
    pub(crate) fn leaves(&mut self, text: usize, tokens: usize) {
        self.leaving = Some((text, tokens));
    }

    /// The reader has what was about to be handed over.
    pub(crate) fn left(&mut self) {
        let Some((text, tokens)) = self.leaving.take().filter(|(_, tokens)| *tokens > 0) else { return };
        let now = Instant::now();
        match self.texts[text] {
            Text::Silent => {
                self.metrics.first_token.observe(now - self.arrived);
                // The others have come with it.
                self.metrics.inter_token.observe_shared(Duration::ZERO, tokens - 1);
            }
            Text::Said(before) => self.metrics.inter_token.observe_shared(now - before, tokens),
            Text::Ended => return,
        }
        self.texts[text] = Text::Said(now);
    }

    /// A text has come to its end, and what was to be kept of it is.
    pub(crate) fn ended(&mut self, text: usize, reason: FinishReason, timings: Timings) {
        self.texts[text] = Text::Ended;
        let metrics = &self.metrics;
        metrics.finished(reason);
        metrics.queue_time.observe(timings.queue);
        metrics.prefill_time.observe(timings.prefill);
        metrics.decode_time.observe(timings.decode);
        metrics.whole_time.observe(self.arrived.elapsed());
    }

    /// No text goes on, for the reason of this code.
    pub(crate) fn failed(&mut self, code: &'static str) {
        let open = self.end_all();
        self.metrics.failed(code, open);
    }

    /// The reader takes nothing any more: what is cancelled from now on is for that.
    pub(crate) fn stalled(&mut self) {
        self.cancelled = Cancelled::Stalled;
    }

    /// Ends the texts that have not ended; how many there were.
    fn end_all(&mut self) -> usize {
        let open = self.texts.iter_mut().filter(|text| !matches!(text, Text::Ended));
        open.map(|text| *text = Text::Ended).count()
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
