//! Completions as they go out: one object, or the chunks of a stream.

use std::time::{SystemTime, UNIX_EPOCH};

use rand::Rng;
use serde::Serialize;

use super::state::Served;
use crate::engine::{Finish, FinishReason, Timings};

/// Tokens that a request took.
#[expect(clippy::struct_field_names, reason = "the names are the format's")]
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
    pub(super) total_tokens: usize,
}

impl Usage {
    /// What a request has taken that has generated nothing yet.
    pub(super) fn of_prompts(tokens: usize) -> Self {
        Self { prompt_tokens: tokens, completion_tokens: 0, total_tokens: tokens }
    }

    pub(super) fn add_completion(&mut self, tokens: usize) {
        self.completion_tokens += tokens;
        self.total_tokens += tokens;
    }
}

/// The field `usage` of an object.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum UsageField {
    /// Not there: nobody asked.
    Absent,
    /// Null: it comes at the stream's end.
    Later,
    /// There.
    Known(Usage),
}

impl UsageField {
    fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

/// Where the time went, in milliseconds: an addition to OpenAI's format.
#[expect(clippy::struct_field_names, reason = "the names say the unit")]
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct TimingsMs {
    queue_ms: f64,
    prefill_ms: f64,
    decode_ms: f64,
}

impl From<Timings> for TimingsMs {
    fn from(timings: Timings) -> Self {
        let ms = |duration: std::time::Duration| duration.as_micros() as f64 / 1e3;
        Self { queue_ms: ms(timings.queue), prefill_ms: ms(timings.prefill), decode_ms: ms(timings.decode) }
    }
}

/// One text, or a piece of it.
#[derive(Debug, Default, Serialize)]
pub(super) struct Choice {
    pub(super) index: usize,
    pub(super) text: String,
    /// Always null: log probabilities are refused.
    pub(super) logprobs: Option<()>,
    pub(super) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timings: Option<TimingsMs>,
}

impl Choice {
    /// Marks the text as ended.
    pub(super) fn end(&mut self, finish: &Finish) {
        self.finish_reason = Some(match finish.reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        });
        self.timings = Some(finish.timings.into());
    }
}

/// What all objects of one answer have in common.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    id: String,
    created: u64,
    model: String,
    system_fingerprint: String,
}

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [Choice],
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    usage: UsageField,
}

impl Answer {
    pub(super) fn new(served: &Served) -> Self {
        Self {
            id: format!("cmpl-{:032x}", rand::rng().random::<u128>()),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            model: served.name.clone(),
            system_fingerprint: served.fingerprint.clone(),
        }
    }

    /// The JSON of one object with `choices`.
    pub(super) fn json(&self, choices: &[Choice], usage: UsageField) -> String {
        let Self { id, created, model, system_fingerprint } = self;
        let object = "text_completion";
        let completion = Completion { id, object, created: *created, model, system_fingerprint, choices, usage };
        // Strings, numbers and lists of them: there is nothing in it that JSON cannot say.
        serde_json::to_string(&completion).unwrap_or_default()
    }
}
