//! What operators watch: counts and times, kept without locks on the way of a token, and written for scrapers.
//!
//! Names follow vLLM's where there is one, with `tidegate_` for `vllm:`, so that its dashboards need that one change.
//! Knows no HTTP; what is counted elsewhere (by the engine, the store, the system) is gathered at each scrape.

mod exposition;
mod gather;
mod histogram;
mod meter;
mod process;

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Registry, Unit};

pub(crate) use exposition::{CLASSIC, OPEN_METRICS};
pub(crate) use gather::{Gathered, Model};
use histogram::Histogram;
pub(crate) use meter::Meter;

use crate::engine::FinishReason;

/// Before every name that is this server's own.
const PREFIX: &str = "tidegate";

/// One answer to HTTP. Every label has a bounded number of values: the route is the pattern, never the path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Answered {
    /// The pattern that the path matched; `other` where none did.
    pub(crate) route: String,
    /// The method; `other` where HTTP does not define it.
    pub(crate) method: &'static str,
    pub(crate) status: u16,
}

/// One answer that says why not.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Refused {
    pub(crate) status: u16,
    /// The error's code, or its type where it has none.
    pub(crate) code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    finished_reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Cause {
    cause: Cancelled,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Found {
    tier: &'static str,
}

/// Why a text was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cancelled {
    /// Its client left.
    Disconnected,
    /// Its client read nothing for too long.
    Stalled,
}

impl EncodeLabelValue for Cancelled {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        let word = match self {
            Self::Disconnected => "disconnected",
            Self::Stalled => "stalled",
        };
        EncodeLabelValue::encode(&word, encoder)
    }
}

/// A request for text that the engine has taken.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Taken {
    pub(crate) prompt_tokens: usize,
    /// Those of them that needed no computing.
    pub(crate) cached_tokens: usize,
    /// Where it goes on with a conversation.
    pub(crate) turn: Option<TurnTaken>,
}

/// The conversation that a request goes on with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TurnTaken {
    /// Where its state was found: `memory`, `disk`, or `new` where there was none yet.
    pub(crate) tier: &'static str,
    /// Tokens of the text before that are computed again.
    pub(crate) recomputed_tokens: u64,
}

/// All that is counted here.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    http: Family<Answered, Counter>,
    refused: Family<Refused, Counter>,
    finished: Family<Reason, Counter>,
    failed: Family<Code, Counter>,
    cancelled: Family<Cause, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    turns: Family<Found, Counter>,
    recomputed_tokens: Counter,
    first_token: Histogram,
    inter_token: Histogram,
    whole_time: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    /// When the server began, in seconds since 1970.
    began: f64,
}

impl Metrics {
    /// Nothing counted yet.
    pub(crate) fn new() -> Self {
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
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
            first_token: Histogram::new(histogram::FIRST_TOKEN),
            inter_token: Histogram::new(histogram::INTER_TOKEN),
            whole_time: Histogram::new(histogram::REQUEST),
            queue_time: Histogram::new(histogram::REQUEST),
            prefill_time: Histogram::new(histogram::REQUEST),
            decode_time: Histogram::new(histogram::REQUEST),
            began,
        };
        metrics.register();
        // What has never happened is 0, not absent: a rate needs a first value.
        for reason in [FinishReason::Stop, FinishReason::Length, FinishReason::Interrupted] {
            metrics.finished.get_or_create(&Reason { finished_reason: word(reason) }).inc_by(0);
        }
        for cause in [Cancelled::Disconnected, Cancelled::Stalled] {
            metrics.cancelled.get_or_create(&Cause { cause }).inc_by(0);
        }
        for code in ["generation_failed", "grammar_limit", "shutting_down", "stalled"] {
            metrics.failed.get_or_create(&Code { code }).inc_by(0);
        }
        for tier in ["memory", "disk", "new"] {
            metrics.turns.get_or_create(&Found { tier }).inc_by(0);
        }
        metrics
    }

    fn register(&mut self) {
        let all = &mut self.registry;
        all.register("http_requests", "Answers to HTTP requests, when they start", self.http.clone());
        all.register(
            "requests_refused",
            "Answers that say why not, with a status of 400 and more",
            self.refused.clone(),
        );
        let help = "Texts (one for each choice of each prompt) that came to their end";
        all.register("request_success", help, self.finished.clone());
        all.register(
            "request_failure",
            "Texts that were begun and failed, by the code of the error",
            self.failed.clone(),
        );
        let help = "Texts that were given up since their clients left, or read nothing for too long";
        all.register("request_cancelled", help, self.cancelled.clone());
        let help = "Tokens of the prompts of requests that were taken, those that needed no computing included";
        all.register("prompt_tokens", help, self.prompt_tokens.clone());
        let help = "Prompt tokens that needed no computing, since their beginning was known";
        all.register("prompt_tokens_cached", help, self.cached_tokens.clone());
        let help = "Requests that went on with a session, by where its state was found";
        all.register("session_turns", help, self.turns.clone());
        let help = "Tokens of conversations that had to be computed again for a turn";
        all.register("session_recomputed_tokens", help, self.recomputed_tokens.clone());
        let mut time = |name: &str, help: &str, histogram: &Histogram| {
            all.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        };
        time("time_to_first_token", "From a request's arrival until its first token was handed out", &self.first_token);
        time("inter_token_latency", "Between tokens of a text as they were handed out", &self.inter_token);
        time(
            "e2e_request_latency",
            "From a request's arrival to a text's end, of texts that finished",
            &self.whole_time,
        );
        time("request_queue_time", "Waiting for a slot, of texts that finished", &self.queue_time);
        time("request_prefill_time", "From the slot to the first token, of texts that finished", &self.prefill_time);
        time("request_decode_time", "From the first token to the last, of texts that finished", &self.decode_time);
    }

    /// Everything as text, in OpenMetrics or in the older format.
    pub(crate) fn text(&self, gathered: &Gathered<'_>, open: bool) -> String {
        let mut text = String::with_capacity(32 << 10);
        let elsewhere = [gathered.registry(), gather::process(self.began)];
        let mut registries = std::iter::once(&self.registry).chain(&elsewhere);
        // A string takes all that is written.
        let _ = registries.try_for_each(|registry| encode_registry(&mut text, registry));
        let _ = encode_eof(&mut text);
        if open { text } else { exposition::classic(&text) }
    }

    /// Counts an answer.
    pub(crate) fn answered(&self, answer: &Answered) {
        self.http.get_or_create(answer).inc();
    }

    /// Counts an answer that says why not.
    pub(crate) fn refused(&self, refused: &Refused) {
        self.refused.get_or_create(refused).inc();
    }

    /// Counts a request that the engine has taken.
    pub(crate) fn taken(&self, taken: &Taken) {
        self.prompt_tokens.inc_by(taken.prompt_tokens as u64);
        self.cached_tokens.inc_by(taken.cached_tokens as u64);
        if let Some(turn) = taken.turn {
            self.turns.get_or_create(&Found { tier: turn.tier }).inc();
            self.recomputed_tokens.inc_by(turn.recomputed_tokens);
        }
    }

    fn finished(&self, reason: FinishReason) {
        self.finished.get_or_create(&Reason { finished_reason: word(reason) }).inc();
    }

    fn failed(&self, code: &'static str, texts: usize) {
        if texts > 0 {
            self.failed.get_or_create(&Code { code }).inc_by(texts as u64);
        }
    }

    fn cancelled(&self, cause: Cancelled, texts: usize) {
        self.cancelled.get_or_create(&Cause { cause }).inc_by(texts as u64);
    }
}

fn word(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Interrupted => "interrupted",
    }
}
