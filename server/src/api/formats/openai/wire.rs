//! The bodies of requests for text, as they come in.

use std::collections::BTreeMap;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode, header};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use utoipa::openapi::{AllOfBuilder, Ref, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::api::error::ApiError;
use crate::api::formats::numbers;
use crate::api::openapi::fragments;
use crate::api::openapi::schemas::{Grammars, ToolFields};
use crate::api::request::grammar::Constrained;
use crate::api::request::tools::{MessageCall, Tools};
use crate::api::run::OnDisconnect;
use crate::text::Message;

/// Levels of objects and arrays in a body that serde_json reads.
const DEEPEST: usize = 127;

/// A prompt, or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, an array of strings, an array of token ids, or an array of those")]
pub(in crate::api) enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}

/// One stop string, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
pub(in crate::api) enum Stop {
    One(String),
    Many(Vec<String>),
}

/// A seed: whatever 64 bits can hold, with a sign or without.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "expected an integer of 64 bits")]
pub(in crate::api) enum Seed {
    Unsigned(u64),
    Signed(i64),
}

impl Seed {
    pub(in crate::api) fn bits(self) -> u64 {
        match self {
            Self::Unsigned(seed) => seed,
            Self::Signed(seed) => seed.cast_unsigned(),
        }
    }
}

/// Log probabilities: how many with each token in completions, whether at all in chat.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "expected an integer from 0 to 20 in completions, true or false in chat")]
pub(in crate::api) enum Logprobs {
    Switch(bool),
    Top(u64),
}

/// Options of a stream; only if `stream` is true.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct StreamOptions {
    /// Whether the last chunk has the usage, and no choices.
    pub(in crate::api) include_usage: Option<bool>,
    /// Not supported: must be false or absent.
    #[schema(schema_with = fragments::never)]
    pub(in crate::api) continuous_usage_stats: Option<bool>,
}

/// Which format a request for text has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) enum Format {
    Completions,
    Chat,
    Responses,
}

impl Format {
    pub(in crate::api) fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
        }
    }
}

/// What a message says.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of text parts")]
pub(in crate::api) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// A part of a message; only text is understood.
#[derive(Debug, Deserialize)]
pub(in crate::api) struct Part {
    #[serde(rename = "type")]
    pub(in crate::api) kind: String,
    pub(in crate::api) text: Option<String>,
}

/// One message of a conversation.
#[derive(Debug, Default, Deserialize)]
pub(in crate::api) struct ChatMessage {
    pub(in crate::api) role: String,
    pub(in crate::api) content: Option<Content>,
    /// Whose message it is among those of its role.
    pub(in crate::api) name: Option<String>,
    /// The calls that an assistant's message makes.
    pub(in crate::api) tool_calls: Option<Vec<MessageCall>>,
    /// The call that a tool's message answers.
    pub(in crate::api) tool_call_id: Option<String>,
}

impl ChatMessage {
    /// The message as the template takes it. `param` is the field's name.
    pub(in crate::api) fn text(self, param: &str) -> Result<Message, ApiError> {
        let text = |part: Part| match part.text {
            Some(text) if matches!(part.kind.as_str(), "text" | "input_text" | "output_text") => Ok(text),
            _ => {
                let message = format!("{param} must have parts of text alone, found one of type {:?}", part.kind);
                Err(ApiError::invalid(Some(param), message))
            }
        };
        let content = match self.content {
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => parts.into_iter().map(text).collect::<Result<Vec<_>, _>>()?.concat(),
            // What a message says that calls tools is the calls. One that was cut off before its first call was whole
            // says nothing, and comes back as it went out.
            None if self.role == "assistant" => String::new(),
            None => return Err(ApiError::invalid(Some(param), format!("{param} must all have content"))),
        };
        let mut more = Map::new();
        let calls = self.tool_calls.unwrap_or_default().into_iter().map(|call| call.shown(param));
        let calls = calls.collect::<Result<Vec<_>, _>>()?;
        if !calls.is_empty() {
            more.insert("tool_calls".into(), calls.into());
        }
        more.extend(self.tool_call_id.map(|id| ("tool_call_id".into(), id.into())));
        more.extend(self.name.map(|name| ("name".into(), name.into())));
        // The same under its newer name, which templates do not know.
        let role = if self.role == "developer" { "system".to_owned() } else { self.role };
        Ok(Message { role, content, more })
    }
}

/// A request for text as OpenAI defines it, whichever of its formats, with vLLM's additions and those for sessions;
/// `null` is the same as absent.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(in crate::api) struct GenerationRequest {
    /// The model's name as in `/v1/models`.
    pub(in crate::api) model: Option<String>,
    #[schema(schema_with = fragments::prompt)]
    pub(in crate::api) prompt: Option<Prompt>,
    #[schema(schema_with = fragments::messages)]
    pub(in crate::api) messages: Option<Vec<ChatMessage>>,
    #[schema(schema_with = fragments::max_tokens)]
    pub(in crate::api) max_tokens: Option<u64>,
    #[schema(schema_with = fragments::max_tokens)]
    pub(in crate::api) max_completion_tokens: Option<u64>,
    #[schema(schema_with = fragments::stop)]
    pub(in crate::api) stop: Option<Stop>,
    /// Whether to stream the answer as server-sent events.
    pub(in crate::api) stream: Option<bool>,
    pub(in crate::api) stream_options: Option<StreamOptions>,
    /// 0 always takes the most likely token.
    #[schema(minimum = 0, maximum = 2)]
    pub(in crate::api) temperature: Option<f64>,
    /// Sample from the most likely tokens that together have this probability.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub(in crate::api) top_p: Option<f64>,
    /// Sample from this many of the most likely tokens; 0 and -1 mean all.
    #[schema(minimum = -1)]
    pub(in crate::api) top_k: Option<i64>,
    /// Sample from tokens with at least this share of the most likely token's probability.
    #[schema(minimum = 0, maximum = 1)]
    pub(in crate::api) min_p: Option<f64>,
    /// Sample from the most typical tokens that together have this probability.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub(in crate::api) typical_p: Option<f64>,
    /// Above 1, repeated tokens become less likely.
    #[schema(exclusive_minimum = 0, maximum = 10)]
    pub(in crate::api) repetition_penalty: Option<f64>,
    /// Subtracted from a token's logit for each time it was generated.
    #[schema(minimum = -2, maximum = 2)]
    pub(in crate::api) frequency_penalty: Option<f64>,
    /// Subtracted once from the logit of each token that was generated.
    #[schema(minimum = -2, maximum = 2)]
    pub(in crate::api) presence_penalty: Option<f64>,
    #[schema(schema_with = fragments::logit_bias)]
    pub(in crate::api) logit_bias: Option<BTreeMap<String, f64>>,
    #[schema(schema_with = fragments::seed)]
    pub(in crate::api) seed: Option<Seed>,
    /// Choices per prompt; choice i is sampled with the seed plus i.
    #[schema(minimum = 1, maximum = 128)]
    pub(in crate::api) n: Option<u64>,
    /// Texts generated per prompt; the `n` most likely are returned.
    #[schema(minimum = 1, maximum = 128)]
    pub(in crate::api) best_of: Option<u64>,
    /// Whether the text starts with the prompt; not for translations.
    pub(in crate::api) echo: Option<bool>,
    #[schema(schema_with = fragments::anything)]
    pub(in crate::api) logprobs: Option<Logprobs>,
    /// The number of log probabilities per token.
    #[schema(minimum = 0, maximum = 20)]
    pub(in crate::api) top_logprobs: Option<u64>,
    /// Whether tokens are named by their ids, as `token_id:7`.
    pub(in crate::api) return_tokens_as_token_ids: Option<bool>,
    /// Tokens to generate before the text may end.
    #[schema(minimum = 0)]
    pub(in crate::api) min_tokens: Option<u64>,
    #[schema(schema_with = fragments::some_token_ids)]
    pub(in crate::api) stop_token_ids: Option<Vec<u32>>,
    /// Whether to put the model's initial tokens before the prompt. Default: true.
    pub(in crate::api) add_special_tokens: Option<bool>,
    /// Whether to continue past the end of a text.
    pub(in crate::api) ignore_eos: Option<bool>,
    /// Whether the answer has the ids of its tokens.
    pub(in crate::api) return_token_ids: Option<bool>,
    /// The session that this is a turn of. The rest of the body has only what is new.
    pub(in crate::api) session: Option<String>,
    /// A name for the version that the turn creates; only with `session`.
    #[schema(max_length = 256)]
    pub(in crate::api) label: Option<String>,
    pub(in crate::api) on_disconnect: Option<OnDisconnect>,
    /// The state from an answer with `return_state`: the conversation continues from it. Needs a server with a secret.
    #[schema(content_encoding = "base64")]
    pub(in crate::api) state: Option<String>,
    /// Whether the answer has the conversation's state, for the client to keep. Needs a server with a secret.
    pub(in crate::api) return_state: Option<bool>,
    /// The form that the answer must have, under whichever name.
    #[serde(skip)]
    pub(in crate::api) constrained: Option<Constrained>,
    /// The tools that the answer may call.
    #[serde(skip)]
    pub(in crate::api) tools: Option<Tools>,
    /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
    #[serde(flatten)]
    #[schema(value_type = RestFields)]
    pub(in crate::api) rest: BTreeMap<String, Value>,
}

/// The fields that are parsed from `rest`.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes fields that are parsed by hand")]
struct RestFields {
    #[serde(flatten)]
    grammars: Grammars,
    #[serde(flatten)]
    tools: ToolFields,
}

macro_rules! requests {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        pub(in crate::api) struct $name;

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                let fields = Ref::from_schema_name(GenerationRequest::name());
                Schema::AllOf(AllOfBuilder::new().item(fields).build()).into()
            }
        }

        impl ToSchema for $name {
            fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
                schemas.push((GenerationRequest::name().into_owned(), GenerationRequest::schema()));
                GenerationRequest::schemas(schemas);
            }
        }
    )*};
}

requests!(
    /// The fields of a [`GenerationRequest`] that completions take.
    CompletionRequest,
    /// The fields of a [`GenerationRequest`] that chat takes.
    ChatRequest
);

impl GenerationRequest {
    /// Takes out of `rest` what asks for a form of the answer.
    pub(in crate::api) fn take_forms(&mut self) -> Result<(), ApiError> {
        self.constrained = Constrained::take(&mut self.rest)?;
        self.tools = Tools::take(&mut self.rest)?;
        Ok(())
    }

    /// Whether a stream is to end with its usage.
    pub(in crate::api) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }
}

/// The body, where it says that it is JSON and came whole.
pub(in crate::api) fn body(
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
    max_body_bytes: usize,
) -> Result<Bytes, ApiError> {
    if !is_json(headers) {
        let message = "content-type must be application/json";
        return Err(ApiError::request(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, None, message));
    }
    body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            let message = format!("the body must be at most {max_body_bytes} bytes long");
            ApiError::request(StatusCode::PAYLOAD_TOO_LARGE, None, None, message)
        }
        status => ApiError::request(status, None, None, format!("the body could not be read: {rejection}")),
    })
}

/// Parses a body, with an error that names the field at fault. A number such as `8.0` is an integer, as JSON Schema has
/// it: where a body with such numbers is not understood, it is read again with `8` in its place.
pub(in crate::api) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    strictly(body).or_else(|error| numbers::whole(body).map_or(Err(error), |body| strictly(&body)))
}

fn strictly<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    // Serde would take an array for the fields in their order.
    if body.trim_ascii_start().first() == Some(&b'[') {
        return Err(ApiError::invalid(None, "the body must be a JSON object, found an array"));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    let request = serde_path_to_error::deserialize(&mut json).map_err(|error| field_error(&error))?;
    json.end().map_err(|error| ApiError::invalid(None, format!("the body must be one JSON object: {error}")))?;
    Ok(request)
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else { return false };
    let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

fn field_error(error: &serde_path_to_error::Error<serde_json::Error>) -> ApiError {
    let field = error.path().iter().find_map(|segment| match segment {
        serde_path_to_error::Segment::Map { key } => Some(key.as_str()),
        _ => None,
    });
    // The parser's own bound; it has no code for it.
    if error.inner().to_string().starts_with("recursion limit exceeded") {
        return ApiError::invalid(field, format!("the body must be nested at most {DEEPEST} levels deep"));
    }
    match field {
        Some(field) => ApiError::invalid(Some(field), format!("{}: {}", error.path(), error.inner())),
        None => ApiError::invalid(None, format!("the body must be a JSON object: {}", error.inner())),
    }
}
