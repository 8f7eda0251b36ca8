//! What `/v1/completions` and `/v1/chat/completions` answer, whole and in chunks.

use std::collections::BTreeMap;

use serde_json::Value;
use utoipa::ToSchema;

use crate::api::formats::openai::answer::{TimingsMs, Usage};
use crate::api::formats::responses::{Message, Object, TextPart};
use crate::api::openapi::fragments::{nothing, stop_reason};
use crate::api::run::encoder::SessionInfo;

#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
enum TextCompletion {
    TextCompletion,
}

#[derive(ToSchema)]
enum ChatCompletion {
    #[serde(rename = "chat.completion")]
    Whole,
}

#[derive(ToSchema)]
enum ChatCompletionChunk {
    #[serde(rename = "chat.completion.chunk")]
    Chunk,
}

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum Assistant {
    Assistant,
}

/// Why a text has ended: by itself or at a stop string, or because it had as many tokens as were asked for.
#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum FinishReason {
    Stop,
    Length,
}

/// What each object of an answer has.
#[derive(ToSchema)]
struct Head {
    id: String,
    /// Seconds since 1970.
    created: u64,
    /// The name of the model.
    model: String,
    /// Changes when the weights or the server do.
    system_fingerprint: String,
}

/// What has become of the conversation that a text belongs to.
#[derive(ToSchema)]
struct Kept {
    /// Where the request named a session: the version that the turn has made.
    #[schema(nullable = false)]
    session: Option<SessionInfo>,
    /// Where the request asked for it: the sealed state, to go on from.
    #[schema(nullable = false, content_encoding = "base64")]
    state: Option<String>,
}

/// A text, or several.
#[derive(ToSchema)]
pub(in crate::api) struct Completion {
    object: TextCompletion,
    choices: Vec<CompletionChoice>,
    usage: Usage,
    #[serde(flatten)]
    head: Head,
    #[serde(flatten)]
    kept: Kept,
}

/// One event of a streamed completion.
#[derive(ToSchema)]
pub(in crate::api) struct CompletionChunk {
    object: TextCompletion,
    choices: Vec<CompletionChoice>,
    /// Where `stream_options.include_usage` is true: null, and in the last chunk, which has no choices, the usage.
    usage: Option<Usage>,
    #[serde(flatten)]
    head: Head,
    #[serde(flatten)]
    kept: Kept,
}

/// One text, or a piece of it.
#[derive(ToSchema)]
struct CompletionChoice {
    /// Which of the prompts it goes on with.
    index: u64,
    text: String,
    /// Null unless `logprobs` was given.
    #[schema(required)]
    logprobs: Option<CompletionLogprobs>,
    /// Null until the text has ended.
    #[schema(required)]
    finish_reason: Option<FinishReason>,
    #[schema(schema_with = stop_reason)]
    stop_reason: Option<Value>,
    /// The ids of the prompt, in its first chunk, where `return_token_ids` is true.
    #[schema(nullable = false)]
    prompt_token_ids: Option<Vec<u32>>,
    /// The ids of the text, where `return_token_ids` is true.
    #[schema(nullable = false)]
    token_ids: Option<Vec<u32>>,
    /// Where the time went, once the text has ended.
    #[schema(nullable = false)]
    timings: Option<TimingsMs>,
}

/// An answer to messages.
#[derive(ToSchema)]
pub(in crate::api) struct Chat {
    object: ChatCompletion,
    choices: Vec<ChatChoice>,
    usage: Usage,
    #[serde(flatten)]
    head: Head,
    #[serde(flatten)]
    kept: Kept,
}

/// One event of a streamed answer.
#[derive(ToSchema)]
pub(in crate::api) struct ChatChunk {
    object: ChatCompletionChunk,
    choices: Vec<ChatDelta>,
    /// Where `stream_options.include_usage` is true: null, and in the last chunk, which has no choices, the usage.
    usage: Option<Usage>,
    #[serde(flatten)]
    head: Head,
    #[serde(flatten)]
    kept: Kept,
}

/// One message.
#[derive(ToSchema)]
struct ChatChoice {
    index: u64,
    message: ChatMessage,
    /// Null unless `logprobs` was true.
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
    finish_reason: ChatFinishReason,
    #[schema(schema_with = stop_reason)]
    stop_reason: Option<Value>,
    /// The ids of the text, where `return_token_ids` is true.
    #[schema(nullable = false)]
    token_ids: Option<Vec<u32>>,
}

/// What the model says.
#[derive(ToSchema)]
struct ChatMessage {
    role: Assistant,
    /// Null where the message is calls of tools.
    #[schema(required)]
    content: Option<String>,
    #[schema(nullable = false)]
    tool_calls: Option<Vec<ToolCall>>,
    #[schema(schema_with = nothing)]
    refusal: (),
}

/// A piece of a message.
#[derive(ToSchema)]
struct ChatDelta {
    index: u64,
    delta: ChatPiece,
    /// Null unless `logprobs` was true.
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
    /// Null until the text has ended.
    #[schema(required)]
    finish_reason: Option<ChatFinishReason>,
    #[schema(schema_with = stop_reason)]
    stop_reason: Option<Value>,
    /// The ids of the piece, where `return_token_ids` is true.
    #[schema(nullable = false)]
    token_ids: Option<Vec<u32>>,
}

/// What a message begins with, goes on with or ends with: its role, some text, or nothing more.
#[derive(ToSchema)]
struct ChatPiece {
    #[schema(nullable = false)]
    role: Option<Assistant>,
    /// Null where the message is calls of tools.
    content: Option<String>,
    #[schema(nullable = false)]
    tool_calls: Option<Vec<ToolCall>>,
}

/// The call of a tool, or a piece of one.
#[derive(ToSchema)]
struct ToolCall {
    /// Which call of the message, in pieces.
    #[schema(nullable = false)]
    index: Option<u64>,
    #[schema(nullable = false)]
    id: Option<String>,
    #[schema(nullable = false)]
    r#type: Option<FunctionKind>,
    function: CalledFunction,
}

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum FunctionKind {
    Function,
}

/// The function that is called.
#[derive(ToSchema)]
struct CalledFunction {
    #[schema(nullable = false)]
    name: Option<String>,
    /// The text of a JSON object, or a piece of it.
    arguments: String,
}

/// Lists with one entry for each token.
#[derive(ToSchema)]
struct CompletionLogprobs {
    tokens: Vec<String>,
    /// Null for the first token of an echoed prompt.
    token_logprobs: Vec<Option<f32>>,
    /// The likeliest tokens in its place, with its own.
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Where the tokens begin in the text, in characters.
    text_offset: Vec<u64>,
}

/// The tokens of a message.
#[derive(ToSchema)]
struct ChatLogprobs {
    content: Vec<ChatToken>,
    #[schema(schema_with = nothing)]
    refusal: (),
}

/// A token, with those that were likeliest in its place.
#[derive(ToSchema)]
struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<LikelyToken>,
}

/// A token that was likely.
#[derive(ToSchema)]
struct LikelyToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// As in completions, or because the message calls tools.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
enum ChatFinishReason {
    Stop,
    Length,
    ToolCalls,
}

/// One event of a streamed response: its name, its place, and what it is about.
#[derive(ToSchema)]
pub(in crate::api) struct ResponseEvent {
    /// Its name, as the event has it too.
    r#type: String,
    /// From 0 on.
    sequence_number: u64,
    /// The response as it is then: in those that begin or end it.
    #[schema(nullable = false)]
    response: Option<Object>,
    /// Always 0: there is one message.
    #[schema(nullable = false)]
    output_index: Option<u64>,
    /// The message, where it begins or ends.
    #[schema(nullable = false)]
    item: Option<Message>,
    /// The id of the message that a piece is of.
    #[schema(nullable = false)]
    item_id: Option<String>,
    /// Always 0: the message has one part.
    #[schema(nullable = false)]
    content_index: Option<u64>,
    /// The part of the message, where it begins or ends.
    #[schema(nullable = false)]
    part: Option<TextPart>,
    /// A piece of the text.
    #[schema(nullable = false)]
    delta: Option<String>,
    /// The whole text, where it ends.
    #[schema(nullable = false)]
    text: Option<String>,
    /// Always empty.
    #[schema(nullable = false, max_items = 0)]
    logprobs: Option<Vec<Value>>,
    /// Of an error, as `message` and `param` are.
    code: Option<String>,
    #[schema(nullable = false)]
    message: Option<String>,
    param: Option<String>,
}
