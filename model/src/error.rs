//! Why a call on a model failed. Loading a checkpoint has errors of its own (`weights::LoadError`).

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use crate::cuda_error::CudaError;
use crate::layout::StateLayout;

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
    /// The pool was made by a decoder of another family, whose states have as many numbers.
    #[error("the pool must be of this decoder: its states are those of another family")]
    ForeignFamily,
    /// A token id past the vocabulary; nothing has changed.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The id in the call.
        id: u32,
        /// Tokens in the vocabulary.
        vocab_size: usize,
    },
    /// A step takes the same number of tokens, at least one, for each of its rows; nothing has changed.
    #[error(
        "each row must have a slot and as many tokens as the others, at least one: found {ids} ids and {rows} slots"
    )]
    Rows {
        /// Token ids in the call.
        ids: usize,
        /// Slots in the call.
        rows: usize,
    },
    /// Slices or tensors whose sizes do not fit together.
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
    /// The model is a decoder without an encoder.
    #[error("the model reads no source: it is a decoder alone")]
    NoEncoder,
    /// The device does not sample.
    #[error("the device does not sample tokens")]
    NoSampler,
    /// The model reads no drafts.
    #[error("the model reads no drafts: it takes one token of a row in each step")]
    NoSpeculation,
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

/// The result of a call to a decoder, a pool or a mixer.
pub(crate) type Result<T> = std::result::Result<T, ModelError>;

impl ModelError {
    /// An argument out of its bounds.
    pub(crate) fn argument(
        parameter: impl Into<Cow<'static, str>>,
        bound: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::Argument { parameter: parameter.into(), bound: bound.into(), found: found.to_string() }
    }

    /// Sizes that do not fit.
    pub(crate) fn shape(
        op: &'static str,
        what: &'static str,
        expected: impl std::fmt::Debug,
        found: impl std::fmt::Debug,
    ) -> Self {
        Self::Shape { op, what, expected: format!("{expected:?}"), found: format!("{found:?}") }
    }

    /// Slots of which one is named twice.
    pub(crate) fn repeated(slots: &[usize]) -> Self {
        let again = slots.iter().enumerate().find(|(i, slot)| slots[..*i].contains(slot));
        Self::Slot { slot: again.map_or(0, |(_, &slot)| slot), reason: SlotError::Duplicate }
    }

    /// Refuses a slot that is out of range.
    pub(crate) fn check_slot(slot: usize, slots: usize) -> Result<()> {
        let reason = SlotError::OutOfRange(slots);
        if slot < slots { Ok(()) } else { Err(Self::Slot { slot, reason }) }
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
    /// It has read drafts, and how many of them it keeps is not known yet.
    #[error("has read drafts, of which some must be kept first")]
    Drafted,
    /// It has read no drafts since its last change.
    #[error("has no drafts to keep")]
    NoDrafts,
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
