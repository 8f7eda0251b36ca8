//! Where a run sends its events: into one response, a stream, a log that a client can resume, or nowhere.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, stream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::active::StopHandle;
use super::encoder::StreamEvent;
use super::hold::Hold;
use super::streams::{LogWriter, Streams};
use super::version;
use crate::api::error::ApiError;
use crate::api::shares::Share;
use crate::session::Owner;

/// Events that may wait for their reader. When the buffer is full, the run waits, and the engine with it.
const BUFFER: usize = 32;

/// A response in one piece, and the memory reserved for it. Both are freed once the response is written.
struct WholeBody {
    json: String,
    _memory: Option<Share>,
}

impl IntoResponse for WholeBody {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "application/json")], Body::from(Bytes::from_owner(self))).into_response()
    }
}

impl AsRef<[u8]> for WholeBody {
    fn as_ref(&self) -> &[u8] {
        self.json.as_bytes()
    }
}

/// A response in one piece, or an error in its place.
pub(in crate::api) struct Last {
    body: Result<WholeBody, ApiError>,
    /// The session's version after the turn.
    version: Option<String>,
}

impl Last {
    pub(in crate::api) fn new(body: Result<String, ApiError>, memory: Option<Share>, version: Option<String>) -> Self {
        Self { body: body.map(|json| WholeBody { json, _memory: memory }), version }
    }
}

/// The run's side of the connection to the client.
pub(in crate::api) enum Sink {
    Whole(Option<oneshot::Sender<Last>>),
    /// `None` marks the regular end.
    Stream(mpsc::Sender<Option<StreamEvent>>),
    Log(LogWriter),
    /// The client has disconnected, and the run continues.
    Closed,
}

impl Sink {
    /// Whether the response is sent in one piece at the end.
    pub(in crate::api) fn wants_body(&self) -> bool {
        matches!(self, Self::Whole(_))
    }

    /// Sends events; returns false if the reader is gone or did not take one of them within `limit`. Cancel-safe: `out`
    /// keeps the events that were not sent.
    pub(in crate::api) async fn send(&self, out: &mut Vec<StreamEvent>, limit: Duration) -> bool {
        match self {
            Self::Stream(sender) => {
                while !out.is_empty() {
                    let Ok(Ok(place)) = timeout(limit, sender.reserve()).await else { return false };
                    place.send(Some(out.remove(0)));
                }
            }
            Self::Log(log) => out.drain(..).for_each(|event| log.push(event)),
            Self::Whole(_) | Self::Closed => out.clear(),
        }
        true
    }

    /// Whether the reader is connected, even if it does not read.
    pub(in crate::api) fn has_reader(&self) -> bool {
        matches!(self, Self::Stream(sender) if !sender.is_closed())
    }

    /// Waits until the client has disconnected.
    pub(in crate::api) async fn disconnected(&mut self) {
        match self {
            Self::Whole(Some(sender)) => sender.closed().await,
            Self::Stream(sender) => sender.closed().await,
            // The reader of a log may come back.
            Self::Whole(None) | Self::Log(_) | Self::Closed => std::future::pending().await,
        }
    }

    /// Sends the last events, and the response in one piece or its error.
    pub(in crate::api) async fn close(self, mut out: Vec<StreamEvent>, last: Last) {
        self.send(&mut out, Duration::MAX).await;
        match self {
            // A reader that has disconnected needs nothing.
            Self::Whole(sender) => _ = sender.map(|sender| sender.send(last)),
            Self::Stream(sender) => _ = sender.send(None).await,
            Self::Log(log) => log.end(),
            Self::Closed => {}
        }
    }
}

/// Creates a sink, and the future of its response in one piece.
pub(in crate::api) fn whole() -> (Sink, impl Future<Output = Result<Response, ApiError>>) {
    let (sender, receiver) = oneshot::channel();
    let answer = async {
        // A run that ends without sending a result has panicked.
        let panicked = |_| Last::new(Err(ApiError::internal()), None, None);
        let Last { body, version } = receiver.await.unwrap_or_else(panicked);
        body.map(|body| version::tagged(body.into_response(), version.as_deref()))
    };
    (Sink::Whole(Some(sender)), answer)
}

/// Creates a sink, and the response that streams its events. The stream ends when its reader disconnects.
pub(in crate::api) fn streamed(keep_alive: Duration) -> (Sink, Response) {
    let (sender, receiver) = mpsc::channel::<Option<StreamEvent>>(BUFFER);
    let events = stream::unfold(Some(receiver), |receiver| async move {
        let mut receiver = receiver?;
        match receiver.recv().await {
            Some(Some(event)) => Some((event.into(), Some(receiver))),
            Some(None) => None,
            // A run that drops its sender without ending the stream has panicked.
            None => Some((StreamEvent::data(ApiError::internal().body().to_string()).into(), None)),
        }
    });
    (Sink::Stream(sender), respond(events, keep_alive))
}

/// Creates a sink that keeps its events in a log, and a response that follows the log. The stream continues without its
/// reader, which can resume it.
pub(super) fn logged(
    streams: &Streams,
    (owner, stop, hold): (Owner, StopHandle, Option<Arc<Hold>>),
    keep_alive: Duration,
) -> (Sink, Response) {
    let (log, writer) = streams.open(owner, stop, hold);
    let mut response = respond(Arc::clone(&log).follow(0), keep_alive);
    if let Ok(id) = HeaderValue::from_str(log.id()) {
        response.headers_mut().insert(HeaderName::from_static("x-stream-id"), id);
    }
    (Sink::Log(writer), response)
}

/// Returns a response in one piece that is already known.
pub(in crate::api) fn repeated(json: String, memory: Option<Share>) -> Response {
    WholeBody { json, _memory: memory }.into_response()
}

/// Returns a response that streams events that are already known.
pub(in crate::api) fn replayed(events: Vec<StreamEvent>, memory: Option<Share>, keep_alive: Duration) -> Response {
    let events = stream::unfold((events.into_iter(), memory), |(mut events, memory)| async move {
        let event = events.next()?;
        Some((sse::Event::from(event), (events, memory)))
    });
    respond(events, keep_alive)
}

/// Returns the response that streams `events`.
pub(in crate::api) fn respond(
    events: impl Stream<Item = sse::Event> + Send + 'static,
    keep_alive: Duration,
) -> Response {
    use futures_util::StreamExt;
    let keep_alive = KeepAlive::new().interval(keep_alive).text("alive");
    // A proxy that buffers responses would undo the streaming.
    let unbuffered = [(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"))];
    (unbuffered, Sse::new(events.map(Ok::<_, Infallible>)).keep_alive(keep_alive)).into_response()
}
