//! Streams that outlive their readers: kept for a while, numbered, and taken up again at any event.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{Response, sse};
use futures_util::{Stream, stream};
use rand::Rng;
use tokio::sync::watch;

use crate::api::auth::owner::Caller;
use crate::api::error::{ApiError, ErrorBody};
use crate::api::openapi::{self, Error, Id, LastEventId, schemas};
use crate::api::run::encoder::Said;
use crate::api::run::sink;
use crate::api::state::AppState;
use crate::session::Owner;

/// How long a stream that has ended can still be read.
const KEPT: Duration = Duration::from_mins(10);

/// Bytes of one stream's events that are kept; then the oldest are forgotten.
const MOST_BYTES: usize = 8 << 20;

/// Bytes of all streams' events that are kept; then the streams that ended longest ago are forgotten.
const MOST_BYTES_OF_ALL: usize = 256 << 20;

/// Streams of one owner that are kept; then those that ended longest ago are forgotten.
const MOST_STREAMS: usize = 256;

/// The events of one stream, from the first that is still kept.
pub(in crate::api) struct Log {
    id: String,
    owner: Owner,
    events: Mutex<Events>,
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct Events {
    /// How many have been forgotten.
    first: usize,
    kept: VecDeque<Said>,
    bytes: usize,
    ended: Option<Instant>,
}

/// The one that writes a log; the log ends with it, however it goes.
pub(in crate::api) struct LogWriter(Arc<Log>);

impl LogWriter {
    /// Adds an event.
    pub(in crate::api) fn push(&self, said: Said) {
        self.0.push(said);
    }

    /// No more will come.
    pub(in crate::api) fn end(self) {
        self.0.end();
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        if self.0.lock().ended.is_none() {
            // The run has panicked.
            self.0.push(Said::data(ApiError::internal().body().to_string()));
            self.0.end();
        }
    }
}

impl Log {
    pub(in crate::api) fn id(&self) -> &str {
        &self.id
    }

    fn push(&self, said: Said) {
        let mut events = self.lock();
        events.bytes += said.data.len();
        events.kept.push_back(said);
        while events.bytes > MOST_BYTES {
            let Some(oldest) = events.kept.pop_front() else { break };
            events.bytes -= oldest.data.len();
            events.first += 1;
        }
        drop(events);
        self.changed.send_replace(());
    }

    fn end(&self) {
        self.lock().ended = Some(Instant::now());
        self.changed.send_replace(());
    }

    /// The events from number `next` on, those that are there and those that will come, each with its number as `id`.
    pub(in crate::api) fn follow(self: Arc<Self>, next: usize) -> impl Stream<Item = sse::Event> + Send + use<> {
        let changed = self.changed.subscribe();
        stream::unfold((self, changed, Some(next)), |(log, mut changed, next)| async move {
            let next = next?;
            loop {
                changed.mark_unchanged();
                let found = {
                    let events = log.lock();
                    match next.checked_sub(events.first).map(|at| events.kept.get(at)) {
                        Some(Some(said)) => Some(Ok(said.clone())),
                        Some(None) if events.ended.is_some() => return None,
                        Some(None) => None,
                        None => Some(Err(forgotten())),
                    }
                };
                match found {
                    Some(Ok(said)) => {
                        let event = sink::written(sse::Event::default().id(next.to_string()), said);
                        return Some((event, (log, changed, Some(next + 1))));
                    }
                    // A reader so slow that what it waits for is gone is told so.
                    Some(Err(error)) => {
                        let event = sse::Event::default().data(error.body().to_string());
                        return Some((event, (log, changed, None)));
                    }
                    // The log, and so the other end of this, lives as long as it is followed.
                    None => changed.changed().await.ok()?,
                }
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, Events> {
        // Nothing panics while it holds the lock.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When it ended.
    fn ended(&self) -> Option<Instant> {
        self.lock().ended
    }

    fn is_over(&self) -> bool {
        self.ended().is_some_and(|ended| ended.elapsed() >= KEPT)
    }
}

fn forgotten() -> ApiError {
    let message = "the events after this one are no longer kept";
    ApiError::request(StatusCode::GONE, Some("last-event-id"), Some("gone"), message)
}

/// The streams that can be taken up again.
#[derive(Default)]
pub(in crate::api) struct Streams {
    logs: Mutex<HashMap<String, Arc<Log>>>,
}

impl Streams {
    /// A new stream, and its writer.
    pub(in crate::api) fn open(&self, owner: Owner) -> (Arc<Log>, LogWriter) {
        let id = format!("strm_{:032x}", rand::rng().random::<u128>());
        let log = Log { id: id.clone(), owner, events: Mutex::default(), changed: watch::Sender::new(()) };
        let log = Arc::new(log);
        let mut logs = self.lock();
        make_room(&mut logs, owner);
        logs.insert(id, Arc::clone(&log));
        (Arc::clone(&log), LogWriter(log))
    }

    /// A stream, where it is this owner's.
    fn get(&self, owner: Owner, id: &str) -> Option<Arc<Log>> {
        let mut logs = self.lock();
        logs.retain(|_, log| !log.is_over());
        logs.get(id).filter(|log| log.owner == owner).map(Arc::clone)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Log>>> {
        // Nothing panics while it holds the lock.
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgets streams that have ended, those over their time first, until the bounds hold with one more of `owner`.
fn make_room(logs: &mut HashMap<String, Arc<Log>>, owner: Owner) {
    logs.retain(|_, log| !log.is_over());
    let mut ended: Vec<(Instant, Arc<Log>)> =
        logs.values().filter_map(|log| Some((log.ended()?, Arc::clone(log)))).collect();
    ended.sort_unstable_by_key(|(at, _)| *at);
    let mut bytes: usize = logs.values().map(|log| log.lock().bytes).sum();
    let mut own = logs.values().filter(|log| log.owner == owner).count();
    for (_, log) in ended {
        if bytes > MOST_BYTES_OF_ALL || (own >= MOST_STREAMS && log.owner == owner) {
            bytes -= log.lock().bytes;
            own -= usize::from(log.owner == owner);
            logs.remove(&log.id);
        }
    }
}

type StreamEvents = openapi::Events<schemas::CompletionChunk, ErrorBody>;

/// Resume a stream after a disconnect
///
/// The stream of a turn with `"on_disconnect": "continue"`, from the event after `last-event-id`, or from the first.
#[utoipa::path(
    get,
    path = "/v1/streams/{id}",
    operation_id = "followStream",
    tag = "text",
    params(Id, LastEventId),
    responses(
        (status = 200, description = "The events of the stream, each with its number as `id`.",
            content((inline(StreamEvents) = "text/event-stream"))),
        Error<400>,
        Error<404>,
        Error<410>
    )
)]
pub(in crate::api) async fn follow(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::invalid(Some("id"), rejection.to_string()))?;
    let missing = || ApiError::request(StatusCode::NOT_FOUND, Some("id"), Some("not_found"), "no stream has this id");
    let log = state.streams().get(owner, &id).ok_or_else(missing)?;
    let last = headers.get("last-event-id").map(|value| value.to_str().unwrap_or_default());
    let next = last.map_or(Some(0), |last| last.parse::<usize>().ok()?.checked_add(1)).ok_or_else(|| {
        let message = format!("last-event-id must be the number of an event, found {:?}", last.unwrap_or_default());
        ApiError::invalid(Some("last-event-id"), message)
    })?;
    if next < log.lock().first {
        return Err(forgotten());
    }
    Ok(sink::respond(log.follow(next), state.options().keep_alive))
}
