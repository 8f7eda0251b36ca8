//! The items of a response's output: reasoning, messages, and tool calls.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The status of a response, or of one item of its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponseStatus)]
pub(super) enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

/// An item of the output: the model's reasoning, its message, or a tool call.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = ResponseOutputItem)]
pub(in crate::api) enum OutputItem {
    Message(Message),
    Call(FunctionCall),
    Reasoning(ReasoningItem),
}

/// What the model wrote in `<think>…</think>` before its answer.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseReasoningItem)]
pub(in crate::api) struct ReasoningItem {
    pub(super) id: String,
    #[serde(rename = "type")]
    pub(super) kind: ReasoningKind,
    pub(super) status: Status,
    /// Always empty: `content` has the whole reasoning.
    #[schema(value_type = Vec<Value>, max_items = 0)]
    pub(super) summary: Vec<()>,
    /// Empty in a stream until the text begins, then one part.
    pub(super) content: Vec<ReasoningPart>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseReasoningItemKind)]
pub(super) enum ReasoningKind {
    #[serde(rename = "reasoning")]
    Reasoning,
}

/// The text of the reasoning.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseReasoningText)]
pub(in crate::api) struct ReasoningPart {
    #[serde(rename = "type")]
    pub(super) kind: ReasoningTextKind,
    pub(super) text: String,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseReasoningTextKind)]
pub(super) enum ReasoningTextKind {
    #[default]
    #[serde(rename = "reasoning_text")]
    ReasoningText,
}

/// The model's message.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseMessage)]
pub(in crate::api) struct Message {
    pub(super) id: String,
    #[serde(rename = "type")]
    pub(super) kind: MessageKind,
    pub(super) status: Status,
    pub(super) role: Role,
    /// Empty in a stream until the text begins, then one part.
    pub(super) content: Vec<TextPart>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseMessageKind)]
pub(super) enum MessageKind {
    #[serde(rename = "message")]
    Message,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseRole)]
pub(super) enum Role {
    #[serde(rename = "assistant")]
    Assistant,
}

/// The text of the message.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseText)]
pub(in crate::api) struct TextPart {
    #[serde(rename = "type")]
    pub(super) kind: TextKind,
    pub(super) text: String,
    #[schema(value_type = Vec<Value>, max_items = 0)]
    pub(super) annotations: Vec<()>,
    #[schema(value_type = Vec<Value>, max_items = 0)]
    pub(super) logprobs: Vec<()>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseTextKind)]
pub(super) enum TextKind {
    #[default]
    #[serde(rename = "output_text")]
    OutputText,
}

/// A call to a function that the client runs.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseFunctionCall)]
pub(in crate::api) struct FunctionCall {
    pub(super) id: String,
    #[serde(rename = "type")]
    pub(super) kind: CallKind,
    pub(super) status: Status,
    /// The id that the client sends back with the function's output.
    pub(super) call_id: String,
    pub(super) name: String,
    /// A JSON object as text, or the beginning of that text if the answer was cut off.
    pub(super) arguments: String,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[schema(as = ResponseCallKind)]
pub(super) enum CallKind {
    #[serde(rename = "function_call")]
    FunctionCall,
}
