//! The states of a pool's slots in host memory, each of the same constant size, and the buffers of a step on the CPU.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::compute::Compute;
use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};
use crate::kernels::threads::Threads;
use crate::layout::StateLayout;
use crate::memory::{Denominators, StateType};
use crate::mixers::layer::{LayerState, LayerStates, Layers, SlotState};
use crate::mixers::rotary::Angles;
use crate::pool::{Pool, SlotStates, TextLength};

/// The settings of a pool.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Number of conversations that the pool can hold at once.
    pub slots: usize,
    /// The threads that compute the pool's steps.
    pub threads: Arc<Threads>,
    /// The element type of the pool's states.
    pub state: StateType,
}

impl PoolOptions {
    /// Options for `slots` slots with f32 states, computed by the process's threads.
    pub fn new(slots: usize) -> Self {
        Self { slots, threads: Arc::clone(Threads::global()), state: StateType::F32 }
    }
}

/// The buffers of a step. They belong to the pool, which runs one step at a time.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) cx: Compute,
    /// The residual stream: (rows, hidden)
    pub(crate) x: Vec<f32>,
    /// The tokens whose logits are computed: (tokens, hidden)
    pub(crate) last: Vec<f32>,
    pub(crate) positions: Vec<u64>,
    pub(crate) angles: Angles,
    pub(crate) denominators: Denominators,
    /// The slots of the last draft step.
    pub(crate) drafted: Vec<usize>,
}

/// A pool of slots for conversations in host memory.
pub type StatePool = Pool<HostStates>;

/// The states of a pool's slots in host memory.
#[derive(Debug)]
pub struct HostStates {
    layers: Box<dyn LayerStates>,
    workspace: Workspace,
    /// The maximum number of source tokens; 0 for a decoder-only model.
    most_source: usize,
    layout: StateLayout,
}

impl Pool<HostStates> {
    /// Creates a pool of empty texts.
    ///
    /// # Errors
    /// `slots` is 0, or there is not enough memory.
    pub(crate) fn new(config: &DecoderConfig, layers: &dyn Layers, options: PoolOptions) -> Result<Self> {
        let PoolOptions { slots, threads, state } = options;
        // This is a lower bound: a bf16 state keeps some elements as f32.
        let least = match state {
            StateType::F32 => config.state_bytes(),
            StateType::Bf16 => config.state_bytes() / 2,
        };
        if slots == 0 || !slots.checked_mul(least).is_some_and(can_allocate) {
            let bound = format!("at least 1 and fit into memory at {} bytes each", config.state_bytes());
            return Err(ModelError::argument("slots", bound, slots));
        }
        let workspace = Workspace {
            cx: Compute::new(threads),
            x: Vec::new(),
            last: Vec::new(),
            positions: Vec::new(),
            angles: Angles::new(config.head_dim, config.rope_theta),
            denominators: Denominators::default(),
            drafted: Vec::new(),
        };
        let most_source = config.source().map_or(0, |source| source.max_positions);
        let (layers, layout) = (layers.new_states(slots, state), config.state_layout());
        let states = HostStates { layers, workspace, most_source, layout };
        Ok(Self::of(states, slots, most_source > 0))
    }

    /// Returns a copy of one layer of a slot's state: memory (heads, [`StateLayout::head`]) and the convolution inputs.
    ///
    /// # Errors
    /// There is no such slot or layer, or a failed step left the slot's state incomplete.
    pub fn layer(&self, layer: usize, slot: usize) -> Result<(Tensor, Option<Tensor>)> {
        self.check_ready(slot)?;
        let layers = self.states.layers.len();
        if layer >= layers {
            return Err(ModelError::LayerOutOfRange { layer, layers });
        }
        let [memory, inputs, _] = self.states.layers.layer(layer).parts().map(|part| {
            let mut numbers = Vec::new();
            part.inspect(|part| part.read(slot, &mut numbers));
            numbers
        });
        let StateLayout { heads, head, taps, channels, .. } = self.states.layout;
        let inputs = (taps > 0).then(|| Tensor::from_vec(inputs, (taps, channels), &Device::Cpu)).transpose()?;
        Ok((Tensor::from_vec(memory, (heads, head), &Device::Cpu)?, inputs))
    }

    /// The states of all layers, and the buffers of a step.
    pub(crate) fn parts(&mut self) -> (&mut dyn LayerStates, &mut Workspace) {
        (&mut *self.states.layers, &mut self.states.workspace)
    }

    /// Sets the positions of the step's rows, one per slot.
    pub(crate) fn set_positions(&mut self, slots: &[usize]) {
        let mut positions = std::mem::take(&mut self.states.workspace.positions);
        positions.clear();
        positions.extend(self.positions(slots));
        self.states.workspace.positions = positions;
    }
}

impl SlotStates for HostStates {
    fn layout(&self) -> StateLayout {
        self.layout
    }

    /// Counts whole caches, although the system provides their memory only as they fill.
    fn slot_bytes(&self) -> usize {
        self.layers().flat_map(LayerState::parts).flatten().map(SlotState::bytes).sum()
    }

    fn denominators(&self) -> Denominators {
        self.workspace.denominators
    }

    fn clear(&mut self, slot: usize) -> Result<()> {
        for layer in 0..self.layers.len() {
            self.layers.layer_mut(layer).parts_mut().into_iter().flatten().for_each(|part| part.reset(slot));
        }
        Ok(())
    }

    /// Reads the parts of a [`StateLayout`], each for all layers.
    fn read(&self, slot: usize, length: TextLength) -> Result<Vec<f32>> {
        let mut numbers = Vec::with_capacity(self.layout.numbers());
        for part in 0..self.layout.parts().len() {
            self.layers().filter_map(|layer| layer.parts()[part]).for_each(|part| part.read(slot, &mut numbers));
        }
        if self.most_source > 0 {
            // At most 65,536, which f32 represents exactly.
            numbers.push(length.source as f32);
        }
        Ok(numbers)
    }

    fn length_of(&self, numbers: &[f32], tokens: u64) -> Result<TextLength> {
        let source = if self.most_source > 0 { self.source_tokens(numbers[numbers.len() - 1], tokens)? } else { 0 };
        let length = TextLength { tokens, source };
        for (part, layer, numbers) in self.layout.split(numbers) {
            if let Some(state) = self.layers.layer(layer).parts()[part] {
                state.check(layer, numbers, tokens_of(part, length))?;
            }
        }
        Ok(length)
    }

    fn write(&mut self, slot: usize, numbers: &[f32], length: TextLength) -> Result<()> {
        for (part, layer, numbers) in self.layout.split(numbers) {
            if let Some(state) = &mut self.layers.layer_mut(layer).parts_mut()[part] {
                state.write(slot, numbers, tokens_of(part, length));
            }
        }
        Ok(())
    }
}

impl HostStates {
    fn layers(&self) -> impl Iterator<Item = &dyn LayerState> {
        (0..self.layers.len()).map(|layer| self.layers.layer(layer))
    }

    /// Returns the number of source tokens, which an exported state ends with, for a text of `tokens` tokens.
    fn source_tokens(&self, found: f32, tokens: u64) -> Result<u64> {
        let most = (self.most_source as u64).min(tokens);
        // The cast saturates, so only an integer in range equals its own count.
        let (count, least) = (found as u64, u64::from(tokens > 0));
        if count as f32 != found || count < least || count > most {
            return Err(ModelError::argument("the length of the source", format!("{least} to {most} tokens"), found));
        }
        Ok(count)
    }
}

/// The number of tokens behind a part of a state: those of the source, or those of the text after it.
fn tokens_of(part: usize, length: TextLength) -> u64 {
    if part == StateLayout::SOURCE { length.source } else { length.tokens - length.source }
}

/// Returns whether the system would allocate this many bytes. A failed allocation would end the process, and zeroed
/// memory is only provided as it is used, so this tries an allocation first and frees it again.
pub(crate) fn can_allocate(bytes: usize) -> bool {
    let mut probe = Vec::<u8>::new();
    let there = probe.try_reserve_exact(bytes).is_ok();
    // Otherwise the compiler could remove the unused allocation.
    std::hint::black_box(probe.as_ptr());
    there
}
