//! What the candle backend needs of a family: one token at a time, and a state that is a list of tensors.

use candle_core::{Result, Tensor};

use crate::layout::StateLayout;

/// What a layer keeps of a text: the tensors of its memory, then its last inputs, oldest first.
pub(super) type LayerState = Vec<Tensor>;

/// The shapes of a [`LayerState`], the same in every layer.
#[derive(Clone, Debug)]
pub(super) struct StateShape {
    pub(super) layers: usize,
    pub(super) memory: Vec<Vec<usize>>,
    /// How many inputs a layer keeps, and their shape.
    pub(super) inputs: (usize, Vec<usize>),
}

impl StateShape {
    /// The shapes of a layer's tensors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Vec<usize>> {
        self.memory.iter().chain(std::iter::repeat_n(&self.inputs.1, self.inputs.0))
    }

    /// The order of the numbers outside of the backend. A layer's memory counts as one head.
    pub(super) fn layout(&self) -> StateLayout {
        let numbers = |shape: &Vec<usize>| shape.iter().product::<usize>();
        StateLayout {
            layers: self.layers,
            heads: 1,
            head: self.memory.iter().map(numbers).sum(),
            taps: self.inputs.0,
            channels: if self.inputs.0 == 0 { 0 } else { numbers(&self.inputs.1) },
            cross: 0,
        }
    }
}

/// A model of candle tensors.
pub(super) trait Family: Send + Sync {
    /// The shapes of a text's state.
    fn state(&self) -> StateShape;

    /// Reads the token `id`, a tensor (1), at this position of one text -> logits, whose last dimension is the vocabulary.
    /// `state` has an element for each layer.
    fn step(&self, id: &Tensor, position: u64, state: &mut [LayerState]) -> Result<Tensor>;
}
