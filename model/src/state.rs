//! A pool of slots. Each holds the state of one conversation, and all have the same constant size.

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

/// The settings of a pool.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// The number of conversations that fit.
    pub slots: usize,
    /// The threads that compute its steps.
    pub threads: Arc<Threads>,
    /// The type of the states' numbers.
    pub state: StateType,
}

impl PoolOptions {
    /// `slots` slots, states in f32, the threads of the process.
    pub fn new(slots: usize) -> Self {
        Self { slots, threads: Arc::clone(Threads::global()), state: StateType::F32 }
    }
}

/// The buffers of a step. They belong to the pool because a pool takes one step at a time.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) cx: Compute,
    /// The residual stream: (rows, time, hidden)
    pub(crate) x: Vec<f32>,
    /// The normed rows whose logits are computed: (rows, hidden)
    pub(crate) last: Vec<f32>,
    pub(crate) positions: Vec<u64>,
    pub(crate) angles: Angles,
    pub(crate) denominators: Denominators,
}

/// Slots for conversations, allocated once and addressed by index.
#[derive(Debug)]
pub struct StatePool {
    states: Box<dyn LayerStates>,
    workspace: Workspace,
    /// Tokens of each slot, those of its source included.
    tokens: Vec<u64>,
    /// Tokens of each slot's source; 0 for a slot that has read none.
    source: Vec<u64>,
    /// Maximum number of tokens of a source; 0 for a decoder alone.
    max_source: usize,
    /// Slots in the middle of a step. If the step failed, their layers may be at different tokens: only a reset makes them
    /// usable.
    incomplete: Vec<bool>,
    layout: StateLayout,
}

impl StatePool {
    /// A pool of empty texts.
    ///
    /// # Errors
    /// [`ModelError::PoolSize`] when `slots` is 0, or the system does not have enough memory.
    pub(crate) fn new(config: &DecoderConfig, layers: &dyn Layers, options: PoolOptions) -> Result<Self> {
        let PoolOptions { slots, threads, state } = options;
        let bytes = config.state_bytes();
        // A lower bound: a bf16 state keeps some of its numbers in f32.
        let least = match state {
            StateType::F32 => bytes,
            StateType::Bf16 => bytes / 2,
        };
        if slots == 0 || !slots.checked_mul(least).is_some_and(can_allocate) {
            return Err(ModelError::PoolSize { slots, bytes });
        }
        let workspace = Workspace {
            cx: Compute::new(threads),
            x: Vec::new(),
            last: Vec::new(),
            positions: Vec::new(),
            angles: Angles::new(config.head_dim, config.rope_theta),
            denominators: Denominators::default(),
        };
        Ok(Self {
            states: layers.new_states(slots, state),
            workspace,
            tokens: vec![0; slots],
            source: vec![0; slots],
            max_source: config.source().map_or(0, |source| source.max_positions),
            incomplete: vec![false; slots],
            layout: config.state_layout(),
        })
    }

    /// The number of conversations that fit.
    pub fn slots(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens that a slot has read since its last reset, those of its source included; 0 for a slot out of range.
    pub fn tokens(&self, slot: usize) -> u64 {
        self.tokens.get(slot).copied().unwrap_or(0)
    }

    /// Bytes of one slot. The length of its text does not matter; of a cache that is not full, the system has provided
    /// only a part.
    pub fn state_bytes(&self) -> usize {
        self.layers().flat_map(LayerState::parts).flatten().map(SlotState::bytes).sum()
    }

    /// The denominators of all slots since the pool was made, except those of probed steps.
    pub fn denominators(&self) -> Denominators {
        self.workspace.denominators
    }

    /// The layout of the numbers of [`Self::export`].
    pub fn layout(&self) -> StateLayout {
        self.layout
    }

    /// Makes a slot an empty text.
    ///
    /// # Errors
    /// [`ModelError::SlotOutOfRange`].
    pub fn reset(&mut self, slot: usize) -> Result<()> {
        ModelError::check_slot(slot, self.slots())?;
        for layer in 0..self.states.len() {
            self.states.layer_mut(layer).parts_mut().into_iter().flatten().for_each(|part| part.reset(slot));
        }
        self.tokens[slot] = 0;
        self.source[slot] = 0;
        self.incomplete[slot] = false;
        Ok(())
    }

    /// One layer of a slot, copied: memory (heads, [`StateLayout::head`]) and the convolution's inputs (taps, channels).
    ///
    /// # Errors
    /// When the slot or the layer is out of range, or a step that failed has left the slot part way.
    pub fn layer(&self, layer: usize, slot: usize) -> Result<(Tensor, Option<Tensor>)> {
        self.check_complete(slot)?;
        let layers = self.states.len();
        if layer >= layers {
            return Err(ModelError::LayerOutOfRange { layer, layers });
        }
        let [memory, inputs, _] = self.states.layer(layer).parts().map(|part| {
            let mut numbers = Vec::new();
            part.inspect(|part| part.read(slot, &mut numbers));
            numbers
        });
        let StateLayout { heads, head, taps, channels, .. } = self.layout;
        let inputs = (taps > 0).then(|| Tensor::from_vec(inputs, (taps, channels), &Device::Cpu)).transpose()?;
        Ok((Tensor::from_vec(memory, (heads, head), &Device::Cpu)?, inputs))
    }

    /// The numbers of a slot, copied, in the order of [`StateLayout`].
    ///
    /// # Errors
    /// When the slot is out of range, or a step that failed has left it part way.
    pub fn export(&self, slot: usize) -> Result<Vec<f32>> {
        self.check_complete(slot)?;
        let mut numbers = Vec::with_capacity(self.layout.numbers());
        for part in 0..self.layout.parts().len() {
            self.layers().filter_map(|layer| layer.parts()[part]).for_each(|part| part.read(slot, &mut numbers));
        }
        if self.max_source > 0 {
            // At most 65,536: exact.
            numbers.push(self.source[slot] as f32);
        }
        Ok(numbers)
    }

    /// Sets a slot to the numbers of [`Self::export`] of a text of `tokens` tokens. This also makes a slot usable that a
    /// failed step has left part way.
    ///
    /// # Errors
    /// When the slot is out of range, or the numbers are not a state of this model: too many or too few, a maximum that no
    /// keys have, or sums over a source that are not those of its tokens. Then nothing has changed. A maximum that is too
    /// low is accepted: the next key takes its place, and the text before it is forgotten.
    pub fn import(&mut self, slot: usize, numbers: &[f32], tokens: u64) -> Result<()> {
        ModelError::check_slot(slot, self.slots())?;
        if numbers.len() != self.layout.numbers() {
            return Err(ModelError::StateLength { expected: self.layout.numbers(), found: numbers.len() });
        }
        let source = if self.max_source > 0 { self.source_tokens(numbers[numbers.len() - 1], tokens)? } else { 0 };
        self.each_part(numbers, |states, layer, part, numbers| match states.layer(layer).parts()[part] {
            Some(state) => state.check(layer, numbers, tokens_of(part, tokens, source)),
            None => Ok(()),
        })?;
        self.each_part(numbers, |states, layer, part, numbers| {
            if let Some(state) = &mut states.layer_mut(layer).parts_mut()[part] {
                state.write(slot, numbers, tokens_of(part, tokens, source));
            }
            Ok(())
        })?;
        self.tokens[slot] = tokens;
        self.source[slot] = source;
        self.incomplete[slot] = false;
        Ok(())
    }

    fn layers(&self) -> impl Iterator<Item = &dyn LayerState> {
        (0..self.states.len()).map(|layer| self.states.layer(layer))
    }

    /// Calls `call(states, layer, part, numbers of it)` for every part of every layer of an exported state.
    fn each_part(
        &mut self,
        mut numbers: &[f32],
        mut call: impl FnMut(&mut dyn LayerStates, usize, usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        for (part, len) in self.layout.parts().into_iter().enumerate() {
            for layer in 0..self.states.len() {
                let (own, rest) = numbers.split_at(len);
                call(&mut *self.states, layer, part, own)?;
                numbers = rest;
            }
        }
        Ok(())
    }

    /// The tokens of the source of an exported state of a text of `tokens` tokens.
    fn source_tokens(&self, found: f32, tokens: u64) -> Result<u64> {
        let max = (self.max_source as u64).min(tokens);
        // The cast saturates, so that it is exact only for a whole number in range.
        let (count, min) = (found as u64, u64::from(tokens > 0));
        if count as f32 != found || count < min || count > max {
            return Err(ModelError::StateSource { min, max, found });
        }
        Ok(count)
    }

    /// Empties a slot, which stays incomplete until [`Self::end_source`].
    pub(crate) fn begin_source(&mut self, slot: usize) -> Result<()> {
        self.reset(slot)?;
        self.incomplete[slot] = true;
        Ok(())
    }

    /// Makes a source of `tokens` tokens the whole text of a slot.
    pub(crate) fn end_source(&mut self, slot: usize, tokens: usize) {
        self.tokens[slot] = tokens as u64;
        self.source[slot] = tokens as u64;
        self.incomplete[slot] = false;
    }

    /// The states of all layers, and the buffers of a step.
    pub(crate) fn parts(&mut self) -> (&mut dyn LayerStates, &mut Workspace) {
        (&mut *self.states, &mut self.workspace)
    }

    /// Begins a step of these slots and notes their positions. The slots are incomplete until [`Self::end_step`].
    pub(crate) fn begin_step(&mut self, slots: &[usize]) -> Result<()> {
        for (i, &slot) in slots.iter().enumerate() {
            ModelError::check_slot(slot, self.slots())?;
            if slots[..i].contains(&slot) {
                return Err(ModelError::SlotRepeated { slot });
            }
            self.check_complete(slot)?;
            if self.max_source > 0 && self.source[slot] == 0 {
                return Err(ModelError::SourceMissing { slot });
            }
        }
        slots.iter().for_each(|&slot| self.incomplete[slot] = true);
        self.workspace.positions.clear();
        self.workspace.positions.extend(slots.iter().map(|&slot| self.tokens[slot] - self.source[slot]));
        Ok(())
    }

    /// Ends a step in which each of these slots has read `tokens` tokens.
    pub(crate) fn end_step(&mut self, slots: &[usize], tokens: usize) {
        for &slot in slots {
            self.tokens[slot] += tokens as u64;
            self.incomplete[slot] = false;
        }
    }

    fn check_complete(&self, slot: usize) -> Result<()> {
        ModelError::check_slot(slot, self.slots())?;
        if self.incomplete[slot] { Err(ModelError::SlotIncomplete { slot }) } else { Ok(()) }
    }
}

/// Tokens behind a part of a state: those of the source, or those of the text after it.
fn tokens_of(part: usize, tokens: u64, source: u64) -> u64 {
    if part == StateLayout::SOURCE { source } else { tokens - source }
}

/// Whether the system would provide so many bytes. Zeroed memory is provided when it is touched, and an allocation that
/// fails ends the process: so this asks for it and gives it back.
pub(crate) fn can_allocate(bytes: usize) -> bool {
    let mut probe = Vec::<u8>::new();
    let there = probe.try_reserve_exact(bytes).is_ok();
    // The compiler may remove an unused allocation.
    std::hint::black_box(probe.as_ptr());
    there
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Decoder;
    use crate::weights::WeightType;

    #[test]
    fn a_slot_left_part_way_by_a_failed_step_is_refused_until_it_is_reset() {
        let text = r#"{"model_type": "rfa_gate", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4,
            "num_hidden_layers": 1, "num_attention_heads": 1, "proj_dim": 2}"#;
        let decoder = Decoder::random(DecoderConfig::from_json(text).unwrap(), WeightType::F32, 1).unwrap();
        let mut pool = decoder.new_pool(3).unwrap();
        pool.begin_step(&[0, 2]).unwrap();
        let error = pool.begin_step(&[1, 2]).unwrap_err();
        assert!(matches!(error, ModelError::SlotIncomplete { slot: 2 }), "{error}");
        pool.begin_step(&[1]).unwrap();
        pool.end_step(&[1], 5);
        pool.begin_step(&[1]).unwrap();
        pool.reset(2).unwrap();
        pool.begin_step(&[2]).unwrap();
        assert_eq!((pool.tokens(0), pool.tokens(1)), (0, 5));
    }
}
