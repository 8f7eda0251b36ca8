//! What a turn adds to the text of a conversation. It is kept beside the versions and never read to continue one.

use super::id::VersionId;

/// The text that a version adds to that of the version before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddedText {
    /// How many tokens of the text before it remain: usually all. A stop string may remove the last ones, which were
    /// pending, and a new source of an encoder-decoder replaces them all.
    pub kept: u64,
    /// The tokens that follow.
    pub tokens: Vec<u32>,
    /// The messages that it adds, in order.
    pub messages: Vec<AddedMessage>,
}

/// A message that a turn adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedMessage {
    /// Who wrote it.
    pub role: Role,
    /// Whether it continues the last message of the text before it.
    pub continues: bool,
    /// What it says.
    pub content: Content,
    /// A JSON object with further fields, such as `tool_calls`.
    pub more: Option<String>,
}

/// Where the content of a message is. Ranges are of the added tokens and their bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// The text of these tokens.
    Tokens(u64, u64),
    /// These bytes of the tokens' text.
    Bytes(u64, u64),
    /// The content itself, because the chat template has changed it.
    Text(String),
    /// None: the message consists of its further fields.
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
    /// Its name in a message.
    pub fn as_str(self) -> &'static str {
        ROLES[self as usize].1
    }

    /// The role with this name.
    pub fn parse(name: &str) -> Option<Self> {
        ROLES.iter().find(|(_, known)| *known == name).map(|(role, _)| *role)
    }

    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        ROLES.get(usize::from(byte)).map(|(role, _)| *role)
    }
}

impl AddedMessage {
    /// The most bytes that it takes when it is stored.
    pub fn most_bytes(&self) -> u64 {
        let text = if let Content::Text(text) = &self.content { text.len() } else { 0 };
        (32 + text + self.more.as_ref().map_or(0, String::len)) as u64
    }
}

impl AddedText {
    /// Replaces the content of the last message, if it begins here, by calls of tools: a JSON array.
    pub fn set_tool_calls(&mut self, calls: &str) {
        if let Some(last) = self.messages.last_mut().filter(|last| !last.continues) {
            (last.content, last.more) = (Content::None, Some(format!(r#"{{"tool_calls":{calls}}}"#)));
        }
    }

    /// How many tokens the text has with it.
    pub fn total(&self) -> u64 {
        self.kept + self.tokens.len() as u64
    }
}

/// A message of a conversation, as it is read back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptMessage {
    /// Who wrote it.
    pub role: Role,
    /// What it says; what is no character is U+FFFD.
    pub content: Option<String>,
    /// The version that added it.
    pub version: VersionId,
    /// A JSON object with further fields.
    pub more: Option<String>,
    /// The tokens of which its content is the text; `None` if it is not made of tokens alone.
    pub tokens: Option<(u64, u64)>,
}

/// A part of the messages of a version's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessagesPart {
    /// How many messages the text has.
    pub total: u64,
    /// The number of the first message of the part.
    pub start: u64,
    /// The number after that of the last one.
    pub end: u64,
    /// The messages.
    pub messages: Vec<KeptMessage>,
}

/// A part of a version's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextPart {
    /// How many tokens the text has.
    pub total: u64,
    /// The position of the first token of the part.
    pub start: u64,
    /// The position after the last one.
    pub end: u64,
    /// The tokens.
    pub tokens: Vec<u32>,
}

/// The texts of two versions, from where they part or somewhat before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartedTexts {
    /// The position from which on there are tokens. Before it the texts are the same.
    pub start: u64,
    /// The rest of each text.
    pub ends: [Vec<u32>; 2],
}
