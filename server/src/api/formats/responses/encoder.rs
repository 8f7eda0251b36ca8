//! The responses of `/v1/responses`: the events of a stream, or one object.

use super::events::{Events, Payload};
use super::items::Status;
use super::object::{Failed, Incomplete, IncompleteReason, InputDetails, Object, OutputDetails, ResponseUsage};
use super::output::Output;
use crate::api::error::ApiError;
use crate::api::formats::openai::answer::now;
use crate::api::run::TokenUsage;
use crate::api::run::answer::AnswerSplitter;
use crate::api::run::encoder::{Committed, EventEncoder, StreamEvent, to_json};
use crate::engine::{Delta, Finish, FinishReason};
use crate::session::Snapshot;

/// The length of the conversation that a response continues, in tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Context {
    tokens: u64,
    /// How many of them the state has read.
    read: u64,
}

impl Context {
    pub(super) fn of(snapshot: &Snapshot) -> Self {
        Self { tokens: snapshot.tokens(), read: snapshot.read }
    }
}

/// Encodes the responses of `/v1/responses`.
pub(super) struct ResponseEncoder {
    object: Object,
    output: Output,
    context: Context,
    /// Tokens of the reasoning.
    reasoning_tokens: u64,
    /// The number of the next event.
    next: u64,
    /// The number of the first event that is sent only after the response is stored.
    after_commit: Option<u64>,
}

impl ResponseEncoder {
    /// Creates the encoder of a response, whose answer `splitter` splits.
    pub(super) fn new(object: Object, context: Context, splitter: AnswerSplitter) -> Self {
        let output = Output::new(splitter);
        Self { object, output, context, reasoning_tokens: 0, next: 0, after_commit: None }
    }

    fn send_response(&mut self, name: &'static str, out: &mut Vec<StreamEvent>) {
        Events { next: &mut self.next, out }.send(name, Payload::Response { response: &self.object });
    }

    fn add_text(&mut self, text: &str, out: &mut Vec<StreamEvent>) {
        self.output.push(text, &mut Events { next: &mut self.next, out });
    }

    /// Sends the first events, which are about the whole response.
    fn begin_response(&mut self, out: &mut Vec<StreamEvent>) {
        self.send_response("response.created", out);
        self.send_response("response.in_progress", out);
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

impl EventEncoder for ResponseEncoder {
    fn start(&mut self, out: &mut Vec<StreamEvent>) {
        self.begin_response(out);
        self.output.open(&mut Events { next: &mut self.next, out });
    }

    fn delta(&mut self, _: usize, delta: Delta, out: &mut Vec<StreamEvent>) {
        if !self.output.may_reason() || delta.token_ids.is_empty() {
            return self.add_text(&delta.text, out);
        }
        for token in delta.tokens() {
            let before = self.output.is_reasoning();
            self.add_text(&token.text, out);
            self.reasoning_tokens += u64::from(before || self.output.is_reasoning());
        }
    }

    fn end_text(&mut self, _: usize, finish: &Finish, _: &Committed, out: &mut Vec<StreamEvent>) {
        self.after_commit = Some(self.next);
        let answer = finish.snapshot.as_ref().and_then(|snapshot| snapshot.answer.as_ref());
        match answer.filter(|answer| answer.open) {
            None => {}
            Some(answer) if self.object.store => self.object.held_text.clone_from(&answer.held),
            Some(answer) => {
                // No response can continue this one, so the text that was held back is sent now.
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
        self.output.finish(self.object.status, &mut Events { next: &mut self.next, out });
        self.object.output = self.output.items().to_vec();
    }

    fn end(&mut self, usage: TokenUsage, out: &mut Vec<StreamEvent>) {
        let input_tokens = self.context.tokens + usage.prompt as u64;
        let output_tokens = usage.completion as u64;
        let cached_tokens = self.context.read + usage.cached as u64;
        // If the prompt opens the reasoning, the beginning of a tool call was counted as reasoning.
        let reasoning_tokens = if self.output.has_reasoning() { self.reasoning_tokens } else { 0 };
        let cache_write_tokens = if self.object.store { input_tokens - cached_tokens } else { 0 };
        self.object.usage = Some(ResponseUsage {
            input_tokens,
            input_tokens_details: InputDetails { cached_tokens, cache_write_tokens },
            output_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens },
            total_tokens: input_tokens + output_tokens,
        });
        self.end_response(out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<StreamEvent>) {
        // The events after the commit have not been sent, so their numbers are used again.
        self.next = self.after_commit.unwrap_or(self.next);
        let body = error.body();
        let field = |name: &str| body["error"][name].as_str();
        let payload = Payload::Error { code: field("code"), message: error.message(), param: field("param") };
        Events { next: &mut self.next, out }.send("error", payload);
        let failed = Failed { code: "server_error".into(), message: error.message().into() };
        let object = &mut self.object;
        (object.status, object.error, object.output) = (Status::Failed, Some(failed), self.output.failed());
        (object.completed_at, object.incomplete_details, object.usage) = (None, None, None);
        object.held_text.clear();
        self.end_response(out);
    }

    fn holds_stream(&self) -> bool {
        true
    }

    fn body(&self) -> String {
        to_json(&self.object)
    }
}

/// Returns the events of a stream that repeats a response with this body, for a retry of its request. Each text and the
/// arguments of each call come in one piece.
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
    let mut encoder = ResponseEncoder::new(started, Context::default(), AnswerSplitter::default());
    encoder.begin_response(&mut out);
    for (index, item) in done.output.iter().enumerate() {
        item.replay(index, &mut Events { next: &mut encoder.next, out: &mut out });
    }
    encoder.object = done;
    encoder.end_response(&mut out);
    out
}
