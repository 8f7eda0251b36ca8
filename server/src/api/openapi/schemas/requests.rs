//! The bodies of requests for text. Fields are as in `api/wire.rs` and `api/responses/wire.rs`; what is common to all
//! three is in [`Sampling`], which is merged into each. A field that is null counts as absent.

use std::collections::BTreeMap;

use serde_json::Value;
use utoipa::ToSchema;

use crate::api::openapi::fragments::{
    anything, input, logit_bias, max_tokens, messages, metadata, never, no_reasoning, prompt, response_format, seed,
    some_token_ids, stop, text_format, tool_choice, tools,
};

/// How the next token is chosen. What is absent is as the model recommends.
#[derive(ToSchema)]
struct Sampling {
    /// The model's name, as `/v1/models` has it; any other is 404.
    model: Option<String>,
    /// Whether the answer comes as server-sent events.
    stream: Option<bool>,
    /// 0 always takes the likeliest token.
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f64>,
    /// Draw from the likeliest tokens that together have this probability.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    /// Draw from this many of the likeliest tokens; 0 and -1 mean all.
    #[schema(minimum = -1)]
    top_k: Option<i64>,
    /// Draw from tokens with at least this share of the likeliest one's probability.
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f64>,
    /// Draw from the most typical tokens that together have this probability.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    typical_p: Option<f64>,
    /// Above 1 makes tokens that were seen less likely.
    #[schema(exclusive_minimum = 0, maximum = 10)]
    repetition_penalty: Option<f64>,
    /// Taken from a token's logit for each time that it was generated.
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f64>,
    /// Taken from the logit of each token that was generated.
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f64>,
    #[schema(schema_with = logit_bias)]
    logit_bias: Option<Value>,
    #[schema(schema_with = seed)]
    seed: Option<Value>,
    #[schema(schema_with = stop)]
    stop: Option<Value>,
    /// Goes on past the end of a text.
    ignore_eos: Option<bool>,
}

/// How many texts there are, and what is told of their tokens.
#[derive(ToSchema)]
struct Wishes {
    /// Texts for each prompt; choice i has the seed plus i.
    #[schema(minimum = 1, maximum = 128)]
    n: Option<u64>,
    /// Tokens that no end of the text comes before.
    #[schema(minimum = 0)]
    min_tokens: Option<u64>,
    #[schema(schema_with = some_token_ids)]
    stop_token_ids: Option<Value>,
    /// Whether tokens are called by their ids, as `token_id:7`.
    return_tokens_as_token_ids: Option<bool>,
    #[schema(schema_with = response_format)]
    response_format: Option<Value>,
}

/// Which form the text must have; one of these at most.
#[derive(ToSchema)]
struct Form {
    /// A regular expression that the whole text must match.
    regex: Option<String>,
    /// A grammar in Lark's form that the whole text must follow.
    grammar: Option<String>,
    /// vLLM's form of a form: one of `json`, `regex`, `choice` and `grammar`.
    #[schema(value_type = Option<Object>)]
    structured_outputs: Option<Value>,
    /// A JSON schema that the text must follow, as an object or as text.
    #[schema(schema_with = anything)]
    json_schema: Option<Value>,
    /// As `json_schema`.
    #[schema(schema_with = anything)]
    guided_json: Option<Value>,
    /// As `regex`.
    guided_regex: Option<String>,
    /// Texts one of which is to come.
    #[schema(min_items = 1)]
    guided_choice: Option<Vec<String>>,
    /// As `grammar`.
    guided_grammar: Option<String>,
}

/// What only completions take.
#[derive(ToSchema)]
struct CompletionWishes {
    /// Texts that are generated for each prompt; the `n` likeliest are told.
    #[schema(minimum = 1, maximum = 128)]
    best_of: Option<u64>,
    /// Whether the text begins with the prompt; not where that is translated.
    echo: Option<bool>,
    /// How many log probabilities are told with each token.
    #[schema(minimum = 0, maximum = 20)]
    logprobs: Option<u64>,
    /// Whether the tokens that begin every text are put before the prompt; true where it is absent.
    add_special_tokens: Option<bool>,
}

/// What only chat takes.
#[derive(ToSchema)]
struct ChatWishes {
    /// Whether log probabilities are told with each token.
    logprobs: Option<bool>,
    /// How many, where they are.
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<u64>,
    /// Functions that the answer may call.
    #[schema(schema_with = tools)]
    tools: Option<Value>,
    #[schema(schema_with = tool_choice)]
    tool_choice: Option<Value>,
    /// Whether an answer may make several calls.
    parallel_tool_calls: Option<bool>,
}

/// What turns of kept conversations take beside the rest.
#[derive(ToSchema)]
struct Turn {
    /// The session that this is a turn of: the rest of the body has only what is new.
    session: Option<String>,
    /// A name for the version that the turn makes; with `session` alone.
    #[schema(max_length = 256)]
    label: Option<String>,
    on_disconnect: Option<OnDisconnect>,
    /// The state that an answer with `return_state` gave: the conversation goes on from it. Needs a server with a
    /// secret.
    #[schema(content_encoding = "base64")]
    state: Option<String>,
    /// Whether the answer is to have the conversation's state, for the client to keep. Needs a server with a secret.
    return_state: Option<bool>,
    /// Whether the answer is to have the ids of its tokens.
    return_token_ids: Option<bool>,
    stream_options: Option<StreamOptions>,
}

/// What becomes of a turn whose client leaves before its end: it has not happened, it ends there, or it goes on and
/// its stream can be taken up again. Without `session`: `rollback` alone.
#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum OnDisconnect {
    Rollback,
    Commit,
    Continue,
}

/// What to add to a stream; only where `stream` is true.
#[derive(ToSchema)]
struct StreamOptions {
    /// Whether the last chunk has no choices, but the usage.
    include_usage: Option<bool>,
    /// Not supported: false or absent.
    #[schema(schema_with = never)]
    continuous_usage_stats: Option<bool>,
}

/// A text to go on with.
#[derive(ToSchema)]
pub(in crate::api) struct CompletionRequest {
    #[schema(schema_with = prompt)]
    prompt: Option<Value>,
    #[schema(schema_with = max_tokens)]
    max_tokens: Option<u64>,
    #[serde(flatten)]
    sampling: Sampling,
    #[serde(flatten)]
    wishes: Wishes,
    #[serde(flatten)]
    form: Form,
    #[serde(flatten)]
    own: CompletionWishes,
    #[serde(flatten)]
    turn: Turn,
}

/// Messages to be answered.
#[derive(ToSchema)]
pub(in crate::api) struct ChatRequest {
    #[schema(schema_with = messages)]
    messages: Option<Value>,
    #[schema(schema_with = max_tokens)]
    max_tokens: Option<u64>,
    #[schema(schema_with = max_tokens)]
    max_completion_tokens: Option<u64>,
    #[serde(flatten)]
    sampling: Sampling,
    #[serde(flatten)]
    wishes: Wishes,
    #[serde(flatten)]
    form: Form,
    #[serde(flatten)]
    own: ChatWishes,
    #[serde(flatten)]
    turn: Turn,
}

/// Something to be answered, alone or after an earlier response.
#[derive(ToSchema)]
pub(in crate::api) struct ResponseRequest {
    #[schema(schema_with = input)]
    input: Option<Value>,
    /// Read before the input, as the system's.
    instructions: Option<String>,
    /// The response to go on from.
    previous_response_id: Option<String>,
    /// Whether the response is kept, to be read again and to go on from. The default is true.
    store: Option<bool>,
    stream_options: Option<ResponseStreamOptions>,
    #[schema(schema_with = max_tokens)]
    max_output_tokens: Option<u64>,
    #[schema(schema_with = metadata)]
    metadata: Option<BTreeMap<String, String>>,
    /// Given back in the answer, and otherwise not used.
    user: Option<String>,
    /// Given back in the answer: there are no tools.
    parallel_tool_calls: Option<bool>,
    tool_choice: Option<ToolChoice>,
    truncation: Option<Truncation>,
    text: Option<TextConfig>,
    #[schema(schema_with = no_reasoning)]
    reasoning: Option<Value>,
    #[serde(flatten)]
    form: Form,
    #[serde(flatten)]
    sampling: Sampling,
}

/// What to add to a stream of events; only where `stream` is true.
#[derive(ToSchema)]
struct ResponseStreamOptions {
    /// Not supported: false or absent.
    #[schema(schema_with = never)]
    include_obfuscation: Option<bool>,
}

/// Which tool to call: there are none, so both mean the same.
#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum ToolChoice {
    Auto,
    None,
}

/// What to do where a conversation outgrows the model's context: it has no such end, so both mean the same.
#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum Truncation {
    Disabled,
    Auto,
}

/// Which form the text is to have.
#[derive(ToSchema)]
struct TextConfig {
    #[schema(schema_with = text_format)]
    format: Option<Value>,
    verbosity: Option<Verbosity>,
}

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum Verbosity {
    Medium,
}
