//! What OpenAI's formats of completions and chat have in common: the object around the texts, usage, and why a text
//! ended.

use std::time::{SystemTime, UNIX_EPOCH};

use rand::Rng;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::run::encoder::{Kept, Said, SessionInfo};
use crate::api::state::Served;
use crate::engine::{FinishReason, StopCause, Timings};

/// Tokens that a request took.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(in crate::api) struct Usage {
    pub(in crate::api) prompt_tokens: usize,
    pub(in crate::api) completion_tokens: usize,
    pub(in crate::api) total_tokens: usize,
    pub(in crate::api) prompt_tokens_details: PromptDetails,
}

/// How much of the prompts needed no computing.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(in crate::api) struct PromptDetails {
    pub(in crate::api) cached_tokens: usize,
}

impl Usage {
    /// What a request has taken that has generated nothing yet.
    pub(in crate::api) fn of_prompts(tokens: usize, cached_tokens: usize) -> Self {
        let prompt_tokens_details = PromptDetails { cached_tokens };
        Self { prompt_tokens: tokens, completion_tokens: 0, total_tokens: tokens, prompt_tokens_details }
    }

    pub(in crate::api) fn add_completion(&mut self, tokens: usize) {
        self.completion_tokens += tokens;
        self.total_tokens += tokens;
    }
}

/// The field `usage` of an object.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub(in crate::api) enum UsageField {
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
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = Timings)]
pub(in crate::api) struct TimingsMs {
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

/// Why a text ended, in OpenAI's words.
pub(in crate::api) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        // The one who interrupted it does not read this; whoever asks for it again sees that more was to come.
        FinishReason::Length | FinishReason::Interrupted => "length",
    }
}

/// What has ended a text by itself: an addition to OpenAI's format.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(in crate::api) enum StopReason {
    /// Null: an end-of-text token, or nothing.
    Other(()),
    /// A token that the request has named.
    Token(u32),
    /// A stop string.
    String(String),
}

impl StopReason {
    /// That of a text that `stop` has ended.
    pub(in crate::api) fn of(stop: Option<&StopCause>) -> Self {
        match stop {
            Some(StopCause::Token(token)) => Self::Token(*token),
            Some(StopCause::String(string)) => Self::String(string.clone()),
            Some(StopCause::Eos(_) | StopCause::Grammar) | None => Self::Other(()),
        }
    }
}

/// Seconds since 1970.
pub(in crate::api) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What all objects of one answer have in common.
#[derive(Clone, Debug)]
pub(in crate::api) struct Head {
    pub(in crate::api) id: String,
    pub(in crate::api) created: u64,
    pub(in crate::api) model: String,
    pub(in crate::api) system_fingerprint: String,
}

impl Head {
    /// That of a new answer, whose id begins with `prefix`.
    pub(in crate::api) fn new(prefix: &str, served: &Served) -> Self {
        Self {
            id: format!("{prefix}-{:032x}", rand::rng().random::<u128>()),
            created: now(),
            model: served.name.clone(),
            system_fingerprint: served.fingerprint.clone(),
        }
    }

    /// The JSON of one object of the answer.
    pub(in crate::api) fn json<C: Serialize>(
        &self,
        object: &'static str,
        choices: &[C],
        usage: UsageField,
        kept: &Kept,
    ) -> String {
        let Self { id, created, model, system_fingerprint } = self;
        let (session, state, created) = (kept.session.as_ref(), kept.state.as_deref(), *created);
        let completion = Completion { id, object, created, model, system_fingerprint, choices, usage, session, state };
        // Strings, numbers and lists of them: there is nothing in it that JSON cannot say.
        serde_json::to_string(&completion).unwrap_or_default()
    }
}

#[derive(Serialize)]
struct Completion<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    usage: UsageField,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<&'a SessionInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'a str>,
}

/// What a request wants to be told.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::api) struct Wanted {
    pub(in crate::api) include_usage: bool,
    pub(in crate::api) token_ids: bool,
    /// The texts in one piece at the end: a stream that is not sent again goes without.
    pub(in crate::api) whole: bool,
}

/// A body that has been given before, as the stream that it would have been.
pub(in crate::api) fn replay(body: &str, include_usage: bool) -> Vec<Said> {
    let Ok(Value::Object(mut rest)) = serde_json::from_str(body) else { return vec![Said::data("[DONE]")] };
    let usage = rest.remove("usage");
    let mut out = Vec::new();
    if include_usage {
        rest.insert("usage".into(), Value::Null);
    }
    let mut choices = rest.remove("choices").unwrap_or_default();
    if rest.get("object").is_some_and(|object| object == "chat.completion") {
        rest.insert("object".into(), "chat.completion.chunk".into());
        for choice in choices.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
            let mut message = choice.remove("message").unwrap_or_default();
            for (index, call) in
                message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten().enumerate()
            {
                call["index"] = index.into();
            }
            choice.insert("delta".into(), message);
        }
    }
    rest.insert("choices".into(), choices);
    out.push(Said::data(Value::Object(rest.clone()).to_string()));
    if let (true, Some(usage)) = (include_usage, usage) {
        rest.insert("choices".into(), Value::Array(Vec::new()));
        rest.insert("usage".into(), usage);
        out.push(Said::data(Value::Object(rest).to_string()));
    }
    out.push(Said::data("[DONE]"));
    out
}
