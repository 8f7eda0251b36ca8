//! What the responses of OpenAI's completions and chat have in common: the object around the texts, the usage, and why
//! a text ended.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::wire::StreamOptions;
use crate::api::error::ApiError;
use crate::api::openapi::schemas::json_schemas;
use crate::api::request::ValidRequest;
use crate::api::run::TokenUsage;
use crate::api::run::encoder::StreamEvent;
use crate::engine::{FinishReason, StopCause, Timings};

/// The tokens that a request used.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(in crate::api) struct Usage {
    pub(in crate::api) prompt_tokens: usize,
    pub(in crate::api) completion_tokens: usize,
    /// The tokens of the prompts and the texts together.
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
    /// Null until the end of the stream.
    Later,
    Known(Usage),
}

impl UsageField {
    pub(in crate::api) fn is_absent(&self) -> bool {
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

/// Why a text ended: by itself or at a stop string, at its maximum length, or, in chat, with tool calls.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = FinishReason)]
pub(in crate::api) enum Ending {
    Stop,
    Length,
    ToolCalls,
}

impl From<FinishReason> for Ending {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            // The client that interrupted it is gone. A retry learns that the text is incomplete.
            FinishReason::Length | FinishReason::Interrupted => Self::Length,
        }
    }
}

/// What ended a text before its maximum length: an addition to OpenAI's format.
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

json_schemas! {
    StopReason: "StopReason" = {
        "description": "The stop string or the token of `stop_token_ids` that ended the text; otherwise null.",
        "type": ["string", "integer", "null"],
    };
}

impl StopReason {
    /// Returns the reason for a text that `stop` ended.
    pub(in crate::api) fn of(stop: Option<&StopCause>) -> Self {
        match stop {
            Some(StopCause::Token(token)) => Self::Token(*token),
            Some(StopCause::String(string)) => Self::String(string.clone()),
            Some(StopCause::Eos(_) | StopCause::Turn | StopCause::Grammar) | None => Self::Other(()),
        }
    }
}

/// Returns the current time, in seconds since 1970.
pub(in crate::api) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// What all objects of one response have in common.
#[derive(Clone, Debug)]
pub(in crate::api) struct Envelope {
    pub(in crate::api) id: String,
    pub(in crate::api) created: u64,
    pub(in crate::api) model: String,
    pub(in crate::api) system_fingerprint: String,
}

impl Envelope {
    /// Creates the envelope of a new response, whose id begins with `prefix`.
    pub(in crate::api) fn new(prefix: &str, request: &ValidRequest) -> Self {
        let ValidRequest { served, identity, .. } = request;
        Self {
            id: format!("{prefix}-{}", identity.id),
            created: identity.created,
            model: served.name.clone(),
            system_fingerprint: served.fingerprint.clone(),
        }
    }
}

/// Defines an object of a response: a whole response, or a chunk of a stream. Each is a type of its own, instead of one
/// type with a parameter, so that each has its own name in the OpenAPI description.
macro_rules! openai_object {
    ($(#[$meta:meta])* $name:ident, $kind:ident, $choice:ident) => {
        $(#[$meta])*
        #[derive(serde::Serialize, utoipa::ToSchema)]
        pub(in crate::api) struct $name<'a> {
            id: &'a str,
            object: $kind,
            /// When the response began, in seconds since 1970.
            created: u64,
            /// The model's name.
            model: &'a str,
            /// Changes with the weights and with the server's version.
            system_fingerprint: &'a str,
            /// Only in chat with `return_token_ids`: the ids of the prompt; in a stream, only in the first chunk.
            #[serde(skip_serializing_if = "Option::is_none")]
            #[schema(nullable = false)]
            prompt_token_ids: Option<&'a [u32]>,
            #[schema(value_type = Vec<$choice>)]
            choices: &'a [&'a $choice],
            /// In a stream, only with `stream_options.include_usage`: null, or the usage so far with
            /// `continuous_usage_stats`; a last chunk, which has no choices, has the final usage.
            #[serde(skip_serializing_if = "UsageField::is_absent")]
            #[schema(value_type = Option<$crate::api::formats::openai::answer::Usage>)]
            usage: UsageField,
            /// If the request named a session: the version that the turn made.
            #[serde(skip_serializing_if = "Option::is_none")]
            #[schema(nullable = false)]
            session: Option<&'a $crate::api::run::encoder::SessionInfo>,
            /// If the request asked for it: the state, to continue from.
            #[serde(skip_serializing_if = "Option::is_none")]
            #[schema(nullable = false, content_encoding = "base64")]
            state: Option<&'a str>,
        }

        impl $name<'_> {
            fn json(
                envelope: &Envelope,
                prompt: Option<&[u32]>,
                choices: &[&$choice],
                usage: UsageField,
                committed: &Committed,
            ) -> String {
                let Envelope { id, created, model, system_fingerprint } = envelope;
                let (session, state) = (committed.session.as_ref(), committed.state.as_deref());
                let (object, created) = ($kind, *created);
                let prompt_token_ids = prompt;
                let object = $name { id, object, created, model, system_fingerprint, prompt_token_ids, choices, usage, session, state };
                $crate::api::run::encoder::to_json(&object)
            }
        }
    };
}
pub(in crate::api::formats) use openai_object;

/// What a request asks its response to contain.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::api) struct ResponseOptions {
    pub(in crate::api) usage: StreamUsage,
    pub(in crate::api) token_ids: bool,
    /// Whether tokens are named by their ids.
    pub(in crate::api) tokens_as_ids: bool,
}

/// Where a stream has its usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::api) enum StreamUsage {
    #[default]
    Absent,
    /// Only in a last chunk.
    AtEnd,
    /// In every chunk: the usage so far.
    Continuous,
}

impl StreamUsage {
    /// Whether a stream ends with its usage.
    pub(in crate::api) fn is_on(self) -> bool {
        self != Self::Absent
    }

    /// Returns the usage in a chunk before the last.
    pub(in crate::api) fn of_chunk(self, so_far: TokenUsage) -> UsageField {
        match self {
            Self::Absent => UsageField::Absent,
            Self::AtEnd => UsageField::Later,
            Self::Continuous => UsageField::Known(so_far.into()),
        }
    }
}

/// Returns the usage of a request before its first generated token.
pub(in crate::api) fn usage_at_start(request: &ValidRequest) -> TokenUsage {
    let prompt = request.prompts.iter().map(Vec::len).sum();
    TokenUsage { prompt, cached: request.cached.iter().sum(), completion: 0 }
}

/// Returns where a stream has its usage. As in vLLM, its chunks have the usage only if its end has it.
pub(in crate::api) fn stream_usage(options: Option<&StreamOptions>, stream: bool) -> Result<StreamUsage, ApiError> {
    let Some(options) = options else { return Ok(StreamUsage::Absent) };
    let invalid = |message| Err(ApiError::invalid(Some("stream_options"), message));
    if !stream {
        return invalid("stream_options must be absent unless stream is true");
    }
    Ok(match (options.include_usage, options.continuous_usage_stats) {
        (Some(true), Some(true)) => StreamUsage::Continuous,
        (Some(true), _) => StreamUsage::AtEnd,
        _ => StreamUsage::Absent,
    })
}

/// Returns the events of a stream that repeats a response with this body, for a retry of its request.
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
