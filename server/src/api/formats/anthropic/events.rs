//! A message in words: the events of its stream, and the object at its end.

use rand::Rng;
use serde::Serialize;
use utoipa::ToSchema;

use super::blocks::{Block, Blocks, Change, More};
use super::wire::MessagesRequest;
use crate::api::error::ApiError;
use crate::api::formats::foreign::{Begun, Foreign};
use crate::api::formats::openai::answer::Usage;
use crate::api::formats::openai::wire::{GenerationRequest, parse};
use crate::api::request::tools::Tools;
use crate::api::run::encoder::{Dialect, Kept, Said};
use crate::api::state::Served;
use crate::engine::{Delta, Finish, FinishReason, StopCause};

/// A message that has not begun, with the tools that it may call.
pub(super) struct Begins(Option<Tools>);

impl Foreign for Begins {
    const NAMES: &'static [(&'static str, &'static str)] = &[("prompt", "messages"), ("stop", "stop_sequences")];

    fn read(body: &[u8], served: &Served) -> Result<(GenerationRequest, Self), ApiError> {
        let wire: MessagesRequest = parse(body)?;
        let (wire, tools) = wire.into_generation(served)?;
        Ok((wire, Self(tools)))
    }

    fn dialect(self, begun: &Begun<'_>) -> Box<dyn Dialect> {
        let prompt: usize = begun.prompts.iter().map(Vec::len).sum();
        Box::new(Writer {
            id: format!("msg_{:032x}", rand::rng().random::<u128>()),
            model: begun.served.name.clone(),
            blocks: Blocks::new(self.0.as_ref().map(Tools::reader)),
            stop: Stop::default(),
            usage: Tokens::new(prompt, begun.cached.iter().sum(), 0),
        })
    }
}

/// Tokens of a request. Cached prompt tokens are counted separately.
#[derive(Clone, Copy, Serialize, ToSchema)]
#[schema(as = AnthropicUsage)]
#[expect(clippy::struct_field_names, reason = "the names are the format's")]
pub(super) struct Tokens {
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
#[derive(Clone, Default, Serialize, ToSchema)]
#[schema(as = AnthropicStop)]
pub(super) struct Stop {
    #[schema(required, pattern = "^(end_turn|max_tokens|stop_sequence|tool_use)$")]
    stop_reason: Option<&'static str>,
    #[schema(required)]
    stop_sequence: Option<String>,
}

/// A message of the assistant.
#[derive(Serialize, ToSchema)]
#[schema(as = AnthropicMessage)]
pub(super) struct Message<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    #[schema(pattern = "^message$")]
    kind: &'static str,
    #[schema(pattern = "^assistant$")]
    role: &'static str,
    model: &'a str,
    content: &'a [Block],
    #[serde(flatten)]
    stop: &'a Stop,
    usage: Tokens,
}

/// The data of an event. Its `type` is also the event's name.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicEvent)]
pub(super) enum Event<'a> {
    MessageStart { message: Message<'a> },
    ContentBlockStart { index: usize, content_block: Block },
    Ping,
    ContentBlockDelta { index: usize, delta: More },
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
        let data = serde_json::to_string(self).expect("strings, numbers and lists become JSON");
        Said { name: Some(name), data }
    }
}

/// The format of `/v1/messages`.
struct Writer {
    id: String,
    model: String,
    blocks: Blocks,
    stop: Stop,
    usage: Tokens,
}

impl Writer {
    fn message<'a>(&'a self, content: &'a [Block]) -> Message<'a> {
        let (id, model, stop, usage) = (&self.id, &self.model, &self.stop, self.usage);
        Message { id, kind: "message", role: "assistant", model, content, stop, usage }
    }
}

fn say(changes: Vec<Change>, out: &mut Vec<Said>) {
    out.extend(changes.into_iter().map(|change| match change {
        Change::Start(index, content_block) => Event::ContentBlockStart { index, content_block }.said(),
        Change::More(index, delta) => Event::ContentBlockDelta { index, delta }.said(),
        Change::Stop(index) => Event::ContentBlockStop { index }.said(),
    }));
}

impl Dialect for Writer {
    fn open(&mut self, out: &mut Vec<Said>) {
        out.push(Event::MessageStart { message: self.message(&[]) }.said());
        let mut changes = Vec::new();
        self.blocks.open(&mut changes);
        say(changes, out);
        out.push(Event::Ping.said());
    }

    fn delta(&mut self, _: usize, delta: Delta, out: &mut Vec<Said>) {
        let mut changes = Vec::new();
        self.blocks.push(&delta.text, &mut changes);
        say(changes, out);
    }

    fn end(&mut self, _: usize, finish: &Finish, _: &Kept, out: &mut Vec<Said>) {
        let mut changes = Vec::new();
        self.blocks.finish(&mut changes);
        say(changes, out);
        let (reason, sequence) = match (finish.reason, &finish.stop) {
            (FinishReason::Stop, Some(StopCause::String(stop))) => ("stop_sequence", Some(stop.clone())),
            (FinishReason::Stop, _) if self.blocks.has_called() => ("tool_use", None),
            (FinishReason::Stop, _) => ("end_turn", None),
            (FinishReason::Length | FinishReason::Interrupted, _) => ("max_tokens", None),
        };
        self.stop = Stop { stop_reason: Some(reason), stop_sequence: sequence };
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
        serde_json::to_string(&self.message(self.blocks.all())).unwrap_or_default()
    }
}
