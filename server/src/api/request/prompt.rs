//! From what a request says to the token ids that the engine reads.

use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::formats::openai::wire::{ChatMessage, Format, GenerationRequest, Prompt};
use crate::api::request::tools::Tools;
use crate::api::state::Served;
use crate::session::Snapshot;
use crate::text::{After, ChatError, ChatTemplate, Message};

/// Most messages of one request.
const MAX_MESSAGES: usize = 10_000;

/// The token ids of each prompt. `base` is the conversation that a prompt goes on with, where there is one.
pub(in crate::api) fn encode(
    format: Format,
    wire: &mut GenerationRequest,
    served: &Served,
    base: Option<&Snapshot>,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let (other, name) = match format {
        Format::Completions => (wire.messages.is_some(), "messages"),
        Format::Chat | Format::Responses => (wire.prompt.is_some(), "prompt"),
    };
    if other {
        return Err(ApiError::invalid(Some(name), format!("{name} must be absent at {}", format.path())));
    }
    if format != Format::Completions && wire.add_special_tokens == Some(false) {
        let message = "add_special_tokens must be absent, null or true where there is a chat template";
        return Err(ApiError::invalid(Some("add_special_tokens"), message));
    }
    match format {
        Format::Chat | Format::Responses => {
            let messages = wire.messages.take().unwrap_or_default();
            let name = if format == Format::Chat { "messages" } else { "input" };
            let tools = wire.tools.as_ref().map(Tools::shown);
            Ok(vec![messages_to_ids(messages, tools, name, served, base)?])
        }
        Format::Completions => {
            let bare = !wire.add_special_tokens.unwrap_or(true);
            prompts(wire.prompt.take(), bare, served, base)
        }
    }
}

/// The ids of one prompt or of several; `bare` without the special tokens that the tokenizer puts around a text.
fn prompts(
    prompt: Option<Prompt>,
    bare: bool,
    served: &Served,
    base: Option<&Snapshot>,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let text = |text: &str| {
        if bare {
            let ids = served.tokenizer.encode_more(text);
            return ids.map_err(|error| ApiError::invalid(Some("prompt"), format!("prompt: {error}")));
        }
        text_to_ids(text, "prompt", served, base)
    };
    if let Some(base) = base {
        return match prompt {
            None if base.tokens() > 0 => Ok(vec![Vec::new()]),
            Some(Prompt::Text(one)) => Ok(vec![text(&one)?]),
            Some(Prompt::Ids(ids)) => Ok(vec![ids]),
            None => Err(ApiError::invalid(Some("prompt"), "prompt must be given where the conversation is empty")),
            Some(_) => {
                Err(ApiError::invalid(Some("prompt"), "prompt must be one where it goes on with a conversation"))
            }
        };
    }
    let prompt = prompt.ok_or_else(|| ApiError::invalid(Some("prompt"), "prompt must be given"))?;
    let count = match &prompt {
        Prompt::Text(_) | Prompt::Ids(_) => 1,
        Prompt::Texts(texts) => texts.len(),
        Prompt::IdLists(lists) => lists.len(),
    };
    // More than can wait at once would never be let in.
    let most = served.engine.queue_capacity();
    if count == 0 || count > most {
        let message = format!("prompt must hold from 1 to {most} prompts, found {count}");
        return Err(ApiError::invalid(Some("prompt"), message));
    }
    match prompt {
        Prompt::Text(one) => Ok(vec![text(&one)?]),
        Prompt::Texts(texts) => texts.iter().map(|one| text(one)).collect(),
        Prompt::Ids(ids) => Ok(vec![ids]),
        Prompt::IdLists(lists) => Ok(lists),
    }
}

/// A text's ids: a whole text's at the start of a conversation, a further piece's after that. A source is a whole text
/// wherever it comes; none is a turn that goes on.
pub(in crate::api) fn text_to_ids(
    text: &str,
    param: &str,
    served: &Served,
    base: Option<&Snapshot>,
) -> Result<Vec<u32>, ApiError> {
    let ids = match base {
        Some(_) if served.reads_sources() && text.is_empty() => return Ok(Vec::new()),
        Some(base) if base.tokens() > 0 && !served.reads_sources() => served.tokenizer.encode_more(text),
        _ => served.tokenizer.encode(text),
    };
    ids.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))
}

/// What a conversation's messages, or its further messages, are as ids; the model's answer is to follow.
pub(in crate::api) fn messages_to_ids(
    messages: Vec<ChatMessage>,
    tools: Option<&Value>,
    param: &str,
    served: &Served,
    base: Option<&Snapshot>,
) -> Result<Vec<u32>, ApiError> {
    takes_messages(served, param)?;
    let base = base.filter(|base| base.tokens() > 0);
    if messages.is_empty() && base.is_some_and(|base| base.answer.as_ref().is_some_and(|answer| answer.open)) {
        return Ok(Vec::new());
    }
    let messages = checked(messages, param)?;
    let template = template(served, param)?;
    let refused = |error: ChatError| ApiError::invalid(Some(param), format!("{param}: {error}"));
    let ids = match base {
        None => served.tokenizer.encode_chat(&template.render_tools(&messages, tools).map_err(refused)?),
        Some(base) => {
            let after = if base.answer.is_some() { After::Answer } else { After::Messages };
            served.tokenizer.encode_more(&template.render_more_tools(&messages, tools, after).map_err(refused)?)
        }
    };
    ids.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))
}

/// What further messages are as ids where no answer is to follow.
pub(in crate::api) fn messages_to_closed_ids(
    messages: Vec<ChatMessage>,
    param: &str,
    served: &Served,
    base: &Snapshot,
) -> Result<Vec<u32>, ApiError> {
    takes_messages(served, param)?;
    let messages = checked(messages, param)?;
    let after = if base.answer.is_some() { After::Answer } else { After::Messages };
    let text = template(served, param)?.render_more_closed(&messages, after);
    let text = text.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))?;
    let ids = served.tokenizer.encode_more(&text);
    ids.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))
}

/// What messages are as ids where no answer is to follow.
pub(in crate::api) fn closed_to_ids(
    messages: Vec<ChatMessage>,
    param: &str,
    served: &Served,
) -> Result<Vec<u32>, ApiError> {
    takes_messages(served, param)?;
    let messages = checked(messages, param)?;
    let text = template(served, param)?.render_closed(&messages);
    let text = text.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))?;
    let ids = served.tokenizer.encode_chat(&text);
    ids.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))
}

pub(in crate::api) fn checked(messages: Vec<ChatMessage>, param: &str) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() || messages.len() > MAX_MESSAGES {
        let message = format!("{param} must hold from 1 to {MAX_MESSAGES} messages, found {}", messages.len());
        return Err(ApiError::invalid(Some(param), message));
    }
    messages.into_iter().map(|message| message.text(param)).collect()
}

pub(in crate::api) fn template<'a>(served: &'a Served, param: &str) -> Result<&'a ChatTemplate, ApiError> {
    takes_messages(served, param)?;
    let message = "the checkpoint has no chat template, and takes prompts at /v1/completions alone";
    served.template.as_deref().ok_or_else(|| ApiError::invalid(Some(param), message))
}

/// Refuses messages, be they none, where a prompt is a source.
fn takes_messages(served: &Served, param: &str) -> Result<(), ApiError> {
    if served.reads_sources() {
        let message = "the model translates: it takes no messages, but a source as the prompt at /v1/completions";
        return Err(ApiError::invalid(Some(param), message));
    }
    Ok(())
}
