//! `POST /v1/chat/completions`: messages in, one message out, or several to choose from.

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use crate::api::formats::openai::answer::{Head, StopReason, Usage, UsageField, Wanted, finish_reason};
use crate::api::formats::openai::logprobs::{ChatLogprobs, TokenNames};
use crate::api::request::tools::{Piece, Reader, ToolCall, Tools};
use crate::api::request::validate::Details;
use crate::api::run::alignment::{Aligner, Placed};
use crate::api::run::encoder::{Dialect, Kept, Said};
use crate::engine::{Delta, Finish, FinishReason, StopCause};

/// What is said, or a piece of it.
#[derive(Clone, Debug, Default, Serialize)]
struct Message {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Null where the message is calls of tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
    /// Null in a whole message: the model refuses nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<Value>,
}

#[derive(Debug, Default, Serialize)]
struct Choice {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Message>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

impl From<Piece> for Message {
    fn from(piece: Piece) -> Self {
        match piece {
            Piece::Text(text) => Self { content: Some(text.into()), ..Self::default() },
            Piece::Call(call) => Self { tool_calls: vec![call], ..Self::default() },
        }
    }
}

/// A message while it grows.
struct Growing {
    text: String,
    /// What tells calls of tools from text, where there may be any.
    reader: Option<Reader>,
    token_ids: Vec<u32>,
    logprobs: Option<ChatLogprobs>,
    aligner: Option<Aligner>,
    reason: Option<&'static str>,
    stop: Option<StopReason>,
}

/// The format of `/v1/chat/completions`.
pub(in crate::api) struct Chat {
    head: Head,
    wanted: Wanted,
    names: TokenNames,
    texts: Vec<Growing>,
    kept: Kept,
    usage: UsageField,
}

impl Chat {
    pub(in crate::api) fn new(head: Head, wanted: Wanted, details: &Details) -> Self {
        let opening = details.openings.first().cloned().unwrap_or_default();
        let growing = |_| Growing {
            text: String::new(),
            reader: details.tools.as_ref().map(Tools::reader),
            token_ids: Vec::new(),
            logprobs: details.logprobs.map(|_| ChatLogprobs::default()),
            aligner: details.logprobs.map(|_| Aligner::new(Arc::clone(&details.tokenizer), &opening)),
            reason: None,
            stop: None,
        };
        Self {
            head,
            wanted,
            names: TokenNames::new(Arc::clone(&details.tokenizer), details.names_by_id),
            texts: (0..details.choices.generated).map(growing).collect(),
            kept: Kept::default(),
            usage: UsageField::Absent,
        }
    }

    fn chunk(&self, delta: Message, choice: Choice, kept: &Kept) -> Said {
        let usage = if self.wanted.include_usage { UsageField::Later } else { UsageField::Absent };
        let choice = Choice { delta: Some(delta), ..choice };
        Said::data(self.head.json("chat.completion.chunk", &[choice], usage, kept))
    }

    fn say(&self, index: usize, pieces: impl Iterator<Item = Piece>, out: &mut Vec<Said>) {
        let chunk = |piece: Piece| self.chunk(piece.into(), Choice { index, ..Choice::default() }, &Kept::default());
        out.extend(pieces.map(chunk));
    }

    /// The log probabilities of a piece, added to those of the whole message where that is wanted.
    fn logprobs(&mut self, index: usize, placed: &[Placed]) -> Option<ChatLogprobs> {
        let more = ChatLogprobs::of(placed, &self.names);
        if let Some(logprobs) = self.texts[index].logprobs.as_mut().filter(|_| self.wanted.whole) {
            logprobs.extend(&more);
        }
        Some(more).filter(|logprobs| !logprobs.is_empty())
    }
}

impl Growing {
    /// More of the answer, as pieces; its plain text is kept where the whole is wanted.
    fn read(&mut self, text: String, whole: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        match &mut self.reader {
            Some(reader) => reader.push(&text, &mut pieces),
            None if text.is_empty() => {}
            None => pieces.push(Piece::Text(text)),
        }
        self.keep(&pieces, whole);
        pieces
    }

    /// What was held back when the answer ended.
    fn finish(&mut self, whole: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if let Some(reader) = &mut self.reader {
            reader.finish(&mut pieces);
        }
        self.keep(&pieces, whole);
        pieces
    }

    fn keep(&mut self, pieces: &[Piece], whole: bool) {
        for piece in pieces.iter().filter(|_| whole) {
            if let Piece::Text(text) = piece {
                self.text.push_str(text);
            }
        }
    }
}

impl Dialect for Chat {
    fn open(&mut self, out: &mut Vec<Said>) {
        for index in 0..self.texts.len() {
            let called = self.texts[index].reader.as_ref().is_some_and(|reader| !reader.is_plain());
            let content = Some((!called).then(String::new).into());
            let delta = Message { role: Some("assistant"), content, ..Message::default() };
            out.push(self.chunk(delta, Choice { index, ..Choice::default() }, &Kept::default()));
        }
    }

    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<Said>) {
        let Delta { text, token_ids, logprobs } = delta;
        let growing = &mut self.texts[index];
        if self.wanted.whole {
            growing.token_ids.extend(token_ids.iter().filter(|_| self.wanted.token_ids));
        }
        let placed = growing.aligner.as_mut().map(|aligner| aligner.push(&text, logprobs));
        let logprobs = placed.and_then(|placed| self.logprobs(index, &placed));
        let mut pieces = self.texts[index].read(text, self.wanted.whole).into_iter();
        // Without ids there is nothing to say until there is text.
        let first = pieces.next();
        if first.is_some() || logprobs.is_some() || self.wanted.token_ids {
            let token_ids = self.wanted.token_ids.then_some(token_ids);
            let choice = Choice { index, logprobs, token_ids, ..Choice::default() };
            let message = first.unwrap_or_else(|| Piece::Text(String::new())).into();
            out.push(self.chunk(message, choice, &Kept::default()));
        }
        self.say(index, pieces, out);
    }

    fn end(&mut self, index: usize, finish: &Finish, kept: &Kept, out: &mut Vec<Said>) {
        let last = self.texts[index].finish(self.wanted.whole);
        self.say(index, last.into_iter(), out);
        let growing = &mut self.texts[index];
        let called = finish.reason == FinishReason::Stop && growing.reader.as_ref().is_some_and(Reader::has_called);
        growing.reason = Some(if called { "tool_calls" } else { finish_reason(finish.reason) });
        growing.stop = Some(StopReason::of(finish.stop.as_ref()));
        let mut placed =
            growing.aligner.as_mut().map(|aligner| aligner.finish(finish.stop.as_ref())).unwrap_or_default();
        if matches!(finish.stop, Some(StopCause::Eos(_) | StopCause::Token(_))) {
            // The token that ends a message is no part of it.
            placed.pop();
        }
        let (finish_reason, stop_reason) = (growing.reason, growing.stop.clone());
        let logprobs = self.logprobs(index, &placed);
        self.kept = kept.clone();
        let choice = Choice { index, logprobs, finish_reason, stop_reason, ..Choice::default() };
        out.push(self.chunk(Message::default(), choice, kept));
    }

    fn close(&mut self, usage: Usage, out: &mut Vec<Said>) {
        self.usage = UsageField::Known(usage);
        if self.wanted.include_usage {
            // The state is large, and has been sent.
            let kept = Kept { state: None, ..self.kept.clone() };
            out.push(Said::data(self.head.json::<Choice>("chat.completion.chunk", &[], self.usage, &kept)));
        }
        out.push(Said::data("[DONE]"));
    }

    fn body(&self) -> String {
        let choice = |(index, growing): (usize, &Growing)| {
            let called = growing.reader.as_ref().is_some_and(|reader| !reader.is_plain());
            let content = Some((!called).then(|| growing.text.clone()).into());
            let tool_calls = growing.reader.as_ref().map(Reader::calls).unwrap_or_default();
            Choice {
                index,
                message: Some(Message { role: Some("assistant"), content, tool_calls, refusal: Some(Value::Null) }),
                logprobs: growing.logprobs.clone(),
                finish_reason: growing.reason,
                stop_reason: growing.stop.clone(),
                token_ids: self.wanted.token_ids.then(|| growing.token_ids.clone()),
                ..Choice::default()
            }
        };
        let choices: Vec<Choice> = self.texts.iter().enumerate().map(choice).collect();
        self.head.json("chat.completion", &choices, self.usage, &self.kept)
    }
}
