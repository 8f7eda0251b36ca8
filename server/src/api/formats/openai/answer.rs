//! What the responses of OpenAI's completions and chat have in common: the object around the texts, usage, and why a text
//! ended.

use std::time::{SystemTime, UNIX_EPOCH};

use rand::Rng;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::wire::StreamOptions;
use crate::api::error::ApiError;
use crate::api::run::TokenUsage;
use crate::api::run::encoder::{Committed, SessionInfo, StreamEvent, to_json};
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

/// How many tokens of the prompts were not computed.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(in crate::api) struct PromptDetails {
    pub(in crate::api) cached_tokens: usize,
}

impl From<TokenUsage> for Usage {
    fn from(usage: TokenUsage) -> Self {
        Self {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            total_tokens: usage.prompt + usage.completion,
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached },
        }
    }
}

/// The field `usage` of an object.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub(in crate::api) enum UsageField {
    /// Not asked for.
    Absent,
    /// Null, until the end of the stream.
    Later,
    Known(Usage),
}

impl UsageField {
    fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

/// Times in milliseconds: an addition to OpenAI's format.
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

/// Why a text ended, in OpenAI's terms.
pub(in crate::api) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        // The client that interrupted it is gone. A retry learns that the text is incomplete.
        FinishReason::Length | FinishReason::Interrupted => "length",
    }
}

/// What ended a text before its length did: an addition to OpenAI's format.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(in crate::api) enum StopReason {
    /// Null: an end-of-text token, or nothing.
    Other(()),
    /// A token that the request named.
    Token(u32),
    /// A stop string.
    String(String),
}

impl StopReason {
    /// The reason of a text that `stop` ended.
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

/// What all objects of one response have in common.
#[derive(Clone, Debug)]
pub(in crate::api) struct Envelope {
    id: String,
    created: u64,
    model: String,
    system_fingerprint: String,
}

impl Envelope {
    /// The envelope of a new response, whose id begins with `prefix`.
    pub(in crate::api) fn new(prefix: &str, served: &Served) -> Self {
        Self {
            id: format!("{prefix}-{:032x}", rand::rng().random::<u128>()),
            created: now(),
            model: served.name.clone(),
            system_fingerprint: served.fingerprint.clone(),
        }
    }

    /// The JSON of one object of the response.
    pub(in crate::api) fn json<C: Serialize>(
        &self,
        object: &'static str,
        choices: &[C],
        usage: UsageField,
        committed: &Committed,
    ) -> String {
        let Self { id, created, model, system_fingerprint } = self;
        let (session, state, created) = (committed.session.as_ref(), committed.state.as_deref(), *created);
        let completion = Completion { id, object, created, model, system_fingerprint, choices, usage, session, state };
        to_json(&completion)
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

/// What a request asks of its response.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::api) struct ResponseOptions {
    pub(in crate::api) include_usage: bool,
    pub(in crate::api) token_ids: bool,
    /// Whether tokens are named by their ids.
    pub(in crate::api) tokens_as_ids: bool,
}

/// Whether a stream ends with its usage.
pub(in crate::api) fn include_usage(options: Option<&StreamOptions>, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = options else { return Ok(false) };
    let invalid = |message| Err(ApiError::invalid(Some("stream_options"), message));
    if !stream {
        return invalid("stream_options must be absent unless stream is true");
    }
    if options.continuous_usage_stats.unwrap_or(false) {
        return invalid("stream_options.continuous_usage_stats must be absent, null or false: it is not supported");
    }
    Ok(options.include_usage.unwrap_or(false))
}

/// The stream for a retry of a request whose response had this body.
pub(in crate::api) fn replay(body: &str, include_usage: bool) -> Vec<StreamEvent> {
    let Ok(Value::Object(mut rest)) = serde_json::from_str(body) else { return vec![StreamEvent::data("[DONE]")] };
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
    out.push(StreamEvent::data(Value::Object(rest.clone()).to_string()));
    if let (true, Some(usage)) = (include_usage, usage) {
        rest.insert("choices".into(), Value::Array(Vec::new()));
        rest.insert("usage".into(), usage);
        out.push(StreamEvent::data(Value::Object(rest).to_string()));
    }
    out.push(StreamEvent::data("[DONE]"));
    out
}
