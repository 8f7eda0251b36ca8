//! A message of `/v1/chat/completions`, whole or in pieces.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::formats::openai::wire::FunctionKind;
use crate::api::openapi::literals::literals;
use crate::api::openapi::schemas::nothing;
use crate::api::run::tool_calls::{self, Piece};

literals!(Assistant = "assistant");

/// A message.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ChatMessage)]
pub(super) struct Message {
    pub(super) role: Assistant,
    /// Null in a message that calls tools.
    #[schema(required)]
    pub(super) content: Option<String>,
    /// What the model wrote in `<think>…</think>` before its answer, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCall>,
    /// Always null: the model refuses nothing.
    #[schema(required, schema_with = nothing)]
    pub(super) refusal: (),
}

/// A piece of a message.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = ChatPiece)]
pub(super) struct MessagePiece {
    /// Only in the first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(super) role: Option<Assistant>,
    /// Null at the beginning of a message that calls tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub(super) content: Option<Value>,
    /// What the model writes in `<think>…</think>` before its answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCall>,
}

/// A tool call, whole or a piece of one. Only the first piece has more than the index and arguments.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub(super) struct ToolCall {
    /// The call's position in the message; only in pieces.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(super) index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(super) id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(super) kind: Option<FunctionKind>,
    pub(super) function: Function,
}

/// The function that is called.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = CalledFunction)]
pub(super) struct Function {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(super) name: Option<String>,
    /// A JSON object as text, or a piece of that text.
    pub(super) arguments: String,
}

impl ToolCall {
    pub(super) fn new(index: Option<usize>, id: String, name: String, arguments: String) -> Self {
        let function = Function { name: Some(name), arguments };
        Self { index, id: Some(id), kind: Some(FunctionKind), function }
    }

    pub(super) fn whole(call: &tool_calls::ToolCall) -> Self {
        Self::new(None, call.id.clone(), call.name.clone(), call.arguments.clone())
    }
}

impl MessagePiece {
    /// Returns a piece of a message that is a tool call, or a piece of one.
    fn call(call: ToolCall) -> Self {
        Self { tool_calls: vec![call], ..Self::default() }
    }
}

impl From<Piece> for MessagePiece {
    fn from(piece: Piece) -> Self {
        match piece {
            Piece::Reasoning(text) => Self { reasoning_content: Some(text), ..Self::default() },
            Piece::Text(text) => Self { content: Some(text.into()), ..Self::default() },
            Piece::CallStart { index, id, name } => Self::call(ToolCall::new(Some(index), id, name, String::new())),
            Piece::Arguments { index, text } => {
                let function = Function { name: None, arguments: text };
                Self::call(ToolCall { index: Some(index), function, ..ToolCall::default() })
            }
        }
    }
}
