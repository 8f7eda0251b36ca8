//! Where a request for text begins: at nothing, at a session's head, or at a state that the client has kept.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rand::Rng;

use crate::api::auth::context;
use crate::api::error::ApiError;
use crate::api::formats::openai::reading;
use crate::api::formats::openai::wire::GenerationRequest;
use crate::api::run::{Keeping, no_key};
use crate::api::state::{AppState, Served};
use crate::engine::{Keep, Start};
use crate::session::{Owner, SessionId, Snapshot, Turn, VersionId};

/// Bytes of a body beside the state in it.
const ROOM: usize = 64 << 10;

/// Longest time that a request may wait for its session.
const MAX_WAIT: Duration = Duration::from_mins(10);

/// Where a request begins.
pub(in crate::api) enum Origin {
    /// At nothing; beginnings of the prompt may be known.
    Plain { owner: Owner },
    /// At a session's head, which nobody else moves meanwhile.
    Session { owner: Owner, turn: Box<Turn> },
    /// At a state that came with the request, or that is to go with the answer.
    Client { owner: Owner, snapshot: Arc<Snapshot>, wanted: bool },
    /// At a stored response, or at nothing, with a new response to be stored or not.
    Response { snapshot: Arc<Snapshot>, keeping: Box<Keeping> },
}

impl Origin {
    /// What the request names.
    pub(in crate::api) async fn find(
        state: &AppState,
        served: &Arc<Served>,
        owner: Owner,
        headers: &HeaderMap,
        wire: &GenerationRequest,
    ) -> Result<Self, ApiError> {
        let sealed = wire.state.is_some() || wire.return_state.unwrap_or(false);
        let Some(id) = &wire.session else {
            if wire.label.is_some() {
                return Err(ApiError::invalid(Some("label"), "label must be absent where there is no session"));
            }
            if !sealed {
                return Ok(Self::Plain { owner });
            }
            let snapshot = open_state(state, served, owner, wire.state.clone()).await?;
            return Ok(Self::Client { owner, snapshot, wanted: wire.return_state.unwrap_or(false) });
        };
        if sealed {
            let message = "state and return_state must be absent with a session, which the server keeps";
            return Err(ApiError::invalid(Some("state"), message));
        }
        context::check_may_store("session")?;
        let id = session_id(id, "session")?;
        let wait = wait(headers)?;
        let _place = if wait.is_zero() { None } else { Some(state.waiter()?) };
        let turn = state.store()?.begin(owner, &id, if_match(headers)?, wait).await?;
        Ok(Self::Session { owner, turn: Box::new(turn) })
    }

    /// Whether there is no conversation before the request.
    pub(in crate::api) fn is_plain(&self) -> bool {
        matches!(self, Self::Plain { .. })
    }

    /// The conversation so far.
    pub(in crate::api) fn snapshot(&self) -> Option<&Arc<Snapshot>> {
        match self {
            Self::Plain { .. } => None,
            Self::Session { turn, .. } => Some(turn.head()),
            Self::Client { snapshot, .. } | Self::Response { snapshot, .. } => Some(snapshot),
        }
    }

    /// What a request with this prompt goes on from, and which snapshots it makes.
    pub(in crate::api) fn start(&self, served: &Served, prompt: &[u32]) -> (Start, Keep) {
        match self {
            Self::Plain { owner } => {
                let on = served.prefixes.is_on();
                let start = served.prefixes.longest(*owner, prompt).map_or(Start::Empty, Start::Prefix);
                (start, Keep { prompt: on, end: on })
            }
            Self::Session { turn, .. } => (Start::Session(Arc::clone(turn.head())), Keep { prompt: false, end: true }),
            Self::Client { snapshot, .. } | Self::Response { snapshot, .. } => {
                (Start::Session(Arc::clone(snapshot)), Keep { prompt: false, end: true })
            }
        }
    }

    /// What becomes of the snapshots.
    pub(in crate::api) fn keeping(self, label: Option<String>) -> Keeping {
        match self {
            Self::Plain { owner } => Keeping::Prefixes(owner),
            Self::Session { owner, turn } => Keeping::Turn { owner, turn, version: VersionId::new(), label },
            Self::Client { owner, wanted, .. } => Keeping::Sealed { owner, wanted },
            Self::Response { keeping, .. } => *keeping,
        }
    }
}

/// The state that a client has kept, or the empty one.
async fn open_state(
    state: &AppState,
    served: &Arc<Served>,
    owner: Owner,
    sealed: Option<String>,
) -> Result<Arc<Snapshot>, ApiError> {
    let param = if sealed.is_some() { "state" } else { "return_state" };
    if served.codec.keys.is_none() {
        return Err(no_key(param));
    }
    // What is given out must be taken back.
    let (most, bound) = (served.codec.max_sealed_bytes() / 3 * 4 + ROOM, state.options().max_body_bytes);
    if most > bound {
        let message = format!("{param} needs bodies of {most} bytes for this model; --max-body-bytes allows {bound}");
        return Err(ApiError::request(StatusCode::NOT_IMPLEMENTED, Some(param), Some("body_limit"), message));
    }
    let Some(sealed) = sealed else {
        return Ok(Arc::new(Snapshot::empty(rand::rng().random())));
    };
    let codec = Arc::clone(&served.codec);
    let opening = reading(state, move || {
        let invalid = |error: String| ApiError::invalid(Some("state"), format!("state: {error}"));
        let bytes = BASE64.decode(sealed).map_err(|error| invalid(format!("must be base64: {error}")))?;
        codec.open(&bytes, &owner.0).map(Arc::new).map_err(|error| invalid(error.to_string()))
    });
    opening.await
}

/// A session's id that came from outside; one that is none answers as one that is not there.
pub(in crate::api) fn session_id(id: &str, param: &str) -> Result<SessionId, ApiError> {
    SessionId::parse(id).ok_or_else(|| ApiError::missing(param, "session"))
}

/// A version's id that came from outside.
pub(in crate::api) fn version_id(id: &str, param: &str) -> Result<VersionId, ApiError> {
    VersionId::parse(id).ok_or_else(|| ApiError::missing(param, "version"))
}

/// The version that `If-Match` names, with or without quotes; `*` is any.
pub(in crate::api) fn if_match(headers: &HeaderMap) -> Result<Option<VersionId>, ApiError> {
    let Some(value) = headers.get("if-match") else { return Ok(None) };
    let value = value.to_str().unwrap_or_default().trim().trim_matches('"');
    if value == "*" {
        return Ok(None);
    }
    let message = || ApiError::invalid(Some("if-match"), format!("if-match must be a version or *, found {value:?}"));
    VersionId::parse(value).map(Some).ok_or_else(message)
}

/// How long to wait for a session that is in use: `Prefer: wait=SECONDS` (RFC 7240); not at all where nothing is said.
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
