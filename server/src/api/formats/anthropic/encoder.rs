//! The responses of `/v1/messages`: the events of a stream, or one object.

use rand::Rng;
use serde::Serialize;
use serde_json::{Value, json};

use super::blocks::{Block, BlockDelta, Blocks, Change};
use crate::api::error::ApiError;
use crate::api::request::ValidRequest;
use crate::api::run::TokenUsage;
use crate::api::run::encoder::{Committed, EventEncoder, StreamEvent, to_json};
use crate::api::run::tool_calls::ToolCallParser;
use crate::engine::{Delta, Finish, FinishReason, StopCause};

/// Tokens that a request took. Those of the prompt that were not computed are counted separately.
#[derive(Clone, Copy, Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the format's")]
struct Usage {
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
#[derive(Clone, Default, Serialize)]
struct Stop {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

#[derive(Serialize)]
struct Message<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    content: &'a [Block],
    #[serde(flatten)]
    stop: &'a Stop,
    usage: Usage,
}

/// An event. Its type is also its name.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart { message: Message<'a> },
    ContentBlockStart { index: usize, content_block: Block },
    Ping,
    ContentBlockDelta { index: usize, delta: BlockDelta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: &'a Stop, usage: Usage },
    MessageStop,
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
        let parser = request.tools.as_ref().map(|tools| ToolCallParser::new(tools.may_answer_text()));
        Self {
            id: format!("msg_{:032x}", rand::rng().random::<u128>()),
            model: request.served.name.clone(),
            blocks: Blocks::new(parser),
            stop: Stop::default(),
            usage: TokenUsage { prompt, cached: request.cached.iter().sum(), completion: 0 }.into(),
        }
    }

    fn message<'a>(&'a self, content: &'a [Block]) -> Message<'a> {
        let (id, model, stop, usage) = (&self.id, &self.model, &self.stop, self.usage);
        Message { id, kind: "message", role: "assistant", model, content, stop, usage }
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
        let mut body = error_body(error, None);
        // The id is in the headers of the stream.
        if let Some(body) = body.as_object_mut() {
            body.remove("request_id");
        }
        out.push(StreamEvent { name: Some("error"), data: body.to_string() });
    }

    fn body(&self) -> String {
        to_json(&self.message(self.blocks.all()))
    }
}

/// The body of an error; the id is the request's.
pub(in crate::api) fn error_body(error: &ApiError, id: Option<&str>) -> Value {
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
    json!({"type": "error", "error": {"type": kind, "message": error.message()}, "request_id": id})
}
