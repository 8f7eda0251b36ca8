//! The response object of OpenAI's Responses API, as it is sent, stored, and read again for retries.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::items::{OutputItem, Status};
use crate::api::formats::openai::tools::{FlatTool, FlatToolChoice};
use crate::api::openapi::schemas::nothing;

/// A response, finished or not.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = Response)]
pub(in crate::api) struct Object {
    pub(super) id: String,
    #[serde(rename = "object")]
    pub(super) kind: Kind,
    pub(super) created_at: u64,
    /// When it was completed; null if it was cut off.
    #[schema(required)]
    pub(super) completed_at: Option<u64>,
    pub(super) status: Status,
    /// Always false: background mode is refused.
    pub(super) background: bool,
    #[schema(required)]
    pub(super) error: Option<Failed>,
    #[schema(required)]
    pub(super) incomplete_details: Option<Incomplete>,
    #[schema(required)]
    pub(super) instructions: Option<String>,
    #[schema(required)]
    pub(super) max_output_tokens: Option<u64>,
    pub(super) model: String,
    pub(super) output: Vec<OutputItem>,
    pub(super) parallel_tool_calls: bool,
    #[schema(required)]
    pub(super) previous_response_id: Option<String>,
    pub(super) reasoning: Reasoning,
    pub(super) service_tier: ServiceTier,
    pub(super) store: bool,
    pub(super) temperature: f32,
    pub(super) text: TextOptions,
    #[schema(value_type = FlatToolChoice)]
    pub(super) tool_choice: Value,
    /// The functions that the answer could call.
    #[schema(value_type = Vec<FlatTool>)]
    pub(super) tools: Vec<Map<String, Value>>,
    /// Always 0: log probabilities are refused.
    pub(super) top_logprobs: u32,
    pub(super) top_p: f32,
    pub(super) truncation: Truncation,
    #[schema(required)]
    pub(super) usage: Option<ResponseUsage>,
    #[schema(required)]
    pub(super) user: Option<String>,
    pub(super) metadata: BTreeMap<String, String>,
    /// An addition to OpenAI's format: text that was held back because it may be the beginning of a stop string. A
    /// response that continues this one begins with it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) held_text: String,
}

/// The type of the object.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseKind)]
pub(super) enum Kind {
    #[serde(rename = "response")]
    Response,
}

/// Why a response failed.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseError)]
pub(super) struct Failed {
    pub(super) code: String,
    pub(super) message: String,
}

/// Why a text was cut off.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseIncomplete)]
pub(super) struct Incomplete {
    pub(super) reason: IncompleteReason,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponseIncompleteReason)]
pub(super) enum IncompleteReason {
    MaxOutputTokens,
}

/// Always empty: a request cannot set how much a model reasons.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseReasoning)]
pub(super) struct Reasoning {
    #[schema(required, schema_with = nothing)]
    effort: Option<()>,
    #[schema(required, schema_with = nothing)]
    summary: Option<()>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = ResponseServiceTier)]
pub(super) enum ServiceTier {
    #[default]
    Default,
}

/// The format of the text.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseTextOptions)]
pub(super) struct TextOptions {
    pub(super) format: TextFormat,
}

/// The format that the request asked for.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseTextFormat)]
pub(super) struct TextFormat {
    #[serde(rename = "type")]
    kind: FormatKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    schema: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponseFormatKind)]
enum FormatKind {
    #[default]
    Text,
    JsonObject,
    JsonSchema,
}

/// What to do with input that exceeds the context. The context has no limit, so both values mean the same.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = ResponseTruncation)]
pub(super) enum Truncation {
    #[default]
    Disabled,
    Auto,
}

/// The tokens that a response used. As in OpenAI's count, the earlier conversation is part of the input.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
pub(super) struct ResponseUsage {
    pub(super) input_tokens: u64,
    pub(super) input_tokens_details: InputDetails,
    pub(super) output_tokens: u64,
    pub(super) output_tokens_details: OutputDetails,
    pub(super) total_tokens: u64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseInputDetails)]
pub(super) struct InputDetails {
    /// Tokens that were not computed, because a state had already read them.
    pub(super) cached_tokens: u64,
    /// Tokens that this response added to the stored state.
    pub(super) cache_write_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseOutputDetails)]
pub(super) struct OutputDetails {
    /// Tokens from the one that completes the opening tag to the one that completes the closing tag.
    pub(super) reasoning_tokens: u64,
}
