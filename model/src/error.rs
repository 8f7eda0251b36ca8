//! Why a call on a model failed. Loading a checkpoint has errors of its own (`weights::LoadError`).

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use crate::cuda_error::CudaError;

/// Why a model refused a call, or failed in it.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The slot cannot take part in the call; nothing has changed.
    #[error("slot {slot} {reason}")]
    Slot {
        /// The slot.
        slot: usize,
        /// Why not.
        reason: SlotError,
    },
    /// An argument is out of its bounds; nothing has changed.
    #[error("{parameter} must be {bound}, found {found}")]
    Argument {
        /// The argument.
        parameter: Cow<'static, str>,
        /// The values that are accepted.
        bound: String,
        /// The value that was given.
        found: String,
    },
    /// The model is a decoder without an encoder.
    #[error("the model reads no source: it is a decoder alone")]
    NoEncoder,
    /// The device does not sample.
    #[error("the device does not sample tokens")]
    NoSampler,
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    /// The CUDA device failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// An error of another implementation of [`crate::LanguageModel`].
    #[error("{0}")]
    Other(String),
}

impl ModelError {
    /// An argument out of its bounds.
    pub(crate) fn argument(
        parameter: impl Into<Cow<'static, str>>,
        bound: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::Argument { parameter: parameter.into(), bound: bound.into(), found: found.to_string() }
    }

    /// An error of another implementation of [`crate::LanguageModel`].
    pub fn other(reason: impl std::fmt::Display) -> Self {
        Self::Other(reason.to_string())
    }
}

/// Lets functions that return candle's errors pass on ours.
impl From<ModelError> for candle_core::Error {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Tensor(error) => error,
            error => Self::wrap(error),
        }
    }
}

/// Why a slot cannot take part in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// There are only so many slots.
    #[error("is out of range: there are {0} slots")]
    OutOfRange(usize),
    /// One call names it more than once.
    #[error("is named twice")]
    Duplicate,
    /// A failed step or transfer left its state incomplete.
    #[error("has an incomplete state since a step or transfer failed, and must be reset")]
    Incomplete,
    /// A text of an encoder-decoder continues a source, and the slot has none.
    #[error("has no source, which must be read first")]
    NoSource,
    /// Its state is being copied between the device and the host.
    #[error("has a state transfer in progress")]
    InTransfer,
    /// No transfer of its state has been started.
    #[error("has no state transfer in progress")]
    NoTransfer,
}
