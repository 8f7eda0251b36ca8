//! What a turn adds to the text of a conversation. It is kept beside the versions and never needed to continue one.

use super::id::VersionId;

/// The text that a version adds to its parent's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddedText {
    /// How many tokens of the parent's text remain: usually all. A stop string may remove the last ones, which were
    /// pending, and a new source of an encoder-decoder model replaces all of them.
    pub kept: u64,
    /// The tokens that follow.
    pub tokens: Vec<u32>,
    /// The added messages, in order.
    pub messages: Vec<AddedMessage>,
}

/// A message that a turn adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedMessage {
    /// Who wrote it.
    pub role: Role,
    /// Whether the message continues the last message of the parent's text.
    pub continues: bool,
    /// What the message says.
    pub content: Content,
    /// A JSON object with further fields, such as `tool_calls`.
    pub more: Option<String>,
}

/// Where the content of a message is. Ranges refer to the added tokens, or to the bytes of their text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// The text of these tokens.
    Tokens(u64, u64),
    /// These bytes of the tokens' text.
    Bytes(u64, u64),
    /// The content itself, because the chat template has changed it in the tokens.
    Text(String),
    /// No content: the message consists of its further fields.
    None,
}

/// Who wrote a message.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    System,
    User,
    Assistant,
    Tool,
    Developer,
}

const ROLES: [(Role, &str); 5] = [
    (Role::System, "system"),
    (Role::User, "user"),
    (Role::Assistant, "assistant"),
    (Role::Tool, "tool"),
    (Role::Developer, "developer"),
];

impl Role {
    /// Returns the role's name in a message.
    pub fn as_str(self) -> &'static str {
        ROLES[self as usize].1
    }

    /// Returns the role with this name.
    pub fn parse(name: &str) -> Option<Self> {
        ROLES.iter().find(|(_, known)| *known == name).map(|(role, _)| *role)
    }

    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        ROLES.get(usize::from(byte)).map(|(role, _)| *role)
    }
}

impl AddedMessage {
    /// Returns an upper bound of the bytes that the message takes when stored.
    pub fn most_bytes(&self) -> u64 {
        let text = if let Content::Text(text) = &self.content { text.len() } else { 0 };
        (32 + text + self.more.as_ref().map_or(0, String::len)) as u64
    }
}

impl AddedText {
    /// Replaces the content of the last message, if that message begins in this text, by tool calls: a JSON array.
    pub fn set_tool_calls(&mut self, calls: &str) {
        if let Some(last) = self.messages.last_mut().filter(|last| !last.continues) {
            (last.content, last.more) = (Content::None, Some(format!(r#"{{"tool_calls":{calls}}}"#)));
        }
    }

    /// Returns the number of tokens of the whole text, up to and including this part.
    pub fn total(&self) -> u64 {
        self.kept + self.tokens.len() as u64
    }
}

/// A message of a conversation, as it is read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptMessage {
    /// Who wrote it.
    pub role: Role,
    /// What the message says; invalid UTF-8 is replaced by U+FFFD.
    pub content: Option<String>,
    /// The version that added it.
    pub version: VersionId,
    /// A JSON object with further fields.
    pub more: Option<String>,
    /// The range of tokens whose text is the content; `None` if the content is not made of whole tokens.
    pub tokens: Option<(u64, u64)>,
}

/// A range of the messages of a version's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessagesPart {
    /// Number of messages of the whole text.
    pub total: u64,
    /// The index of the first message in the range.
    pub start: u64,
    /// The index after the last message in the range.
    pub end: u64,
    /// The messages.
    pub messages: Vec<KeptMessage>,
}

/// A range of a version's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextPart {
    /// Number of tokens of the whole text.
    pub total: u64,
    /// The position of the first token in the range.
    pub start: u64,
    /// The position after the last token in the range.
    pub end: u64,
    /// The tokens.
    pub tokens: Vec<u32>,
}

/// The texts of two versions, starting at or somewhat before the point where they diverge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartedTexts {
    /// The position at which `ends` start. Before it, the texts are the same.
    pub start: u64,
    /// The rest of each text.
    pub ends: [Vec<u32>; 2],
}
