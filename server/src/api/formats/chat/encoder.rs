//! The responses of `/v1/chat/completions`: one message, or several to choose from.

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use crate::api::formats::openai::answer::{Envelope, ResponseOptions, StopReason, UsageField, finish_reason};
use crate::api::formats::openai::logprobs::{ChatLogprobs, TokenNames};
use crate::api::request::ValidRequest;
use crate::api::run::TokenUsage;
use crate::api::run::alignment::{AlignedToken, TokenAligner, carried};
use crate::api::run::encoder::{Committed, EventEncoder, StreamEvent};
use crate::api::run::tool_calls::{self, Piece, ToolCallParser};
use crate::engine::{Delta, Finish, FinishReason, StopCause};

/// A message, or a piece of one.
#[derive(Clone, Debug, Default, Serialize)]
struct Message {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Null in a message that calls tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Value>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
    /// Null in a complete message: the model refuses nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<Value>,
}

/// A call of a tool, complete or a piece of it. Only the first piece has more than its index and arguments.
#[derive(Clone, Debug, Default, Serialize)]
struct ToolCall {
    /// The call's place in the message; pieces only.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function,
}

/// The function that is called.
#[derive(Clone, Debug, Default, Serialize)]
struct Function {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The text of a JSON object, or a piece of it.
    arguments: String,
}

impl ToolCall {
    fn new(index: Option<usize>, id: String, name: String, arguments: String) -> Self {
        let function = Function { name: Some(name), arguments };
        Self { index, id: Some(id), kind: Some("function"), function }
    }
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
            Piece::CallStart { index, id, name } => {
                let call = ToolCall::new(Some(index), id, name, String::new());
                Self { tool_calls: vec![call], ..Self::default() }
            }
            Piece::Arguments { index, text } => {
                let function = Function { name: None, arguments: text };
                let call = ToolCall { index: Some(index), function, ..ToolCall::default() };
                Self { tool_calls: vec![call], ..Self::default() }
            }
        }
    }
}

/// A message that is being generated.
struct PartialMessage {
    text: String,
    /// Separates calls of tools from text, if there may be calls.
    parser: Option<ToolCallParser>,
    token_ids: Vec<u32>,
    logprobs: Option<ChatLogprobs>,
    aligner: Option<TokenAligner>,
    reason: Option<&'static str>,
    stop: Option<StopReason>,
}

/// Encodes the responses of `/v1/chat/completions`.
pub(in crate::api) struct ChatEncoder {
    envelope: Envelope,
    options: ResponseOptions,
    /// Whether the whole messages are needed at the end.
    collect: bool,
    names: TokenNames,
    texts: Vec<PartialMessage>,
    committed: Committed,
    usage: UsageField,
}

impl ChatEncoder {
    pub(super) fn new(request: &ValidRequest, options: ResponseOptions, collect: bool) -> Self {
        let tokenizer = &request.served.tokenizer;
        let carried = carried(request).next().unwrap_or_default();
        let message = |_| PartialMessage {
            text: String::new(),
            parser: request.tools.as_ref().map(|tools| ToolCallParser::new(tools.may_answer_text())),
            token_ids: Vec::new(),
            logprobs: request.logprobs.map(|_| ChatLogprobs::default()),
            aligner: request.logprobs.map(|_| TokenAligner::new(Arc::clone(tokenizer), &carried)),
            reason: None,
            stop: None,
        };
        Self {
            envelope: Envelope::new("chatcmpl", &request.served),
            options,
            collect,
            names: TokenNames::new(Arc::clone(tokenizer), options.tokens_as_ids),
            texts: (0..request.choices.generated).map(message).collect(),
            committed: Committed::default(),
            usage: UsageField::Absent,
        }
    }

    fn chunk(&self, delta: Message, choice: Choice, committed: &Committed) -> StreamEvent {
        let usage = if self.options.include_usage { UsageField::Later } else { UsageField::Absent };
        let choice = Choice { delta: Some(delta), ..choice };
        StreamEvent::data(self.envelope.json("chat.completion.chunk", &[choice], usage, committed))
    }

    fn send(&self, index: usize, pieces: impl Iterator<Item = Piece>, out: &mut Vec<StreamEvent>) {
        let chunk =
            |piece: Piece| self.chunk(piece.into(), Choice { index, ..Choice::default() }, &Committed::default());
        out.extend(pieces.map(chunk));
    }

    /// The log probabilities of a piece, which are also collected for the whole message.
    fn logprobs(&mut self, index: usize, tokens: &[AlignedToken]) -> Option<ChatLogprobs> {
        let more = ChatLogprobs::of(tokens, &self.names);
        if let Some(logprobs) = self.texts[index].logprobs.as_mut().filter(|_| self.collect) {
            logprobs.extend(&more);
        }
        Some(more).filter(|logprobs| !logprobs.is_empty())
    }
}

impl PartialMessage {
    /// Splits more of the answer into pieces, and collects the text if asked to.
    fn push(&mut self, text: String, collect: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        match &mut self.parser {
            Some(parser) => parser.push(&text, &mut pieces),
            None if text.is_empty() => {}
            None => pieces.push(Piece::Text(text)),
        }
        self.collect(&pieces, collect);
        pieces
    }

    /// The pieces that were held back until the end.
    fn finish(&mut self, collect: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if let Some(parser) = &mut self.parser {
            parser.finish(&mut pieces);
        }
        self.collect(&pieces, collect);
        pieces
    }

    fn collect(&mut self, pieces: &[Piece], collect: bool) {
        for piece in pieces.iter().filter(|_| collect) {
            if let Piece::Text(text) = piece {
                self.text.push_str(text);
            }
        }
    }
}

impl EventEncoder for ChatEncoder {
    fn start(&mut self, out: &mut Vec<StreamEvent>) {
        for index in 0..self.texts.len() {
            let called = self.texts[index].parser.as_ref().is_some_and(|parser| !parser.is_plain());
            let content = Some((!called).then(String::new).into());
            let delta = Message { role: Some("assistant"), content, ..Message::default() };
            out.push(self.chunk(delta, Choice { index, ..Choice::default() }, &Committed::default()));
        }
    }

    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<StreamEvent>) {
        let Delta { text, token_ids, logprobs } = delta;
        let message = &mut self.texts[index];
        if self.collect && self.options.token_ids {
            message.token_ids.extend(&token_ids);
        }
        let aligned = message.aligner.as_mut().map(|aligner| aligner.push(&text, logprobs));
        let logprobs = aligned.and_then(|tokens| self.logprobs(index, &tokens));
        let mut pieces = self.texts[index].push(text, self.collect).into_iter();
        // Without ids there is nothing to send until there is text.
        let first = pieces.next();
        if first.is_some() || logprobs.is_some() || self.options.token_ids {
            let token_ids = self.options.token_ids.then_some(token_ids);
            let choice = Choice { index, logprobs, token_ids, ..Choice::default() };
            let message = first.unwrap_or_else(|| Piece::Text(String::new())).into();
            out.push(self.chunk(message, choice, &Committed::default()));
        }
        self.send(index, pieces, out);
    }

    fn end_text(&mut self, index: usize, finish: &Finish, committed: &Committed, out: &mut Vec<StreamEvent>) {
        let last = self.texts[index].finish(self.collect);
        self.send(index, last.into_iter(), out);
        let message = &mut self.texts[index];
        let called =
            finish.reason == FinishReason::Stop && message.parser.as_ref().is_some_and(ToolCallParser::has_called);
        message.reason = Some(if called { "tool_calls" } else { finish_reason(finish.reason) });
        message.stop = Some(StopReason::of(finish.stop.as_ref()));
        let mut aligned =
            message.aligner.as_mut().map(|aligner| aligner.finish(finish.stop.as_ref())).unwrap_or_default();
        if matches!(finish.stop, Some(StopCause::Eos(_) | StopCause::Token(_))) {
            // The token that ends a message is not part of it.
            aligned.pop();
        }
        let (finish_reason, stop_reason) = (message.reason, message.stop.clone());
        let logprobs = self.logprobs(index, &aligned);
        self.committed = committed.clone();
        let choice = Choice { index, logprobs, finish_reason, stop_reason, ..Choice::default() };
        out.push(self.chunk(Message::default(), choice, committed));
    }

    fn end(&mut self, usage: TokenUsage, out: &mut Vec<StreamEvent>) {
        self.usage = UsageField::Known(usage.into());
        if self.options.include_usage {
            // The state is large, and has been sent already.
            let committed = Committed { state: None, ..self.committed.clone() };
            out.push(StreamEvent::data(self.envelope.json::<Choice>(
                "chat.completion.chunk",
                &[],
                self.usage,
                &committed,
            )));
        }
        out.push(StreamEvent::data("[DONE]"));
    }

    fn body(&self) -> String {
        let choice = |(index, message): (usize, &PartialMessage)| {
            let called = message.parser.as_ref().is_some_and(|parser| !parser.is_plain());
            let content = Some((!called).then(|| message.text.clone()).into());
            let call = |call: &tool_calls::ToolCall| {
                ToolCall::new(None, call.id.clone(), call.name.clone(), call.arguments.clone())
            };
            let tool_calls = message.parser.iter().flat_map(|parser| parser.calls().iter().map(call)).collect();
            Choice {
                index,
                message: Some(Message { role: Some("assistant"), content, tool_calls, refusal: Some(Value::Null) }),
                logprobs: message.logprobs.clone(),
                finish_reason: message.reason,
                stop_reason: message.stop.clone(),
                token_ids: self.options.token_ids.then(|| message.token_ids.clone()),
                ..Choice::default()
            }
        };
        let choices: Vec<Choice> = self.texts.iter().enumerate().map(choice).collect();
        self.envelope.json("chat.completion", &choices, self.usage, &self.committed)
    }
}
