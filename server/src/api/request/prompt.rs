//! From prompts and messages to the token ids that the engine reads.

use super::tools::Tools;
use crate::api::error::ApiError;
use crate::api::state::Served;
use crate::session::Snapshot;
use crate::text::{After, ChatTemplate, Message, TextError};

/// Most messages of one request.
const MAX_MESSAGES: usize = 10_000;

/// What the model reads.
#[derive(Debug)]
pub(in crate::api) enum Prompt {
    /// Nothing new: the answer continues the conversation.
    Missing,
    /// One prompt or several. Without `add_special_tokens`, texts are encoded without the special tokens around them.
    Inputs { inputs: Vec<Input>, add_special_tokens: bool },
    /// Messages, which the checkpoint's chat template makes into a text. The answer continues `prefill` if there is one.
    Messages { messages: Vec<Message>, prefill: Option<String> },
}

/// One prompt.
#[derive(Debug)]
pub(in crate::api) enum Input {
    Text(String),
    Ids(Vec<u32>),
    /// Texts and token ids one after the other.
    Mixed(Vec<Piece>),
}

/// A piece of a prompt.
#[derive(Debug)]
pub(in crate::api) enum Piece {
    Text(String),
    Id(u32),
}

impl Prompt {
    /// The token ids of each prompt, which `param` asks for. `base` is the conversation that is continued.
    pub(in crate::api) fn encode(
        self,
        param: &str,
        tools: Option<&Tools>,
        served: &Served,
        base: Option<&Snapshot>,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let invalid = |message: String| Err(ApiError::invalid(Some(param), message));
        match self {
            Self::Missing => match base {
                Some(base) if base.tokens() > 0 => Ok(vec![Vec::new()]),
                Some(_) => invalid(format!("{param} must be given if the conversation is empty")),
                None => invalid(format!("{param} must be given")),
            },
            Self::Inputs { inputs, add_special_tokens } => {
                // More than the queue holds would never be admitted.
                let most = served.engine.queue_capacity();
                if inputs.is_empty() || inputs.len() > most {
                    return invalid(format!("{param} must hold from 1 to {most} prompts, found {}", inputs.len()));
                }
                inputs.into_iter().map(|input| input.encode(param, add_special_tokens, served, base)).collect()
            }
            Self::Messages { messages, prefill } => {
                Ok(vec![encode_messages(&messages, prefill.as_deref(), tools, param, served, base)?])
            }
        }
    }
}

impl Input {
    fn encode(
        self,
        param: &str,
        add_special_tokens: bool,
        served: &Served,
        base: Option<&Snapshot>,
    ) -> Result<Vec<u32>, ApiError> {
        match self {
            Self::Text(text) if add_special_tokens => encode_text(&text, param, served, base),
            Self::Text(text) => served.tokenizer.encode_more(&text).map_err(refused(param)),
            Self::Ids(ids) => Ok(ids),
            Self::Mixed(pieces) => {
                let mut ids = Vec::new();
                for (at, piece) in pieces.into_iter().enumerate() {
                    match piece {
                        Piece::Id(id) => ids.push(id),
                        // A text in front gets the special tokens that begin every text; ids in front are taken as
                        // they are.
                        Piece::Text(text) if at == 0 => {
                            ids.extend(served.tokenizer.encode_chat(&text).map_err(refused(param))?);
                        }
                        Piece::Text(text) => ids.extend(served.tokenizer.encode_more(&text).map_err(refused(param))?),
                    }
                }
                Ok(ids)
            }
        }
    }
}

fn refused(param: &str) -> impl Fn(TextError) -> ApiError {
    move |error| ApiError::invalid(Some(param), format!("{param}: {error}"))
}

/// The ids of a text: with the special tokens around it at the start of a conversation, without them after that. A
/// source always has them; an empty one lets the answer before it continue.
pub(in crate::api) fn encode_text(
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
    ids.map_err(refused(param))
}

/// The ids of a conversation's messages, or of its further messages, up to where the model's answer begins.
fn encode_messages(
    messages: &[Message],
    prefill: Option<&str>,
    tools: Option<&Tools>,
    param: &str,
    served: &Served,
    base: Option<&Snapshot>,
) -> Result<Vec<u32>, ApiError> {
    takes_messages(served, param)?;
    let base = base.filter(|base| base.tokens() > 0);
    if messages.is_empty() && base.is_some_and(|base| base.answer.as_ref().is_some_and(|answer| answer.open)) {
        return Ok(Vec::new());
    }
    check_count(messages, param)?;
    let (template, tools) = (chat_template(served, param)?, tools.map(Tools::template));
    let text = match base {
        None => template.render_tools(messages, tools),
        Some(base) => template.render_more_tools(messages, tools, after(base)),
    };
    let mut text = text.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))?;
    text.push_str(prefill.unwrap_or_default());
    let ids = if base.is_some() { served.tokenizer.encode_more(&text) } else { served.tokenizer.encode_chat(&text) };
    ids.map_err(refused(param))
}

/// The ids of messages that no answer follows, at the start of a conversation or after `base`.
pub(in crate::api) fn encode_closed_messages(
    messages: &[Message],
    param: &str,
    served: &Served,
    base: &Snapshot,
) -> Result<Vec<u32>, ApiError> {
    let template = chat_template(served, param)?;
    check_count(messages, param)?;
    let begins = base.tokens() == 0;
    let text =
        if begins { template.render_closed(messages) } else { template.render_more_closed(messages, after(base)) };
    let text = text.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))?;
    let ids = if begins { served.tokenizer.encode_chat(&text) } else { served.tokenizer.encode_more(&text) };
    ids.map_err(refused(param))
}

/// The text of a conversation's messages, with the beginning of an answer or without.
pub(in crate::api) fn render_messages(
    messages: &[Message],
    answer: bool,
    param: &str,
    served: &Served,
) -> Result<String, ApiError> {
    let template = chat_template(served, param)?;
    check_count(messages, param)?;
    let text = if answer { template.render(messages) } else { template.render_closed(messages) };
    text.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))
}

fn after(base: &Snapshot) -> After {
    if base.answer.is_some() { After::Answer } else { After::Messages }
}

fn check_count(messages: &[Message], param: &str) -> Result<(), ApiError> {
    if messages.is_empty() || messages.len() > MAX_MESSAGES {
        let message = format!("{param} must hold from 1 to {MAX_MESSAGES} messages, found {}", messages.len());
        return Err(ApiError::invalid(Some(param), message));
    }
    Ok(())
}

fn chat_template<'a>(served: &'a Served, param: &str) -> Result<&'a ChatTemplate, ApiError> {
    takes_messages(served, param)?;
    let message = "the checkpoint has no chat template, and takes prompts at /v1/completions alone";
    served.template.as_deref().ok_or_else(|| ApiError::invalid(Some(param), message))
}

fn takes_messages(served: &Served, param: &str) -> Result<(), ApiError> {
    if served.reads_sources() {
        let message = "the model translates: it takes no messages, but a source as the prompt at /v1/completions";
        return Err(ApiError::invalid(Some(param), message));
    }
    Ok(())
}
