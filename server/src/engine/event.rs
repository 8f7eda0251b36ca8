//! What the engine tells the one who submitted a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::session::Snapshot;

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-text token or a stop string.
    Stop,
    /// As many tokens as were asked for.
    Length,
    /// Whoever asked wanted no more.
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
}

/// What ended a text that ended by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// This end-of-text token.
    Eos(u32),
    /// This token, which the request has named.
    Token(u32),
    /// This stop string.
    String(String),
    /// Its grammar allowed nothing more.
    Grammar,
}

/// A token and its log probability, with those that were likeliest: natural logarithms of the model's own
/// distribution, before whatever a request does to it.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub token: u32,
    /// Its log probability; -9999 for one that the model rules out.
    pub logprob: f32,
    /// The likeliest tokens with theirs, as many as were asked for, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// The end of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// Why it ended.
    pub reason: FinishReason,
    /// What ended it; none where [`Self::reason`] is not [`FinishReason::Stop`].
    pub stop: Option<StopCause>,
    /// The sum of those of all tokens generated, the one that ended the text among them, where log probabilities were
    /// asked for.
    pub cumulative_logprob: Option<f64>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, with the end-of-text token where there was one.
    pub completion_tokens: usize,
    /// Where the time went.
    pub timings: Timings,
    /// The text's end, where it was asked for; none where it came before there was a slot for it.
    pub snapshot: Option<Arc<Snapshot>>,
}

/// Why a request ended without its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// An error or a panic; the log has the details.
    #[error("generation failed on the server; its log has the reason under the request's id")]
    Internal,
    /// The text's grammar asked for more than its limits allow: the request's doing, and no fault of the server's.
    #[error("the text could not follow its grammar within the limits")]
    Grammar,
    /// The server is going down and could not wait any longer.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// Nobody read the text for too long.
    #[error("the text was not read for too long")]
    Stalled,
}

/// The next piece of a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Whole characters; empty where they are still held back.
    pub text: String,
    /// The tokens generated since the last piece.
    pub token_ids: Vec<u32>,
    /// Those of each of them, where they were asked for.
    pub logprobs: Vec<TokenLogprobs>,
}

/// One event of a request: perhaps the prompt's end and its log probabilities, any number of pieces, then one of the last two.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt has been read, but for its last token.
    Read(Arc<Snapshot>),
    /// The log probabilities of the prompt's tokens, where they were asked for; the first has none. Before all text.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// More text.
    Delta(Delta),
    /// The end.
    Finished(Finish),
    /// No more will come.
    Failed(Failure),
}

/// The events of one request. Dropping it cancels the request.
#[derive(Debug)]
pub struct EventStream {
    pub(super) receiver: mpsc::Receiver<Event>,
    pub(super) interrupt: Interrupt,
}

/// Asks for the end of a text that is still growing.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Ends the text with what it has by now; its last event comes as always.
    pub fn now(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl EventStream {
    /// The next event; `None` after the last, or when the engine is gone.
    pub async fn next(&mut self) -> Option<Event> {
        self.receiver.recv().await
    }

    /// What ends the text before its time.
    pub fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
    }

    /// The next event, for callers outside an async runtime.
    pub fn blocking_next(&mut self) -> Option<Event> {
        self.receiver.blocking_recv()
    }

    /// Polls for the next event.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.receiver.poll_recv(context)
    }
}
