//! What the candle backend needs from a model family: single-token steps, and a state that is a list of tensors.

use candle_core::{Result, Tensor};

use crate::layout::StateLayout;

/// The state of one layer for one sequence: its memory tensors, then its last inputs, oldest first.
pub(super) type LayerState = Vec<Tensor>;

/// The shapes of a [`LayerState`]; all layers have the same.
#[derive(Clone, Debug)]
pub(super) struct StateShape {
    pub(super) layers: usize,
    pub(super) memory: Vec<Vec<usize>>,
    /// How many inputs a layer keeps, and the shape of each.
    pub(super) inputs: (usize, Vec<usize>),
}

impl StateShape {
    /// The shapes of one layer's tensors.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Vec<usize>> {
        self.memory.iter().chain(std::iter::repeat_n(&self.inputs.1, self.inputs.0))
    }

    /// The layout of an exported state. A layer's memory counts as one head.
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

/// A model that runs on candle tensors.
pub(super) trait Family: Send + Sync {
    /// The shape of one sequence's state.
    fn state(&self) -> StateShape;

    /// Feeds the token `id`, a tensor of shape (1), at `position` of a sequence -> logits, whose last dimension is the
    /// vocabulary. `state` has one element per layer.
    fn step(&self, id: &Tensor, position: u64, state: &mut [LayerState]) -> Result<Tensor>;

    /// Like [`Self::step`], where the logits are not needed.
    fn read(&self, id: &Tensor, position: u64, state: &mut [LayerState]) -> Result<()> {
        self.step(id, position, state).map(drop)
    }
}
