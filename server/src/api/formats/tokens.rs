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
use utoipa::ToSchema;

use crate::api::error::{ApiError, ErrorBody};
use crate::api::formats::openai::reading;
use crate::api::formats::openai::wire::{ChatMessage, body as json_body, parse};
use crate::api::openapi::{GenerationErrors, fragments};
use crate::api::request::prompt;
use crate::api::state::{AppState, Served};
use crate::text::Message;

/// A text to tokenize: `content` for clients of llama.cpp, `prompt` or `messages` for clients of vLLM.
#[derive(Debug, Deserialize, ToSchema)]
struct TokenizeRequest {
    model: Option<String>,
    content: Option<String>,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
    prompt: Option<String>,
    #[schema(schema_with = fragments::messages)]
    messages: Option<Vec<ChatMessage>>,
    add_special_tokens: Option<bool>,
    add_generation_prompt: Option<bool>,
    return_token_strs: Option<bool>,
    #[serde(flatten)]
    #[schema(ignore)]
    rest: BTreeMap<String, Value>,
}

/// Tokens to turn into text.
#[derive(Debug, Deserialize, ToSchema)]
struct DetokenizeRequest {
    model: Option<String>,
    #[schema(required, schema_with = fragments::some_ids)]
    tokens: Option<Vec<u32>>,
}

/// Messages to apply the chat template to.
#[derive(Debug, Deserialize, ToSchema)]
struct TemplateRequest {
    model: Option<String>,
    #[schema(required, schema_with = fragments::some_messages)]
    messages: Option<Vec<ChatMessage>>,
    add_generation_prompt: Option<bool>,
    #[serde(flatten)]
    #[schema(ignore)]
    rest: BTreeMap<String, Value>,
}

/// A token with what it stands for: a text where its bytes are one.
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

/// The tokens in the words of llama.cpp, which reads `tokens` alone, and of vLLM.
#[derive(Serialize, ToSchema)]
struct Tokenized<'a> {
    count: usize,
    max_model_len: usize,
    /// Token ids; with `with_pieces`, objects with `id` and `piece`.
    #[schema(schema_with = fragments::anything)]
    tokens: Tokens<'a>,
    #[schema(required)]
    token_strs: Option<Vec<String>>,
}

/// A text, for clients of llama.cpp and of vLLM.
#[derive(Serialize, ToSchema)]
struct Detokenized<'a> {
    content: &'a str,
    prompt: &'a str,
}

/// The prompt that the model reads.
#[derive(Serialize, ToSchema)]
struct Rendered {
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
        Ok(said(&Tokenized {
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
        check(wire.model.as_deref(), &BTreeMap::new(), served)?;
        let ids = wire.tokens.ok_or_else(|| ApiError::invalid(Some("tokens"), "tokens must be given"))?;
        bounded(ids.len(), "tokens", served)?;
        check_ids(&ids, "tokens", served)?;
        let bytes: Vec<u8> = ids.iter().flat_map(|id| served.tokenizer.piece(*id)).copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        Ok(said(&Detokenized { content: &text, prompt: &text }))
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
        check(wire.model.as_deref(), &wire.rest, served)?;
        let open = wire.add_generation_prompt.unwrap_or(true);
        Ok(said(&Rendered { prompt: rendered(wire.messages.unwrap_or_default(), open, served)? }))
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
    let message = "this server makes texts alone: its model has not been trained for embeddings";
    ApiError::request(StatusCode::NOT_IMPLEMENTED, None, Some("not_supported"), message)
}

/// Reads a body and answers it away from the connections' threads.
async fn answer(
    state: &AppState,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
    work: impl FnOnce(&[u8], &Served) -> Result<String, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let body = json_body(headers, body, state.options().max_body_bytes)?;
    let served = Arc::clone(state.ready()?);
    let said = reading(state, move || work(&body, &served)).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], said).into_response())
}

fn said(answer: &impl Serialize) -> String {
    // Strings, numbers and lists of them: there is nothing in it that JSON cannot say.
    serde_json::to_string(answer).unwrap_or_default()
}

/// Refuses another model, and fields that would change the answer and are not here.
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

/// The ids, and the name of the field that they were made from.
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

/// The text of messages, with the beginning of an answer or without.
fn rendered(messages: Vec<ChatMessage>, open: bool, served: &Served) -> Result<String, ApiError> {
    let template = prompt::template(served, "messages")?;
    let messages: Vec<Message> = prompt::checked(messages, "messages")?;
    let text = if open { template.render(&messages) } else { template.render_closed(&messages) };
    text.map_err(|error| ApiError::invalid(Some("messages"), format!("messages: {error}")))
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
