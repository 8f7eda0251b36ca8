//! Errors of a decoder, its pools and its mixers. Errors of loading a checkpoint are in `weights`.

use crate::layout::StateLayout;

/// Why a decoder or a pool refused a call. Unless a variant says otherwise, nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The pool has fewer slots.
    #[error("slot {slot} is out of range: the pool has {slots}")]
    SlotOutOfRange {
        /// The slot in the call.
        slot: usize,
        /// Slots of the pool.
        slots: usize,
    },
    /// One step may advance a slot once.
    #[error("slot {slot} is named twice")]
    SlotRepeated {
        /// The slot in the call.
        slot: usize,
    },
    /// A step failed part way: the layers of the slot are at different tokens.
    #[error("slot {slot} was left part way by a step that failed, and must be reset")]
    SlotIncomplete {
        /// The slot in the call.
        slot: usize,
    },
    /// Every text of an encoder-decoder begins with a source.
    #[error("slot {slot} has no source, which must be read first")]
    SourceMissing {
        /// The slot in the call.
        slot: usize,
    },
    /// The decoder has fewer layers.
    #[error("layer {layer} is out of range: the decoder has {layers}")]
    LayerOutOfRange {
        /// The layer in the call.
        layer: usize,
        /// Layers of the decoder.
        layers: usize,
    },
    /// A pool of no slots, or of more than fit into memory.
    #[error("slots must be at least 1 and fit into memory, found {slots} of {bytes} bytes")]
    PoolSize {
        /// Slots asked for.
        slots: usize,
        /// Bytes of one slot in f32.
        bytes: usize,
    },
    /// The pool was made by a decoder of another shape.
    #[error("the pool must be of this decoder: its states are {found:?}, the decoder's {expected:?}")]
    ForeignPool {
        /// The decoder's layout.
        expected: StateLayout,
        /// The pool's layout.
        found: StateLayout,
    },
    /// The pool was made by a decoder of another family, whose states have as many numbers.
    #[error("the pool must be of this decoder: its states are those of another family")]
    ForeignFamily,
    /// A token id past the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The id in the call.
        id: u32,
        /// Tokens in the vocabulary.
        vocab_size: usize,
    },
    /// A step takes the same number of tokens, at least one, for each of its rows.
    #[error(
        "each row must have a slot and as many tokens as the others, at least one: found {ids} ids and {rows} slots"
    )]
    Rows {
        /// Token ids in the call.
        ids: usize,
        /// Slots in the call.
        rows: usize,
    },
    /// The model is a decoder alone.
    #[error("the model reads no source: it is a decoder alone")]
    NoEncoder,
    /// A source that is empty or too long.
    #[error("a source must have 1 to {max} tokens, found {found}")]
    SourceLength {
        /// The config's `max_source_positions`.
        max: usize,
        /// Tokens in the call.
        found: usize,
    },
    /// The encoder's working memory cannot be allocated.
    #[error("a source of {tokens} tokens needs {bytes} bytes while it is read, more than the system has")]
    SourceMemory {
        /// Tokens in the call.
        tokens: usize,
        /// Bytes that reading them needs.
        bytes: usize,
    },
    /// An imported state of another size.
    #[error("a state must have {expected} numbers, found {found}")]
    StateLength {
        /// Numbers of this model's states.
        expected: usize,
        /// Numbers in the call.
        found: usize,
    },
    /// An imported state whose source has an impossible length.
    #[error("the source must have {min} to {max} tokens, found {found}")]
    StateSource {
        /// 0 for an empty text, else 1.
        min: u64,
        /// The config's `max_source_positions`, or the tokens of the text if they are fewer.
        max: u64,
        /// The number in the state.
        found: f32,
    },
    /// An imported state with a maximum that no keys of this model have: it would outweigh every key to come.
    #[error("the maximum of layer {layer}, head {head} must be at most {max}, found {found}")]
    StateMaximum {
        /// The layer.
        layer: usize,
        /// The head.
        head: usize,
        /// The largest maximum that a key can have.
        max: f32,
        /// The number in the state.
        found: f32,
    },
    /// An imported state whose sums over the source have another weight than one for each token.
    #[error("c of the source in layer {layer}, head {head} must be its {tokens} tokens, found {found}")]
    StateCount {
        /// The layer.
        layer: usize,
        /// The head.
        head: usize,
        /// Tokens of the source.
        tokens: u64,
        /// The number in the state.
        found: f32,
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
    /// A tensor operation of the evaluation path failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// The result of a call to a decoder, a pool or a mixer.
pub(crate) type Result<T> = std::result::Result<T, ModelError>;

impl ModelError {
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
        Self::SlotRepeated { slot: again.map_or(0, |(_, &slot)| slot) }
    }

    /// Refuses a slot that is out of range.
    pub(crate) fn check_slot(slot: usize, slots: usize) -> Result<()> {
        if slot < slots { Ok(()) } else { Err(Self::SlotOutOfRange { slot, slots }) }
    }
}
