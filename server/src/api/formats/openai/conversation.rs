//! Fields that control how the chat template renders the messages, with vLLM's names and meanings.

use serde_json::{Map, Value};

use super::invalid;
use crate::api::error::ApiError;
use crate::api::request::prompt::{Conversation, Ending};
use crate::text::Message;

/// Template variables that other fields or the server set.
const RESERVED: [&str; 9] = [
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "documents",
    "messages",
    "raise_exception",
    "strftime_now",
    "tokenize",
    "tools",
];

/// The fields of a body that control the chat template.
pub(in crate::api::formats) struct TemplateFields {
    pub(in crate::api::formats) add_generation_prompt: Option<bool>,
    pub(in crate::api::formats) continue_final_message: Option<bool>,
    pub(in crate::api::formats) chat_template_kwargs: Option<Map<String, Value>>,
}

impl TemplateFields {
    /// Applies the fields to `messages`. `calls` says whether the answer may call tools.
    pub(in crate::api::formats) fn apply(
        self,
        mut messages: Vec<Message>,
        calls: bool,
    ) -> Result<Conversation, ApiError> {
        let ending = match (self.continue_final_message, self.add_generation_prompt) {
            (Some(true), Some(true)) => {
                let message = "continue_final_message must be absent or false if add_generation_prompt is true";
                return Err(invalid("continue_final_message", message));
            }
            (Some(true), _) if calls => {
                let message = "continue_final_message must be absent or false if tools may be called: a call cannot be \
                               continued";
                return Err(invalid("continue_final_message", message));
            }
            (Some(true), _) => Ending::Prefill(last_text(&mut messages)?),
            (_, Some(false)) => Ending::Nothing,
            _ => Ending::Answer,
        };
        let mut variables = self.chat_template_kwargs.unwrap_or_default();
        if let Some(name) = RESERVED.iter().find(|name| variables.contains_key(**name)) {
            let message = format!("chat_template_kwargs.{name} must be absent: other fields or the server set it");
            return Err(invalid("chat_template_kwargs", message));
        }
        if let (Ending::Prefill(_), Some(thinks)) = (&ending, variables.get_mut("enable_thinking")) {
            // The template would put a tag that opens reasoning before the message.
            *thinks = false.into();
        }
        Ok(Conversation { messages, ending, variables, only_new: false })
    }
}

/// Takes the last message, which must be a text of the assistant after at least one other message.
fn last_text(messages: &mut Vec<Message>) -> Result<String, ApiError> {
    let last = messages.pop().filter(|last| last.role == "assistant" && !last.more.contains_key("tool_calls"));
    match last {
        Some(last) if !messages.is_empty() => Ok(last.content),
        _ => {
            let message = "messages must end with a text of the assistant's, after another message, for \
                           continue_final_message";
            Err(invalid("messages", message))
        }
    }
}
