//! Converts the input of a request, a text or items, to messages for the chat template.

use serde::Deserialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::formats::content::Content;
use crate::api::formats::openai::invalid;
use crate::api::formats::openai::wire::{self, ChatMessage, MessageCall};
use crate::text::Message;

/// A string, or an array of items.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a string or an array of items")]
pub(super) enum Input {
    Text(String),
    Items(Vec<Item>),
}

/// One item of the input: a message with a role and content; a function call that an earlier response made, with its
/// `call_id`, name and arguments; the output of such a call, with the same `call_id`; or the reasoning of an earlier
/// response, which is left out: models do not read it again.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = InputItem)]
pub(super) struct Item {
    /// Default: `message`.
    #[serde(rename = "type")]
    #[schema(pattern = "^(message|function_call|function_call_output|reasoning)$")]
    kind: Option<String>,
    #[schema(pattern = "^(user|assistant|system|developer)$")]
    role: Option<String>,
    content: Option<Content>,
    call_id: Option<String>,
    name: Option<String>,
    /// A JSON object as text.
    arguments: Option<String>,
    /// A string, or an array of text parts.
    output: Option<Content>,
}

/// Converts the instructions and the input, in this order.
pub(super) fn messages(instructions: Option<String>, input: Option<Input>) -> Result<Vec<Message>, ApiError> {
    let message =
        |role: &str, content| ChatMessage { role: role.into(), content: Some(content), ..ChatMessage::default() };
    let mut messages: Vec<ChatMessage> = Vec::new();
    messages.extend(instructions.map(|text| message("system", Content::Text(text))));
    match input {
        None => {}
        Some(Input::Text(text)) => messages.push(message("user", Content::Text(text))),
        Some(Input::Items(items)) => {
            let mut items = items.into_iter().enumerate().peekable();
            while let Some((at, item)) = items.next() {
                let cut_off = item.is("reasoning") && items.peek().is_some_and(|(_, next)| !next.is_of_answer());
                // If reasoning is the first item, the assistant's turn may be the stored answer before it.
                if cut_off && at > 0 {
                    // Many templates require messages of the user and the assistant to alternate.
                    messages.push(message("assistant", Content::Text(String::new())));
                }
                item.add_to(&mut messages, at)?;
            }
        }
    }
    wire::messages(messages, "input")
}

impl Item {
    fn is(&self, kind: &str) -> bool {
        self.kind.as_deref() == Some(kind)
    }

    /// Whether the item belongs to the same answer as reasoning right before it.
    fn is_of_answer(&self) -> bool {
        self.is("reasoning") || self.is("function_call") || self.role.as_deref() == Some("assistant")
    }

    fn add_to(self, messages: &mut Vec<ChatMessage>, at: usize) -> Result<(), ApiError> {
        let needed = |name: &str, value: Option<String>| {
            let message = || invalid("input", format!("input[{at}].{name} must be a string that is not empty"));
            value.filter(|value| !value.is_empty()).ok_or_else(message)
        };
        match self.kind.as_deref() {
            None | Some("message") => messages.push(self.message(at)?),
            Some("function_call") => {
                let arguments = self.arguments.unwrap_or_default();
                let call = MessageCall::new(needed("call_id", self.call_id)?, needed("name", self.name)?, arguments);
                // The calls of one response are consecutive items. They become one message, as in chat.
                match messages.last_mut().and_then(|last| last.tool_calls.as_mut()) {
                    Some(calls) => calls.push(call),
                    None => messages.push(ChatMessage {
                        role: "assistant".into(),
                        tool_calls: Some(vec![call]),
                        ..ChatMessage::default()
                    }),
                }
            }
            Some("function_call_output") => {
                let id = needed("call_id", self.call_id)?;
                let Some(content) = self.output else {
                    return Err(invalid("input", format!("input[{at}].output must be a string or parts of text")));
                };
                messages.push(ChatMessage {
                    role: "tool".into(),
                    content: Some(content),
                    tool_call_id: Some(id),
                    ..ChatMessage::default()
                });
            }
            Some("reasoning") => {}
            Some(kind) => {
                let kind: String = kind.chars().take(100).collect();
                let message = format!(
                    "input[{at}].type must be message, function_call, function_call_output or reasoning, found {kind:?}"
                );
                return Err(invalid("input", message));
            }
        }
        Ok(())
    }

    fn message(self, at: usize) -> Result<ChatMessage, ApiError> {
        let role = match self.role.as_deref() {
            Some(role @ ("user" | "assistant" | "system" | "developer")) => role.to_owned(),
            role => {
                let found: String = role.unwrap_or("none").chars().take(100).collect();
                let message = format!("input[{at}].role must be user, assistant, system or developer, found {found}");
                return Err(invalid("input", message));
            }
        };
        Ok(ChatMessage { role, content: self.content, ..ChatMessage::default() })
    }
}
