//! What a decoder on the device remembers: a pool of slots, and what a step holds on the way.
//!
//! A slot's numbers lie together: S of all layers, z and c of all layers, the convolutions' inputs of all layers. So a
//! slot is emptied, taken to the host and put back in three pieces (`states`): here while all wait, or by `moves` while
//! the other slots go on.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::bail;

use super::choose::Choices;
use super::device::{Buffer, CudaDevice, Pinned, Recorded, Result};
use super::moves::Moves;
use super::ops::Inputs;
use super::plan::{OUTPUT_HEAD, Plan, column, input_bytes, slot_bytes, width};
use super::states::Shape;
pub(super) use super::states::floats;
use crate::config::DecoderConfig;
use crate::cuda_error::CudaError;
use crate::layout::StateLayout;
use crate::memory::{Denominators, StateType};

/// A slot that is none: a row that fills up a recorded step.
pub(super) const NOBODY: u32 = u32::MAX;

/// Where one layer's states are on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer {
    pub(super) state: StateType,
    /// Of slot 0; the next slot's is so many numbers on.
    pub(super) s: u64,
    pub(super) s_stride: usize,
    pub(super) sums: u64,
    pub(super) sums_stride: usize,
    pub(super) tails: u64,
    pub(super) tails_stride: usize,
}

/// A step's rows, and where their inputs are on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) rows: usize,
    /// Tokens of each.
    pub(super) time: usize,
    pub(super) ids: u64,    // (rows time)
    pub(super) slots: u64,  // (rows)
    pub(super) places: u64, // (rows)
    pub(super) angles: u64, // (rows time, d / 2, 2)
    /// The slot, where the step is of one alone.
    pub(super) one_slot: Option<usize>,
}

/// What a step holds on the way; its tokens are the first of each.
#[derive(Debug)]
pub(super) struct Workspace {
    pub(super) hidden: usize,
    pub(super) x: Buffer,         // (tokens, hidden)
    pub(super) normed: Inputs,    // (tokens, hidden)
    pub(super) qkv: Buffer,       // (tokens, 3 heads d)
    pub(super) convolved: Buffer, // (tokens, 3 heads d)
    pub(super) gate: Buffer,      // (tokens, heads)
    pub(super) phi: Buffer,       // (tokens, heads, 2, F)
    pub(super) h: Inputs,         // (tokens, heads d)
    pub(super) inner: Inputs,     // (tokens, intermediate)
    pub(super) sums: Buffer,      // (heads, F + 1)
    /// What a step is given: places, slots, ids, angles.
    pub(super) input: Buffer,
    /// What it gives: how many denominators were clamped since the pool was made, what was chosen, the logits.
    pub(super) output: Buffer, // (OUTPUT_HEAD bytes), (rows, CHOICE_BYTES), (rows, vocab)
    /// Bytes before the logits.
    pub(super) head: usize,
}

impl Workspace {
    fn new(device: &CudaDevice, config: &DecoderConfig, plan: &Plan) -> Result<Self> {
        let floats = |numbers: usize| device.buffer("a step", numbers * size_of::<f32>());
        let [x, qkv, convolved, gate, phi, sums] = plan.numbers;
        Ok(Self {
            hidden: config.hidden_size,
            x: floats(x)?,
            normed: Inputs::new(device, plan.tokens, config.hidden_size)?,
            qkv: floats(qkv)?,
            convolved: floats(convolved)?,
            gate: floats(gate)?,
            phi: floats(phi)?,
            h: Inputs::new(device, plan.tokens, config.inner_size())?,
            inner: Inputs::new(device, plan.tokens, config.intermediate_size)?,
            sums: floats(sums)?,
            input: device.buffer("a step", plan.input)?,
            output: device.buffer("logits", plan.output)?,
            head: plan.head,
        })
    }

    pub(super) fn clamped(&self) -> u64 {
        self.output.at
    }

    pub(super) fn chosen(&self) -> u64 {
        self.output.at + OUTPUT_HEAD as u64
    }

    pub(super) fn logits(&self) -> u64 {
        self.output.at + self.head as u64
    }
}

/// Slots for conversations on a device, allocated once and addressed by index.
#[derive(Debug)]
pub struct CudaPool {
    // Moves end before the memory goes that they read and write.
    pub(super) moves: Moves,
    // Recorded steps go before the memory that they read.
    pub(super) steps: HashMap<usize, Box<dyn Recorded>>,
    pub(super) work: Workspace,
    pub(super) input: Box<dyn Pinned>,
    pub(super) output: Box<dyn Pinned>,
    pub(super) choices: Choices,
    pub(super) device: CudaDevice,
    pub(super) shape: Shape,
    s: Buffer,     // (slots, layers, heads, d, column)
    sums: Buffer,  // (slots, layers, heads, F + 1)
    tails: Buffer, // (slots, layers, taps, channels)
    /// Of the decoder that the pool is for: what it has recorded reads that one's weights.
    pub(super) owner: Arc<()>,
    /// Whether the device has failed for good.
    lost: AtomicBool,
    pub(super) tokens: Vec<u64>,
    /// Slots that a failed step may have left half way: only a reset makes them usable.
    pub(super) torn: Vec<bool>,
    pub(super) denominators: Denominators,
}

impl CudaPool {
    pub(super) fn new(
        device: &CudaDevice,
        config: &DecoderConfig,
        owner: &Arc<()>,
        slots: usize,
        state: StateType,
    ) -> Result<Self> {
        let shape =
            Shape { layout: config.state_layout(), state, features: config.features(), head_dim: config.head_dim };
        let [s, sums, tails] = shape.parts().map(|bytes| slots * bytes);
        let what = format!("the state of {slots} slots of {} bytes each", shape.parts().iter().sum::<usize>());
        let plan = Plan::new(config, slots);
        let work = Workspace::new(device, config, &plan)?;
        Ok(Self {
            steps: HashMap::new(),
            input: device.0.pinned(plan.input)?,
            output: device.0.pinned(plan.output)?,
            choices: Choices::new(device, config.vocab_size, plan.rows)?,
            work,
            device: device.clone(),
            shape,
            s: device.buffer(&what, s)?,
            sums: device.buffer(&what, sums)?,
            tails: device.buffer(&what, tails)?,
            // Once it is known that so many fit.
            moves: Moves::new(slots),
            owner: Arc::clone(owner),
            lost: AtomicBool::new(false),
            tokens: vec![0; slots],
            torn: vec![false; slots],
            denominators: Denominators::default(),
        })
    }

    /// How many conversations fit.
    pub fn slots(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens that a slot has taken in since it was last zeroed.
    pub fn tokens(&self, slot: usize) -> u64 {
        self.tokens.get(slot).copied().unwrap_or(0)
    }

    /// Bytes of one slot, whatever it has seen.
    pub fn state_bytes(&self) -> usize {
        let Shape { layout, features, head_dim, state } = self.shape;
        slot_bytes(layout, features, head_dim, state)
    }

    /// The denominators of all slots since the pool was made, those of the last prompts once a step has come after them.
    pub fn denominators(&self) -> Denominators {
        self.denominators
    }

    /// How the numbers of [`Self::export`] lie.
    pub fn layout(&self) -> StateLayout {
        self.shape.layout
    }

    /// Makes a slot an empty text again.
    ///
    /// # Errors
    /// When there is no such slot, its state is on its way, or the device fails.
    pub fn reset(&mut self, slot: usize) -> candle_core::Result<()> {
        self.check(slot)?;
        self.torn[slot] = true;
        for (at, bytes) in self.parts(slot).into_iter().zip(self.shape.parts()) {
            self.device.0.clear(at, bytes).map_err(|error| self.told(error))?;
        }
        self.tokens[slot] = 0;
        self.torn[slot] = false;
        Ok(())
    }

    /// A slot's numbers, copied, as [`crate::StatePool::export`] gives them: a state moves between devices.
    ///
    /// # Errors
    /// When there is no such slot, a step that failed has left it half way, its state is on its way, or the device fails.
    pub fn export(&self, slot: usize) -> candle_core::Result<Vec<f32>> {
        self.check_whole(slot)?;
        let mut parts = self.shape.parts().map(|bytes| vec![0; bytes]);
        for (bytes, at) in parts.iter_mut().zip(self.parts(slot)) {
            self.device.0.download(at, bytes).map_err(|error| self.told(error))?;
        }
        Ok(self.shape.numbers(parts.each_ref().map(Vec::as_slice)))
    }

    /// Puts numbers that an `export` has given into a slot, which then has seen `tokens` tokens. A torn slot is whole
    /// again. What is held as bf16 takes the nearest.
    ///
    /// # Errors
    /// When there is no such slot, its state is on its way, or `numbers` are not as many as a slot has: then nothing has
    /// changed. When the device fails: then the slot is refused until it is reset.
    pub fn import(&mut self, slot: usize, numbers: &[f32], tokens: u64) -> candle_core::Result<()> {
        self.check(slot)?;
        self.check_numbers(numbers)?;
        let mut parts = self.shape.parts().map(|bytes| vec![0; bytes]);
        self.shape.fill(numbers, parts.each_mut().map(Vec::as_mut_slice));
        self.torn[slot] = true;
        for (bytes, at) in parts.iter().zip(self.parts(slot)) {
            self.device.0.upload(at, bytes).map_err(|error| self.told(error))?;
        }
        self.tokens[slot] = tokens;
        self.torn[slot] = false;
        Ok(())
    }

    /// What a step has given, once it is there.
    pub(super) fn received(&mut self) -> Result<&[u8]> {
        let output = self.output.bytes()?;
        self.denominators.clamped = u64::from_le_bytes(*output.first_chunk().unwrap_or(&[0; 8]));
        Ok(output)
    }

    /// Whether the device has failed for good: all that is asked for will fail, in this process.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Takes note of an error on its way to the caller.
    pub(super) fn told(&self, error: CudaError) -> candle_core::Error {
        self.lost.fetch_or(matches!(error, CudaError::Lost { .. }), Ordering::Relaxed);
        candle_core::Error::wrap(error)
    }

    /// Copies one slot's state, which must be whole, into all others, on the device: of a measurement.
    pub(super) fn spread(&mut self, from: usize) -> Result<()> {
        let tokens = self.tokens[from];
        for slot in (0..self.slots()).filter(|&slot| slot != from) {
            for ((source, to), bytes) in self.parts(from).into_iter().zip(self.parts(slot)).zip(self.shape.parts()) {
                if bytes > 0 {
                    self.device.0.copy(to, source, bytes)?;
                }
            }
            (self.tokens[slot], self.torn[slot]) = (tokens, false);
        }
        Ok(())
    }

    /// Where a slot's parts are.
    pub(super) fn parts(&self, slot: usize) -> [u64; 3] {
        let [s, sums, tails] = self.shape.parts().map(|bytes| (slot * bytes) as u64);
        [self.s.at + s, self.sums.at + sums, self.tails.at + tails]
    }

    /// Where one layer's states are.
    pub(super) fn layer(&self, layer: usize) -> Layer {
        let Shape { layout: of, state, features, head_dim } = self.shape;
        let (s, sums, tails) =
            (of.heads * head_dim * column(features), of.heads * (features + 1), of.taps * of.channels);
        Layer {
            state,
            s: self.s.at + (layer * s * width(state)) as u64,
            s_stride: of.layers * s,
            sums: self.sums.at + (layer * sums * size_of::<f32>()) as u64,
            sums_stride: of.layers * sums,
            tails: self.tails.at + (layer * tails * size_of::<f32>()) as u64,
            tails_stride: of.layers * tails,
        }
    }

    /// Where a step's inputs are on the device, and their bytes.
    pub(super) fn step(&self, rows: usize, time: usize, rope: bool) -> (Step, usize) {
        let tokens = rows * time;
        let places = self.work.input.at;
        let slots = places + (rows * size_of::<u64>()) as u64;
        let ids = slots + (rows * size_of::<u32>()) as u64;
        let angles = ids + (tokens * size_of::<u32>()) as u64;
        let bytes = input_bytes(rows, tokens, if rope { self.shape.head_dim } else { 0 });
        (Step { rows, time, ids, slots, places, angles, one_slot: None }, bytes)
    }

    /// Begins a step of these slots -> the place of each row's first token. Until [`Self::advance`] they count as torn.
    pub(super) fn begin(&mut self, slots: &[usize]) -> candle_core::Result<Vec<u64>> {
        for (i, &slot) in slots.iter().enumerate() {
            let Err(error) = self.check_whole(slot) else {
                self.torn[slot] = true;
                continue;
            };
            // As it was before: those that come before this one were whole.
            for &slot in &slots[..i] {
                self.torn[slot] = false;
            }
            if slots[..i].contains(&slot) {
                bail!("slot {slot} is named twice");
            }
            return Err(error);
        }
        Ok(slots.iter().map(|&slot| self.tokens[slot]).collect())
    }

    /// Ends a step: counts the tokens that the slots have taken in.
    pub(super) fn advance(&mut self, slots: &[usize], by: usize) {
        for &slot in slots {
            self.tokens[slot] += by as u64;
            self.torn[slot] = false;
        }
        self.denominators.all += (slots.len() * by * self.shape.layout.layers * self.shape.layout.heads) as u64;
    }

    /// Refuses a slot that is none, or whose state is on its way.
    pub(super) fn check(&self, slot: usize) -> candle_core::Result<()> {
        if slot >= self.slots() {
            bail!("slot {slot} is out of range: the pool has {}", self.slots());
        }
        if self.moves.is_moving(slot) {
            bail!("the state of slot {slot} is on its way between the device and the host");
        }
        Ok(())
    }

    /// Refuses a slot that has no whole state.
    pub(super) fn check_whole(&self, slot: usize) -> candle_core::Result<()> {
        self.check(slot)?;
        if self.torn[slot] {
            bail!("slot {slot} was left half way by a step or a move that failed, and must be reset");
        }
        Ok(())
    }

    pub(super) fn check_numbers(&self, numbers: &[f32]) -> candle_core::Result<()> {
        if numbers.len() == self.shape.layout.numbers() {
            return Ok(());
        }
        bail!("a state must have {} numbers, found {}", self.shape.layout.numbers(), numbers.len())
    }
}
