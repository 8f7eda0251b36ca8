//! What a request continues: nothing, a session, a state that the client keeps, or a stored response; and what is
//! committed when it ends.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rand::Rng;
use serde::Deserialize;
use utoipa::ToSchema;

use super::blocking::run_blocking;
use super::messages::PromptMessages;
use super::recorder::{Recorders, TextRecorder};
use crate::api::auth::context::{self, Demand};
use crate::api::error::ApiError;
use crate::api::state::{AppState, Served};
use crate::session::{Owner, ResponseId, Restart, SessionId, Snapshot, StoreError, Turn, VersionId};

/// Bytes that a body may have besides the state in it.
const BODY_MARGIN: usize = 64 << 10;

/// Longest time that a request may wait for its session.
const MAX_WAIT: Duration = Duration::from_mins(10);

/// How long a turn that is carried out again waits for its session: the server that had the session may have died only
/// now.
const REPEAT_WAIT: Duration = Duration::from_secs(15);

/// What happens to a turn whose client disconnects before its end. `rollback`: it leaves no trace. `commit`: it ends
/// there, with the text so far. `continue`: it runs to its end, and its stream can be resumed. Default: `rollback`, the
/// only choice without `session`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::api) enum OnDisconnect {
    /// The session stays as it was.
    #[default]
    Rollback,
    /// The turn ends with the text so far.
    Commit,
    /// The turn runs to its end, and the client can resume its stream.
    Continue,
}

/// Which texts of a turn are kept. `best`: the text whose tokens have the greatest mean log probability (the first of
/// equals) becomes the session's new version. `all`: the others also become sessions, forks of this one. `none`:
/// nothing is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::api) enum Keep {
    /// The best text becomes the session's new version.
    Best,
    /// The best text becomes the session's new version, and the others become forks.
    All,
    /// The session stays as it was.
    #[serde(rename = "none")]
    Nothing,
}

/// What a request says about the conversation that it continues.
#[derive(Debug, Default)]
pub(in crate::api) struct SessionParameters {
    pub(in crate::api) session: Option<String>,
    pub(in crate::api) label: Option<String>,
    pub(in crate::api) on_disconnect: Option<OnDisconnect>,
    /// A sealed state, in base64.
    pub(in crate::api) state: Option<String>,
    pub(in crate::api) return_state: bool,
    pub(in crate::api) keep: Option<Keep>,
    /// How many texts the turn generates.
    pub(in crate::api) texts: usize,
    /// The turn that this one carries out again, if another server has begun it.
    pub(in crate::api) repeat: Option<Repeat>,
}

/// A turn that another server has begun.
#[derive(Debug)]
pub(in crate::api) struct Repeat {
    pub(in crate::api) restart: Restart,
    /// The version that the turn creates.
    pub(in crate::api) version: VersionId,
}

impl SessionParameters {
    /// Returns what happens on a disconnect. Only the turn of a session can outlive its client.
    pub(in crate::api) fn on_disconnect(&self) -> Result<OnDisconnect, ApiError> {
        match self.on_disconnect {
            Some(choice) if choice != OnDisconnect::Rollback && self.session.is_none() => {
                let message = "on_disconnect must be rollback without a session";
                Err(ApiError::invalid(Some("on_disconnect"), message))
            }
            choice => Ok(choice.unwrap_or_default()),
        }
    }
}

/// What is committed when a request ends.
pub(in crate::api) enum CommitPlan {
    /// Prefixes that later requests of the same owner may share.
    Prefixes(Owner),
    /// The next version of a session.
    Turn { owner: Owner, turn: Box<Turn>, version: VersionId, label: Option<String>, keep: Option<Keep> },
    /// Nothing: the client keeps the state, if it asked for the new one.
    ClientState { owner: Owner, return_state: bool },
    /// A stored response.
    Response { owner: Owner, id: ResponseId, parent: Option<VersionId> },
    /// Nothing, except the result for a retry of the same request.
    Nothing(Owner),
}

impl CommitPlan {
    /// Returns the turn, if the request is one of a session.
    pub(in crate::api) fn turn(&self) -> Option<&Turn> {
        if let Self::Turn { turn, .. } = self { Some(turn) } else { None }
    }

    /// Creates the session of a turn, if it does not exist yet. If the texts of conversations are stored, reserves
    /// space for what the request adds, and returns a recorder for each text.
    pub(in crate::api) async fn prepare(
        &mut self,
        state: &AppState,
        served: &Served,
        demand: &Demand,
        recorder: Option<TextRecorder>,
    ) -> Result<Recorders, ApiError> {
        let Some(recorder) = recorder else { return Ok(Recorders::default()) };
        let keeps_text = state.store()?.keeps_text();
        if let Self::Turn { turn, .. } = self {
            if keeps_text {
                let tokens = (demand.prompt_tokens + demand.max_tokens) as u64;
                turn.reserve_text(tokens, served.limits.vocab_size as u64, recorder.most_message_bytes()).await?;
            }
            turn.create_session().await?;
        }
        Ok(if keeps_text { Recorders::new(&recorder, demand.texts) } else { Recorders::default() })
    }

    /// Returns the version that will be the session's head.
    pub(in crate::api) fn version(&self) -> Option<&VersionId> {
        match self {
            Self::Turn { turn, keep: Some(Keep::Nothing), .. } => Some(&turn.session().head.id),
            Self::Turn { version, .. } => Some(version),
            _ => None,
        }
    }

    /// Returns which of several texts are kept.
    pub(in crate::api) fn keep(&self) -> Option<Keep> {
        if let Self::Turn { keep, .. } = self { *keep } else { None }
    }

    /// Whether the state at the end of each of the `texts` is needed.
    pub(super) fn needs_ends(&self, texts: usize) -> bool {
        match self {
            Self::Turn { keep: Some(keep), .. } => *keep != Keep::Nothing,
            Self::ClientState { return_state: false, .. } => false,
            // It is not known which of several texts will be continued, and keeping all states would evict others.
            _ => texts == 1,
        }
    }

    /// Returns the owner of the request.
    pub(in crate::api) fn owner(&self) -> Owner {
        match self {
            Self::Prefixes(owner)
            | Self::Turn { owner, .. }
            | Self::ClientState { owner, .. }
            | Self::Response { owner, .. }
            | Self::Nothing(owner) => *owner,
        }
    }
}

/// What a request continues, and what is committed at its end.
pub(in crate::api) struct Continuation {
    /// The conversation so far; `None` if the prompt is the whole text.
    snapshot: Option<Arc<Snapshot>>,
    plan: CommitPlan,
}

impl Continuation {
    /// Continues nothing: a new text, whose prompt may begin with a known prefix.
    pub(in crate::api) fn none(owner: Owner) -> Self {
        Self { snapshot: None, plan: CommitPlan::Prefixes(owner) }
    }

    /// Continues a conversation whose last state is `snapshot`.
    pub(in crate::api) fn of(snapshot: Arc<Snapshot>, plan: CommitPlan) -> Self {
        Self { snapshot: Some(snapshot), plan }
    }

    /// Continues a slot: the prompt may begin with the text of the session's state, and the whole text becomes the
    /// session's next version.
    pub(in crate::api) fn slot(owner: Owner, turn: Turn) -> Self {
        let plan = CommitPlan::Turn { owner, turn: Box::new(turn), version: VersionId::new(), label: None, keep: None };
        Self { snapshot: None, plan }
    }

    /// Finds the conversation that `parameters` name. Locks a session for the request, after a wait if the `Prefer`
    /// header asks for one.
    pub(in crate::api) async fn find(
        parameters: SessionParameters,
        state: &AppState,
        served: &Arc<Served>,
        owner: Owner,
        headers: &HeaderMap,
    ) -> Result<Self, ApiError> {
        let SessionParameters { session, label, state: sealed, return_state, keep, texts, repeat, .. } = parameters;
        let seals = sealed.is_some() || return_state;
        let Some(id) = session else {
            if label.is_some() {
                return Err(ApiError::invalid(Some("label"), "label must be absent without a session"));
            }
            if keep.is_some() {
                return Err(ApiError::invalid(Some("keep"), "keep must be absent without a session"));
            }
            if !seals {
                return Ok(Self::none(owner));
            }
            let snapshot = open_state(state, served, owner, sealed).await?;
            return Ok(Self::of(snapshot, CommitPlan::ClientState { owner, return_state }));
        };
        if seals {
            let message = "state and return_state must be absent with a session, which the server keeps";
            return Err(ApiError::invalid(Some("state"), message));
        }
        if keep == Some(Keep::Nothing) && label.is_some() {
            return Err(ApiError::invalid(
                Some("label"),
                "label must be absent with keep: none, which makes no version",
            ));
        }
        context::check_may_store("session")?;
        let id = session_id(&id, "session")?;
        if let Some(Repeat { restart, version }) = repeat {
            let turn = Box::new(state.store()?.begin_again(owner, &id, &restart, REPEAT_WAIT).await?);
            return Ok(Self::of(Arc::clone(turn.head()), CommitPlan::Turn { owner, turn, version, label, keep }));
        }
        let wait = wait(headers)?;
        let _permit = if wait.is_zero() { None } else { Some(state.waiters().enter(owner)?) };
        let mut turn = Box::new(begin(state, owner, &id, headers, wait).await?);
        if keep == Some(Keep::All) {
            turn.reserve_forks(texts.saturating_sub(1)).await.map_err(|error| no_forks(error, texts))?;
        }
        let head = Arc::clone(turn.head());
        Ok(Self::of(head, CommitPlan::Turn { owner, turn, version: VersionId::new(), label, keep }))
    }

    /// Returns the conversation so far.
    pub(in crate::api) fn snapshot(&self) -> Option<&Arc<Snapshot>> {
        self.snapshot.as_ref()
    }

    /// Returns which of several texts are kept.
    pub(super) fn keep(&self) -> Option<Keep> {
        self.plan.keep()
    }

    /// Returns the recorder of the text that a request with this prompt adds, if that text is stored. `messages` are
    /// those of the prompt, if it consists of messages.
    pub(super) fn recorder(
        &self,
        prompt: &[u32],
        messages: Option<PromptMessages>,
        served: &Served,
    ) -> Option<TextRecorder> {
        match (&self.snapshot, &self.plan) {
            (Some(base), CommitPlan::Turn { .. } | CommitPlan::Response { .. }) => {
                Some(TextRecorder::new(base, prompt, messages, served))
            }
            (None, CommitPlan::Turn { turn, .. }) => Some(TextRecorder::whole(turn.head(), prompt, served)),
            _ => None,
        }
    }

    /// Returns what is committed at the end.
    pub(super) fn plan(&self) -> &CommitPlan {
        &self.plan
    }

    /// Takes what is committed at the end, for a run.
    pub(in crate::api) fn into_plan(self) -> CommitPlan {
        self.plan
    }
}

/// Converts the error of a turn of `texts` texts that cannot leave forks.
fn no_forks(error: StoreError, texts: usize) -> ApiError {
    match error {
        StoreError::TooManyForks { versions, bound, .. } => {
            let most = bound / versions + 1;
            let message = format!(
                "n must be at most {most} with keep: all in a session of {versions} versions, found {texts}: each of the \
                 others becomes a fork"
            );
            ApiError::invalid(Some("n"), message)
        }
        error => error.into(),
    }
}

/// Opens the sealed state that a client has kept; without one, returns an empty state.
async fn open_state(
    state: &AppState,
    served: &Arc<Served>,
    owner: Owner,
    sealed: Option<String>,
) -> Result<Arc<Snapshot>, ApiError> {
    let param = if sealed.is_some() { "state" } else { "return_state" };
    if served.codec.keys.is_none() {
        let message = format!("{param} needs a secret on the server (--secret-file); it has none");
        return Err(ApiError::request(StatusCode::NOT_IMPLEMENTED, Some(param), Some("no_secret"), message));
    }
    // A client must be able to send back the state that it is given.
    let (most, bound) = (served.codec.max_sealed_bytes() / 3 * 4 + BODY_MARGIN, state.options().max_body_bytes);
    if most > bound {
        let message = format!("{param} needs bodies of {most} bytes for this model; --max-body-bytes allows {bound}");
        return Err(ApiError::request(StatusCode::NOT_IMPLEMENTED, Some(param), Some("body_limit"), message));
    }
    let Some(sealed) = sealed else {
        return Ok(Arc::new(Snapshot::empty(rand::rng().random())));
    };
    let codec = Arc::clone(&served.codec);
    let opening = run_blocking(state, sealed.len(), move || {
        let invalid = |error: String| ApiError::invalid(Some("state"), format!("state: {error}"));
        let bytes = BASE64.decode(sealed).map_err(|error| invalid(format!("must be base64: {error}")))?;
        codec.open(&bytes, &owner.0).map(Arc::new).map_err(|error| invalid(error.to_string()))
    });
    opening.await
}

/// Parses a session's id from a client; a malformed one is reported as missing.
pub(in crate::api) fn session_id(id: &str, param: &str) -> Result<SessionId, ApiError> {
    SessionId::parse(id).ok_or_else(|| ApiError::missing(param, "session"))
}

/// Parses a version's id from a client; a malformed one is reported as missing.
pub(in crate::api) fn version_id(id: &str, param: &str) -> Result<VersionId, ApiError> {
    VersionId::parse(id).ok_or_else(|| ApiError::missing(param, "version"))
}

/// Begins a turn. If its session has moved on from the version that `If-Match` names, the request may be a retry of the
/// turn that has moved it, if that ran on another server after this one looked for its receipt.
pub(in crate::api) async fn begin(
    state: &AppState,
    owner: Owner,
    id: &SessionId,
    headers: &HeaderMap,
    wait: Duration,
) -> Result<Turn, ApiError> {
    let (store, expected) = (state.store()?, if_match(headers)?);
    match store.begin(owner, id, expected, wait).await {
        Err(error @ StoreError::Stale { .. }) => {
            let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
            Err(store.unless_answered(owner, key, error).await.into())
        }
        begun => Ok(begun?),
    }
}

/// Returns the version that `If-Match` names, with or without quotes; `None` without the header and for `*`.
pub(in crate::api) fn if_match(headers: &HeaderMap) -> Result<Option<VersionId>, ApiError> {
    let Some(value) = headers.get("if-match") else { return Ok(None) };
    let value = value.to_str().unwrap_or_default().trim().trim_matches('"');
    if value == "*" {
        return Ok(None);
    }
    let message = || ApiError::invalid(Some("if-match"), format!("if-match must be a version or *, found {value:?}"));
    VersionId::parse(value).map(Some).ok_or_else(message)
}

/// Returns how long to wait for a session in use: `Prefer: wait=SECONDS` (RFC 7240); by default not at all.
pub(in crate::api) fn wait(headers: &HeaderMap) -> Result<Duration, ApiError> {
    let values = headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
    let mut parts = values.flat_map(|value| value.split([',', ';']));
    let Some(seconds) = parts.find_map(|part| part.trim().strip_prefix("wait=")) else {
        return Ok(Duration::ZERO);
    };
    let seconds = seconds.trim_matches('"').parse().ok().map(Duration::from_secs).filter(|wait| *wait <= MAX_WAIT);
    let message = format!("prefer: wait must be a whole number of seconds up to {}", MAX_WAIT.as_secs());
    seconds.ok_or_else(|| ApiError::invalid(Some("prefer"), message))
}
