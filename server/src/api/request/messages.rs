//! Records which messages a prompt has, and where in it their contents are, so that they can be read back.

use serde_json::Value;

use crate::session::{AddedMessage, Content, Role};
use crate::text::{Message, Vocabulary};

/// The messages of a prompt.
#[derive(Clone, Debug)]
pub(in crate::api) struct PromptMessages {
    pub(super) added: Vec<AddedMessage>,
    /// Whether the last message is the beginning of the answer.
    pub(super) prefilled: bool,
}

/// How far after the last content found the next one may begin, in bytes. A content that is not found there is stored
/// as text, so that the search does not read the rest of the prompt for each message.
const DISTANCE: usize = 4 << 10;

/// Returns the messages of a prompt, followed by the beginning of the answer, if it has one. A content that the chat
/// template has not changed is found in the prompt's text, and not stored again.
pub(in crate::api) fn added(
    messages: &[Message],
    prefill: Option<&str>,
    prompt: &[u32],
    vocabulary: &Vocabulary,
) -> PromptMessages {
    let text = String::from_utf8(vocabulary.bytes_of(prompt)).unwrap_or_default();
    let mut from = 0;
    let mut find = |content: &str| {
        let near = text.floor_char_boundary(from + DISTANCE + content.len());
        let Some(at) = text[from..near].find(content).map(|at| from + at) else {
            return Content::Text(content.to_owned());
        };
        from = at + content.len();
        Content::Bytes(at as u64, from as u64)
    };
    let mut added = Vec::with_capacity(messages.len() + 1);
    for message in messages {
        let content = match message.content.as_str() {
            "" if message.more.contains_key("tool_calls") => Content::None,
            content => find(content),
        };
        let more = (!message.more.is_empty()).then(|| Value::from(message.more.clone()).to_string());
        let role = Role::parse(&message.role).unwrap_or(Role::User);
        added.push(AddedMessage { role, continues: false, content, more });
    }
    if let Some(prefill) = prefill {
        let content = find(prefill);
        added.push(AddedMessage { role: Role::Assistant, continues: false, content, more: None });
    }
    PromptMessages { added, prefilled: prefill.is_some() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_found_in_order_or_kept() {
        let vocabulary = Vocabulary::new((0..=255).map(|byte: u8| Box::from([byte])).collect());
        let message = |role: &str, content: &str| Message {
            role: role.to_owned(),
            content: content.to_owned(),
            ..Message::default()
        };
        let messages = [message("user", "a"), message("assistant", "lost"), message("user", "a"), message("tool", "")];
        let prompt: Vec<u32> = "User: a\nUser: a\nBot: so".bytes().map(u32::from).collect();
        let found = added(&messages, Some(" so"), &prompt, &vocabulary);
        let contents: Vec<_> = found.added.into_iter().map(|message| (message.role, message.content)).collect();
        assert_eq!(
            contents,
            [
                (Role::User, Content::Bytes(6, 7)),
                (Role::Assistant, Content::Text("lost".to_owned())),
                (Role::User, Content::Bytes(14, 15)),
                (Role::Tool, Content::Bytes(15, 15)),
                (Role::Assistant, Content::Bytes(20, 23)),
            ]
        );
    }

    #[test]
    fn a_content_is_looked_for_only_near_the_one_before() {
        let vocabulary = Vocabulary::new((0..=255).map(|byte: u8| Box::from([byte])).collect());
        let message = Message { role: "user".to_owned(), content: "aé".to_owned(), ..Message::default() };
        let found = |distance: usize| {
            let prompt: Vec<u32> = format!("{}aé", "-".repeat(distance)).bytes().map(u32::from).collect();
            added(std::slice::from_ref(&message), None, &prompt, &vocabulary).added.remove(0).content
        };
        let near = DISTANCE as u64;
        assert_eq!(found(DISTANCE), Content::Bytes(near, near + 3));
        assert_eq!(found(DISTANCE + 1), Content::Text("aé".to_owned()));
        assert_eq!(found(DISTANCE + 2), Content::Text("aé".to_owned()));
    }

    #[test]
    fn a_prompt_that_is_no_text_has_its_contents_kept() {
        let vocabulary = Vocabulary::new((0..=255).map(|byte: u8| Box::from([byte])).collect());
        let message = Message { role: "user".to_owned(), content: "é".to_owned(), ..Message::default() };
        let found = added(&[message], None, &[0xc3], &vocabulary);
        assert_eq!(found.added[0].content, Content::Text("é".to_owned()));
    }
}
