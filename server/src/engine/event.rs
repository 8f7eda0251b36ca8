//! The events of a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::mpsc;

use super::row_drafts::DraftCounts;
use crate::session::Snapshot;

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-text token or a stop string.
    Stop,
    /// It has `max_tokens` tokens.
    Length,
    /// The client interrupted it.
    Interrupted,
}

/// How long each part of a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// From submission to a free slot.
    pub queue: Duration,
    /// From the slot to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Prompt chunks and decode steps that the engine made between submission and a free slot.
    pub queue_steps: u64,
}

/// What stopped a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// This end-of-text token.
    Eos(u32),
    /// This token, one of the request's `stop_token_ids`.
    Token(u32),
    /// This stop string.
    String(String),
    /// The text went on to the next turn of its conversation.
    Turn,
    /// The grammar allowed nothing more.
    Grammar,
}

impl StopCause {
    /// Whether the text was cut before a stop string or a turn marker.
    pub fn is_string(&self) -> bool {
        matches!(self, Self::String(_) | Self::Turn)
    }
}

/// A token's log probability, and the most likely tokens with theirs. They are natural logarithms of the model's own
/// distribution, before any sampling parameter changes it.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub token: u32,
    /// Its log probability; -9999 if the model rules the token out.
    pub logprob: f32,
    /// The most likely tokens with their log probabilities, as many as requested, in descending order.
    pub top: Vec<(u32, f32)>,
}

/// The end of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// Why it ended.
    pub reason: FinishReason,
    /// What stopped it; `None` unless [`Self::reason`] is [`FinishReason::Stop`].
    pub stop: Option<StopCause>,
    /// The sum of the log probabilities of all generated tokens, including one that ended the text, if log
    /// probabilities were requested.
    pub cumulative_logprob: Option<f64>,
    /// Number of tokens in the prompt.
    pub prompt_tokens: usize,
    /// Number of generated tokens, including an end-of-text token.
    pub completion_tokens: usize,
    /// How long each part of the request took.
    pub timings: Timings,
    /// The draft tokens of the text, if the engine speculates.
    pub drafts: DraftCounts,
    /// Set if a stop string begins within a token: the last tokens of the snapshot's text, which encode the part of
    /// that token before the stop string.
    pub retokenized: Vec<u32>,
    /// The snapshot at the end, if requested; `None` if the text ended before it got a slot.
    pub snapshot: Option<Arc<Snapshot>>,
}

impl Finish {
    /// The mean log probability of the generated tokens, if log probabilities were requested and any token was
    /// generated.
    pub fn mean_logprob(&self) -> Option<f64> {
        self.cumulative_logprob.filter(|_| self.completion_tokens > 0).map(|sum| sum / self.completion_tokens as f64)
    }
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// An error or a panic; the log has the details.
    #[error("generation failed on the server; its log has the reason under the request's id")]
    Internal,
    /// The text's grammar exceeded its limits: an error of the request, not of the server.
    #[error("the text could not follow its grammar within the limits")]
    Grammar,
    /// The server shut down before the request finished.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// The request waited in a full queue, and its tenant had more requests there than others.
    #[error("too many requests are waiting, and this one made room for one of another key; try again soon")]
    Displaced,
    /// Nobody read the text for too long.
    #[error("the text was not read for too long")]
    Stalled,
}

/// The next piece of a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Complete characters; empty while text is held back.
    pub text: String,
    /// The tokens generated since the previous piece.
    pub token_ids: Vec<u32>,
    /// The log probability of each of these tokens, if requested.
    pub logprobs: Vec<TokenLogprobs>,
    /// The byte offset in `text` where each token's text ends; the last token has no entry.
    pub ends: Vec<usize>,
}

impl Delta {
    /// Splits this piece into one piece per token. How many tokens a piece has depends on draft tokens, forced tokens
    /// and slow readers; the split pieces depend on the text alone.
    pub fn tokens(self) -> impl Iterator<Item = Self> {
        let Self { text, token_ids, logprobs, ends } = self;
        let (mut logprobs, mut begin, last) = (logprobs.into_iter(), 0, text.len());
        token_ids.into_iter().zip(ends.into_iter().chain([last])).map(move |(token, end)| {
            let (text, logprobs) = (text[begin..end].to_owned(), logprobs.next().into_iter().collect());
            begin = end;
            Self { text, token_ids: vec![token], logprobs, ends: Vec::new() }
        })
    }
}

/// One event of a request. Events come in the order of the variants; the last is either `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The log probabilities of the prompt's tokens, if requested; the first token has none.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// The next piece of text.
    Delta(Delta),
    /// The end of the text.
    Finished(Finish),
    /// The request failed.
    Failed(Failure),
}

/// The events of one request. Dropping the stream cancels the request.
#[derive(Debug)]
pub struct EventStream {
    pub(super) receiver: mpsc::Receiver<Event>,
    pub(super) interrupt: Interrupt,
}

/// Ends a running request early.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Ends the text after what has been generated so far; [`Event::Finished`] follows as usual.
    pub fn now(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl EventStream {
    /// Returns the next event; `None` after the last event, or if the engine has ended.
    pub async fn next(&mut self) -> Option<Event> {
        self.receiver.recv().await
    }

    /// Returns a handle that ends the text early.
    pub fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
    }

    /// Returns the next event, for callers outside an async runtime.
    pub fn blocking_next(&mut self) -> Option<Event> {
        self.receiver.blocking_recv()
    }

    /// Polls for the next event.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.receiver.poll_recv(context)
    }
}
