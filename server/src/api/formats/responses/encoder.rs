//! The responses of `/v1/responses`: the events of a stream, or one object.

use rand::Rng;
use serde::Serialize;

use super::object::{
    Failed, Incomplete, IncompleteReason, InputDetails, Message, MessageKind, Object, OutputDetails, ResponseUsage,
    Role, Status, TextPart,
};
use crate::api::error::ApiError;
use crate::api::formats::openai::answer::now;
use crate::api::run::TokenUsage;
use crate::api::run::encoder::{Committed, EventEncoder, StreamEvent, to_json};
use crate::engine::{Delta, Finish, FinishReason};
use crate::session::Snapshot;

/// The length of the conversation that a response continues, in tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Context {
    tokens: u64,
    /// The tokens that are in its state.
    read: u64,
}

impl Context {
    pub(super) fn of(snapshot: &Snapshot) -> Self {
        Self { tokens: snapshot.tokens(), read: snapshot.read }
    }
}

/// An event: its name, its number in the stream, and its contents.
#[derive(Serialize)]
struct Event<T: Serialize> {
    #[serde(rename = "type")]
    name: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    payload: T,
}

#[derive(Serialize)]
struct ResponsePayload<'a> {
    response: &'a Object,
}

#[derive(Serialize)]
struct ItemPayload<'a> {
    output_index: usize,
    item: &'a Message,
}

/// A position in the output. It is always the first: there is one message with one part.
#[derive(Serialize)]
struct Position<'a> {
    item_id: &'a str,
    output_index: usize,
    content_index: usize,
}

#[derive(Serialize)]
struct PartPayload<'a> {
    #[serde(flatten)]
    position: Position<'a>,
    part: &'a TextPart,
}

#[derive(Serialize)]
struct DeltaPayload<'a> {
    #[serde(flatten)]
    position: Position<'a>,
    delta: &'a str,
    logprobs: [(); 0],
}

#[derive(Serialize)]
struct TextPayload<'a> {
    #[serde(flatten)]
    position: Position<'a>,
    text: &'a str,
    logprobs: [(); 0],
}

#[derive(Serialize)]
struct ErrorPayload<'a> {
    code: Option<&'a str>,
    message: &'a str,
    param: Option<&'a str>,
}

/// Encodes the responses of `/v1/responses`.
pub(super) struct ResponseEncoder {
    object: Object,
    message_id: String,
    text: String,
    context: Context,
    /// The number of the next event.
    next: u64,
    /// The number of the first event that is sent only after the response is stored.
    after_commit: Option<u64>,
}

impl ResponseEncoder {
    pub(super) fn new(object: Object, context: Context) -> Self {
        let message_id = format!("msg_{:032x}", rand::rng().random::<u128>());
        Self { object, message_id, text: String::new(), context, next: 0, after_commit: None }
    }

    fn send(&mut self, name: &'static str, payload: impl Serialize, out: &mut Vec<StreamEvent>) {
        out.push(event(self.next, name, payload));
        self.next += 1;
    }

    fn message(&self, status: Status, content: Vec<TextPart>) -> Message {
        let (id, kind, role) = (self.message_id.clone(), MessageKind::Message, Role::Assistant);
        Message { id, kind, status, role, content }
    }

    fn part(&self) -> TextPart {
        TextPart { text: self.text.clone(), ..TextPart::default() }
    }

    fn send_response(&mut self, name: &'static str, out: &mut Vec<StreamEvent>) {
        out.push(event(self.next, name, ResponsePayload { response: &self.object }));
        self.next += 1;
    }

    fn add_text(&mut self, text: &str, out: &mut Vec<StreamEvent>) {
        // A token without text makes no event.
        if !text.is_empty() {
            self.text.push_str(text);
            let id = self.message_id.clone();
            self.send(
                "response.output_text.delta",
                DeltaPayload { position: position(&id), delta: text, logprobs: [] },
                out,
            );
        }
    }

    /// Ends the message, which has all its text.
    fn end_message(&mut self, status: Status, out: &mut Vec<StreamEvent>) {
        let part = self.part();
        let id = self.message_id.clone();
        self.send(
            "response.output_text.done",
            TextPayload { position: position(&id), text: &part.text, logprobs: [] },
            out,
        );
        self.send("response.content_part.done", PartPayload { position: position(&id), part: &part }, out);
        let message = self.message(status, vec![part]);
        self.send("response.output_item.done", ItemPayload { output_index: 0, item: &message }, out);
        self.object.output = vec![message];
    }

    /// Sends the last event.
    fn end_response(&mut self, out: &mut Vec<StreamEvent>) {
        let name = match self.object.status {
            Status::Incomplete => "response.incomplete",
            Status::Failed => "response.failed",
            Status::Completed | Status::InProgress => "response.completed",
        };
        self.send_response(name, out);
    }
}

fn position(message_id: &str) -> Position<'_> {
    Position { item_id: message_id, output_index: 0, content_index: 0 }
}

fn event(sequence_number: u64, name: &'static str, payload: impl Serialize) -> StreamEvent {
    StreamEvent { name: Some(name), data: to_json(&Event { name, sequence_number, payload }) }
}

impl EventEncoder for ResponseEncoder {
    fn start(&mut self, out: &mut Vec<StreamEvent>) {
        self.send_response("response.created", out);
        self.send_response("response.in_progress", out);
        let message = self.message(Status::InProgress, Vec::new());
        self.send("response.output_item.added", ItemPayload { output_index: 0, item: &message }, out);
        let part = PartPayload { position: position(&message.id), part: &TextPart::default() };
        self.send("response.content_part.added", part, out);
    }

    fn delta(&mut self, _: usize, delta: Delta, out: &mut Vec<StreamEvent>) {
        self.add_text(&delta.text, out);
    }

    fn end_text(&mut self, _: usize, finish: &Finish, _: &Committed, out: &mut Vec<StreamEvent>) {
        self.after_commit = Some(self.next);
        let answer = finish.snapshot.as_ref().and_then(|snapshot| snapshot.answer.as_ref());
        match answer.filter(|answer| answer.open) {
            None => {}
            Some(answer) if self.object.store => self.object.held_text.clone_from(&answer.held),
            Some(answer) => {
                // No response continues this one: the text that was held back is sent now.
                let rest = answer.held.clone() + &String::from_utf8_lossy(&answer.bytes);
                self.add_text(&rest, out);
            }
        }
        self.object.status = match finish.reason {
            FinishReason::Stop => Status::Completed,
            FinishReason::Length | FinishReason::Interrupted => Status::Incomplete,
        };
        match self.object.status {
            Status::Completed => self.object.completed_at = Some(now()),
            _ => self.object.incomplete_details = Some(Incomplete { reason: IncompleteReason::MaxOutputTokens }),
        }
        self.end_message(self.object.status, out);
    }

    fn end(&mut self, usage: TokenUsage, out: &mut Vec<StreamEvent>) {
        let input_tokens = self.context.tokens + usage.prompt as u64;
        let output_tokens = usage.completion as u64;
        let cached_tokens = self.context.read + usage.cached as u64;
        let cache_write_tokens = if self.object.store { input_tokens - cached_tokens } else { 0 };
        self.object.usage = Some(ResponseUsage {
            input_tokens,
            input_tokens_details: InputDetails { cached_tokens, cache_write_tokens },
            output_tokens,
            output_tokens_details: OutputDetails::default(),
            total_tokens: input_tokens + output_tokens,
        });
        self.end_response(out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<StreamEvent>) {
        // The events after the commit have not been sent.
        self.next = self.after_commit.unwrap_or(self.next);
        let body = error.body();
        let field = |name: &str| body["error"][name].as_str();
        let payload = ErrorPayload { code: field("code"), message: error.message(), param: field("param") };
        self.send("error", payload, out);
        let failed = Failed { code: "server_error".into(), message: error.message().into() };
        let message = self.message(Status::Incomplete, vec![self.part()]);
        let object = &mut self.object;
        (object.status, object.error, object.output) = (Status::Failed, Some(failed), vec![message]);
        (object.completed_at, object.incomplete_details, object.usage) = (None, None, None);
        object.held_text.clear();
        self.end_response(out);
    }

    fn body(&self) -> String {
        to_json(&self.object)
    }
}

/// The stream for a retry of a request whose response had this body. The text comes in one piece.
pub(super) fn replay(body: &str) -> Vec<StreamEvent> {
    let mut out = Vec::new();
    let Ok(done) = serde_json::from_str::<Object>(body) else { return out };
    let started = Object {
        status: Status::InProgress,
        output: Vec::new(),
        completed_at: None,
        incomplete_details: None,
        usage: None,
        held_text: String::new(),
        ..done.clone()
    };
    let mut encoder = ResponseEncoder::new(started, Context::default());
    let message = done.output.first();
    if let Some(message) = message {
        encoder.message_id.clone_from(&message.id);
    }
    encoder.start(&mut out);
    let part = message.and_then(|message| message.content.first());
    encoder.add_text(part.map_or("", |part| &part.text), &mut out);
    encoder.end_message(done.status, &mut out);
    encoder.object = done;
    encoder.end_response(&mut out);
    out
}
