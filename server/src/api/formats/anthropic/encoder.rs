//! The responses of `/v1/messages`: the events of a stream, or one object.

use serde::Serialize;
use utoipa::ToSchema;

use super::blocks::{Block, BlockDelta, Blocks, Change};
use crate::api::error::ApiError;
use crate::api::openapi::literals::literals;
use crate::api::request::ValidRequest;
use crate::api::run::TokenUsage;
use crate::api::run::answer::AnswerSplitter;
use crate::api::run::encoder::{Committed, EventEncoder, StreamEvent, to_json};
use crate::engine::{Delta, Finish, FinishReason, StopCause};

/// The tokens that a request used. Prompt tokens that were not computed count only as `cache_read_input_tokens`.
#[derive(Clone, Copy, Serialize, ToSchema)]
#[schema(as = AnthropicUsage)]
#[expect(clippy::struct_field_names, reason = "the names are the format's")]
pub(in crate::api) struct Usage {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
}

impl From<TokenUsage> for Usage {
    fn from(usage: TokenUsage) -> Self {
        Self {
            input_tokens: usage.prompt.saturating_sub(usage.cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached,
            output_tokens: usage.completion,
        }
    }
}

/// Why a message ended; both fields are null until then.
#[derive(Clone, Default, Serialize, ToSchema)]
#[schema(as = AnthropicStop)]
pub(in crate::api) struct Stop {
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`.
    #[schema(required)]
    stop_reason: Option<&'static str>,
    #[schema(required)]
    stop_sequence: Option<String>,
}

literals!(MessageKind = "message", Role = "assistant", ErrorKind = "error");

/// An answer.
#[derive(Serialize, ToSchema)]
#[schema(as = AnthropicMessage)]
pub(in crate::api) struct Message<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    #[schema(inline)]
    kind: MessageKind,
    #[schema(inline)]
    role: Role,
    model: &'a str,
    content: &'a [Block],
    #[serde(flatten)]
    stop: &'a Stop,
    usage: Usage,
}

/// An event of a stream. Its type is also the event's name.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicEvent)]
pub(in crate::api) enum Event<'a> {
    MessageStart { message: Message<'a> },
    ContentBlockStart { index: usize, content_block: Block },
    Ping,
    ContentBlockDelta { index: usize, delta: BlockDelta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: &'a Stop, usage: Usage },
    MessageStop,
    Error { error: ErrorDetails<'a> },
}

impl Event<'_> {
    fn encode(&self) -> StreamEvent {
        let name = match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::Ping => "ping",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
            Self::Error { .. } => "error",
        };
        StreamEvent { name: Some(name), data: to_json(self) }
    }
}

/// Encodes the responses of `/v1/messages`.
pub(super) struct MessageEncoder {
    id: String,
    model: String,
    blocks: Blocks,
    stop: Stop,
    usage: Usage,
}

impl MessageEncoder {
    pub(super) fn new(request: &ValidRequest) -> Self {
        let prompt = request.prompts.iter().map(Vec::len).sum();
        Self {
            id: format!("msg_{}", request.identity.id),
            model: request.served.name.clone(),
            blocks: Blocks::new(AnswerSplitter::of(request, 0)),
            stop: Stop::default(),
            usage: TokenUsage { prompt, cached: request.cached.iter().sum(), completion: 0 }.into(),
        }
    }

    fn message<'a>(&'a self, content: &'a [Block]) -> Message<'a> {
        let (id, model, stop, usage) = (&self.id, &self.model, &self.stop, self.usage);
        Message { id, kind: MessageKind, role: Role, model, content, stop, usage }
    }
}

fn send(changes: Vec<Change>, out: &mut Vec<StreamEvent>) {
    out.extend(changes.into_iter().map(|change| match change {
        Change::Start(index, content_block) => Event::ContentBlockStart { index, content_block }.encode(),
        Change::Delta(index, delta) => Event::ContentBlockDelta { index, delta }.encode(),
        Change::Stop(index) => Event::ContentBlockStop { index }.encode(),
    }));
}

impl EventEncoder for MessageEncoder {
    fn start(&mut self, out: &mut Vec<StreamEvent>) {
        out.push(Event::MessageStart { message: self.message(&[]) }.encode());
        let mut changes = Vec::new();
        self.blocks.open(&mut changes);
        send(changes, out);
        out.push(Event::Ping.encode());
    }

    fn delta(&mut self, _: usize, delta: Delta, out: &mut Vec<StreamEvent>) {
        let mut changes = Vec::new();
        self.blocks.push(&delta.text, &mut changes);
        send(changes, out);
    }

    fn end_text(&mut self, _: usize, finish: &Finish, _: &Committed, out: &mut Vec<StreamEvent>) {
        let mut changes = Vec::new();
        self.blocks.finish(&mut changes);
        send(changes, out);
        let (reason, sequence) = match (finish.reason, &finish.stop) {
            (FinishReason::Stop, Some(StopCause::String(stop))) => ("stop_sequence", Some(stop.clone())),
            (FinishReason::Stop, _) if self.blocks.has_called() => ("tool_use", None),
            (FinishReason::Stop, _) => ("end_turn", None),
            (FinishReason::Length | FinishReason::Interrupted, _) => ("max_tokens", None),
        };
        self.stop = Stop { stop_reason: Some(reason), stop_sequence: sequence };
    }

    fn end(&mut self, usage: TokenUsage, out: &mut Vec<StreamEvent>) {
        self.usage = usage.into();
        out.push(Event::MessageDelta { delta: &self.stop, usage: self.usage }.encode());
        out.push(Event::MessageStop.encode());
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<StreamEvent>) {
        // The request's id is in the headers of the stream.
        out.push(Event::Error { error: error.into() }.encode());
    }

    fn holds_stream(&self) -> bool {
        true
    }

    fn body(&self) -> String {
        to_json(&self.message(self.blocks.all()))
    }
}

/// The body of an error.
#[derive(Serialize, ToSchema)]
#[schema(as = AnthropicError)]
pub(in crate::api) struct ErrorBody<'a> {
    #[serde(rename = "type")]
    #[schema(inline)]
    kind: ErrorKind,
    error: ErrorDetails<'a>,
    #[schema(required)]
    request_id: Option<&'a str>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = AnthropicErrorDetails)]
pub(in crate::api) struct ErrorDetails<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    message: &'a str,
    /// The parameter at fault, if the error is about one: an addition to Anthropic's format.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    param: Option<&'a str>,
    /// What is wrong, for programs to read: an addition to Anthropic's format.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    code: Option<&'a str>,
}

impl<'a> ErrorBody<'a> {
    pub(in crate::api) fn new(error: &'a ApiError, request_id: Option<&'a str>) -> Self {
        Self { kind: ErrorKind, error: error.into(), request_id }
    }
}

impl<'a> From<&'a ApiError> for ErrorDetails<'a> {
    fn from(error: &'a ApiError) -> Self {
        let kind = match error.status().as_u16() {
            401 => "authentication_error",
            402 => "billing_error",
            403 => "permission_error",
            404 => "not_found_error",
            408 | 504 => "timeout_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        Self { kind, message: error.message(), param: error.param(), code: error.code() }
    }
}
