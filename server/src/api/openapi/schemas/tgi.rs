//! What the format of text-generation-inference takes and gives.

use serde_json::Value;
use utoipa::ToSchema;

use crate::api::openapi::written::{anything, max_tokens};

/// A text to go on with, in the format of text-generation-inference.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct GenerateRequest {
    #[schema(nullable = false, required)]
    inputs: Option<String>,
    parameters: Option<GenerateParameters>,
    /// At `/` alone: whether the answer comes as server-sent events.
    stream: Option<bool>,
}

/// How to go on.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct GenerateParameters {
    /// Texts of which the best is told; above 1 only where `do_sample` is true, and not in a stream.
    #[schema(minimum = 1, maximum = 8)]
    best_of: Option<u64>,
    decoder_input_details: Option<bool>,
    details: Option<bool>,
    /// Whether tokens are drawn; otherwise the likeliest is taken, unless a parameter says how to draw.
    do_sample: Option<bool>,
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f64>,
    #[schema(schema_with = max_tokens)]
    max_new_tokens: Option<u64>,
    #[schema(exclusive_minimum = 0, maximum = 10)]
    repetition_penalty: Option<f64>,
    return_full_text: Option<bool>,
    seed: Option<u64>,
    #[schema(max_items = 16)]
    stop: Option<Vec<String>>,
    #[schema(exclusive_minimum = 0, maximum = 2)]
    temperature: Option<f64>,
    #[schema(minimum = 1)]
    top_k: Option<u64>,
    #[schema(minimum = 0, maximum = 20)]
    top_n_tokens: Option<u64>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    /// Tokens of the prompt that are read: the last ones, or of a source, which an encoder-decoder translates, the first.
    #[schema(minimum = 1)]
    truncate: Option<usize>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    typical_p: Option<f64>,
    /// Not supported: false or absent.
    #[schema(schema_with = crate::api::openapi::written::never)]
    watermark: Option<bool>,
    /// `{"type": "json" | "regex" | "json_schema", "value": …}`
    #[schema(value_type = Option<Object>)]
    grammar: Option<Value>,
    /// Not supported: absent.
    #[schema(schema_with = crate::api::openapi::written::nothing)]
    adapter_id: Option<String>,
}

/// A text.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Generated {
    generated_text: String,
    /// Where `details` was true.
    #[schema(schema_with = anything)]
    details: Option<Value>,
}

/// What is answered at `/`: a list of one text, or an event.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct GeneratedList(Vec<Generated>);

/// One event of a streamed text.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct GeneratedToken {
    index: u64,
    token: TokenDetails,
    #[schema(nullable = false)]
    top_tokens: Option<Vec<TokenDetails>>,
    /// The whole text, at its end.
    #[schema(required)]
    generated_text: Option<String>,
    #[schema(schema_with = anything)]
    details: Value,
}

/// A token.
#[derive(ToSchema)]
struct TokenDetails {
    id: u32,
    text: String,
    #[schema(required)]
    logprob: Option<f32>,
    special: bool,
}

/// What a client of text-generation-inference wants to know of its server.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct ServerInfo {
    model_id: String,
    model_sha: String,
    model_pipeline_tag: String,
    max_concurrent_requests: u64,
    max_best_of: u64,
    max_stop_sequences: u64,
    max_input_tokens: u64,
    max_total_tokens: u64,
    validation_workers: u64,
    max_client_batch_size: u64,
    router: String,
    version: String,
    #[schema(required)]
    sha: Option<String>,
    #[schema(required)]
    docker_label: Option<String>,
}

/// Why a request was refused, in the format of text-generation-inference.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct GenerateError {
    error: String,
    error_type: String,
}
