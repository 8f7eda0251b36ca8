//! Turns prompts and messages into the token ids that the engine reads.

use serde_json::{Map, Value};

use super::encode::encode;
use super::messages::{self, PromptMessages};
use super::tools::Tools;
use crate::api::error::ApiError;
use crate::api::state::Served;
use crate::session::Snapshot;
use crate::text::{After, Around, ChatTemplate, Message, ReasoningStart, TemplateInput};

/// Most messages of one request.
const MAX_MESSAGES: usize = 10_000;

/// What the model reads.
#[derive(Debug)]
pub(in crate::api) enum Prompt {
    /// Nothing new: the answer continues the conversation.
    Missing,
    /// One prompt or several. Without `add_special_tokens`, texts are encoded without the special tokens around them.
    Inputs { inputs: Vec<Input>, add_special_tokens: bool },
    /// Messages, which the checkpoint's chat template turns into a text.
    Messages(Conversation),
}

/// Messages, and how the chat template writes them.
#[derive(Clone, Debug, Default)]
pub(in crate::api) struct Conversation {
    pub(in crate::api) messages: Vec<Message>,
    pub(in crate::api) ending: Ending,
    /// Further variables for the template.
    pub(in crate::api) variables: Map<String, Value>,
    /// Whether the messages of a turn must not include answers: the conversation already has its answers, and would
    /// read them twice.
    pub(in crate::api) only_new: bool,
}

/// What follows the messages.
#[derive(Clone, Debug, Default)]
pub(in crate::api) enum Ending {
    /// The beginning of an answer.
    #[default]
    Answer,
    /// An answer that begins with this text, which the model continues.
    Prefill(String),
    /// Nothing: the model decides how to go on.
    Nothing,
}

impl From<Vec<Message>> for Conversation {
    fn from(messages: Vec<Message>) -> Self {
        Self { messages, ..Self::default() }
    }
}

impl Conversation {
    /// Returns what the template gets besides the messages.
    fn input<'a>(&'a self, tools: Option<&'a Tools>) -> TemplateInput<'a> {
        let closed = matches!(self.ending, Ending::Nothing);
        let (tools, variables) = (tools.map(Tools::template), Some(&self.variables));
        TemplateInput { tools, variables, closed, prefill: self.prefill() }
    }

    /// Returns the text at the beginning of the answer, if there is any.
    fn prefill(&self) -> Option<&str> {
        match &self.ending {
            Ending::Prefill(text) if !text.is_empty() => Some(text),
            _ => None,
        }
    }

    /// Returns the messages, and where in `prompt` their contents are.
    pub(in crate::api) fn added(&self, prompt: &[u32], served: &Served) -> PromptMessages {
        messages::added(&self.messages, self.prefill(), prompt, served.tokenizer.vocabulary())
    }

    /// Renders the conversation as text.
    pub(in crate::api) fn render(
        &self,
        tools: Option<&Tools>,
        param: &str,
        served: &Served,
    ) -> Result<String, ApiError> {
        let template = chat_template(served, param)?;
        check_count(&self.messages, param)?;
        let text = template.render_with(&self.messages, self.input(tools));
        let text = text.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))?;
        Ok(text + self.prefill().unwrap_or_default())
    }
}

/// One prompt.
#[derive(Debug)]
pub(in crate::api) enum Input {
    Text(String),
    Ids(Vec<u32>),
    /// Texts and token ids, one after the other.
    Mixed(Vec<Piece>),
}

/// A piece of a prompt.
#[derive(Debug)]
pub(in crate::api) enum Piece {
    Text(String),
    Id(u32),
}

impl Prompt {
    /// Returns where the prompt leaves the reasoning of a model that reasons.
    pub(in crate::api) fn reasoning_start(&self, tools: Option<&Tools>, served: &Served) -> Option<ReasoningStart> {
        let Self::Messages(conversation) = self else { return None };
        let template = served.template.as_deref().filter(|template| template.has_reasoning())?;
        let messages = &conversation.messages;
        if messages.is_empty() {
            // The text continues an answer.
            return Some(ReasoningStart::Free);
        }
        let input = conversation.input(tools);
        // The messages of a turn need not be a whole conversation. A template's errors are reported when the prompt is
        // encoded.
        let whole = template.render_with(messages, input);
        let text = whole.or_else(|_| template.render_more_with(messages, input, After::Answer)).ok()?;
        Some(ReasoningStart::after((text + conversation.prefill().unwrap_or_default()).as_bytes()))
    }

    /// Encodes each prompt, which `param` gave, into token ids. `base` is the conversation that is continued.
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
            Self::Messages(conversation) => Ok(vec![encode_messages(&conversation, tools, param, served, base)?]),
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
            Self::Text(text) => {
                let continues = base.is_some_and(|base| base.tokens() > 0) && !served.reads_sources();
                encode(&text, if continues { Around::More } else { Around::Nothing }, param, served)
            }
            Self::Ids(ids) => Ok(ids),
            Self::Mixed(pieces) => {
                let mut ids = Vec::new();
                for (at, piece) in pieces.into_iter().enumerate() {
                    match piece {
                        Piece::Id(id) => ids.push(id),
                        // A leading text gets the special tokens that begin every text; leading ids are taken as they
                        // are.
                        Piece::Text(text) if at == 0 => {
                            ids.extend(encode(&text, Around::Begin, param, served)?);
                        }
                        Piece::Text(text) => ids.extend(encode(&text, Around::More, param, served)?),
                    }
                }
                Ok(ids)
            }
        }
    }
}

/// Encodes a text: with the special tokens around it at the start of a conversation, without them after that. A source
/// always has them; an empty source lets the answer before it continue.
pub(in crate::api) fn encode_text(
    text: &str,
    param: &str,
    served: &Served,
    base: Option<&Snapshot>,
) -> Result<Vec<u32>, ApiError> {
    match base {
        Some(_) if served.reads_sources() && text.is_empty() => Ok(Vec::new()),
        Some(base) if base.tokens() > 0 && !served.reads_sources() => encode(text, Around::More, param, served),
        _ => encode(text, Around::Both, param, served),
    }
}

/// Encodes a conversation's messages, or its further messages after `base`, up to where the model's answer begins.
fn encode_messages(
    conversation: &Conversation,
    tools: Option<&Tools>,
    param: &str,
    served: &Served,
    base: Option<&Snapshot>,
) -> Result<Vec<u32>, ApiError> {
    takes_messages(served, param)?;
    let Some(base) = base.filter(|base| base.tokens() > 0) else {
        return encode(&conversation.render(tools, param, served)?, Around::Begin, param, served);
    };
    let messages = &conversation.messages;
    if messages.is_empty() && base.answer.as_ref().is_some_and(|answer| answer.open) {
        return Ok(Vec::new());
    }
    check_count(messages, param)?;
    if conversation.only_new {
        check_new(messages, param)?;
    }
    let text = chat_template(served, param)?.render_more_with(messages, conversation.input(tools), after(base));
    let text = text.map_err(|error| ApiError::invalid(Some(param), format!("{param}: {error}")))?;
    encode(&(text + conversation.prefill().unwrap_or_default()), Around::More, param, served)
}

/// Encodes messages that no answer follows, at the start of a conversation or after `base`.
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
    encode(&text, if begins { Around::Begin } else { Around::More }, param, served)
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

/// Refuses answers among the messages of a turn.
fn check_new(messages: &[Message], param: &str) -> Result<(), ApiError> {
    let Some(at) = messages.iter().position(|message| message.role == "assistant") else { return Ok(()) };
    let message = format!(
        "{param} must hold only what is new, found an answer at {param}[{at}]: the conversation has its answers already. \
         Send the messages after the last answer, or history: \"append\" to append all of them as they are"
    );
    Err(ApiError::invalid(Some(param), message))
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
