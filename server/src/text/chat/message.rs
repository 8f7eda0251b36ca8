//! Messages, and the errors of chat templates.

use serde_json::{Map, Value};

/// Most steps that a template may take. They take about a second, and allow a thousand steps for each of ten thousand
/// messages.
pub(super) const MAX_STEPS: u64 = 10_000_000;

/// Longest text, in bytes, that a template may produce.
pub(super) const MAX_BYTES: usize = 64 << 20;

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text.
    pub content: String,
    /// Other fields that templates read: `tool_calls`, `tool_call_id`, `name`.
    pub more: Map<String, Value>,
}

/// What a template gets besides the messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct TemplateInput<'a> {
    /// The tools that the answer may call, as a list of objects in OpenAI's format. The template decides whether and
    /// where to write them.
    pub tools: Option<&'a Value>,
    /// Further variables.
    pub variables: Option<&'a Map<String, Value>>,
    /// Whether to leave out the beginning of the assistant's answer.
    pub closed: bool,
    /// The text that follows the beginning of the answer, which the template does not write. It is the variable
    /// `continue_final_message`.
    pub prefill: Option<&'a str>,
}

/// Why the template produced no text.
#[allow(missing_docs, reason = "the messages explain the fields")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// The template raised an exception, for example because roles do not alternate.
    #[error("the chat template refused the messages: {0}")]
    Refused(String),
    /// The template took too many steps.
    #[error("the chat template must take at most {MAX_STEPS} steps, and takes more for these messages")]
    Steps,
    /// The text is too long.
    #[error("the rendered chat must be at most {MAX_BYTES} bytes long, and these messages give more")]
    Long,
    /// The template has an error, or does not support these messages.
    #[error("the chat template failed: {0}")]
    Failed(String),
    /// The template shows a message only next to certain other messages.
    #[error("messages[{at}] (role {role}): the chat template shows this message only together with others")]
    Hidden { at: usize, role: String },
    /// The template changes earlier text when messages are added.
    #[error(
        "the chat template does not allow adding messages to a stored conversation: send the whole conversation instead"
    )]
    NotAppendable,
}
