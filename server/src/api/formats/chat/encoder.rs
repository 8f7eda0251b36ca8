//! The responses of `/v1/chat/completions`: one message, or several to choose from.

use std::sync::Arc;

use serde::Serialize;
use utoipa::ToSchema;

use super::message::{Assistant, Message, MessagePiece, ToolCall};
use crate::api::formats::openai::answer::{
    Ending, Envelope, ResponseOptions, StopReason, TimingsMs, UsageField, openai_object, usage_at_start,
};
use crate::api::formats::openai::logprobs::{ChatLogprobs, TokenNames};
use crate::api::openapi::literals::literals;
use crate::api::request::ValidRequest;
use crate::api::run::TokenUsage;
use crate::api::run::alignment::{AlignedToken, TokenAligner, carried};
use crate::api::run::answer::AnswerSplitter;
use crate::api::run::encoder::{Committed, EventEncoder, StreamEvent, to_json};
use crate::api::run::tool_calls::Piece;
use crate::engine::{Delta, Finish, FinishReason, StopCause};

literals!(ChatCompletion = "chat.completion", ChatCompletionChunk = "chat.completion.chunk");

openai_object! {
    /// A response with one or more answers.
    Chat, ChatCompletion, Choice
}

openai_object! {
    /// One event of a streamed answer.
    ChatChunk, ChatCompletionChunk, ChunkChoice
}

/// A whole answer.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ChatChoice)]
struct Choice {
    index: usize,
    message: Message,
    /// Null without `logprobs`.
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
    #[schema(required, nullable = false)]
    finish_reason: Option<Ending>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    stop_reason: Option<StopReason>,
    /// With `return_token_ids`: the ids of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    token_ids: Option<Vec<u32>>,
    /// Absent until the answer has ended, and in a stream that other servers can continue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    timings: Option<TimingsMs>,
    /// With `keep`, once the text has ended: the mean log probability of its tokens. Absent for a text without tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    mean_logprob: Option<f64>,
}

/// A piece of an answer.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = ChatDelta)]
struct ChunkChoice {
    index: usize,
    delta: MessagePiece,
    /// Null without `logprobs`.
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
    /// Null until the answer has ended.
    #[schema(required)]
    finish_reason: Option<Ending>,
    /// Absent until the answer has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    stop_reason: Option<StopReason>,
    /// With `return_token_ids`: the ids of the piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    token_ids: Option<Vec<u32>>,
    /// Absent until the answer has ended, and in a stream that other servers can continue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    timings: Option<TimingsMs>,
    /// With `keep`, once the text has ended: the mean log probability of its tokens. Absent for a text without tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    mean_logprob: Option<f64>,
}

/// A message that is being generated.
struct PartialMessage {
    text: String,
    reasoning: String,
    splitter: AnswerSplitter,
    token_ids: Vec<u32>,
    logprobs: Option<ChatLogprobs>,
    aligner: Option<TokenAligner>,
    reason: Option<Ending>,
    stop: Option<StopReason>,
    timings: Option<TimingsMs>,
    mean_logprob: Option<f64>,
}

/// Encodes the responses of `/v1/chat/completions`.
pub(in crate::api) struct ChatEncoder {
    envelope: Envelope,
    options: ResponseOptions,
    /// Whether the whole messages are needed at the end.
    collect: bool,
    /// Whether the response has the mean log probability of each answer.
    means: bool,
    names: TokenNames,
    /// The prompt's ids, if asked for.
    prompt: Option<Vec<u32>>,
    texts: Vec<PartialMessage>,
    committed: Committed,
    /// Whether the response has timings.
    timed: bool,
    /// The tokens used so far.
    so_far: TokenUsage,
    usage: UsageField,
}

impl ChatEncoder {
    pub(super) fn new(request: &ValidRequest, options: ResponseOptions, collect: bool) -> Self {
        let tokenizer = &request.served.tokenizer;
        let carried = carried(request).next().unwrap_or_default();
        let names = TokenNames::new(Arc::clone(tokenizer), options.tokens_as_ids);
        let message = |index| PartialMessage {
            text: String::new(),
            reasoning: String::new(),
            splitter: AnswerSplitter::of(request, index),
            token_ids: Vec::new(),
            logprobs: request.logprobs.map(|_| ChatLogprobs::new(&names)),
            aligner: request.logprobs.map(|_| TokenAligner::new(Arc::clone(tokenizer), &carried)),
            reason: None,
            stop: None,
            timings: None,
            mean_logprob: None,
        };
        Self {
            envelope: Envelope::new("chatcmpl", request),
            prompt: request.prompts.first().filter(|_| options.token_ids).cloned(),
            options,
            collect,
            means: request.means,
            texts: (0..request.choices.generated).map(message).collect(),
            names,
            committed: Committed::default(),
            timed: request.identity.timed,
            so_far: usage_at_start(request),
            usage: UsageField::Absent,
        }
    }

    fn chunk(&self, choice: &ChunkChoice, committed: &Committed) -> StreamEvent {
        let prompt = self.prompt.as_deref().filter(|_| choice.index == 0 && choice.delta.role.is_some());
        let usage = self.options.usage.of_chunk(self.so_far);
        StreamEvent::data(ChatChunk::json(&self.envelope, prompt, &[choice], usage, committed))
    }

    fn send(&self, index: usize, pieces: impl Iterator<Item = MessagePiece>, out: &mut Vec<StreamEvent>) {
        let choice = |delta| ChunkChoice { index, delta, ..ChunkChoice::default() };
        let chunk = |piece| self.chunk(&choice(piece), &Committed::default());
        out.extend(pieces.map(chunk));
    }

    /// Returns the log probabilities of a piece; `None` if it has none.
    fn logprobs(&self, tokens: Vec<AlignedToken>) -> Option<ChatLogprobs> {
        Some(ChatLogprobs::of(tokens, &self.names)).filter(|logprobs| !logprobs.is_empty())
    }

    /// Sends a piece. If the whole message is needed, adds the piece's log probabilities to it.
    fn send_piece(&mut self, choice: ChunkChoice, committed: &Committed, out: &mut Vec<StreamEvent>) {
        out.push(self.chunk(&choice, committed));
        let whole = self.texts[choice.index].logprobs.as_mut().filter(|_| self.collect);
        if let (Some(whole), Some(more)) = (whole, choice.logprobs) {
            whole.append(more);
        }
    }
}

impl PartialMessage {
    /// Splits more of the answer into pieces, and collects them if asked to.
    fn push(&mut self, text: &str, collect: bool) -> Vec<Piece> {
        let pieces = self.splitter.push(text);
        self.collect(&pieces, collect);
        pieces
    }

    /// Returns the pieces that were held back until the end, and collects them if asked to.
    fn finish(&mut self, collect: bool) -> Vec<Piece> {
        let pieces = self.splitter.finish();
        self.collect(&pieces, collect);
        pieces
    }

    fn collect(&mut self, pieces: &[Piece], collect: bool) {
        for piece in pieces.iter().filter(|_| collect) {
            match piece {
                Piece::Reasoning(text) => self.reasoning.push_str(text),
                Piece::Text(text) => self.text.push_str(text),
                Piece::CallStart { .. } | Piece::Arguments { .. } => {}
            }
        }
    }
}

impl EventEncoder for ChatEncoder {
    fn start(&mut self, out: &mut Vec<StreamEvent>) {
        for index in 0..self.texts.len() {
            let called = self.texts[index].splitter.calls_only();
            let content = Some((!called).then(String::new).into());
            let delta = MessagePiece { role: Some(Assistant), content, ..MessagePiece::default() };
            out.push(self.chunk(&ChunkChoice { index, delta, ..ChunkChoice::default() }, &Committed::default()));
        }
    }

    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<StreamEvent>) {
        let Delta { text, token_ids, logprobs, .. } = delta;
        self.so_far.completion += token_ids.len();
        let message = &mut self.texts[index];
        if self.collect && self.options.token_ids {
            message.token_ids.extend(&token_ids);
        }
        let aligned = message.aligner.as_mut().map(|aligner| aligner.push(&text, logprobs));
        let logprobs = aligned.and_then(|tokens| self.logprobs(tokens));
        let mut pieces = self.texts[index].push(&text, self.collect).into_iter().map(MessagePiece::from);
        // Without token ids, there is nothing to send until there is text.
        let first = pieces.next();
        if first.is_some() || logprobs.is_some() || self.options.token_ids {
            let token_ids = self.options.token_ids.then_some(token_ids);
            let delta = first.unwrap_or_else(|| Piece::Text(String::new()).into());
            let choice = ChunkChoice { index, delta, logprobs, token_ids, ..ChunkChoice::default() };
            self.send_piece(choice, &Committed::default(), out);
        }
        self.send(index, pieces, out);
    }

    fn end_text(&mut self, index: usize, finish: &Finish, committed: &Committed, out: &mut Vec<StreamEvent>) {
        let last = self.texts[index].finish(self.collect);
        self.send(index, last.into_iter().map(MessagePiece::from), out);
        let message = &mut self.texts[index];
        let called = finish.reason == FinishReason::Stop && message.splitter.has_called();
        message.reason = Some(if called { Ending::ToolCalls } else { finish.reason.into() });
        message.stop = Some(StopReason::of(finish.stop.as_ref()));
        message.timings = self.timed.then(|| finish.timings.into());
        message.mean_logprob = finish.mean_logprob().filter(|_| self.means);
        let mut aligned =
            message.aligner.as_mut().map(|aligner| aligner.finish(finish.stop.as_ref())).unwrap_or_default();
        if matches!(finish.stop, Some(StopCause::Eos(_) | StopCause::Token(_))) {
            // The token that ends a message is not part of it.
            aligned.pop();
        }
        let (finish_reason, stop_reason) = (message.reason, message.stop.clone());
        let (timings, mean_logprob) = (message.timings, message.mean_logprob);
        let logprobs = self.logprobs(aligned);
        self.committed = committed.clone();
        let mut choice = ChunkChoice { index, logprobs, finish_reason, stop_reason, ..ChunkChoice::default() };
        (choice.timings, choice.mean_logprob) = (timings, mean_logprob);
        self.send_piece(choice, committed, out);
    }

    fn end(&mut self, usage: TokenUsage, out: &mut Vec<StreamEvent>) {
        self.usage = UsageField::Known(usage.into());
        if self.options.usage.is_on() {
            // The state is large, and has been sent already.
            let committed = Committed { state: None, ..self.committed.clone() };
            out.push(StreamEvent::data(ChatChunk::json(&self.envelope, None, &[], self.usage, &committed)));
        }
        out.push(StreamEvent::data("[DONE]"));
    }

    fn tool_calls(&self, index: usize) -> Option<String> {
        let splitter = Some(&self.texts.get(index)?.splitter).filter(|splitter| splitter.has_called())?;
        let calls: Vec<ToolCall> = splitter.calls().iter().map(ToolCall::whole).collect();
        Some(to_json(&calls))
    }

    fn body(&self) -> String {
        let choice = |(index, message): (usize, &PartialMessage)| {
            let content = (!message.splitter.calls_only()).then(|| message.text.clone());
            let tool_calls = message.splitter.calls().iter().map(ToolCall::whole).collect();
            let reasoning_content = Some(message.reasoning.clone()).filter(|reasoning| !reasoning.is_empty());
            Choice {
                index,
                message: Message { role: Assistant, content, reasoning_content, tool_calls, refusal: () },
                logprobs: message.logprobs.clone(),
                finish_reason: message.reason,
                stop_reason: message.stop.clone(),
                token_ids: self.options.token_ids.then(|| message.token_ids.clone()),
                timings: message.timings,
                mean_logprob: message.mean_logprob,
            }
        };
        let choices: Vec<Choice> = self.texts.iter().enumerate().map(choice).collect();
        Chat::json(
            &self.envelope,
            self.prompt.as_deref(),
            &choices.iter().collect::<Vec<_>>(),
            self.usage,
            &self.committed,
        )
    }
}
