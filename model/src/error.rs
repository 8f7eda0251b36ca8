//! Why a call to a model failed. Checkpoint loading has its own errors (`weights::LoadError`).

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use crate::cuda_error::CudaError;
use crate::layout::StateLayout;

/// Why a model rejected a call, or failed during it.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A slot cannot take part in the call; nothing has changed.
    #[error("slot {slot} {reason}")]
    Slot {
        /// The slot.
        slot: usize,
        /// Why it cannot.
        reason: SlotError,
    },
    /// An argument is out of bounds; nothing has changed.
    #[error("{parameter} must be {bound}, found {found}")]
    Argument {
        /// The argument.
        parameter: Cow<'static, str>,
        /// The accepted values.
        bound: String,
        /// The value that was given.
        found: String,
    },
    /// The layer is out of range.
    #[error("layer {layer} is out of range: the decoder has {layers}")]
    LayerOutOfRange {
        /// The layer in the call.
        layer: usize,
        /// Layers of the decoder.
        layers: usize,
    },
    /// The pool was made by a decoder of another shape; nothing has changed.
    #[error("the pool must be of this decoder: its states are {found:?}, the decoder's {expected:?}")]
    ForeignPool {
        /// The decoder's layout.
        expected: Box<StateLayout>,
        /// The pool's layout.
        found: Box<StateLayout>,
    },
    /// The pool was made by a decoder of another family, whose states have the same size.
    #[error("the pool must be of this decoder: its states are those of another family")]
    ForeignFamily,
    /// A token id is outside the vocabulary; nothing has changed.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The id in the call.
        id: u32,
        /// Tokens in the vocabulary.
        vocab_size: usize,
    },
    /// Rows do not all have the same number of tokens, at least one; nothing has changed.
    #[error(
        "each row must have a slot and as many tokens as the others, at least one: found {ids} ids and {rows} slots"
    )]
    Rows {
        /// Token ids in the call.
        ids: usize,
        /// Slots in the call.
        rows: usize,
    },
    /// Slices or tensors with sizes that do not fit together.
    #[error("{op}: {what} do not fit: expected {expected}, found {found}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The inputs.
        what: &'static str,
        /// The sizes that fit.
        expected: String,
        /// The sizes in the call.
        found: String,
    },
    /// The model is decoder-only and cannot read a source.
    #[error("the model reads no source: it is a decoder alone")]
    NoEncoder,
    /// The device cannot sample.
    #[error("the device does not sample tokens")]
    NoSampler,
    /// The model cannot verify draft tokens.
    #[error("the model reads no drafts: it takes one token of a row in each step")]
    NoSpeculation,
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    /// The CUDA device failed.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// An error from another implementation of [`crate::LanguageModel`].
    #[error("{0}")]
    Other(String),
}

/// The result of a call to a decoder, a pool or a mixer.
pub(crate) type Result<T> = std::result::Result<T, ModelError>;

impl ModelError {
    /// Makes a [`Self::Argument`] error.
    pub(crate) fn argument(
        parameter: impl Into<Cow<'static, str>>,
        bound: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::Argument { parameter: parameter.into(), bound: bound.into(), found: found.to_string() }
    }

    /// Makes a [`Self::Shape`] error.
    pub(crate) fn shape(
        op: &'static str,
        what: &'static str,
        expected: impl std::fmt::Debug,
        found: impl std::fmt::Debug,
    ) -> Self {
        Self::Shape { op, what, expected: format!("{expected:?}"), found: format!("{found:?}") }
    }

    /// Reports the slot that `slots` names twice.
    pub(crate) fn repeated(slots: &[usize]) -> Self {
        let again = slots.iter().enumerate().find(|(i, slot)| slots[..*i].contains(slot));
        Self::Slot { slot: again.map_or(0, |(_, &slot)| slot), reason: SlotError::Duplicate }
    }

    /// Rejects a slot that is out of range.
    pub(crate) fn check_slot(slot: usize, slots: usize) -> Result<()> {
        let reason = SlotError::OutOfRange(slots);
        if slot < slots { Ok(()) } else { Err(Self::Slot { slot, reason }) }
    }

    /// Makes an error for another implementation of [`crate::LanguageModel`].
    pub fn other(reason: impl std::fmt::Display) -> Self {
        Self::Other(reason.to_string())
    }
}

/// Lets functions that return candle's errors propagate ours.
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
    /// It is out of range; there are only this many slots.
    #[error("is out of range: there are {0} slots")]
    OutOfRange(usize),
    /// The call names it more than once.
    #[error("is named twice")]
    Duplicate,
    /// A failed step or transfer left its state incomplete.
    #[error("has an incomplete state since a step or transfer failed, and must be reset")]
    Incomplete,
    /// It has read drafts, and how many of them to keep is not decided yet.
    #[error("has read drafts, of which some must be kept first")]
    Drafted,
    /// It has read no drafts since its last change.
    #[error("has no drafts to keep")]
    NoDrafts,
    /// A text of an encoder-decoder needs a source, and the slot has none.
    #[error("has no source, which must be read first")]
    NoSource,
    /// Its state is being copied between the device and the host.
    #[error("has a state transfer in progress")]
    InTransfer,
    /// No transfer of its state has been started.
    #[error("has no state transfer in progress")]
    NoTransfer,
}
