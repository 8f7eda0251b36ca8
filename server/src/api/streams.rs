//! Streams that outlive their readers: kept for a while, numbered, and taken up again at any event.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{Response, sse};
use futures_util::{Stream, stream};
use rand::Rng;
use tokio::sync::watch;

use super::dialect::Said;
use super::error::ApiError;
use super::owner::Caller;
use super::sink;
use super::state::AppState;
use crate::session::Owner;

/// How long a stream that has ended can still be read.
const KEPT: Duration = Duration::from_mins(10);

/// Bytes of one stream's events that are kept; then the oldest are forgotten.
const MOST_BYTES: usize = 8 << 20;

/// Streams of one owner that are kept; then those that ended longest ago are forgotten.
const MOST_STREAMS: usize = 256;

/// The events of one stream, from the first that is still kept.
pub(super) struct Log {
    id: String,
    owner: Owner,
    events: Mutex<Events>,
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct Events {
    /// How many have been forgotten.
    first: usize,
    kept: std::collections::VecDeque<Said>,
    bytes: usize,
    ended: Option<Instant>,
}

impl Log {
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Adds an event.
    pub(super) fn push(&self, said: Said) {
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

    /// No more will come.
    pub(super) fn end(&self) {
        self.lock().ended = Some(Instant::now());
        self.changed.send_replace(());
    }

    /// The events from number `next` on, those that are there and those that will come, each with its number as `id`.
    pub(super) fn follow(self: Arc<Self>, next: usize) -> impl Stream<Item = sse::Event> + Send + use<> {
        let changed = self.changed.subscribe();
        stream::unfold((self, changed, next), |(log, mut changed, next)| async move {
            loop {
                changed.mark_unchanged();
                let found = {
                    let events = log.lock();
                    match next.checked_sub(events.first).map(|at| events.kept.get(at)) {
                        Some(Some(said)) => Ok(Some(said.clone())),
                        Some(None) if events.ended.is_none() => Err(()),
                        // The end, or a reader so slow that what it waits for has been forgotten.
                        Some(None) | None => Ok(None),
                    }
                };
                match found {
                    Ok(found) => {
                        let said = found?;
                        let event = sse::Event::default().id(next.to_string()).data(said.data);
                        let event = if let Some(name) = said.name { event.event(name) } else { event };
                        return Some((event, (log, changed, next + 1)));
                    }
                    // A log that is gone has ended.
                    Err(()) => changed.changed().await.ok()?,
                }
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, Events> {
        // Nothing panics while it holds the lock.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The streams that can be taken up again.
#[derive(Default)]
pub(super) struct Streams {
    logs: Mutex<HashMap<String, Arc<Log>>>,
}

impl Streams {
    /// A new stream.
    pub(super) fn open(&self, owner: Owner) -> Arc<Log> {
        let id = format!("strm_{:032x}", rand::rng().random::<u128>());
        let log = Log { id: id.clone(), owner, events: Mutex::default(), changed: watch::Sender::new(()) };
        let log = Arc::new(log);
        let mut logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        logs.retain(|_, log| log.lock().ended.is_none_or(|ended| ended.elapsed() < KEPT));
        let mut ended: Vec<(Instant, String)> = logs
            .values()
            .filter(|log| log.owner == owner)
            .filter_map(|log| Some((log.lock().ended?, log.id.clone())))
            .collect();
        ended.sort_unstable_by_key(|(at, _)| *at);
        for (_, id) in ended.iter().take((ended.len() + 1).saturating_sub(MOST_STREAMS)) {
            logs.remove(id);
        }
        logs.insert(id, Arc::clone(&log));
        log
    }

    /// A stream, where it is this owner's.
    fn get(&self, owner: Owner, id: &str) -> Option<Arc<Log>> {
        let logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        logs.get(id).filter(|log| log.owner == owner).map(Arc::clone)
    }
}

/// `GET /v1/streams/{id}`: from the event after `Last-Event-ID`, or from the first.
pub(super) async fn follow(
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
        let message = "the events after this one are no longer kept";
        return Err(ApiError::request(StatusCode::GONE, Some("last-event-id"), Some("gone"), message));
    }
    Ok(sink::respond(log.follow(next), state.options().keep_alive))
}
