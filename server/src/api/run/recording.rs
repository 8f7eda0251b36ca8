//! Records requests whose streams outlive their server. A text is a function of state, request and seed, so another
//! server can compute the same events from the record.
//!
//! The record is written before the engine gets the request. It is removed when the events begin to depend on anything
//! else: when the text is ended early, or fails. After the end of the stream it is kept for a while.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use tracing::warn;

use super::encoder::to_json;
use super::hold::Hold;
use super::parking::{Parked, TextSoFar};
use super::streams::{RETENTION, Streams};
use crate::api::error::ApiError;
use crate::api::request::continuation::{CommitPlan, Repeat, SessionParameters};
use crate::api::request::identity::Identity;
use crate::api::request::prompt::Prompt;
use crate::api::request::{MaxTokens, TextRequest};
use crate::api::state::{AppState, Served};
use crate::engine::{Begun, Delta};
use crate::session::{Owner, Restart, Snapshot, Store, Tier, VersionId};
use crate::text::ChatTemplate;

/// The longest time that a text is assumed to take if `--max-seconds` does not limit it.
const LONGEST: Duration = Duration::from_hours(24);

/// Longest body of a request that is recorded. It is limited because records do not count towards a quota.
const MAX_BODY_BYTES: usize = 256 << 10;

/// The header that marks retries.
const KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Everything that the events of a stream depend on, besides the server's own settings.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StreamRecord {
    /// The path of the request's format.
    pub(super) path: String,
    pub(super) body: String,
    /// The request's `idempotency-key`.
    key: Option<String>,
    /// The fingerprint of the model, the server's version and the kind of device.
    fingerprint: String,
    identity: Identity,
    /// The limit in effect: a default may depend on the key's quota.
    max_tokens: usize,
    /// The number of prompt tokens that the first server had cached, which its events report.
    cached: usize,
    /// The version that the turn starts from, and the version that it creates.
    from: String,
    version: String,
    /// Whether the snapshot was in memory, and whether the client named the version. The last event depends on both.
    in_memory: bool,
    named: bool,
    /// What a server that has shut down has parked of the turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parked: Option<Parked>,
}

/// A request to record.
pub(in crate::api) struct Asked {
    path: &'static str,
    body: String,
    key: Option<String>,
    fingerprint: String,
}

/// A request whose stream other servers can continue.
pub(in crate::api) enum Recorded {
    New(Asked),
    /// A request that another server has begun.
    Again(Box<Recording>),
}

/// The record of a stream that this server holds. Dropping it before it is settled removes the record, or gives up a
/// stream that another server has begun.
pub(in crate::api) struct Recording {
    state: AppState,
    pub(super) hold: Arc<Hold>,
    pub(super) record: StreamRecord,
    /// The first event that the client lacks, if another server has begun the stream.
    resumed_at: Option<usize>,
    /// Number of events so far.
    events: usize,
    /// Number of tokens still to come that another server has generated. They are not computed again.
    known: usize,
    text: TextSoFar,
    /// Whether `record` differs from the record in the store.
    changed: bool,
    /// Whether dropping this has nothing left to do.
    settled: bool,
}

impl Asked {
    /// Returns the request if its stream can be recorded: its events depend on nothing but the record, other servers
    /// use the same store, and the body is not too long. With several texts, the order of the events would depend on
    /// timing, and so would the prompt if the chat template reads the clock.
    pub(in crate::api) fn of(
        state: &AppState,
        (path, headers, body): (Option<&'static str>, &HeaderMap, &Bytes),
        request: &TextRequest,
        served: &Served,
    ) -> Option<Self> {
        let reads_clock = matches!(request.prompt, Prompt::Messages(_))
            && served.template.as_deref().is_some_and(ChatTemplate::reads_clock);
        let cannot = reads_clock || body.len() > MAX_BODY_BYTES;
        if cannot || request.choices.generated > 1 || !state.store().is_ok_and(Store::is_shared) {
            return None;
        }
        let key = headers.get(KEY).and_then(|key| key.to_str().ok()).map(str::to_owned);
        let body = std::str::from_utf8(body).ok()?.to_owned();
        Some(Self { path: path?, body, key, fingerprint: served.fingerprint.clone() })
    }
}

impl Recorded {
    /// Fixes what would otherwise differ from run to run.
    pub(in crate::api) fn fix(&self, request: &mut TextRequest, session: &mut SessionParameters) {
        match self {
            Self::New(_) => request.identity.timed = false,
            Self::Again(recording) => {
                let record = &recording.record;
                request.identity = record.identity.clone();
                request.max_tokens = MaxTokens::Given(record.max_tokens as u64);
                request.reported_cached = Some(record.cached);
                session.repeat = record.repeat();
            }
        }
    }

    /// Loads what is parked of the text, if another server has begun it.
    pub(in crate::api) async fn begun(&mut self) -> Result<Option<Begun>, ApiError> {
        let Self::Again(recording) = self else { return Ok(None) };
        let Some(parked) = &recording.record.parked else { return Ok(None) };
        let begun = parked.load(recording.hold.store()).await?;
        recording.known = begun.as_ref().map_or(0, |begun| begun.token_ids.len());
        Ok(begun)
    }

    /// Records the request. Returns once the record is stored.
    pub(super) async fn begin(
        self,
        state: &AppState,
        plan: &mut CommitPlan,
        (max_tokens, cached, identity): (usize, usize, Identity),
    ) -> Result<Recording, ApiError> {
        let asked = match self {
            Self::New(asked) => asked,
            Self::Again(recording) => return Ok(*recording),
        };
        let CommitPlan::Turn { owner, turn, version, .. } = plan else { return Err(ApiError::internal()) };
        turn.may_repeat();
        let Asked { path, body, key, fingerprint } = asked;
        let Restart { from, tier, named } = turn.restart();
        let record = StreamRecord {
            path: path.to_owned(),
            body,
            key,
            fingerprint,
            identity,
            max_tokens,
            cached,
            from: from.to_string(),
            version: version.to_string(),
            in_memory: tier == Tier::Memory,
            named,
            parked: None,
        };
        let (store, id, bytes) = (state.store()?.clone(), Streams::new_id(), to_json(&record).into_bytes());
        let kept = state.options().max_time.unwrap_or(LONGEST) + RETENTION;
        // Created before the record is stored: if the request ends here, dropping it removes the record.
        let recording = Recording::new(state, (store.clone(), *owner, id.clone()), record, None);
        store.put_stream(*owner, &id, bytes, kept).await?;
        Ok(recording)
    }
}

impl StreamRecord {
    /// Returns the turn to carry out again.
    fn repeat(&self) -> Option<Repeat> {
        let tier = if self.in_memory { Tier::Memory } else { Tier::Disk };
        let restart = Restart { from: VersionId::parse(&self.from)?, tier, named: self.named };
        Some(Repeat { restart, version: VersionId::parse(&self.version)? })
    }
}

impl Recording {
    /// Creates the recording of the stream `id`, whose record is in `store`.
    pub(super) fn new(
        state: &AppState,
        (store, owner, id): (Store, Owner, String),
        record: StreamRecord,
        resumed_at: Option<usize>,
    ) -> Self {
        let hold = Hold::new(store, owner, id);
        Self {
            state: state.clone(),
            hold,
            record,
            resumed_at,
            events: 0,
            known: 0,
            text: TextSoFar::default(),
            changed: false,
            settled: false,
        }
    }

    /// Returns the request's headers and body.
    pub(in crate::api) fn request(&self) -> (HeaderMap, Bytes) {
        let key = self.record.key.as_deref().and_then(|key| HeaderValue::from_str(key).ok());
        (key.map(|key| (KEY, key)).into_iter().collect(), Bytes::from(self.record.body.clone()))
    }

    /// Refuses to continue the stream with a model that would generate another text.
    pub(in crate::api) fn check(&self, served: &Served) -> Result<(), ApiError> {
        if self.record.fingerprint == served.fingerprint {
            return Ok(());
        }
        let message = format!(
            "the stream was begun with the system fingerprint {}, and this server, which has {}, would continue it with \
             another text; send the request again",
            self.record.fingerprint, served.fingerprint
        );
        Err(ApiError::request(StatusCode::GONE, Some("id"), Some("gone"), message))
    }

    /// Adds a piece of the text, so that it can be parked.
    pub(super) fn add(&mut self, delta: &Delta) {
        self.text.add(delta);
    }

    /// Counts events, and the tokens in them that were computed although the client already has them.
    pub(super) fn count(&mut self, events: usize, tokens: usize) {
        let known = tokens.min(self.known);
        self.known -= known;
        if self.resumed_at.is_some_and(|next| self.events < next) {
            self.state.metrics().recomputed_for_streams(tokens - known);
        }
        self.events += events;
    }

    /// Whether the text so far can be parked.
    pub(super) fn can_be_parked(&self) -> bool {
        self.text.can_be_parked()
    }

    /// Ends the record with its stream. Keeps it for a while, so that other servers can still send its events; removes
    /// it if the stream is not `complete`. Does neither if another server has the stream or the client has deleted it.
    pub(super) async fn settle(mut self, complete: bool) {
        self.settled = true;
        if !complete {
            withdraw(&self.hold).await;
        } else if let Err(error) = self.hold.keep(RETENTION).await {
            warn!("the record of a stream was not kept: {error}");
        }
        self.remove_parked();
    }

    /// Returns the number of tokens still to come that another server has generated.
    pub(super) fn known(&self) -> usize {
        self.known
    }

    /// Gives up the stream for another server. Parks the text so far if `end`, the state after it, is given.
    pub(super) async fn release(mut self, end: Option<Arc<Snapshot>>) {
        self.settled = true;
        let mut before = None;
        // The text may have become too long since the run was asked to stop; then its tokens are gone.
        if let Some(end) = end.filter(|_| self.text.can_be_parked()) {
            match std::mem::take(&mut self.text).park(self.hold.store(), &end).await {
                Ok(parked) => {
                    before = self.record.parked.replace(parked);
                    self.changed = true;
                    self.state.metrics().parked();
                }
                Err(error) => warn!("a turn was not parked, so another server computes its text again: {error}"),
            }
        }
        self.hold.release(self.changed.then(|| to_json(&self.record).into_bytes())).await;
        if let Some(before) = before {
            before.remove(self.hold.store()).await;
        }
    }

    /// Forgets the parked text, so that the text is computed again.
    pub(super) fn forget_parked(&mut self) {
        self.changed |= self.record.parked.is_some();
        self.remove_parked();
    }

    /// Removes the parked state in the background. If that fails, the sweep removes it later.
    fn remove_parked(&mut self) {
        if let Some(parked) = self.record.parked.take() {
            let store = self.hold.store().clone();
            tokio::spawn(async move { parked.remove(&store).await });
        }
    }

    /// Removes the record, so that no other server can compute the events. Returns false if one may already do so.
    pub(super) async fn withdraw(&mut self) -> bool {
        let withdrawn = self.hold.withdraw().await.unwrap_or_else(|error| {
            warn!("the record of a stream was not removed, so its turn is left to another server: {error}");
            false
        });
        self.settled |= withdrawn;
        if withdrawn {
            self.remove_parked();
        }
        withdrawn
    }
}

async fn withdraw(hold: &Hold) {
    if let Err(error) = hold.withdraw().await {
        warn!("the record of a stream was not removed: {error}");
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let Some(runtime) = Handle::try_current().ok().filter(|_| !self.settled) else { return };
        let (hold, begun_elsewhere) = (Arc::clone(&self.hold), self.resumed_at.is_some());
        runtime.spawn(async move { if begun_elsewhere { hold.release(None).await } else { withdraw(&hold).await } });
    }
}
