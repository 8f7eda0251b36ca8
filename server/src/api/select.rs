//! Selects the model for a request on a server with several: the model that the request names, else the model of the
//! session or stored response that it continues, else the first model that its key may use.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequestParts, Query, RawPathParams};
use axum::http::request::Parts;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::auth::{context, owner};
use super::error::ApiError;
use super::models::{Entry, Models};
use super::request::blocking::run_blocking;
use super::served::unknown_model;
use super::state::AppState;
use crate::session::{ResponseId, SessionId};

/// An extractor for the state bound to the model that a request's path or query selects.
pub(in crate::api) struct Model(pub(in crate::api) AppState);

impl FromRequestParts<AppState> for Model {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let Some(models) = state.models() else { return check_only(state).map(|()| Self(state.clone())) };
        models.check_open()?;
        let params = RawPathParams::from_request_parts(parts, state).await.ok();
        let id = params.as_ref().and_then(|params| params.iter().find(|(name, _)| *name == "id"));
        let found = match id {
            Some((_, id)) => of_conversation(models, id).await,
            None => None,
        };
        let query = Query::<NamedQuery>::try_from_uri(&parts.uri).ok();
        let named = query.and_then(|Query(query)| query.model);
        bind(state, models, named.as_deref(), found).await.map(Self)
    }
}

/// The `model` parameter of a query.
#[derive(Deserialize)]
struct NamedQuery {
    model: Option<String>,
}

/// The fields of a body that select the model. Errors in a body are reported later, when it is parsed.
#[derive(Default, Deserialize)]
struct NamedBody {
    model: Option<Field>,
    session: Option<Field>,
    previous_response_id: Option<Field>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Field {
    Text(String),
    Other(IgnoredAny),
}

fn text(field: Option<&Field>) -> Option<&str> {
    match field? {
        Field::Text(text) => Some(text),
        Field::Other(_) => None,
    }
}

impl AppState {
    /// Returns the state bound to the model that a JSON body selects. Its engine may still have to be started, by
    /// [`Self::awake`].
    pub(in crate::api) async fn for_body(&self, body: &Bytes) -> Result<Self, ApiError> {
        let Some(models) = self.models() else { return check_only(self).map(|()| self.clone()) };
        models.check_open()?;
        let (body, bytes) = (body.clone(), body.len());
        let read = move || Ok(serde_json::from_slice::<NamedBody>(&body).unwrap_or_default());
        let NamedBody { model, session, previous_response_id } = run_blocking(self, bytes, read).await?;
        let found = match text(session.as_ref()).or_else(|| text(previous_response_id.as_ref())) {
            Some(id) => of_conversation(models, id).await,
            None => None,
        };
        bind(self, models, text(model.as_ref()), found).await
    }

    /// Returns the state once the model's engine takes requests, and starts the engine if necessary.
    pub(in crate::api) async fn awake(self) -> Result<Self, ApiError> {
        let (Some(models), Some(instance)) = (self.models(), self.instance()) else { return Ok(self) };
        if !instance.is_asleep() {
            return Ok(self);
        }
        let name = &instance.served.name;
        let entry = models.named(name).ok_or_else(|| unknown_model(name, &[], Some("model")))?;
        // Waiting requests hold their bodies in memory, so their number is limited.
        let _permit = self.waiters().enter_for_model(owner::current())?;
        models.awake(&entry).await.map(|instance| self.bound(instance))
    }

    /// Returns the state bound to the default model, whether or not its engine runs.
    pub(in crate::api) fn for_default(&self) -> Self {
        let first = self.models().and_then(|models| models.entries().into_iter().find_map(|entry| entry.instance()));
        first.map_or_else(|| self.clone(), |instance| self.bound(instance))
    }
}

/// Refuses a request whose key may not use the only model.
fn check_only(state: &AppState) -> Result<(), ApiError> {
    state.instance().map_or(Ok(()), |only| context::check_model(&only.served.name))
}

/// Returns the model that has the caller's session or stored response `id`. Stores are open whether or not their models
/// are loaded.
async fn of_conversation(models: &Models, id: &str) -> Option<Arc<Entry>> {
    let owner = owner::current();
    let (session, response) = (SessionId::parse(id), ResponseId::parse(id));
    for entry in models.entries() {
        let Some(instance) = entry.instance() else { continue };
        let Some(store) = &instance.store else { continue };
        let is_here = match (&session, &response) {
            (Some(id), _) => store.get(owner, id).await.is_ok(),
            (None, Some(id)) => store.response(owner, id).await.is_ok(),
            (None, None) => return None,
        };
        if is_here {
            return Some(entry);
        }
    }
    None
}

/// Returns the state bound to the model that is `named`, else to the model of the conversation that was `found`, else
/// to the default model.
async fn bind(
    state: &AppState,
    models: &Models,
    named: Option<&str>,
    found: Option<Arc<Entry>>,
) -> Result<AppState, ApiError> {
    let entries = models.entries();
    let visible = || entries.iter().filter(|entry| context::may_use(entry.name()));
    let named = match named {
        Some(name) => match models.named(name) {
            None if !models.any_name() => {
                let names: Vec<&str> = visible().map(|entry| entry.name()).collect();
                return Err(unknown_model(name, &names, Some("model")));
            }
            entry => entry,
        },
        None => None,
    };
    let entry = match (named, found) {
        (Some(named), Some(found)) if !have_one_store(&named, &found) => {
            let message = format!(
                "the conversation belongs to the model `{}`, and the request names `{}`",
                found.name(),
                named.name()
            );
            return Err(ApiError::invalid(Some("model"), message));
        }
        (Some(entry), _) | (None, Some(entry)) => entry,
        (None, None) => Arc::clone(visible().next().or(entries.first()).ok_or_else(ApiError::internal)?),
    };
    context::check_model(entry.name())?;
    if let Some(instance) = models.used(&entry) {
        return Ok(state.bound(instance));
    }
    // The model could not be opened when the server started.
    let _permit = state.waiters().enter_for_model(owner::current())?;
    models.awake(&entry).await.map(|instance| state.bound(instance))
}

/// Whether two models have the same fingerprint, and so the same sessions.
fn have_one_store(one: &Arc<Entry>, other: &Arc<Entry>) -> bool {
    let fingerprint = |entry: &Arc<Entry>| entry.instance().map(|instance| instance.served.codec.fingerprint.clone());
    Arc::ptr_eq(one, other) || (fingerprint(one).is_some() && fingerprint(one) == fingerprint(other))
}
