//! The error that ends one sequence, and how a panic in one sequence is kept from ending the others.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tidegate_model::ModelError;

use super::constraint::ConstraintError;
use super::event::Failure;

/// Why a sequence cannot continue.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{reason}")]
pub(super) struct SequenceError {
    /// For the client.
    pub(super) failure: Failure,
    /// For the log.
    pub(super) reason: String,
}

impl SequenceError {
    /// An error of the server.
    pub(super) fn internal(reason: impl Display) -> Self {
        Self { failure: Failure::Internal, reason: reason.to_string() }
    }
}

impl From<ModelError> for SequenceError {
    fn from(error: ModelError) -> Self {
        Self::internal(error)
    }
}

impl From<ConstraintError> for SequenceError {
    fn from(error: ConstraintError) -> Self {
        Self { failure: Failure::Grammar, reason: format!("grammar: {error}") }
    }
}

/// Runs `step`, and turns a panic into an internal error.
pub(super) fn catch_panic<T, E: Into<SequenceError>>(step: impl FnOnce() -> Result<T, E>) -> Result<T, SequenceError> {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(outcome) => outcome.map_err(Into::into),
        Err(panic) => Err(SequenceError::internal(panic_message(panic.as_ref()))),
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panic: {}", text.unwrap_or("no message"))
}
