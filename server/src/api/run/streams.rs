//! Streams that outlive their connection: their events are numbered and kept for a while, and a client can resume at
//! any of them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::response::sse;
use futures_util::{Stream, stream};
use rand::Rng;
use tokio::sync::watch;

use super::active::{Stop, StopHandle};
use super::encoder::StreamEvent;
use super::hold::Hold;
use crate::api::error::ApiError;
use crate::session::Owner;

/// How long a stream can be read after its end.
pub(super) const RETENTION: Duration = Duration::from_mins(10);

/// Most bytes of one stream's events that are kept. Beyond that, the oldest events are dropped.
const MAX_BYTES: usize = 8 << 20;

/// Most bytes of all streams' events that are kept. Beyond that, the streams that ended first are dropped, but only
/// those of owners with more than an equal share.
const MAX_TOTAL_BYTES: usize = 256 << 20;

/// Most streams of one owner that are kept. Beyond that, the streams that ended first are dropped.
const MAX_STREAMS: usize = 256;

/// The events of one stream, from the first that is still kept.
pub(in crate::api) struct Log {
    id: String,
    owner: Owner,
    events: Mutex<Events>,
    changed: watch::Sender<()>,
    /// Stops the run that writes the log.
    stop: StopHandle,
    /// The stream's record; `None` if no other server can continue the stream.
    hold: Option<Arc<Hold>>,
}

#[derive(Default)]
struct Events {
    /// How many events have been dropped.
    first: usize,
    kept: VecDeque<StreamEvent>,
    bytes: usize,
    ended: Option<Instant>,
}

/// The writer of a log. Dropping it ends the log.
pub(in crate::api) struct LogWriter(Arc<Log>);

impl LogWriter {
    /// Adds an event.
    pub(in crate::api) fn push(&self, event: StreamEvent) {
        self.0.push(event);
    }

    /// Ends the log.
    pub(in crate::api) fn end(self) {
        self.0.end();
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        if self.0.lock().ended.is_none() {
            // The run has panicked.
            self.0.push(StreamEvent::data(ApiError::internal().body().to_string()));
            self.0.end();
        }
    }
}

impl Log {
    pub(in crate::api) fn id(&self) -> &str {
        &self.id
    }

    fn push(&self, event: StreamEvent) {
        let mut events = self.lock();
        events.bytes += event.data.len();
        events.kept.push_back(event);
        while events.bytes > MAX_BYTES {
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

    /// Returns the present and future events from number `next` on, each with its number as `id`.
    pub(in crate::api) fn follow(self: Arc<Self>, next: usize) -> impl Stream<Item = sse::Event> + Send + use<> {
        let changed = self.changed.subscribe();
        stream::unfold((self, changed, Some(next)), |(log, mut changed, next)| async move {
            let next = next?;
            loop {
                changed.mark_unchanged();
                let found = {
                    let events = log.lock();
                    match next.checked_sub(events.first).map(|at| events.kept.get(at)) {
                        Some(Some(event)) => Some(Ok(event.clone())),
                        Some(None) if events.ended.is_some() => return None,
                        Some(None) => None,
                        None => Some(Err(no_longer_kept())),
                    }
                };
                match found {
                    Some(Ok(event)) => {
                        let event = event.write(sse::Event::default().id(next.to_string()));
                        return Some((event, (log, changed, Some(next + 1))));
                    }
                    // The reader is so slow that its next event has been dropped.
                    Some(Err(error)) => {
                        let event = sse::Event::default().data(error.body().to_string());
                        return Some((event, (log, changed, None)));
                    }
                    // `log` holds the sender, so this cannot fail while the log is followed.
                    None => changed.changed().await.ok()?,
                }
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, Events> {
        // No code panics while holding this lock.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> Option<Instant> {
        self.lock().ended
    }

    fn is_over(&self) -> bool {
        self.ended().is_some_and(|ended| ended.elapsed() >= RETENTION)
    }
}

/// Creates the error of a request for events that are gone.
pub(super) fn no_longer_kept() -> ApiError {
    let message = "the events after this one are no longer kept";
    ApiError::request(StatusCode::GONE, Some("last-event-id"), Some("gone"), message)
}

/// The streams that can be resumed.
#[derive(Default)]
pub(in crate::api) struct Streams {
    logs: Mutex<HashMap<String, Arc<Log>>>,
    /// Streams that this server is taking over.
    claimed: Mutex<HashSet<String>>,
}

/// The prefix of every stream id.
const PREFIX: &str = "strm_";

/// Keeps other requests from taking over the same stream, until it is dropped.
pub(super) struct Claim<'a> {
    streams: &'a Streams,
    id: &'a str,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.streams.claims().remove(self.id);
    }
}

impl Streams {
    /// Generates the id of a new stream.
    pub(super) fn new_id() -> String {
        format!("{PREFIX}{:032x}", rand::rng().random::<u128>())
    }

    /// Whether `id` has the form of a stream id.
    pub(super) fn is_id(id: &str) -> bool {
        let digits = id.strip_prefix(PREFIX).unwrap_or_default();
        digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
    }

    /// Whether this server has the events of a stream of `owner`.
    pub(super) fn has(&self, owner: Owner, id: &str) -> bool {
        self.get(owner, id).is_some()
    }

    /// Claims the right to take over a stream; returns `None` while another request has it.
    pub(super) fn claim<'a>(&'a self, id: &'a str) -> Option<Claim<'a>> {
        let is_new = self.claims().insert(id.to_owned());
        // Created only if no request has a claim: dropping a second one would end the first.
        if is_new { Some(Claim { streams: self, id }) } else { None }
    }

    /// Forgets the events of a stream that another server is going to continue. Its readers see the connection end.
    pub(super) fn forget(&self, id: &str) {
        self.lock().remove(id);
    }

    /// Opens a stream, and returns its log and its writer. `stop` ends the run of the writer.
    pub(super) fn open(&self, owner: Owner, stop: StopHandle, hold: Option<Arc<Hold>>) -> (Arc<Log>, LogWriter) {
        let id = hold.as_ref().map_or_else(Self::new_id, |hold| hold.id().to_owned());
        let (events, changed) = (Mutex::default(), watch::Sender::new(()));
        let log = Arc::new(Log { id: id.clone(), owner, events, changed, stop, hold });
        let mut logs = self.lock();
        make_room(&mut logs, owner);
        logs.insert(id, Arc::clone(&log));
        (Arc::clone(&log), LogWriter(log))
    }

    /// Returns the events of a stream of `owner` from number `next` on.
    pub(in crate::api) fn resume(
        &self,
        owner: Owner,
        id: &str,
        next: usize,
    ) -> Result<impl Stream<Item = sse::Event> + Send + use<>, ApiError> {
        let log = self.get(owner, id).ok_or_else(|| ApiError::missing("id", "stream"))?;
        if next < log.lock().first {
            return Err(no_longer_kept());
        }
        Ok(log.follow(next))
    }

    /// Removes the record of a stream that this server computes. Returns false if this server does not have the stream,
    /// or no longer holds its record.
    pub(super) async fn withdraw(&self, owner: Owner, id: &str) -> Result<bool, ApiError> {
        let Some(log) = self.get(owner, id) else { return Ok(false) };
        match &log.hold {
            Some(hold) => Ok(hold.withdraw().await?),
            None => Ok(true),
        }
    }

    /// Forgets a stream of `owner`, and ends its run with the text so far. Current readers still get the rest.
    pub(in crate::api) fn delete(&self, owner: Owner, id: &str) -> Result<(), ApiError> {
        let log = self.get(owner, id).ok_or_else(|| ApiError::missing("id", "stream"))?;
        self.lock().remove(id);
        log.stop.stop(Stop::Finish);
        Ok(())
    }

    fn get(&self, owner: Owner, id: &str) -> Option<Arc<Log>> {
        let mut logs = self.lock();
        logs.retain(|_, log| !log.is_over());
        logs.get(id).filter(|log| log.owner == owner).map(Arc::clone)
    }

    fn claims(&self) -> MutexGuard<'_, HashSet<String>> {
        // No code panics while holding this lock.
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Log>>> {
        // No code panics while holding this lock.
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drops ended streams, expired ones first, until the limits leave room for one more stream of `owner`.
fn make_room(logs: &mut HashMap<String, Arc<Log>>, owner: Owner) {
    logs.retain(|_, log| !log.is_over());
    let mut ended: Vec<(Instant, Arc<Log>)> =
        logs.values().filter_map(|log| Some((log.ended()?, Arc::clone(log)))).collect();
    ended.sort_unstable_by_key(|(at, _)| *at);
    let mut own = logs.values().filter(|log| log.owner == owner).count();
    let mut held: HashMap<Owner, usize> = HashMap::new();
    for log in logs.values() {
        *held.entry(log.owner).or_default() += log.lock().bytes;
    }
    let (mut bytes, part) = (held.values().sum::<usize>(), MAX_TOTAL_BYTES / held.len().max(1));
    for (_, log) in ended {
        let of_owner = held.entry(log.owner).or_default();
        if (bytes > MAX_TOTAL_BYTES && *of_owner > part) || (own >= MAX_STREAMS && log.owner == owner) {
            let freed = log.lock().bytes;
            bytes -= freed;
            *of_owner -= freed;
            own -= usize::from(log.owner == owner);
            logs.remove(&log.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::run::active::{ActiveRuns, Described};

    /// Creates a stream of `owner` that has ended, with this many bytes.
    fn ended(streams: &Streams, owner: Owner, bytes: usize) -> String {
        let run = Described { session: None, auth: None, at_shutdown: Stop::Finish };
        let registration = ActiveRuns::default().register(run, None);
        let (log, writer) = streams.open(owner, registration.handle(), None);
        writer.push(StreamEvent::data("x".repeat(bytes)));
        writer.end();
        log.id().to_owned()
    }

    #[test]
    fn an_owner_that_keeps_much_costs_the_others_no_stream() {
        let (streams, [modest, greedy]) = (Streams::default(), [Owner([1; 16]), Owner([2; 16])]);
        let first = ended(&streams, modest, 1000);
        let many: Vec<String> =
            (0..MAX_TOTAL_BYTES / MAX_BYTES + 4).map(|_| ended(&streams, greedy, MAX_BYTES)).collect();
        assert!(streams.has(modest, &first));
        assert!(!streams.has(greedy, &many[0]) && streams.has(greedy, many.last().expect("many")));
    }

    #[test]
    fn one_request_at_a_time_takes_a_stream_over() {
        let streams = Streams::default();
        let first = streams.claim("one").expect("nobody else takes it over");
        assert!(streams.claim("one").is_none() && streams.claim("two").is_some());
        assert!(streams.claim("one").is_none(), "who was refused has not ended the claim");
        drop(first);
        assert!(streams.claim("one").is_some());
    }

    #[test]
    fn only_ids_of_streams_are_looked_up() {
        assert!(Streams::is_id(&Streams::new_id()));
        for id in
            ["", "strm_", "strm_1", "sess_00000000000000000000000000000000", "strm_0000000000000000000000000000000g"]
        {
            assert!(!Streams::is_id(id), "{id}");
        }
    }
}
