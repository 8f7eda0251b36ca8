//! Texts to tokens and back, without the model: `/tokenize`, `/detokenize` and `/apply-template`, in the formats of
//! llama.cpp and vLLM. The field that is given says which.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::json::{body as json_body, parse};
use super::openai::wire::{ChatMessage, messages};
use crate::api::error::{ApiError, ErrorBody};
use crate::api::openapi::{GenerationErrors, schemas};
use crate::api::request::blocking::run_blocking;
use crate::api::request::prompt::render_messages;
use crate::api::run::encoder::to_json;
use crate::api::state::{AppState, Served};

/// A request for the tokens of a text.
#[derive(Debug, Deserialize)]
struct TokenizeRequest {
    model: Option<String>,
    /// llama.cpp's.
    content: Option<String>,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
    /// vLLM's.
    prompt: Option<String>,
    messages: Option<Vec<ChatMessage>>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,
    return_token_strs: Option<bool>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

/// A request for the text of tokens.
#[derive(Debug, Deserialize)]
struct DetokenizeRequest {
    model: Option<String>,
    tokens: Option<Vec<u32>>,
}

/// A request for the text of messages.
#[derive(Debug, Deserialize)]
struct TemplateRequest {
    model: Option<String>,
    messages: Option<Vec<ChatMessage>>,
    add_generation_prompt: Option<bool>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

/// A token with its text, or with its bytes if they are not valid text.
#[derive(Serialize)]
struct Piece<'a> {
    id: u32,
    piece: Text<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Text<'a> {
    Whole(&'a str),
    Bytes(&'a [u8]),
}

#[derive(Serialize)]
#[serde(untagged)]
enum Tokens<'a> {
    Ids(&'a [u32]),
    Pieces(Vec<Piece<'a>>),
}

/// Tokens for clients of llama.cpp, which read `tokens` alone, and of vLLM.
#[derive(Serialize)]
struct Tokenized<'a> {
    count: usize,
    max_model_len: usize,
    tokens: Tokens<'a>,
    token_strs: Option<Vec<String>>,
}

/// Tokenize a text
#[utoipa::path(
    post,
    path = "/tokenize",
    operation_id = "tokenize",
    tag = "other formats",
    request_body(content = schemas::TokenizeRequest, examples(
        ("llama.cpp" = (value = json!({"content": "Once upon a time", "with_pieces": true}))),
        ("vLLM" = (value = json!({"prompt": "Once upon a time", "return_token_strs": true})))
    )),
    responses((status = 200, description = "The tokens.", body = schemas::Tokenized), GenerationErrors)
)]
pub(in crate::api) async fn tokenize(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    answer(&state, &headers, body, |body, served| {
        let mut wire: TokenizeRequest = parse(body)?;
        check(wire.model.as_deref(), &wire.rest, served)?;
        let given = [wire.content.is_some(), wire.prompt.is_some(), wire.messages.is_some()];
        if given.into_iter().filter(|given| *given).count() != 1 {
            let message = "exactly one of prompt, content and messages must be given";
            return Err(ApiError::invalid(Some("prompt"), message));
        }
        let (ids, param) = ids(&mut wire, served)?;
        bounded(ids.len(), param, served)?;
        let pieces = wire.with_pieces.unwrap_or(false);
        let tokens = if pieces {
            Tokens::Pieces(ids.iter().map(|id| Piece { id: *id, piece: piece(*id, served) }).collect())
        } else {
            Tokens::Ids(&ids)
        };
        let names = || ids.iter().map(|id| served.tokenizer.name(*id)).collect();
        Ok(to_json(&Tokenized {
            count: ids.len(),
            max_model_len: served.limits.context(),
            tokens,
            token_strs: wire.return_token_strs.unwrap_or(false).then(names),
        }))
    })
    .await
}

/// Turn tokens into text
#[utoipa::path(
    post,
    path = "/detokenize",
    operation_id = "detokenize",
    tag = "other formats",
    request_body(content = schemas::DetokenizeRequest, examples(("ids" = (value = json!({"tokens": [5, 6, 7]}))))),
    responses((status = 200, description = "The text.", body = schemas::Detokenized), GenerationErrors)
)]
pub(in crate::api) async fn detokenize(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    answer(&state, &headers, body, |body, served| {
        let wire: DetokenizeRequest = parse(body)?;
        check(wire.model.as_deref(), &BTreeMap::new(), served)?;
        let ids = wire.tokens.ok_or_else(|| ApiError::invalid(Some("tokens"), "tokens must be given"))?;
        bounded(ids.len(), "tokens", served)?;
        check_ids(&ids, "tokens", served)?;
        let bytes: Vec<u8> = ids.iter().flat_map(|id| served.tokenizer.piece(*id)).copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        Ok(to_json(&json!({"content": text, "prompt": text})))
    })
    .await
}

/// Apply the chat template to messages
#[utoipa::path(
    post,
    path = "/apply-template",
    operation_id = "applyTemplate",
    tag = "other formats",
    request_body(content = schemas::TemplateRequest, examples(
        ("a message" = (value = json!({"messages": [{"role": "user", "content": "Tell me of a fox."}]})))
    )),
    responses((status = 200, description = "The prompt.", body = schemas::Rendered), GenerationErrors)
)]
pub(in crate::api) async fn apply_template(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    answer(&state, &headers, body, |body, served| {
        let wire: TemplateRequest = parse(body)?;
        check(wire.model.as_deref(), &wire.rest, served)?;
        let open = wire.add_generation_prompt.unwrap_or(true);
        Ok(to_json(&json!({"prompt": rendered(wire.messages.unwrap_or_default(), open, served)?})))
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
    work: impl FnOnce(&[u8], &Served) -> Result<String, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let body = json_body(headers, body, state.options().max_body_bytes)?;
    let served = Arc::clone(state.ready()?);
    let answer = run_blocking(state, move || work(&body, &served)).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], answer).into_response())
}

/// Refuses another model, and unsupported fields that would change the answer.
fn check(model: Option<&str>, rest: &BTreeMap<String, Value>, served: &Served) -> Result<(), ApiError> {
    if let Some(model) = model {
        served.check_name(model, Some("model"))?;
    }
    for name in ["chat_template", "chat_template_kwargs", "continue_final_message", "documents", "tools"] {
        let asks = rest.get(name).is_some_and(|value| !matches!(value, Value::Null | Value::Bool(false)));
        if asks && rest[name] != json!([]) && rest[name] != json!({}) {
            return Err(ApiError::invalid(Some(name), format!("{name} must be absent: it is not supported here")));
        }
    }
    Ok(())
}

/// The ids, and the name of the field that they come from.
fn ids(wire: &mut TokenizeRequest, served: &Served) -> Result<(Vec<u32>, &'static str), ApiError> {
    let tokenizer = &served.tokenizer;
    let encode = |text: &str, whole: bool| if whole { tokenizer.encode(text) } else { tokenizer.encode_more(text) };
    let (ids, param) = match (&wire.content, &wire.prompt) {
        (Some(content), _) if wire.parse_special == Some(false) => {
            (tokenizer.encode_plain(content, wire.add_special.unwrap_or(false)), "content")
        }
        (Some(content), _) => (encode(content, wire.add_special.unwrap_or(false)), "content"),
        (None, Some(prompt)) => (encode(prompt, wire.add_special_tokens.unwrap_or(true)), "prompt"),
        (None, None) => {
            if wire.add_special_tokens == Some(true) {
                let message = "add_special_tokens must be absent or false with messages: the chat template has them";
                return Err(ApiError::invalid(Some("add_special_tokens"), message));
            }
            let messages = wire.messages.take().unwrap_or_default();
            let text = rendered(messages, wire.add_generation_prompt.unwrap_or(true), served)?;
            (tokenizer.encode_chat(&text), "messages")
        }
    };
    let ids = ids.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))?;
    Ok((ids, param))
}

/// The text of messages, up to where an answer begins if `open`.
fn rendered(given: Vec<ChatMessage>, open: bool, served: &Served) -> Result<String, ApiError> {
    render_messages(&messages(given, "messages")?, open, "messages", served)
}

fn piece(id: u32, served: &Served) -> Text<'_> {
    let bytes = served.tokenizer.piece(id);
    std::str::from_utf8(bytes).map_or(Text::Bytes(bytes), Text::Whole)
}

fn bounded(count: usize, param: &str, served: &Served) -> Result<(), ApiError> {
    let most = served.limits.max_prompt_tokens;
    if count > most {
        let message = format!("{param} must be at most {most} tokens long, found {count} tokens");
        return Err(ApiError::invalid(Some(param), message));
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
