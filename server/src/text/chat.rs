//! Chat templates: from messages to the text that a model reads, whole or as what is added to a kept conversation.
//!
//! How the template's language is run stands in `chat/jinja.rs`. A template comes from the checkpoint, never from a
//! client.

mod jinja;

use std::path::Path;

use chrono::Utc;
use serde::Deserialize;
use serde_json::{Map, Value};

use self::jinja::{Jinja, MOST_BYTES, Rendering, STEPS};
use super::TextError;
use super::tokenizer::{SpecialToken, optional_json};

/// Special tokens of `tokenizer_config.json` that templates name.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`.
    pub role: String,
    /// What is said.
    pub content: String,
    /// What else templates look for in a message: `tool_calls`, `tool_call_id`, `name`.
    pub more: Map<String, Value>,
}

/// How the kept conversation ends that messages are added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// With an assistant's answer whose closing marks are not in the text yet.
    Answer,
    /// With whole messages, all of them closed.
    Messages,
}

/// Why messages do not become a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// The template raised an exception, as for roles that do not alternate.
    #[error("the chat template refuses the messages: {0}")]
    Refused(String),
    /// The template ran for too long.
    #[error("the chat template takes more than {STEPS} steps for these messages")]
    Steps,
    /// The text is too long.
    #[error("the chat template makes more than {MOST_BYTES} bytes of these messages")]
    Long,
    /// The template is wrong, or not made for these messages.
    #[error("the chat template fails: {0}")]
    Failed(String),
    /// The template shows a message, or does not, depending on those around it.
    #[error("messages[{at}] (role {role}): the chat template shows it only together with other messages")]
    Hidden {
        /// The message's place among those given.
        at: usize,
        /// Its role.
        role: String,
    },
    /// The template changes an earlier text when messages are added.
    #[error("the chat template does not let messages be added to a kept conversation, only whole conversations work")]
    NotKept,
}

/// A checkpoint's chat template, compiled.
pub struct ChatTemplate {
    source: String,
    jinja: Jinja,
}

impl ChatTemplate {
    /// The template of the checkpoint in `folder`: `chat_template` of `tokenizer_config.json` (a text, or a list of
    /// names and templates that has a `default`), else `chat_template.jinja`; none where neither is there.
    ///
    /// # Errors
    /// A file that cannot be read or parsed, or a template that does not compile.
    pub fn load(folder: &Path) -> Result<Option<Self>, TextError> {
        let config = folder.join("tokenizer_config.json");
        let bad = |reason: String| TextError::Contents { path: config.clone(), reason };
        let mut values: Map<String, Value> = optional_json(&config)?.unwrap_or_default();
        let mut tokens = Vec::new();
        for name in TOKENS {
            let token = values.remove(name).map(Option::<SpecialToken>::deserialize).transpose();
            let token =
                token.map_err(|_| bad(format!("{name} must be a text, or an object that has it as content")))?;
            tokens.extend(token.flatten().map(|token| (name, token.into_text())));
        }
        let template = values.remove("chat_template").map(Option::<Templates>::deserialize).transpose();
        let (path, source) = match template.map_err(|error| bad(error.to_string()))?.flatten() {
            Some(Templates::One(source)) => (config, source),
            Some(Templates::Named(list)) => {
                let default = list.into_iter().find(|named| named.name == "default");
                let default = default.ok_or_else(|| bad("chat_template has no template of the name default".into()))?;
                (config, default.template)
            }
            None => {
                let path = folder.join("chat_template.jinja");
                match std::fs::read_to_string(&path) {
                    Ok(source) => (path, source),
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                    Err(source) => return Err(TextError::Read { path, source }),
                }
            }
        };
        let jinja = Jinja::compile(&source, tokens);
        let jinja = jinja.map_err(|error| TextError::Contents { path, reason: format!("chat template: {error}") })?;
        Ok(Some(Self { source, jinja }))
    }

    /// The template as the checkpoint has it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a whole conversation, with the beginning of the assistant's answer.
    ///
    /// # Errors
    /// Messages that the template refuses or fails at, too many steps, or too long a text.
    pub fn render(&self, messages: &[Message]) -> Result<String, ChatError> {
        self.render_tools(messages, None)
    }

    /// [`Self::render`] with the tools that the answer may call, a list of objects as OpenAI has them. Where they are
    /// written, and whether, is the template's choice.
    ///
    /// # Errors
    /// As for [`Self::render`].
    pub fn render_tools(&self, messages: &[Message], tools: Option<&Value>) -> Result<String, ChatError> {
        self.jinja.render(Rendering { messages, tools, prompt: true, now: Utc::now() })
    }

    /// The text of a conversation that is to be kept, and to which messages are added later.
    ///
    /// # Errors
    /// As [`render`](Self::render), and a message that the template shows only when others follow: it would be lost.
    pub fn render_closed(&self, messages: &[Message]) -> Result<String, ChatError> {
        let now = Utc::now();
        let (stem, marked) = marked(messages);
        let whole = |messages| self.jinja.render(Rendering { messages, tools: None, prompt: false, now });
        shown(messages, &stem, &whole(&marked)?)?;
        whole(messages)
    }

    /// The text that `messages` add to a conversation that is kept elsewhere and has at least one message, with the
    /// beginning of the assistant's answer. `after` says how that conversation ends; after an answer, the text
    /// begins with the marks that close it.
    ///
    /// It is found by rendering a conversation of marks, which stand for the kept one. So it is what a whole
    /// rendering would have there as far as the template treats each message for itself; where that can be seen not
    /// to hold, an error is returned. An answer is kept as the model gave it: a template that trims answers, or
    /// takes thoughts out of them, would have written less.
    ///
    /// # Errors
    /// As [`render`](Self::render), also where the template refuses a conversation that begins with the user and
    /// goes on with the assistant; a message that the template does not show where it is added; and a template that
    /// changes what stands before.
    pub fn render_more(&self, messages: &[Message], after: After) -> Result<String, ChatError> {
        self.more(messages, None, after, true)
    }

    /// [`Self::render_more`] with the tools that the answer may call. A template that writes them before the first
    /// message does not write them again.
    ///
    /// # Errors
    /// As for [`Self::render_more`].
    pub fn render_more_tools(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        after: After,
    ) -> Result<String, ChatError> {
        self.more(messages, tools, after, true)
    }

    /// [`Self::render_more`] without the beginning of an answer after them.
    ///
    /// # Errors
    /// As for [`Self::render_more`].
    pub fn render_more_closed(&self, messages: &[Message], after: After) -> Result<String, ChatError> {
        self.more(messages, None, after, false)
    }

    fn more(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        after: After,
        prompt: bool,
    ) -> Result<String, ChatError> {
        let now = Utc::now();
        let (stem, marked) = marked(messages);
        let added = |messages| self.added(Rendering { messages, tools, prompt, now }, after);
        shown(messages, &stem, &added(&marked)?)?;
        added(messages)
    }

    /// What messages add, whether or not all of them are in it.
    fn added(&self, more: Rendering, after: After) -> Result<String, ChatError> {
        let messages = more.messages;
        let (user, answer) = (message("user", mark()), message("assistant", mark()));
        let answer_mark = answer.content.clone();
        // An assistant's message follows a user's, everything else an answer: templates want roles to alternate.
        let user_last = after == After::Messages && messages.first().is_none_or(|first| first.role == "assistant");
        let kept = if user_last { vec![user] } else { vec![user, answer] };
        let whole = [kept.as_slice(), messages].concat();
        let whole = self.jinja.render(Rendering { messages: &whole, ..more })?;
        match after {
            After::Answer => match whole.split_once(&answer_mark) {
                Some((_, rest)) if !rest.contains(&answer_mark) => Ok(rest.into()),
                _ => Err(ChatError::NotKept),
            },
            After::Messages => {
                let closed = self.jinja.render(Rendering { messages: &kept, prompt: false, ..more })?;
                whole.strip_prefix(&closed).map(Into::into).ok_or(ChatError::NotKept)
            }
        }
    }
}

/// `chat_template` as Hugging Face writes it.
#[derive(Deserialize)]
#[serde(untagged, expecting = "chat_template must be a text, or a list of objects with name and template")]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

fn message(role: &str, content: String) -> Message {
    Message { role: role.into(), content, ..Message::default() }
}

/// A word that is in no message: nobody can guess it. Small letters and digits alone, so that no template trims,
/// escapes or splits it.
fn mark() -> String {
    format!("m{:032x}", rand::random::<u128>())
}

/// `messages` with a mark in place of each content: one stem for all, and the message's place. Calls of tools are left
/// out, since templates write no content beside them.
fn marked(messages: &[Message]) -> (String, Vec<Message>) {
    let stem = mark();
    let marked = messages.iter().enumerate().map(|(at, original)| {
        let mut more = original.more.clone();
        more.remove("tool_calls");
        Message { role: original.role.clone(), content: format!("{stem}n{at}e"), more }
    });
    let marked = marked.collect();
    (stem, marked)
}

/// Checks that every message's mark is in `text`, which is read once however many they are.
fn shown(messages: &[Message], stem: &str, text: &str) -> Result<(), ChatError> {
    let mut found = vec![false; messages.len()];
    for rest in text.split(stem).skip(1) {
        let place = rest.strip_prefix('n').and_then(|rest| rest.split_once('e'));
        let place = place.and_then(|(place, _)| place.parse::<usize>().ok());
        if let Some(found) = place.and_then(|place| found.get_mut(place)) {
            *found = true;
        }
    }
    match found.iter().position(|found| !found) {
        Some(at) => Err(ChatError::Hidden { at, role: messages[at].role.clone() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, config: &Value) {
        std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    }

    fn load(folder: &Path) -> String {
        let template = ChatTemplate::load(folder).unwrap().expect("there is a template");
        template.render(&[message("user", "Hi".into())]).unwrap()
    }

    fn complaint(folder: &Path) -> String {
        ChatTemplate::load(folder).err().expect("the template is wrong").to_string()
    }

    #[test]
    fn a_template_is_found_where_checkpoints_have_it() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert!(ChatTemplate::load(folder).unwrap().is_none());
        write(folder, &serde_json::json!({"bos_token": {"content": "<s>"}, "chat_template": null}));
        assert!(ChatTemplate::load(folder).unwrap().is_none());
        std::fs::write(folder.join("chat_template.jinja"), "{{ bos_token }}file{{ eos_token }}").unwrap();
        assert_eq!(load(folder), "<s>file");
        let named = |name: &str| serde_json::json!({"name": name, "template": name});
        write(folder, &serde_json::json!({"chat_template": [named("tool_use"), named("default")]}));
        assert_eq!(load(folder), "default");
        write(folder, &serde_json::json!({"eos_token": "</s>", "chat_template": "{{ eos_token }}text"}));
        assert_eq!(load(folder), "</s>text");
    }

    #[test]
    fn a_broken_template_is_named_with_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        std::fs::write(folder.join("chat_template.jinja"), "line\n{% for %}").unwrap();
        let error = complaint(folder);
        assert!(error.contains("chat_template.jinja: chat template: syntax error"), "{error}");
        assert!(error.contains("chat_template:2"), "the line: {error}");
        for (config, part) in [
            (serde_json::json!({"chat_template": "{{ a"}), "chat template: syntax error"),
            (serde_json::json!({"chat_template": "(".repeat(3) + "{{ " + &"(".repeat(1000)}), "chat template: "),
            (serde_json::json!({"chat_template": 7}), "chat_template must be a text, or a list"),
            (serde_json::json!({"chat_template": [{"name": "tool_use", "template": ""}]}), "of the name default"),
            (serde_json::json!({"bos_token": 7}), "bos_token must be a text"),
        ] {
            write(folder, &config);
            let error = complaint(folder);
            assert!(error.contains("tokenizer_config.json: ") && error.contains(part), "{error}");
        }
    }
}
