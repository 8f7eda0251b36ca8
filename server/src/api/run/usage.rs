//! Counts the tokens and times of one request, takes the tokens from what its key has reserved, and logs both when the
//! request ends, however it ends.

use std::time::{Duration, Instant};

use opentelemetry::Context;
use tracing::{Span, info, warn};

use super::encoder::TokenUsage;
use super::spans;
use crate::api::auth::context::Reservation;
use crate::engine::{Failure, Finish, Timings};

/// Adds up a request's tokens and times, and logs them when it is dropped.
pub(in crate::api) struct UsageRecorder {
    span: Span,
    context: Context,
    /// What the request has reserved of its key's quota; `None` if the server has no keys.
    reservation: Option<Reservation>,
    /// Number of tokens still to come that another server has generated, and charged.
    known: usize,
    started: Instant,
    pub(in crate::api) usage: TokenUsage,
    longest: Timings,
    open: usize,
    failure: Option<Failure>,
}

impl UsageRecorder {
    /// Creates a recorder in the current span. The request's prompts count as used now, because the engine has accepted
    /// it.
    pub(in crate::api) fn new(
        (prompt, cached): (usize, usize),
        texts: usize,
        (mut reservation, known): (Option<Reservation>, usize),
    ) -> Self {
        if let Some(reservation) = &mut reservation {
            reservation.spend(prompt);
        }
        Self {
            span: Span::current(),
            context: Context::current(),
            reservation,
            known,
            started: Instant::now(),
            usage: TokenUsage { prompt, cached, completion: 0 },
            longest: Timings::default(),
            open: texts,
            failure: None,
        }
    }

    /// Adds tokens as they come, so that the count is right whenever the request ends.
    pub(in crate::api) fn generated(&mut self, tokens: usize) {
        self.usage.completion += tokens;
        let known = tokens.min(self.known);
        self.known -= known;
        if let Some(reservation) = &mut self.reservation {
            reservation.spend(tokens - known);
        }
    }

    /// Records the end of a text.
    pub(in crate::api) fn finish(&mut self, finish: &Finish) {
        spans::text(&self.context, finish);
        self.longest.queue = self.longest.queue.max(finish.timings.queue);
        self.longest.prefill = self.longest.prefill.max(finish.timings.prefill);
        self.longest.decode = self.longest.decode.max(finish.timings.decode);
        self.open -= 1;
    }

    /// Records why the request cannot be finished.
    pub(in crate::api) fn fail(&mut self, failure: Failure) {
        self.failure = Some(failure);
    }

    /// Whether every text has ended.
    pub(in crate::api) fn is_complete(&self) -> bool {
        self.open == 0
    }
}

impl Drop for UsageRecorder {
    fn drop(&mut self) {
        let ms = |duration: Duration| (duration.as_secs_f64() * 1e4).round() / 10.0;
        self.span.record("prompt_tokens", self.usage.prompt);
        self.span.record("completion_tokens", self.usage.completion);
        self.span.record("queue_ms", ms(self.longest.queue));
        self.span.record("prefill_ms", ms(self.longest.prefill));
        self.span.record("decode_ms", ms(self.longest.decode));
        spans::done(&self.context, &self.usage, self.failure);
        let total_ms = ms(self.started.elapsed());
        self.span.in_scope(|| match self.failure {
            Some(Failure::Grammar) => info!(total_ms, "completion ended: {}", Failure::Grammar),
            Some(failure) => warn!(total_ms, "completion failed: {failure}"),
            None if self.is_complete() => info!(total_ms, "completion finished"),
            None => info!(total_ms, "completion cancelled"),
        });
    }
}
