//! The grammar that an answer must follow, from its first token to its last.
//!
//! An answer that is cut off by its length or by a stop string is a beginning of what the grammar allows, and may be
//! unfinished JSON.

use std::sync::Arc;

use axum::http::StatusCode;

use super::tools::Tools;
use crate::api::error::ApiError;
use crate::api::state::Served;
use crate::engine::Grammar;
use crate::text::{GrammarError, GrammarSpec};

/// A grammar that a request asks for.
#[derive(Clone, Debug)]
pub(in crate::api) struct GrammarRequest {
    spec: GrammarSpec,
    /// The field that asks for it.
    pub(in crate::api) param: &'static str,
    /// Its place in that field.
    path: String,
}

impl GrammarRequest {
    /// A grammar at `path` in the field `param`.
    pub(in crate::api) fn new(spec: GrammarSpec, param: &'static str, path: impl Into<String>) -> Self {
        Self { spec, param, path: path.into() }
    }

    /// The grammar of a request's answers: that of its tools, or the one it asks for, but not both.
    pub(super) fn compile(
        asked: Option<&Self>,
        tools: Option<&Tools>,
        served: &Served,
    ) -> Result<Option<Arc<dyn Grammar>>, ApiError> {
        let calls = tools.map(|tools| Self::new(tools.grammar(), "tools", "tools"));
        if let (Some(Self { param, .. }), Some(_)) = (asked, &calls) {
            let message = format!("{param} must be absent if tools may be called: an answer follows one grammar");
            return Err(ApiError::invalid(Some(param), message));
        }
        let Some(Self { spec, param, path }) = calls.as_ref().or(asked) else { return Ok(None) };
        match served.grammars.compile(spec) {
            Ok(grammar) => Ok(Some(grammar)),
            Err(error @ GrammarError::Busy) => {
                let message = format!("{path} {error}");
                Err(ApiError::server(StatusCode::SERVICE_UNAVAILABLE, "grammars_busy", message))
            }
            Err(error) => Err(ApiError::invalid(Some(param), format!("{path} {error}"))),
        }
    }
}
