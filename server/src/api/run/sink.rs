//! Where a run's words go: to one answer, to a stream, to a log that can be taken up again, or to nobody any more.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, stream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::api::error::ApiError;
use crate::api::run::encoder::Said;
use crate::api::run::streams::LogWriter;
use crate::api::state::AppState;
use crate::session::Owner;

/// Events that may wait for their reader; then the run waits, and the engine after it.
const BUFFER: usize = 32;

/// A run's end of what the client reads.
pub(in crate::api) enum Sink {
    Whole(Option<oneshot::Sender<Result<String, ApiError>>>),
    Stream(mpsc::Sender<Option<Said>>),
    Log(LogWriter),
    /// The client has left; the run goes on.
    Nobody,
}

impl Sink {
    /// Whether the whole answer is wanted at the end.
    pub(in crate::api) fn wants_body(&self) -> bool {
        matches!(self, Self::Whole(_))
    }

    /// Hands over what a stream says; whether there was somebody to take each word within `limit`.
    pub(in crate::api) async fn say(&self, out: &mut Vec<Said>, limit: Duration) -> bool {
        for said in out.drain(..) {
            match self {
                Self::Stream(sender) => {
                    if !matches!(timeout(limit, sender.send(Some(said))).await, Ok(Ok(()))) {
                        return false;
                    }
                }
                Self::Log(log) => log.push(said),
                Self::Whole(_) | Self::Nobody => {}
            }
        }
        true
    }

    /// Whether the reader is there, whether or not it reads.
    pub(in crate::api) fn has_reader(&self) -> bool {
        matches!(self, Self::Stream(sender) if !sender.is_closed())
    }

    /// Waits until the client has left.
    pub(in crate::api) async fn left(&mut self) {
        match self {
            Self::Whole(Some(sender)) => sender.closed().await,
            Self::Stream(sender) => sender.closed().await,
            // Who reads a log may come back.
            Self::Whole(None) | Self::Log(_) | Self::Nobody => std::future::pending().await,
        }
    }

    /// Hands over the last words of a stream, and the whole answer or why there is none.
    pub(in crate::api) async fn close(self, mut out: Vec<Said>, last: Result<String, ApiError>) {
        self.say(&mut out, Duration::MAX).await;
        match self {
            // A reader who has left needs nothing.
            Self::Whole(sender) => _ = sender.map(|sender| sender.send(last)),
            Self::Stream(sender) => _ = sender.send(None).await,
            Self::Log(log) => log.end(),
            Self::Nobody => {}
        }
    }
}

/// An answer in one piece.
pub(in crate::api) fn whole() -> (Sink, impl Future<Output = Result<Response, ApiError>>) {
    let (sender, receiver) = oneshot::channel();
    let answer = async {
        // A run that ends without a word has panicked.
        let body = receiver.await.unwrap_or_else(|_| Err(ApiError::internal()))?;
        Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
    };
    (Sink::Whole(Some(sender)), answer)
}

/// A stream that ends with its reader.
pub(in crate::api) fn streamed(keep_alive: Duration) -> (Sink, Response) {
    let (sender, receiver) = mpsc::channel::<Option<Said>>(BUFFER);
    let events = stream::unfold(Some(receiver), |receiver| async move {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Some(Some(said)) => Some((event(said), Some(receiver))),
            Some(None) => None,
            // A run that ends without its last word has panicked.
            None => Some((event(Said::data(ApiError::internal().body().to_string())), None)),
        }
    });
    (Sink::Stream(sender), respond(events, keep_alive))
}

/// A stream that goes on without its reader, and can be taken up again.
pub(in crate::api) fn logged(state: &AppState, owner: Owner) -> (Sink, Response) {
    let (log, writer) = state.streams().open(owner);
    let mut response = respond(Arc::clone(&log).follow(0), state.options().keep_alive);
    if let Ok(id) = HeaderValue::from_str(log.id()) {
        response.headers_mut().insert(HeaderName::from_static("x-stream-id"), id);
    }
    (Sink::Log(writer), response)
}

/// Words that are known already, as a stream.
pub(in crate::api) fn replayed(words: Vec<Said>, keep_alive: Duration) -> Response {
    respond(stream::iter(words.into_iter().map(event)), keep_alive)
}

fn event(said: Said) -> sse::Event {
    written(sse::Event::default(), said)
}

/// What is said, after what `event` has already: plain clients want the data last.
pub(in crate::api) fn written(event: sse::Event, said: Said) -> sse::Event {
    let event = if let Some(name) = said.name { event.event(name) } else { event };
    event.data(said.data)
}

/// The response that streams `events`.
pub(in crate::api) fn respond(
    events: impl Stream<Item = sse::Event> + Send + 'static,
    keep_alive: Duration,
) -> Response {
    use futures_util::StreamExt;
    let keep_alive = KeepAlive::new().interval(keep_alive).text("alive");
    // Proxies that collect a response before they pass it on would undo the streaming.
    let unbuffered = [(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"))];
    (unbuffered, Sse::new(events.map(Ok::<_, Infallible>)).keep_alive(keep_alive)).into_response()
}
