//! The wire types of conversations that are read back.

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::wire::ListKind;
use crate::api::openapi::literals::literals;
use crate::session::KeptMessage;

literals!(TextKind = "session.text", TokensKind = "session.tokens");

/// A part of a text.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TextQuery {
    /// A version that the session lists, or a tag of the session. Default: the head.
    #[param(nullable = false)]
    pub(super) version: Option<String>,
    /// The position of the first token. Default: 0.
    #[param(nullable = false)]
    pub(super) start: Option<u64>,
    /// The position after the last token, at most 1,000,000 after `start`. Default: that limit, or the end of the text
    /// if it comes first.
    #[param(nullable = false)]
    pub(super) end: Option<u64>,
}

/// The text of a conversation, or a part of it.
#[derive(Serialize, ToSchema)]
pub(super) struct SessionText {
    pub(super) object: TextKind,
    /// The session.
    pub(super) id: String,
    pub(super) version: String,
    /// The position of the first token.
    pub(super) start: u64,
    /// The position after the last token.
    pub(super) end: u64,
    /// Tokens of the whole text.
    pub(super) total: u64,
    /// The text of the tokens. Special tokens have none. Bytes that are not a whole character, for example where a part
    /// begins or ends inside one, become U+FFFD.
    pub(super) text: String,
}

/// The tokens of a conversation, or a part of them.
#[derive(Serialize, ToSchema)]
pub(super) struct SessionTokens {
    pub(super) object: TokensKind,
    /// The session.
    pub(super) id: String,
    pub(super) version: String,
    /// The position of the first token.
    pub(super) start: u64,
    /// The position after the last token.
    pub(super) end: u64,
    /// Tokens of the whole text.
    pub(super) total: u64,
    pub(super) tokens: Vec<u32>,
}

/// A part of the messages of a conversation.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct MessagesQuery {
    /// A version that the session lists, or a tag of the session. Default: the head.
    #[param(nullable = false)]
    pub(super) version: Option<String>,
    /// The number of the first message. Default: 0.
    #[param(nullable = false)]
    pub(super) start: Option<u64>,
    /// The number after that of the last message, at most 10,000 after `start`. Default: that limit, or all messages if
    /// there are fewer.
    #[param(nullable = false)]
    pub(super) end: Option<u64>,
}

/// The messages of a conversation, or a part of them.
#[derive(Serialize, ToSchema)]
pub(super) struct SessionMessages {
    pub(super) object: ListKind,
    /// The session.
    pub(super) id: String,
    pub(super) version: String,
    /// The number of the first message.
    pub(super) start: u64,
    /// The number after that of the last message.
    pub(super) end: u64,
    /// Messages of the whole conversation.
    pub(super) total: u64,
    #[schema(value_type = Vec<SessionMessage>)]
    pub(super) data: Vec<Message>,
}

/// A message that becomes a [`SessionMessage`] only when it is serialized. Its parsed fields take many times the
/// memory, so only one message is parsed at a time.
pub(super) struct Message(KeptMessage);

impl From<KeptMessage> for Message {
    fn from(message: KeptMessage) -> Self {
        Self(message)
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        SessionMessage::new(&self.0).serialize(serializer)
    }
}

/// A message of a conversation. Text and tokens that the client has sent have the role `user`; what the model has
/// generated has the role `assistant`.
#[derive(Serialize, ToSchema)]
pub(super) struct SessionMessage {
    role: &'static str,
    /// Null in a message that calls tools.
    #[schema(required)]
    content: Option<String>,
    /// The version that added it.
    version: String,
    /// The tool calls that it makes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, value_type = Option<Vec<Object>>)]
    tool_calls: Option<Value>,
    /// The tool call that the message answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    tool_call_id: Option<String>,
    /// The name of the author.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    name: Option<String>,
}

/// The further fields of a stored message.
#[derive(Default, Deserialize)]
struct More {
    tool_calls: Option<Value>,
    tool_call_id: Option<String>,
    name: Option<String>,
}

impl SessionMessage {
    fn new(message: &KeptMessage) -> Self {
        let KeptMessage { role, content, version, more, .. } = message;
        let more = more.as_ref().and_then(|more| serde_json::from_str::<More>(more).ok()).unwrap_or_default();
        let tool_calls = more.tool_calls.map(with_text_arguments);
        let (content, version) = (content.clone(), version.to_string());
        let (tool_call_id, name) = (more.tool_call_id, more.name);
        Self { role: role.as_str(), content, version, tool_calls, tool_call_id, name }
    }
}

/// Turns the calls' arguments from objects, as templates take them, into text, as clients send them.
fn with_text_arguments(mut calls: Value) -> Value {
    for call in calls.as_array_mut().into_iter().flatten() {
        if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|arguments| arguments.is_object()) {
            *arguments = Value::String(arguments.to_string());
        }
    }
    calls
}
