//! A checkpoint's chat template, which renders a whole conversation, or what new messages add to a stored one.
//! Templates come from the checkpoint, never from a client.

use std::path::Path;

use chrono::Utc;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::jinja::{Jinja, Rendering};
use super::message::{ChatError, Message, TemplateInput};
use super::world;
use crate::text::error::TextError;
use crate::text::tokenizer::{SpecialToken, Tokenizer, optional_json};

/// Special tokens of `tokenizer_config.json` that templates may name.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];

/// Input for a text after which no answer follows.
const CLOSED: TemplateInput<'static> = TemplateInput { tools: None, variables: None, closed: true, prefill: None };

/// The end of the stored conversation to which messages are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// An assistant's answer whose closing tokens are not in the text yet.
    Answer,
    /// Complete messages, all of them closed.
    Messages,
}

/// A compiled chat template of a checkpoint.
pub struct ChatTemplate {
    source: String,
    jinja: Jinja,
    turns: &'static [&'static str],
}

impl ChatTemplate {
    /// Loads the template of the checkpoint in `folder`: the file `chat_template.jinja`, or else `chat_template` in
    /// `tokenizer_config.json` (a string, or a list of named templates with a `default`), in the order of
    /// `transformers`. Returns `None` if there is neither.
    ///
    /// # Errors
    /// A file cannot be read or parsed, or the template does not compile.
    pub fn load(folder: &Path) -> Result<Option<Self>, TextError> {
        let config = folder.join("tokenizer_config.json");
        let bad = |reason: String| TextError::Contents { path: config.clone(), reason };
        let mut values: Map<String, Value> = optional_json(&config)?.unwrap_or_default();
        let mut tokens = Vec::new();
        for name in TOKENS {
            let token = values.remove(name).map(Option::<SpecialToken>::deserialize).transpose();
            let token =
                token.map_err(|_| bad(format!("{name} must be a text, or an object with the text as content")))?;
            tokens.extend(token.flatten().map(|token| (name, token.into_text())));
        }
        let template = values.remove("chat_template").map(Option::<Templates>::deserialize).transpose();
        let template = template.map_err(|error| bad(error.to_string()))?.flatten();
        let file = folder.join("chat_template.jinja");
        let (path, source) = match (std::fs::read_to_string(&file), template) {
            (Ok(source), _) => (file, source),
            (Err(error), _) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(TextError::Read { path: file, source: error });
            }
            (Err(_), None) => return Ok(None),
            (Err(_), Some(Templates::One(source))) => (config, source),
            (Err(_), Some(Templates::Named(list))) => {
                let default = list.into_iter().find(|named| named.name == "default");
                let default = default.ok_or_else(|| bad("chat_template must have a template named default".into()))?;
                (config, default.template)
            }
        };
        let jinja = Jinja::compile(&source, tokens);
        let jinja = jinja.map_err(|error| TextError::Contents { path, reason: format!("chat template: {error}") })?;
        Ok(Some(Self { source, jinja, turns: &[] }))
    }

    /// Loads a template like [`Self::load`]. If there is none and the tokenizer is RWKV's, uses the format that RWKV
    /// publishes.
    ///
    /// # Errors
    /// As for [`Self::load`].
    pub fn load_for(folder: &Path, tokenizer: &Tokenizer) -> Result<Option<Self>, TextError> {
        let own = Self::load(folder)?;
        let Some(separator) = tokenizer.world_separator() else { return Ok(own) };
        let mut template = match own {
            Some(own) => own,
            None => Self::world(separator).map_err(|error| TextError::Contents {
                path: folder.into(),
                reason: format!("chat template: {error}"),
            })?,
        };
        if template.source.contains(world::USER) {
            template.turns = world::TURNS;
        }
        Ok(Some(template))
    }

    /// Loads a template like [`Self::load_for`], for a model in a single file. `source` is the template in that file,
    /// if any.
    ///
    /// # Errors
    /// The template does not compile.
    pub fn of_file(
        path: &Path,
        source: Option<&str>,
        tokenizer: &Tokenizer,
        tokens: Vec<(&'static str, String)>,
    ) -> Result<Option<Self>, TextError> {
        let bad = |error: minijinja::Error| {
            let reason = format!("chat template: {error}");
            TextError::Contents { path: path.into(), reason }
        };
        let separator = tokenizer.world_separator();
        let mut template = match (source, separator) {
            (Some(source), _) => {
                // RWKV's only special token both begins and ends texts.
                let only = |token: &str| ["bos_token", "eos_token"].map(|name| (name, token.to_owned())).into();
                let jinja = Jinja::compile(source, separator.map_or(tokens, only)).map_err(bad)?;
                Self { source: source.into(), jinja, turns: &[] }
            }
            (None, Some(separator)) => Self::world(separator).map_err(bad)?,
            (None, None) => return Ok(None),
        };
        if separator.is_some() && template.source.contains(world::USER) {
            template.turns = world::TURNS;
        }
        Ok(Some(template))
    }

    /// Creates the template for RWKV's World and G1 models. `separator` is the special token between two texts.
    fn world(separator: &str) -> Result<Self, minijinja::Error> {
        let source = world::SOURCE.to_owned();
        let jinja = Jinja::compile(&source, vec![("separator", separator.to_owned())])?;
        Ok(Self { source, jinja, turns: world::TURNS })
    }

    /// Returns the strings that begin the next turn: an answer ends before them.
    pub fn turns(&self) -> &'static [&'static str] {
        self.turns
    }

    /// Whether answers may begin with reasoning in `<think>…</think>`, because the template writes or reads it or the
    /// model family does.
    pub fn has_reasoning(&self) -> bool {
        !self.turns.is_empty() || self.source.contains("think>")
    }

    /// Whether a prompt depends on the time at which it is rendered.
    pub fn reads_clock(&self) -> bool {
        self.source.contains("strftime_now")
    }

    /// Returns the template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a whole conversation, followed by the beginning of the assistant's answer.
    ///
    /// # Errors
    /// The template refuses the messages, fails, takes too many steps, or produces too long a text.
    pub fn render(&self, messages: &[Message]) -> Result<String, ChatError> {
        self.render_with(messages, TemplateInput::default())
    }

    /// Renders a conversation like [`Self::render`], with more input.
    ///
    /// # Errors
    /// As for [`Self::render`].
    pub fn render_with(&self, messages: &[Message], input: TemplateInput) -> Result<String, ChatError> {
        self.jinja.render(Rendering { messages, input, now: Utc::now() })
    }

    /// Renders a conversation to be stored, to which messages can be added later.
    ///
    /// # Errors
    /// As for [`render`](Self::render). Also if the template shows a message only when others follow, because it would
    /// be lost.
    pub fn render_closed(&self, messages: &[Message]) -> Result<String, ChatError> {
        let now = Utc::now();
        let (stem, marked) = marked(messages);
        let whole = |messages| self.jinja.render(Rendering { messages, input: CLOSED, now });
        shown(messages, &stem, &whole(&marked)?)?;
        whole(messages)
    }

    /// Renders what `messages` add to a stored conversation of at least one message, followed by the beginning of the
    /// assistant's answer. `after` says how that conversation ends. After an answer, the text starts with the tokens
    /// that close it.
    ///
    /// The stored messages are not known here, so placeholders are rendered in their place. The result is correct if the
    /// template treats each message independently; if it visibly does not, an error is returned. Stored answers stay
    /// exactly as generated, even if the template would have trimmed them or removed their reasoning.
    ///
    /// # Errors
    /// As for [`render`](Self::render). Also if the template refuses a conversation that alternates between user and
    /// assistant, does not show a new message, or changes earlier text.
    pub fn render_more(&self, messages: &[Message], after: After) -> Result<String, ChatError> {
        self.render_more_with(messages, TemplateInput::default(), after)
    }

    /// Renders like [`Self::render_more`], but without the beginning of an answer.
    ///
    /// # Errors
    /// As for [`Self::render_more`].
    pub fn render_more_closed(&self, messages: &[Message], after: After) -> Result<String, ChatError> {
        self.render_more_with(messages, CLOSED, after)
    }

    /// Renders like [`Self::render_more`], with more input. A template that writes tools before the first message does
    /// not write them again.
    ///
    /// # Errors
    /// As for [`Self::render_more`].
    pub fn render_more_with(
        &self,
        messages: &[Message],
        input: TemplateInput,
        after: After,
    ) -> Result<String, ChatError> {
        let now = Utc::now();
        let (stem, marked) = marked(messages);
        let added = |messages| self.added(Rendering { messages, input, now }, after);
        shown(messages, &stem, &added(&marked)?)?;
        added(messages)
    }

    /// Renders what the messages add, without checking that all of them appear.
    fn added(&self, more: Rendering, after: After) -> Result<String, ChatError> {
        let messages = more.messages;
        let (user, answer) = (message("user", mark()), message("assistant", mark()));
        let answer_mark = answer.content.clone();
        // Templates expect roles to alternate, so an assistant's message follows a user's, and any other follows an
        // answer.
        let user_last = after == After::Messages && messages.first().is_none_or(|first| first.role == "assistant");
        let stored = if user_last { vec![user] } else { vec![user, answer] };
        let whole = [stored.as_slice(), messages].concat();
        let whole = self.jinja.render(Rendering { messages: &whole, ..more })?;
        match after {
            After::Answer => match whole.split_once(&answer_mark) {
                Some((_, rest)) if !rest.contains(&answer_mark) => Ok(rest.into()),
                _ => Err(ChatError::NotAppendable),
            },
            After::Messages => {
                let input = TemplateInput { closed: true, ..more.input };
                let closed = self.jinja.render(Rendering { messages: &stored, input, ..more })?;
                whole.strip_prefix(&closed).map(Into::into).ok_or(ChatError::NotAppendable)
            }
        }
    }
}

/// The value of `chat_template`, in Hugging Face's format.
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

/// Returns an unguessable word that occurs in no message. It has only lower-case letters and digits, so that no
/// template trims, escapes or splits it.
fn mark() -> String {
    format!("m{:032x}", rand::random::<u128>())
}

/// Returns `messages` with a mark in place of each content: a common stem, which is also returned, and the message's
/// index. Tool calls are left out, because templates write no content next to them.
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

/// Checks that `text` contains every message's mark, in one pass.
fn shown(messages: &[Message], stem: &str, text: &str) -> Result<(), ChatError> {
    let mut found = vec![false; messages.len()];
    for rest in text.split(stem).skip(1) {
        let index = rest.strip_prefix('n').and_then(|rest| rest.split_once('e'));
        let index = index.and_then(|(index, _)| index.parse::<usize>().ok());
        if let Some(found) = index.and_then(|index| found.get_mut(index)) {
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
    fn a_template_is_found_wherever_checkpoints_put_it() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        assert!(ChatTemplate::load(folder).unwrap().is_none());
        write(folder, &serde_json::json!({"bos_token": {"content": "<s>"}, "chat_template": null}));
        assert!(ChatTemplate::load(folder).unwrap().is_none());
        let named = |name: &str| serde_json::json!({"name": name, "template": name});
        write(folder, &serde_json::json!({"chat_template": [named("tool_use"), named("default")]}));
        assert_eq!(load(folder), "default");
        write(folder, &serde_json::json!({"eos_token": "</s>", "chat_template": "{{ eos_token }}text"}));
        assert_eq!(load(folder), "</s>text");
        // The file comes first, as in `transformers`: a repository may have mended its template there.
        std::fs::write(folder.join("chat_template.jinja"), "{{ bos_token }}file{{ eos_token }}").unwrap();
        assert_eq!(load(folder), "file</s>");
    }

    #[test]
    fn errors_name_the_file_of_a_broken_template() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        std::fs::write(folder.join("chat_template.jinja"), "line\n{% for %}").unwrap();
        let error = complaint(folder);
        assert!(error.contains("chat_template.jinja: chat template: syntax error"), "{error}");
        assert!(error.contains("chat_template:2"), "the line: {error}");
        std::fs::remove_file(folder.join("chat_template.jinja")).unwrap();
        for (config, part) in [
            (serde_json::json!({"chat_template": "{{ a"}), "chat template: syntax error"),
            (serde_json::json!({"chat_template": "(".repeat(3) + "{{ " + &"(".repeat(1000)}), "chat template: "),
            (serde_json::json!({"chat_template": 7}), "chat_template must be a text, or a list"),
            (
                serde_json::json!({"chat_template": [{"name": "tool_use", "template": ""}]}),
                "must have a template named default",
            ),
            (serde_json::json!({"bos_token": 7}), "bos_token must be a text"),
        ] {
            write(folder, &config);
            let error = complaint(folder);
            assert!(error.contains("tokenizer_config.json: ") && error.contains(part), "{error}");
        }
    }
}
