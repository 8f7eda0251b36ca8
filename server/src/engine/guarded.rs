//! Steps that may panic: what one row does must not end the others.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tidegate_model::ModelError;

use super::constraint::ConstraintError;
use super::event::Failure;

/// Why a text cannot go on.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{reason}")]
pub(super) struct Fault {
    /// What its client is told.
    pub(super) failure: Failure,
    /// What the log is told.
    pub(super) reason: String,
}

impl Fault {
    /// A fault of the server's.
    pub(super) fn internal(reason: impl Display) -> Self {
        Self { failure: Failure::Internal, reason: reason.to_string() }
    }
}

impl From<ModelError> for Fault {
    fn from(error: ModelError) -> Self {
        Self::internal(error)
    }
}

impl From<ConstraintError> for Fault {
    fn from(error: ConstraintError) -> Self {
        Self { failure: Failure::Grammar, reason: format!("grammar: {error}") }
    }
}

/// Runs a step; a panic is an error of the server's, whatever the step was about.
pub(super) fn guarded<T, E: Into<Fault>>(step: impl FnOnce() -> Result<T, E>) -> Result<T, Fault> {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(outcome) => outcome.map_err(Into::into),
        Err(panic) => Err(Fault::internal(words(panic.as_ref()))),
    }
}

/// What a panic said.
fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panic: {}", text.unwrap_or("no message"))
}
