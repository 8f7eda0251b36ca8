//! What the formats of other servers take and give: Anthropic's messages, llama.cpp's completion, and tokens.

use serde_json::Value;
use utoipa::ToSchema;

use crate::api::openapi::fragments::{
    anything, dialect_messages, llama_biases, llama_prompt, llama_tokens, seed, stop, system,
};

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum MessageKind {
    Message,
}

#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
enum BlockKind {
    Text,
    ToolUse,
}

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum Speaker {
    Assistant,
}

/// Messages to be answered, in Anthropic's format.
#[derive(ToSchema)]
pub(in crate::api) struct MessagesRequest {
    /// The model's name, as `/v1/models` has it; any other is 404.
    #[schema(nullable = false, required)]
    model: Option<String>,
    #[schema(required, schema_with = dialect_messages)]
    messages: Value,
    #[schema(schema_with = system)]
    system: Option<Value>,
    #[schema(required, schema_with = required_max_tokens)]
    max_tokens: Option<u64>,
    /// Texts that end the answer, which does not have them.
    #[schema(max_items = 16)]
    stop_sequences: Option<Vec<String>>,
    /// Whether the answer comes as server-sent events.
    stream: Option<bool>,
    #[schema(minimum = 0, maximum = 1)]
    temperature: Option<f64>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    #[schema(minimum = 0, maximum = 4_294_967_295_u64)]
    top_k: Option<u64>,
    /// Functions that the answer may call.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Value>,
    /// Whether and what to call.
    #[schema(value_type = Option<Object>)]
    tool_choice: Option<Value>,
}

/// Messages whose tokens are to be counted.
#[derive(ToSchema)]
pub(in crate::api) struct CountRequest {
    /// The model's name, as `/v1/models` has it; any other is 404.
    #[schema(nullable = false, required)]
    model: Option<String>,
    #[schema(required, schema_with = dialect_messages)]
    messages: Value,
    #[schema(schema_with = system)]
    system: Option<Value>,
    /// Functions that the answer may call.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Value>,
    /// Whether and what to call.
    #[schema(value_type = Option<Object>)]
    tool_choice: Option<Value>,
}

fn required_max_tokens() -> utoipa::openapi::Ref {
    utoipa::openapi::Ref::from_schema_name("MaxTokens")
}

/// An answer in Anthropic's format.
#[derive(ToSchema)]
pub(in crate::api) struct AnthropicMessage {
    id: String,
    r#type: MessageKind,
    role: Speaker,
    model: String,
    content: Vec<Block>,
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`.
    #[schema(required)]
    stop_reason: Option<String>,
    #[schema(required)]
    stop_sequence: Option<String>,
    usage: AnthropicUsage,
}

/// A piece of an answer: a text, or the call of a tool.
#[derive(ToSchema)]
struct Block {
    r#type: BlockKind,
    #[schema(nullable = false)]
    text: Option<String>,
    #[schema(nullable = false)]
    id: Option<String>,
    #[schema(nullable = false)]
    name: Option<String>,
    #[schema(schema_with = anything)]
    input: Option<Value>,
}

/// Tokens that a request took.
#[derive(ToSchema)]
struct AnthropicUsage {
    input_tokens: u64,
    cache_creation_input_tokens: u64,
    cache_read_input_tokens: u64,
    output_tokens: u64,
}

/// One event of a streamed answer: `message_start`, `content_block_start`, `ping`, `content_block_delta`,
/// `content_block_stop`, `message_delta`, `message_stop`, or `error`.
#[derive(ToSchema)]
pub(in crate::api) struct AnthropicEvent {
    r#type: String,
    #[schema(nullable = false)]
    index: Option<u64>,
    #[schema(nullable = false)]
    message: Option<AnthropicMessage>,
    #[schema(nullable = false)]
    content_block: Option<Block>,
    #[schema(schema_with = anything)]
    delta: Option<Value>,
    #[schema(nullable = false)]
    usage: Option<AnthropicUsage>,
    #[schema(schema_with = anything)]
    error: Option<Value>,
    request_id: Option<String>,
}

/// How many tokens a request would read.
#[derive(ToSchema)]
pub(in crate::api) struct TokenCount {
    input_tokens: u64,
}

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum AnthropicErrorType {
    Error,
}

/// Why a request was refused, in Anthropic's format.
#[derive(ToSchema)]
pub(in crate::api) struct AnthropicError {
    r#type: AnthropicErrorType,
    error: AnthropicErrorDetails,
    #[schema(required)]
    request_id: Option<String>,
}

/// What is known of an error.
#[derive(ToSchema)]
struct AnthropicErrorDetails {
    r#type: String,
    message: String,
}

/// A text to go on with, in llama.cpp's format.
#[derive(ToSchema)]
pub(in crate::api) struct LlamaRequest {
    model: Option<String>,
    #[schema(required, schema_with = llama_prompt)]
    prompt: Value,
    #[schema(schema_with = llama_tokens)]
    n_predict: Option<i64>,
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f64>,
    /// 0 and below mean all.
    top_k: Option<i64>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f64>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    typical_p: Option<f64>,
    #[schema(exclusive_minimum = 0, maximum = 10)]
    repeat_penalty: Option<f64>,
    /// Where there are penalties: -1, for they see the whole text.
    repeat_last_n: Option<i64>,
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f64>,
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f64>,
    #[schema(schema_with = seed)]
    seed: Option<Value>,
    #[schema(schema_with = stop)]
    stop: Option<Value>,
    stream: Option<bool>,
    #[schema(schema_with = llama_biases)]
    logit_bias: Option<Value>,
    ignore_eos: Option<bool>,
    #[schema(minimum = 0, maximum = 20)]
    n_probs: Option<u64>,
    return_tokens: Option<bool>,
    /// A schema that the text must follow.
    #[schema(value_type = Option<Object>)]
    json_schema: Option<Value>,
    /// The order that there is, or absent.
    #[schema(schema_with = anything)]
    samplers: Option<Value>,
    /// -1 alone: a request is not bound to a slot.
    #[schema(minimum = -1, maximum = -1)]
    id_slot: Option<i64>,
}

/// A completion in llama.cpp's format, or the last chunk of a stream; the chunks before have the first fields alone.
#[derive(ToSchema)]
pub(in crate::api) struct LlamaCompletion {
    index: u64,
    content: String,
    tokens: Vec<u32>,
    id_slot: i64,
    stop: bool,
    tokens_predicted: u64,
    tokens_evaluated: u64,
    #[schema(nullable = false)]
    model: Option<String>,
    #[schema(schema_with = anything)]
    generation_settings: Option<Value>,
    #[schema(nullable = false)]
    prompt: Option<String>,
    #[schema(nullable = false)]
    has_new_line: Option<bool>,
    #[schema(nullable = false)]
    truncated: Option<bool>,
    /// `none`, `eos`, `limit` or `word`.
    #[schema(nullable = false)]
    stop_type: Option<String>,
    #[schema(nullable = false)]
    stopping_word: Option<String>,
    #[schema(nullable = false)]
    tokens_cached: Option<u64>,
    #[schema(schema_with = anything)]
    timings: Option<Value>,
    /// Where `n_probs` was given.
    #[schema(nullable = false)]
    completion_probabilities: Option<Vec<Value>>,
}

/// One completion, or as many as there were prompts.
#[derive(ToSchema)]
#[serde(untagged)]
pub(in crate::api) enum LlamaCompletions {
    One(LlamaCompletion),
    Several(Vec<LlamaCompletion>),
}

/// What a client of llama.cpp wants to know of its server.
#[derive(ToSchema)]
pub(in crate::api) struct Props {
    #[schema(schema_with = anything)]
    default_generation_settings: Value,
    total_slots: u64,
    model_alias: String,
    model_path: String,
    #[schema(schema_with = anything)]
    modalities: Value,
    chat_template: String,
    bos_token: String,
    eos_token: String,
    build_info: String,
    is_sleeping: bool,
}

/// The slots.
#[derive(ToSchema)]
pub(in crate::api) struct Slots(Vec<Slot>);

/// A place for a request that runs.
#[derive(ToSchema)]
struct Slot {
    id: u64,
    n_ctx: u64,
    speculative: bool,
    is_processing: bool,
    state_bytes: u64,
}

/// Why a request was refused, in llama.cpp's format.
#[derive(ToSchema)]
pub(in crate::api) struct LlamaError {
    error: LlamaErrorDetails,
}

/// What is known of an error.
#[derive(ToSchema)]
struct LlamaErrorDetails {
    /// The status.
    code: u16,
    message: String,
    r#type: String,
    #[schema(required)]
    param: Option<String>,
}

/// A text to be made into tokens; its field says in whose words: `content` in llama.cpp's, `prompt` or `messages` in
/// vLLM's. One of them.
#[derive(ToSchema)]
pub(in crate::api) struct TokenizeRequest {
    model: Option<String>,
    content: Option<String>,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
    prompt: Option<String>,
    #[schema(schema_with = crate::api::openapi::fragments::messages)]
    messages: Option<Value>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,
    return_token_strs: Option<bool>,
}

/// Tokens, in llama.cpp's words and in vLLM's.
#[derive(ToSchema)]
pub(in crate::api) struct Tokenized {
    count: u64,
    max_model_len: u64,
    /// Ids; with `with_pieces` objects of `id` and `piece`.
    #[schema(schema_with = anything)]
    tokens: Value,
    #[schema(required)]
    token_strs: Option<Vec<String>>,
}

/// Tokens whose text is wanted.
#[derive(ToSchema)]
pub(in crate::api) struct DetokenizeRequest {
    model: Option<String>,
    #[schema(required, schema_with = crate::api::openapi::fragments::some_ids)]
    tokens: Value,
}

/// A text, in llama.cpp's words and in vLLM's.
#[derive(ToSchema)]
pub(in crate::api) struct Detokenized {
    content: String,
    prompt: String,
}

/// Messages whose text is wanted.
#[derive(ToSchema)]
pub(in crate::api) struct TemplateRequest {
    model: Option<String>,
    #[schema(required, schema_with = crate::api::openapi::fragments::some_messages)]
    messages: Value,
    add_generation_prompt: Option<bool>,
}

/// The text that the model reads.
#[derive(ToSchema)]
pub(in crate::api) struct Rendered {
    prompt: String,
}
