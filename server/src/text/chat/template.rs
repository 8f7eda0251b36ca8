//! A checkpoint's chat template, which renders a whole conversation, or what new messages add to a stored one.
//! Templates come from the checkpoint, never from a client.

use std::path::Path;

use chrono::Utc;

use super::jinja::{Jinja, Rendering};
use super::message::{ChatError, Message, TemplateInput};
use super::sources::{TemplateSource, TemplateSources};
use super::world;
use crate::text::error::TextError;
use crate::text::tokenizer::Tokenizer;

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
    jinja: Jinja,
    /// Used instead for requests whose answer may call tools.
    with_tools: Option<Jinja>,
    turns: &'static [&'static str],
}

impl ChatTemplate {
    /// Compiles templates.
    ///
    /// # Errors
    /// A template does not compile.
    pub fn new(sources: TemplateSources) -> Result<Self, TextError> {
        let TemplateSources { default, with_tools, tokens } = sources;
        let compiled = |TemplateSource { path, text }: TemplateSource, name: &str| {
            let failed = |error| TextError::Contents { path, reason: format!("{name}: {error}") };
            Jinja::compile(text, tokens.clone()).map_err(failed)
        };
        let with_tools = with_tools.map(|source| compiled(source, "chat template tool_use")).transpose()?;
        Ok(Self { jinja: compiled(default, "chat template")?, with_tools, turns: &[] })
    }

    /// Loads the templates of the checkpoint in `folder`, which [`TemplateSources::find`] finds.
    ///
    /// # Errors
    /// A file cannot be read or parsed, or a template does not compile.
    pub fn load(folder: &Path) -> Result<Option<Self>, TextError> {
        TemplateSources::find(folder)?.map(Self::new).transpose()
    }

    /// Loads templates like [`Self::load`]. If there is none and the tokenizer is RWKV's, uses the format that RWKV
    /// publishes.
    ///
    /// # Errors
    /// As for [`Self::load`].
    pub fn load_for(folder: &Path, tokenizer: &Tokenizer) -> Result<Option<Self>, TextError> {
        Self::of(folder, TemplateSources::find(folder)?, tokenizer)
    }

    /// Loads templates like [`Self::load_for`], for a model in a single file. `sources` are those in that file, if any.
    ///
    /// # Errors
    /// A template does not compile.
    pub fn of_file(
        path: &Path,
        mut sources: Option<TemplateSources>,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Self>, TextError> {
        if let (Some(sources), Some(separator)) = (&mut sources, tokenizer.world_separator()) {
            // RWKV's only special token both begins and ends texts.
            sources.tokens = ["bos_token", "eos_token"].map(|name| (name, separator.to_owned())).into();
        }
        Self::of(path, sources, tokenizer)
    }

    fn of(path: &Path, sources: Option<TemplateSources>, tokenizer: &Tokenizer) -> Result<Option<Self>, TextError> {
        let own = sources.map(Self::new).transpose()?;
        let Some(separator) = tokenizer.world_separator() else { return Ok(own) };
        let mut template = match own {
            Some(own) => own,
            None => Self::world(separator).map_err(|error| TextError::Contents {
                path: path.into(),
                reason: format!("chat template: {error}"),
            })?,
        };
        if template.jinja.source().contains(world::USER) {
            template.turns = world::TURNS;
        }
        Ok(Some(template))
    }

    /// Creates the template for RWKV's World and G1 models. `separator` is the special token between two texts.
    fn world(separator: &str) -> Result<Self, minijinja::Error> {
        let jinja = Jinja::compile(world::SOURCE.into(), vec![("separator", separator.to_owned())])?;
        Ok(Self { jinja, with_tools: None, turns: world::TURNS })
    }

    /// Returns the strings that begin the next turn: an answer ends before them.
    pub fn turns(&self) -> &'static [&'static str] {
        self.turns
    }

    /// Whether answers may begin with reasoning in `<think>…</think>`, because a template writes or reads it or the
    /// model family does.
    pub fn has_reasoning(&self) -> bool {
        !self.turns.is_empty() || self.any_contains("think>")
    }

    /// Whether a prompt may depend on the time at which it is rendered.
    pub fn reads_clock(&self) -> bool {
        self.any_contains("strftime_now")
    }

    /// Returns the source of the template.
    pub fn source(&self) -> &str {
        self.jinja.source()
    }

    /// Returns the source of the template for requests whose answer may call tools, if they have their own.
    pub fn source_with_tools(&self) -> Option<&str> {
        self.with_tools.as_ref().map(Jinja::source)
    }

    fn any_contains(&self, part: &str) -> bool {
        [Some(self.source()), self.source_with_tools()].into_iter().flatten().any(|source| source.contains(part))
    }

    /// Renders with the template for the input.
    fn rendered(&self, conversation: Rendering) -> Result<String, ChatError> {
        let with_tools = self.with_tools.as_ref().filter(|_| conversation.input.tools.is_some());
        with_tools.unwrap_or(&self.jinja).render(conversation)
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
        self.rendered(Rendering { messages, input, now: Utc::now() })
    }

    /// Renders a conversation to be stored, to which messages can be added later.
    ///
    /// # Errors
    /// As for [`render`](Self::render). Also if the template shows a message only when others follow, because it would
    /// be lost.
    pub fn render_closed(&self, messages: &[Message]) -> Result<String, ChatError> {
        let now = Utc::now();
        let (stem, marked) = marked(messages);
        let whole = |messages| self.rendered(Rendering { messages, input: CLOSED, now });
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
        let whole = self.rendered(Rendering { messages: &whole, ..more })?;
        match after {
            After::Answer => match whole.split_once(&answer_mark) {
                Some((_, rest)) if !rest.contains(&answer_mark) => Ok(rest.into()),
                _ => Err(ChatError::NotAppendable),
            },
            After::Messages => {
                let input = TemplateInput { closed: true, ..more.input };
                let closed = self.rendered(Rendering { messages: &stored, input, ..more })?;
                whole.strip_prefix(&closed).map(Into::into).ok_or(ChatError::NotAppendable)
            }
        }
    }
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
