//! A response in words: the events of its stream, and the object at its end.

use rand::Rng;
use serde::Serialize;

use super::object::{
    Failed, Incomplete, IncompleteReason, InputDetails, Message, MessageKind, Object, OutputDetails, ResponseUsage,
    Role, Status, TextPart,
};
use crate::api::error::ApiError;
use crate::api::formats::openai::answer::{Usage, now};
use crate::api::run::encoder::{Dialect, Kept, Said};
use crate::engine::{Delta, Finish, FinishReason};

/// The conversation that a response goes on with, in tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Before {
    /// All of them.
    pub(super) tokens: u64,
    /// Those that are in its state.
    pub(super) read: u64,
}

/// An event: its name, its place in the stream, and what it is about.
#[derive(Serialize)]
struct Event<T: Serialize> {
    #[serde(rename = "type")]
    name: &'static str,
    sequence_number: u64,
    #[serde(flatten)]
    about: T,
}

#[derive(Serialize)]
struct AboutResponse<'a> {
    response: &'a Object,
}

#[derive(Serialize)]
struct AboutItem<'a> {
    output_index: usize,
    item: &'a Message,
}

/// A place in the output, which is always the same: there is one message with one part.
#[derive(Serialize)]
struct At<'a> {
    item_id: &'a str,
    output_index: usize,
    content_index: usize,
}

#[derive(Serialize)]
struct AboutPart<'a> {
    #[serde(flatten)]
    at: At<'a>,
    part: &'a TextPart,
}

#[derive(Serialize)]
struct AboutDelta<'a> {
    #[serde(flatten)]
    at: At<'a>,
    delta: &'a str,
    logprobs: [(); 0],
}

#[derive(Serialize)]
struct AboutText<'a> {
    #[serde(flatten)]
    at: At<'a>,
    text: &'a str,
    logprobs: [(); 0],
}

#[derive(Serialize)]
struct AboutError<'a> {
    code: Option<&'a str>,
    message: &'a str,
    param: Option<&'a str>,
}

/// The format of `/v1/responses`.
pub(super) struct Writer {
    object: Object,
    message_id: String,
    text: String,
    before: Before,
    /// The number of the next event.
    next: u64,
    /// The number of the first event that is sent only once the response is kept.
    last_words: Option<u64>,
}

impl Writer {
    /// That of a response which has just begun.
    pub(super) fn new(object: Object, before: Before) -> Self {
        let message_id = format!("msg_{:032x}", rand::rng().random::<u128>());
        Self { object, message_id, text: String::new(), before, next: 0, last_words: None }
    }

    fn say(&mut self, name: &'static str, about: impl Serialize, out: &mut Vec<Said>) {
        let said = event(self.next, name, about);
        self.next += 1;
        out.push(said);
    }

    fn message(&self, status: Status, content: Vec<TextPart>) -> Message {
        let (id, kind, role) = (self.message_id.clone(), MessageKind::Message, Role::Assistant);
        Message { id, kind, status, role, content }
    }

    fn part(&self) -> TextPart {
        TextPart { text: self.text.clone(), ..TextPart::default() }
    }

    fn about_response(&mut self, name: &'static str, out: &mut Vec<Said>) {
        out.push(event(self.next, name, AboutResponse { response: &self.object }));
        self.next += 1;
    }

    fn add_text(&mut self, text: &str, out: &mut Vec<Said>) {
        // Tokens without text say nothing.
        if !text.is_empty() {
            self.text.push_str(text);
            let id = self.message_id.clone();
            self.say("response.output_text.delta", AboutDelta { at: at(&id), delta: text, logprobs: [] }, out);
        }
    }

    /// The message has all its text.
    fn end_message(&mut self, status: Status, out: &mut Vec<Said>) {
        let part = self.part();
        let id = self.message_id.clone();
        self.say("response.output_text.done", AboutText { at: at(&id), text: &part.text, logprobs: [] }, out);
        self.say("response.content_part.done", AboutPart { at: at(&id), part: &part }, out);
        let message = self.message(status, vec![part]);
        self.say("response.output_item.done", AboutItem { output_index: 0, item: &message }, out);
        self.object.output = vec![message];
    }

    /// The last event.
    fn end_response(&mut self, out: &mut Vec<Said>) {
        let name = match self.object.status {
            Status::Incomplete => "response.incomplete",
            Status::Failed => "response.failed",
            Status::Completed | Status::InProgress => "response.completed",
        };
        self.about_response(name, out);
    }
}

fn at(message_id: &str) -> At<'_> {
    At { item_id: message_id, output_index: 0, content_index: 0 }
}

fn event(number: u64, name: &'static str, about: impl Serialize) -> Said {
    let event = Event { name, sequence_number: number, about };
    // Strings, numbers and lists of them: there is nothing in it that JSON cannot say.
    Said { name: Some(name), data: serde_json::to_string(&event).unwrap_or_default() }
}

impl Dialect for Writer {
    fn open(&mut self, out: &mut Vec<Said>) {
        self.about_response("response.created", out);
        self.about_response("response.in_progress", out);
        let message = self.message(Status::InProgress, Vec::new());
        self.say("response.output_item.added", AboutItem { output_index: 0, item: &message }, out);
        let part = AboutPart { at: at(&message.id), part: &TextPart::default() };
        self.say("response.content_part.added", part, out);
    }

    fn delta(&mut self, _: usize, delta: Delta, out: &mut Vec<Said>) {
        self.add_text(&delta.text, out);
    }

    fn end(&mut self, _: usize, finish: &Finish, _: &Kept, out: &mut Vec<Said>) {
        self.last_words = Some(self.next);
        let answer = finish.snapshot.as_ref().and_then(|snapshot| snapshot.answer.as_ref());
        match answer.filter(|answer| answer.open) {
            None => {}
            Some(answer) if self.object.store => self.object.held_text.clone_from(&answer.held),
            Some(answer) => {
                // Nobody goes on from here: what waits comes out now.
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

    fn close(&mut self, usage: Usage, out: &mut Vec<Said>) {
        let input_tokens = self.before.tokens + usage.prompt_tokens as u64;
        let output_tokens = usage.completion_tokens as u64;
        let cached_tokens = self.before.read + usage.prompt_tokens_details.cached_tokens as u64;
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

    fn fail(&mut self, error: &ApiError, out: &mut Vec<Said>) {
        // What was to be said at the end has not been sent.
        self.next = self.last_words.unwrap_or(self.next);
        let body = error.body();
        let word = |name: &str| body["error"][name].as_str();
        let about = AboutError { code: word("code"), message: error.message(), param: word("param") };
        self.say("error", about, out);
        let failed = Failed { code: "server_error".into(), message: error.message().into() };
        let message = self.message(Status::Incomplete, vec![self.part()]);
        let object = &mut self.object;
        (object.status, object.error, object.output) = (Status::Failed, Some(failed), vec![message]);
        (object.completed_at, object.incomplete_details, object.usage) = (None, None, None);
        object.held_text.clear();
        self.end_response(out);
    }

    fn body(&self) -> String {
        serde_json::to_string(&self.object).unwrap_or_default()
    }
}

/// A response that has been given before, as the stream that it would have been, its text in one piece.
pub(super) fn replay(body: &str) -> Vec<Said> {
    let mut out = Vec::new();
    let Ok(done) = serde_json::from_str::<Object>(body) else { return out };
    let begun = Object {
        status: Status::InProgress,
        output: Vec::new(),
        completed_at: None,
        incomplete_details: None,
        usage: None,
        held_text: String::new(),
        ..done.clone()
    };
    let mut writer = Writer::new(begun, Before::default());
    let message = done.output.first();
    if let Some(message) = message {
        writer.message_id.clone_from(&message.id);
    }
    writer.open(&mut out);
    let part = message.and_then(|message| message.content.first());
    writer.add_text(part.map_or("", |part| &part.text), &mut out);
    writer.end_message(done.status, &mut out);
    writer.object = done;
    writer.end_response(&mut out);
    out
}
