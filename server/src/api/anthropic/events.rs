//! A message in words: the events of its stream, and the object at its end.

use rand::Rng;
use serde::Serialize;

use super::wire::MessagesRequest;
use crate::api::answer::Usage;
use crate::api::dialect::{Dialect, Kept, Said};
use crate::api::error::ApiError;
use crate::api::foreign::{Begun, Foreign};
use crate::api::state::Served;
use crate::api::wire::{GenerationRequest, parse};
use crate::engine::{Delta, Finish, FinishReason, StopCause};

/// A message that has not begun.
pub(super) struct Begins;

impl Foreign for Begins {
    const NAMES: &'static [(&'static str, &'static str)] = &[("prompt", "messages"), ("stop", "stop_sequences")];

    fn read(body: &[u8], served: &Served) -> Result<(GenerationRequest, Self), ApiError> {
        let wire: MessagesRequest = parse(body)?;
        Ok((wire.into_generation(served)?, Self))
    }

    fn dialect(self, begun: &Begun<'_>) -> Box<dyn Dialect> {
        let prompt: usize = begun.prompts.iter().map(Vec::len).sum();
        Box::new(Writer {
            id: format!("msg_{:032x}", rand::rng().random::<u128>()),
            model: begun.served.name.clone(),
            text: String::new(),
            whole: !begun.stream,
            stop: Stop::default(),
            usage: Tokens::new(prompt, begun.cached.iter().sum(), 0),
        })
    }
}

/// Tokens that a request took. Those of the prompt that were known already are counted for themselves.
#[derive(Clone, Copy, Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the format's")]
struct Tokens {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
}

impl Tokens {
    fn new(prompt: usize, cached: usize, output_tokens: usize) -> Self {
        let input_tokens = prompt.saturating_sub(cached);
        Self { input_tokens, cache_creation_input_tokens: 0, cache_read_input_tokens: cached, output_tokens }
    }
}

/// Why a message ended; both are null until then.
#[derive(Clone, Default, Serialize)]
struct Stop {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

#[derive(Serialize)]
struct Block<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    text: &'a str,
}

impl<'a> Block<'a> {
    fn text(text: &'a str) -> Self {
        Self { kind: "text", text }
    }
}

#[derive(Serialize)]
struct Message<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    content: &'a [Block<'a>],
    #[serde(flatten)]
    stop: &'a Stop,
    usage: Tokens,
}

/// An event; it is named twice.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart { message: Message<'a> },
    ContentBlockStart { index: usize, content_block: Block<'a> },
    Ping,
    ContentBlockDelta { index: usize, delta: Block<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: &'a Stop, usage: Tokens },
    MessageStop,
}

impl Event<'_> {
    fn said(&self) -> Said {
        let name = match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::Ping => "ping",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        };
        // Strings, numbers and lists of them: there is nothing in it that JSON cannot say.
        Said { name: Some(name), data: serde_json::to_string(self).unwrap_or_default() }
    }
}

/// The format of `/v1/messages`.
struct Writer {
    id: String,
    model: String,
    text: String,
    /// Whether the text is wanted in one piece.
    whole: bool,
    stop: Stop,
    usage: Tokens,
}

impl Writer {
    fn message<'a>(&'a self, content: &'a [Block<'a>]) -> Message<'a> {
        let (id, model, stop, usage) = (&self.id, &self.model, &self.stop, self.usage);
        Message { id, kind: "message", role: "assistant", model, content, stop, usage }
    }
}

impl Dialect for Writer {
    fn open(&mut self, out: &mut Vec<Said>) {
        out.push(Event::MessageStart { message: self.message(&[]) }.said());
        out.push(Event::ContentBlockStart { index: 0, content_block: Block::text("") }.said());
        out.push(Event::Ping.said());
    }

    fn delta(&mut self, _: usize, delta: Delta, out: &mut Vec<Said>) {
        // Tokens without text say nothing.
        if !delta.text.is_empty() {
            let block = Block { kind: "text_delta", text: &delta.text };
            out.push(Event::ContentBlockDelta { index: 0, delta: block }.said());
        }
        if self.whole {
            self.text.push_str(&delta.text);
        }
    }

    fn end(&mut self, _: usize, finish: &Finish, _: &Kept, out: &mut Vec<Said>) {
        let (reason, sequence) = match (finish.reason, &finish.stop) {
            (FinishReason::Stop, Some(StopCause::String(stop))) => ("stop_sequence", Some(stop.clone())),
            (FinishReason::Stop, _) => ("end_turn", None),
            (FinishReason::Length | FinishReason::Interrupted, _) => ("max_tokens", None),
        };
        self.stop = Stop { stop_reason: Some(reason), stop_sequence: sequence };
        out.push(Event::ContentBlockStop { index: 0 }.said());
    }

    fn close(&mut self, usage: Usage, out: &mut Vec<Said>) {
        let cached = usage.prompt_tokens_details.cached_tokens;
        self.usage = Tokens::new(usage.prompt_tokens, cached, usage.completion_tokens);
        out.push(Event::MessageDelta { delta: &self.stop, usage: self.usage }.said());
        out.push(Event::MessageStop.said());
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<Said>) {
        let mut body = super::refusal(error, None);
        // The id is in the stream's headers.
        if let Some(body) = body.as_object_mut() {
            body.remove("request_id");
        }
        out.push(Said { name: Some("error"), data: body.to_string() });
    }

    fn body(&self) -> String {
        let content = [Block::text(&self.text)];
        serde_json::to_string(&self.message(&content)).unwrap_or_default()
    }
}
