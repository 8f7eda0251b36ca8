//! The metrics that requests update, and the export of all metrics as text.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};

use super::exposition;
use super::gather::{self, Sources};
use super::histogram::{self, Histogram};
use super::labels::{Cancelled, CauseLabel, CodeLabel, ErrorLabels, HttpLabels, PREFIX, ReasonLabel, TierLabel};
use crate::engine::FinishReason;

/// A request that the engine has accepted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Accepted {
    pub(crate) prompt_tokens: usize,
    /// Prompt tokens that needed no computation.
    pub(crate) cached_tokens: usize,
    /// Set if the request continues a conversation.
    pub(crate) turn: Option<AcceptedTurn>,
}

/// The conversation that a request continues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AcceptedTurn {
    /// Where the conversation's state was found: `memory`, `disk`, or `new` if it had none yet.
    pub(crate) tier: &'static str,
    /// Tokens of the earlier text that have to be computed again.
    pub(crate) recomputed_tokens: u64,
}

/// The metrics that requests update.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    http: Family<HttpLabels, Counter>,
    refused: Family<ErrorLabels, Counter>,
    finished: Family<ReasonLabel, Counter>,
    failed: Family<CodeLabel, Counter>,
    cancelled: Family<CauseLabel, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    turns: Family<TierLabel, Counter>,
    recomputed_tokens: Counter,
    streams_parked: Counter,
    stream_takeovers: Counter,
    stream_recomputed_tokens: Counter,
    pub(super) first_token: Histogram,
    pub(super) inter_token: Histogram,
    pub(super) whole_time: Histogram,
    pub(super) queue_time: Histogram,
    pub(super) queue_steps: Histogram,
    pub(super) prefill_time: Histogram,
    pub(super) decode_time: Histogram,
    /// Start time in seconds since 1970.
    started: f64,
}

impl Metrics {
    /// Creates the metrics, with all counts at zero.
    pub(crate) fn new() -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let mut metrics = Self {
            registry: Registry::with_prefix(PREFIX),
            http: Family::default(),
            refused: Family::default(),
            finished: Family::default(),
            failed: Family::default(),
            cancelled: Family::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            turns: Family::default(),
            recomputed_tokens: Counter::default(),
            streams_parked: Counter::default(),
            stream_takeovers: Counter::default(),
            stream_recomputed_tokens: Counter::default(),
            first_token: Histogram::new(histogram::FIRST_TOKEN),
            inter_token: Histogram::new(histogram::INTER_TOKEN),
            whole_time: Histogram::new(histogram::REQUEST),
            queue_time: Histogram::new(histogram::REQUEST),
            queue_steps: Histogram::of_counts(histogram::STEPS),
            prefill_time: Histogram::new(histogram::REQUEST),
            decode_time: Histogram::new(histogram::REQUEST),
            started,
        };
        metrics.register();
        // Export events that have not happened yet as 0, because computing a rate needs a first value.
        for reason in [FinishReason::Stop, FinishReason::Length, FinishReason::Interrupted] {
            metrics.finished.get_or_create(&ReasonLabel { finished_reason: word(reason) }).inc_by(0);
        }
        for cause in [Cancelled::Disconnected, Cancelled::Stalled, Cancelled::Released] {
            metrics.cancelled.get_or_create(&CauseLabel { cause }).inc_by(0);
        }
        for code in ["generation_failed", "grammar_limit", "shutting_down", "stalled"] {
            metrics.failed.get_or_create(&CodeLabel { code }).inc_by(0);
        }
        for tier in ["memory", "disk", "new"] {
            metrics.turns.get_or_create(&TierLabel { tier }).inc_by(0);
        }
        metrics
    }

    fn register(&mut self) {
        let all = &mut self.registry;
        all.register("http_requests", "HTTP responses, counted when they start", self.http.clone());
        all.register("requests_refused", "Error responses, with a status of 400 or more", self.refused.clone());
        let help = "Texts (one per choice and prompt) that finished";
        all.register("request_success", help, self.finished.clone());
        all.register("request_failure", "Texts that failed after they started, by error code", self.failed.clone());
        let help = "Texts cancelled because their clients disconnected or read nothing for too long, or given up at a shutdown";
        all.register("request_cancelled", help, self.cancelled.clone());
        let help = "Prompt tokens of accepted requests, including those that needed no computation";
        all.register("prompt_tokens", help, self.prompt_tokens.clone());
        let help = "Prompt tokens that needed no computation because of a stored prefix";
        all.register("prompt_tokens_cached", help, self.cached_tokens.clone());
        let help = "Requests that continued a session, by where its state was found";
        all.register("session_turns", help, self.turns.clone());
        let help = "Tokens of conversations computed again for a turn";
        all.register("session_recomputed_tokens", help, self.recomputed_tokens.clone());
        let help = "Streams that this server has left, with the text so far, for another server to continue";
        all.register("streams_parked", help, self.streams_parked.clone());
        let help = "Streams of other servers that this server has taken over";
        all.register("stream_takeovers", help, self.stream_takeovers.clone());
        let help = "Tokens computed again for streams that were taken over, which their clients had already";
        all.register("stream_recomputed_tokens", help, self.stream_recomputed_tokens.clone());
        let help = "Engine steps made while waiting for a slot, for finished texts";
        all.register("request_queue_steps", help, self.queue_steps.clone());
        let mut time = |name: &str, help: &str, histogram: &Histogram| {
            all.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        };
        time(
            "time_to_first_token",
            "Time from a request's arrival until its first token was delivered",
            &self.first_token,
        );
        time("inter_token_latency", "Time between the delivered tokens of a text", &self.inter_token);
        time(
            "e2e_request_latency",
            "Time from a request's arrival to the end of a text, for finished texts",
            &self.whole_time,
        );
        time("request_queue_time", "Time waiting for a slot, for finished texts", &self.queue_time);
        time(
            "request_prefill_time",
            "Time from getting a slot to the first token, for finished texts",
            &self.prefill_time,
        );
        time("request_decode_time", "Time from the first token to the last, for finished texts", &self.decode_time);
    }

    /// Returns all metrics as text, in OpenMetrics format if `open`, otherwise in the older format.
    pub(crate) fn text(&self, sources: &Sources<'_>, open: bool) -> String {
        let mut text = String::with_capacity(32 << 10);
        let elsewhere = [sources.registry(), gather::process(self.started)];
        let mut registries = std::iter::once(&self.registry).chain(&elsewhere);
        // Writing to a string cannot fail.
        let _ = registries.try_for_each(|registry| encode_registry(&mut text, registry));
        let of_models: Vec<String> = sources.of_models().iter().map(encoded).collect();
        text.push_str(&exposition::merged(&of_models));
        let _ = encode_eof(&mut text);
        if open { text } else { exposition::classic(&text) }
    }

    pub(crate) fn count_response(&self, labels: &HttpLabels) {
        self.http.get_or_create(labels).inc();
    }

    pub(crate) fn count_error(&self, labels: &ErrorLabels) {
        self.refused.get_or_create(labels).inc();
    }

    pub(crate) fn accepted(&self, request: &Accepted) {
        self.prompt_tokens.inc_by(request.prompt_tokens as u64);
        self.cached_tokens.inc_by(request.cached_tokens as u64);
        if let Some(turn) = request.turn {
            self.turns.get_or_create(&TierLabel { tier: turn.tier }).inc();
            self.recomputed_tokens.inc_by(turn.recomputed_tokens);
        }
    }

    /// Counts a stream that this server has left for another server.
    pub(crate) fn parked(&self) {
        self.streams_parked.inc();
    }

    /// Counts a stream that this server has taken over from another one.
    pub(crate) fn taken_over(&self) {
        self.stream_takeovers.inc();
    }

    /// Counts tokens that were computed again for a stream that was taken over.
    pub(crate) fn recomputed_for_streams(&self, tokens: usize) {
        self.stream_recomputed_tokens.inc_by(tokens as u64);
    }

    pub(super) fn finished(&self, reason: FinishReason) {
        self.finished.get_or_create(&ReasonLabel { finished_reason: word(reason) }).inc();
    }

    pub(super) fn failed(&self, code: &'static str, texts: usize) {
        if texts > 0 {
            self.failed.get_or_create(&CodeLabel { code }).inc_by(texts as u64);
        }
    }

    pub(super) fn cancelled(&self, cause: Cancelled, texts: usize) {
        self.cancelled.get_or_create(&CauseLabel { cause }).inc_by(texts as u64);
    }
}

fn encoded(registry: &Registry) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = encode_registry(&mut text, registry);
    text
}

fn word(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Interrupted => "interrupted",
    }
}
