//! Converts texts to tokens and back, without running the model: `/tokenize`, `/detokenize` and `/apply-template`, in
//! the formats of llama.cpp and vLLM. The fields in the body show which format is meant.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::json::{body as json_body, parse};
use super::openai::wire::{ChatMessage, messages};
use super::openai::{TemplateFields, tools};
use super::unsupported::{self, Ignored};
use crate::api::error::{ApiError, ErrorBody};
use crate::api::openapi::GenerationErrors;
use crate::api::openapi::schemas::TokenId;
use crate::api::request::blocking::run_blocking;
use crate::api::request::encode::encode_up_to;
use crate::api::request::tools::Tools;
use crate::api::run::encoder::to_json;
use crate::api::state::{AppState, Served};
use crate::text::Around;

/// A request to tokenize a text, which is given in exactly one of `content`, `prompt` and `messages`.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct TokenizeRequest {
    /// The model's name, as in `/v1/models`. Default: the one that is served.
    model: Option<String>,
    /// A text, in llama.cpp's format.
    content: Option<String>,
    /// Whether to add the special tokens that begin every text before `content`. Default: false.
    add_special: Option<bool>,
    /// Whether to read the names of special tokens in `content` as those tokens. Default: true.
    parse_special: Option<bool>,
    /// Whether to list each token with its text. Default: false.
    with_pieces: Option<bool>,
    /// A text, in vLLM's format.
    prompt: Option<String>,
    /// A conversation, in vLLM's format.
    #[schema(min_items = 1, max_items = 10_000)]
    messages: Option<Vec<ChatMessage>>,
    /// Whether to add the special tokens that begin every text before `prompt`; not with `messages`. Default: true.
    add_special_tokens: Option<bool>,
    /// Whether the prompt ends with the beginning of an answer. Default: true, unless `continue_final_message` is true.
    add_generation_prompt: Option<bool>,
    /// Whether the answer continues the last message, which must be a text from the assistant. Default: false.
    continue_final_message: Option<bool>,
    /// Additional variables for the checkpoint's chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Functions that the answer may call.
    #[schema(value_type = Option<tools::ToolsField>)]
    tools: Option<Value>,
    /// With `none`, the answer may not call the tools, and the template does not get them. Default: `auto`.
    #[schema(value_type = Option<tools::ToolChoiceField>)]
    tool_choice: Option<Value>,
    /// Whether to list the names of the tokens. Default: false.
    return_token_strs: Option<bool>,
    #[serde(flatten)]
    #[schema(ignore)]
    rest: BTreeMap<String, Value>,
}

/// A request to turn tokens into text.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct DetokenizeRequest {
    /// The model's name, as in `/v1/models`. Default: the one that is served.
    model: Option<String>,
    #[schema(required, value_type = Vec<TokenId>)]
    tokens: Option<Vec<u32>>,
    #[serde(flatten)]
    #[schema(ignore)]
    rest: BTreeMap<String, Value>,
}

/// A request to apply the chat template to messages.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct TemplateRequest {
    /// The model's name, as in `/v1/models`. Default: the one that is served.
    model: Option<String>,
    #[schema(required, nullable = false, min_items = 1, max_items = 10_000)]
    messages: Option<Vec<ChatMessage>>,
    /// Whether the prompt ends with the beginning of an answer. Default: true, unless `continue_final_message` is true.
    add_generation_prompt: Option<bool>,
    /// Whether the answer continues the last message, which must be a text from the assistant. Default: false.
    continue_final_message: Option<bool>,
    /// Additional variables for the checkpoint's chat template.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Functions that the answer may call.
    #[schema(value_type = Option<tools::ToolsField>)]
    tools: Option<Value>,
    /// With `none`, the answer may not call the tools, and the template does not get them. Default: `auto`.
    #[schema(value_type = Option<tools::ToolChoiceField>)]
    tool_choice: Option<Value>,
    #[serde(flatten)]
    #[schema(ignore)]
    rest: BTreeMap<String, Value>,
}

/// A token with its text, or with its bytes if they are not valid text.
#[derive(Serialize, ToSchema)]
#[schema(as = TokenPiece)]
struct Piece<'a> {
    id: u32,
    piece: Text<'a>,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = TokenText)]
enum Text<'a> {
    Whole(&'a str),
    Bytes(&'a [u8]),
}

/// A token: its id, or with `with_pieces` an object with the id and the text.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = TokenOfText)]
enum Token<'a> {
    Id(u32),
    Piece(Piece<'a>),
}

/// The tokens of a text. llama.cpp's clients read only `tokens`; the other fields are for vLLM's clients.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Tokenized<'a> {
    count: usize,
    /// The maximum length of a prompt and its answer together, in tokens.
    max_model_len: usize,
    tokens: Vec<Token<'a>>,
    #[schema(required)]
    token_strs: Option<Vec<String>>,
}

/// The text of tokens. llama.cpp's clients read `content`, vLLM's clients `prompt`.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Detokenized<'a> {
    content: &'a str,
    prompt: &'a str,
}

/// The text that the model would read.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Rendered {
    prompt: String,
}

/// Tokenize a text
#[utoipa::path(
    post,
    path = "/tokenize",
    operation_id = "tokenize",
    tag = "other formats",
    request_body(content = TokenizeRequest, examples(
        ("llama.cpp" = (value = json!({"content": "Once upon a time", "with_pieces": true}))),
        ("vLLM" = (value = json!({"prompt": "Once upon a time", "return_token_strs": true})))
    )),
    responses((status = 200, description = "The tokens.", body = Tokenized), GenerationErrors)
)]
pub(in crate::api) async fn tokenize(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    answer(&state, &headers, body, |body, served| {
        let mut wire: TokenizeRequest = parse(body)?;
        let ignored = check(wire.model.as_deref(), &wire.rest, served)?;
        let given = [wire.content.is_some(), wire.prompt.is_some(), wire.messages.is_some()];
        if given.into_iter().filter(|given| *given).count() != 1 {
            let message = "exactly one of prompt, content and messages must be given";
            return Err(ApiError::invalid(Some("prompt"), message));
        }
        let (ids, param) = ids(&mut wire, served)?;
        bounded(ids.len(), param, served)?;
        let pieces = wire.with_pieces.unwrap_or(false);
        let token = |id| if pieces { Token::Piece(Piece { id, piece: piece(id, served) }) } else { Token::Id(id) };
        let names = || ids.iter().map(|id| served.tokenizer.name(*id)).collect();
        let tokenized = to_json(&Tokenized {
            count: ids.len(),
            max_model_len: served.limits.context(),
            tokens: ids.iter().copied().map(token).collect(),
            token_strs: wire.return_token_strs.unwrap_or(false).then(names),
        });
        Ok((tokenized, ignored))
    })
    .await
}

/// Turn tokens into text
#[utoipa::path(
    post,
    path = "/detokenize",
    operation_id = "detokenize",
    tag = "other formats",
    request_body(content = DetokenizeRequest, examples(("ids" = (value = json!({"tokens": [5, 6, 7]}))))),
    responses((status = 200, description = "The text.", body = Detokenized), GenerationErrors)
)]
pub(in crate::api) async fn detokenize(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    answer(&state, &headers, body, |body, served| {
        let wire: DetokenizeRequest = parse(body)?;
        let ignored = check(wire.model.as_deref(), &wire.rest, served)?;
        let ids = wire.tokens.ok_or_else(|| ApiError::invalid(Some("tokens"), "tokens must be given"))?;
        bounded(ids.len(), "tokens", served)?;
        check_ids(&ids, "tokens", served)?;
        let bytes = served.tokenizer.pieces(&ids);
        let text = &String::from_utf8_lossy(&bytes);
        Ok((to_json(&Detokenized { content: text, prompt: text }), ignored))
    })
    .await
}

/// Apply the chat template to messages
#[utoipa::path(
    post,
    path = "/apply-template",
    operation_id = "applyTemplate",
    tag = "other formats",
    request_body(content = TemplateRequest, examples(
        ("a message" = (value = json!({"messages": [{"role": "user", "content": "Tell me of a fox."}]})))
    )),
    responses((status = 200, description = "The prompt.", body = Rendered), GenerationErrors)
)]
pub(in crate::api) async fn apply_template(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    answer(&state, &headers, body, |body, served| {
        let wire: TemplateRequest = parse(body)?;
        let ignored = check(wire.model.as_deref(), &wire.rest, served)?;
        let template = TemplateFields {
            add_generation_prompt: wire.add_generation_prompt,
            continue_final_message: wire.continue_final_message,
            chat_template_kwargs: wire.chat_template_kwargs,
        };
        let tools = tools::read(wire.tools, wire.tool_choice, None)?;
        let prompt = rendered(wire.messages.unwrap_or_default(), template, tools.as_ref(), served)?;
        Ok((to_json(&Rendered { prompt }), ignored))
    })
    .await
}

/// Embeddings: not supported
#[utoipa::path(
    post,
    path = "/v1/embeddings",
    operation_id = "embeddings",
    tag = "other formats",
    responses((status = 501, description = "Not supported.", body = ErrorBody))
)]
pub(in crate::api) async fn embeddings() -> ApiError {
    let message = "embeddings are not supported: the model has not been trained for them";
    ApiError::request(StatusCode::NOT_IMPLEMENTED, None, Some("not_supported"), message)
}

/// Parses and answers a body on a thread for blocking work.
async fn answer(
    state: &AppState,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
    work: impl FnOnce(&[u8], &Served) -> Result<(String, Ignored), ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let body = json_body(headers, body, state.options().max_body_bytes)?;
    let state = state.for_body(&body).await?;
    let served = Arc::clone(state.ready()?);
    let (answer, ignored) = run_blocking(&state, body.len(), move || work(&body, &served)).await?;
    Ok(ignored.list(([(header::CONTENT_TYPE, "application/json")], answer).into_response()))
}

/// Refuses the name of another model, and unsupported fields that would change the answer. Returns the fields that have
/// no effect.
fn check(model: Option<&str>, rest: &BTreeMap<String, Value>, served: &Served) -> Result<Ignored, ApiError> {
    if let Some(model) = model {
        served.check_name(model, Some("model"))?;
    }
    unsupported::check_only(rest, &["chat_template", "documents"])
}

/// Returns the token ids, and the name of the field that they come from.
fn ids(wire: &mut TokenizeRequest, served: &Served) -> Result<(Vec<u32>, &'static str), ApiError> {
    let tools = tools::read(wire.tools.take(), wire.tool_choice.take(), None)?;
    let (text, around, param) = match (&wire.content, &wire.prompt) {
        (Some(content), _) => {
            let around = match (wire.parse_special != Some(false), wire.add_special.unwrap_or(false)) {
                (true, true) => Around::Both,
                (true, false) => Around::Nothing,
                (false, true) => Around::PlainBoth,
                (false, false) => Around::PlainNothing,
            };
            (Cow::Borrowed(content.as_str()), around, "content")
        }
        (None, Some(prompt)) => {
            let whole = wire.add_special_tokens.unwrap_or(true);
            (prompt.as_str().into(), if whole { Around::Both } else { Around::Nothing }, "prompt")
        }
        (None, None) => {
            if wire.add_special_tokens == Some(true) {
                let message = "add_special_tokens must be absent or false with messages: the chat template has them";
                return Err(ApiError::invalid(Some("add_special_tokens"), message));
            }
            let template = TemplateFields {
                add_generation_prompt: wire.add_generation_prompt,
                continue_final_message: wire.continue_final_message,
                chat_template_kwargs: wire.chat_template_kwargs.take(),
            };
            let text = rendered(wire.messages.take().unwrap_or_default(), template, tools.as_ref(), served)?;
            (text.into(), Around::Begin, "messages")
        }
    };
    Ok((encode_up_to(served.limits.max_prompt_tokens, &text, around, param, served)?, param))
}

/// Renders messages with the chat template.
fn rendered(
    given: Vec<ChatMessage>,
    template: TemplateFields,
    tools: Option<&Tools>,
    served: &Served,
) -> Result<String, ApiError> {
    let conversation = template.apply(messages(given, "messages")?, tools.is_some())?;
    conversation.render(tools, "messages", served)
}

fn piece(id: u32, served: &Served) -> Text<'_> {
    let bytes = served.tokenizer.piece(id);
    std::str::from_utf8(bytes).map_or(Text::Bytes(bytes), Text::Whole)
}

fn bounded(count: usize, param: &str, served: &Served) -> Result<(), ApiError> {
    let most = served.limits.max_prompt_tokens;
    if count > most {
        let message = format!("{param} must be at most {most} tokens long, found {count} tokens");
        return Err(ApiError::too_long(param, message));
    }
    Ok(())
}

/// Refuses ids that are not in the vocabulary.
pub(in crate::api) fn check_ids(ids: &[u32], param: &str, served: &Served) -> Result<(), ApiError> {
    let size = served.limits.vocab_size;
    match ids.iter().find(|id| **id as usize >= size) {
        Some(id) => {
            let message = format!("{param} must be made of token ids below {size}, found {id}");
            Err(ApiError::invalid(Some(param), message))
        }
        None => Ok(()),
    }
}
