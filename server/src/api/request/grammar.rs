//! The grammar that an answer must follow, from its first token to its last. Reasoning comes before the answer.
//!
//! An answer that is cut off by its length or by a stop string is only the beginning of what the grammar allows, and
//! may be unfinished JSON.

use std::sync::Arc;

use axum::http::StatusCode;

use super::tools::Tools;
use crate::api::error::ApiError;
use crate::api::state::{AppState, Served};
use crate::engine::Grammar;
use crate::text::{CompiledGrammar, GrammarError, GrammarSpec, ReasoningStart};

/// A grammar that a request asks for.
#[derive(Clone, Debug)]
pub(in crate::api) struct GrammarRequest {
    spec: GrammarSpec,
    /// The field that asks for it.
    pub(in crate::api) param: &'static str,
    /// The path of the grammar in the request.
    path: String,
}

impl GrammarRequest {
    /// Creates a request for a grammar at `path` in the field `param`.
    pub(in crate::api) fn new(spec: GrammarSpec, param: &'static str, path: impl Into<String>) -> Self {
        Self { spec, param, path: path.into() }
    }

    /// Returns this grammar after the model's reasoning, if reasoning is possible.
    pub(super) fn after_reasoning(self, start: ReasoningStart) -> Self {
        Self { spec: self.spec.after_reasoning(start), ..self }
    }

    /// Whether the answer is nothing but JSON.
    pub(super) fn is_json(&self) -> bool {
        self.spec.is_json()
    }

    /// Looks up the grammar among the compiled ones.
    pub(super) fn find(self, served: &Served) -> Result<GrammarLookup, ApiError> {
        match served.grammars.cached(&self.spec) {
            Ok(Some(grammar)) => Ok(GrammarLookup::Compiled(grammar)),
            Ok(None) => Ok(GrammarLookup::Missing(self)),
            Err(error) => Err(self.refused(&error)),
        }
    }

    fn refused(&self, error: &GrammarError) -> ApiError {
        let Self { param, path, .. } = self;
        let message = format!("{path} {error}");
        let code = match error {
            GrammarError::Busy => "grammars_busy",
            GrammarError::Unavailable => "grammars_unavailable",
            _ => return ApiError::invalid(Some(param), message),
        };
        ApiError::server(StatusCode::SERVICE_UNAVAILABLE, code, message)
    }
}

/// What a request requires of the form of its answers.
#[derive(Debug, Default)]
pub(in crate::api) struct GrammarParameters {
    pub(in crate::api) grammar: Option<GrammarRequest>,
    /// Whether objects may have properties that their schemas do not name, if the schemas do not say so themselves.
    pub(in crate::api) additional_properties: bool,
}

impl GrammarParameters {
    /// Returns the grammar of a request's answers: that of its tools, or the one that it asks for. If it asks for JSON
    /// and has tools, an answer is calls or JSON, unless it has to be a call.
    pub(super) fn of(self, tools: Option<&mut Tools>) -> Result<Option<GrammarRequest>, ApiError> {
        let request = match (self.grammar, tools) {
            (grammar, None) => grammar,
            (None, Some(tools)) => Some(GrammarRequest::new(tools.grammar(), "tools", "tools")),
            (Some(GrammarRequest { spec, param, path }), Some(tools)) => {
                let Some(schema) = spec.beside_calls() else {
                    let message = format!("{path} must be absent or JSON if tools may be called");
                    return Err(ApiError::invalid(Some(param), message));
                };
                tools.answer_json(schema);
                Some(GrammarRequest::new(tools.grammar(), param, format!("{path} with tools")))
            }
        };
        Ok(request.map(|request| {
            if self.additional_properties {
                return request;
            }
            GrammarRequest { spec: request.spec.without_additional_properties(), ..request }
        }))
    }
}

/// The result of looking up a request's grammar before it is compiled.
pub(in crate::api) enum GrammarLookup {
    /// The request asks for no grammar.
    Absent,
    /// The grammar has been compiled before.
    Compiled(Arc<CompiledGrammar>),
    /// The grammar is not in the cache.
    Missing(GrammarRequest),
}

impl GrammarLookup {
    /// Returns the grammar, and compiles it if necessary. Each owner compiles one grammar at a time.
    pub(in crate::api) async fn compile(
        self,
        state: &AppState,
        served: &Arc<Served>,
    ) -> Result<Option<Arc<dyn Grammar>>, ApiError> {
        let request = match self {
            Self::Absent => return Ok(None),
            Self::Compiled(grammar) => return Ok(Some(grammar)),
            Self::Missing(request) => request,
        };
        let permit = state.compiler(&request.path).await?;
        let served = Arc::clone(served);
        let compiling = tokio::task::spawn_blocking(move || {
            // Held until the compiler ends, even if the client disconnects before.
            let _permit = permit;
            served.grammars.compile(&request.spec).map_err(|error| request.refused(&error))
        });
        let compiled = compiling.await.map_err(|_| ApiError::internal())??;
        Ok(Some(compiled))
    }
}
