//! What a decoder on the device remembers: a pool of slots, and what a step holds on the way.
//!
//! A slot's numbers lie together: S of all layers, z and c of all layers, the convolutions' inputs of all layers. So a
//! slot is emptied, taken to the host and put back in three pieces. S lies column by column there, each filled up with
//! zeros to what the kernels' threads have of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::bail;

use super::choose::Choices;
use super::device::{Buffer, CudaDevice, Pinned, Recorded, Result};
use super::ops::Inputs;
use super::plan::{OUTPUT_HEAD, Plan, column, input_bytes, slot_bytes, width};
use super::weights::nearest;
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
    // Recorded steps go before the memory that they read.
    pub(super) steps: HashMap<usize, Box<dyn Recorded>>,
    pub(super) work: Workspace,
    pub(super) input: Box<dyn Pinned>,
    pub(super) output: Box<dyn Pinned>,
    pub(super) choices: Choices,
    pub(super) device: CudaDevice,
    layout: StateLayout,
    state: StateType,
    features: usize,
    head_dim: usize,
    s: Buffer,     // (slots, layers, heads, d, column)
    sums: Buffer,  // (slots, layers, heads, F + 1)
    tails: Buffer, // (slots, layers, taps, channels)
    /// Of the decoder that the pool is for: what it has recorded reads that one's weights.
    pub(super) owner: Arc<()>,
    /// Whether the device has failed for good.
    lost: AtomicBool,
    tokens: Vec<u64>,
    /// Slots that a failed step may have left half way: only a reset makes them usable.
    torn: Vec<bool>,
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
        let layout = config.state_layout();
        let heads = layout.layers * layout.heads;
        let (features, head_dim) = (config.features(), config.head_dim);
        let what =
            format!("the state of {slots} slots of {} bytes each", slot_bytes(layout, features, head_dim, state));
        let plan = Plan::new(config, slots);
        let work = Workspace::new(device, config, &plan)?;
        Ok(Self {
            steps: HashMap::new(),
            input: device.0.pinned(plan.input)?,
            output: device.0.pinned(plan.output)?,
            choices: Choices::new(device, config.vocab_size, plan.rows)?,
            work,
            device: device.clone(),
            layout,
            state,
            features,
            head_dim,
            s: device.buffer(&what, slots * heads * head_dim * column(features) * width(state))?,
            sums: device.buffer(&what, slots * heads * (features + 1) * size_of::<f32>())?,
            tails: device.buffer(&what, slots * layout.conv() * size_of::<f32>())?,
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
        slot_bytes(self.layout, self.features, self.head_dim, self.state)
    }

    /// The denominators of all slots since the pool was made, those of the last prompts once a step has come after them.
    pub fn denominators(&self) -> Denominators {
        self.denominators
    }

    /// How the numbers of [`Self::export`] lie.
    pub fn layout(&self) -> StateLayout {
        self.layout
    }

    /// Makes a slot an empty text again.
    ///
    /// # Errors
    /// When there is no such slot, or the device fails.
    pub fn reset(&mut self, slot: usize) -> candle_core::Result<()> {
        self.check(slot)?;
        self.torn[slot] = true;
        for buffer in [&self.s, &self.sums, &self.tails] {
            let (at, bytes) = self.part(buffer, slot);
            self.device.0.clear(at, bytes).map_err(|error| self.told(error))?;
        }
        self.tokens[slot] = 0;
        self.torn[slot] = false;
        Ok(())
    }

    /// A slot's numbers, copied, as [`crate::StatePool::export`] gives them: a state moves between devices.
    ///
    /// # Errors
    /// When there is no such slot, a step that failed has left it half way, or the device fails.
    pub fn export(&self, slot: usize) -> candle_core::Result<Vec<f32>> {
        self.check(slot)?;
        if self.torn[slot] {
            bail!("slot {slot} was left half way by a step that failed: there is nothing whole to export");
        }
        let s = self.read(&self.s, slot)?;
        let s: Vec<f32> = match self.state {
            StateType::F32 => floats(&s).collect(),
            StateType::Bf16 => s.as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect(),
        };
        let sums: Vec<f32> = floats(&self.read(&self.sums, slot)?).collect();
        let mut numbers = Vec::with_capacity(self.layout.numbers());
        let column = column(self.features);
        for (s, sums) in s.chunks_exact(self.head_dim * column).zip(sums.chunks_exact(self.features + 1)) {
            numbers.extend((0..self.features).flat_map(|row| s[row..].iter().step_by(column)));
            numbers.extend_from_slice(sums);
        }
        numbers.extend(floats(&self.read(&self.tails, slot)?));
        Ok(numbers)
    }

    /// Puts numbers that an `export` has given into a slot, which then has seen `tokens` tokens. A torn slot is whole
    /// again. What is held as bf16 takes the nearest.
    ///
    /// # Errors
    /// When there is no such slot or `numbers` are not as many as a slot has: then nothing has changed. When the device
    /// fails: then the slot is refused until it is reset.
    pub fn import(&mut self, slot: usize, numbers: &[f32], tokens: u64) -> candle_core::Result<()> {
        self.check(slot)?;
        if numbers.len() != self.layout.numbers() {
            bail!("a state must have {} numbers, found {}", self.layout.numbers(), numbers.len());
        }
        let (memories, tails) = numbers.split_at(self.layout.memory());
        let (mut s, mut sums) = (Vec::new(), Vec::new());
        let zeros = column(self.features) - self.features;
        for head in memories.chunks_exact(self.layout.head) {
            let (matrix, beside) = head.split_at(self.features * self.head_dim);
            for i in 0..self.head_dim {
                let column = matrix[i..].iter().step_by(self.head_dim);
                match self.state {
                    StateType::F32 => s.extend(column.flat_map(|v| v.to_le_bytes())),
                    StateType::Bf16 => s.extend(column.flat_map(|&v| nearest(v))),
                }
                s.resize(s.len() + zeros * width(self.state), 0);
            }
            sums.extend(beside.iter().flat_map(|v| v.to_le_bytes()));
        }
        self.torn[slot] = true;
        let tails = super::device::bytes_of(tails);
        for (buffer, bytes) in [(&self.s, s), (&self.sums, sums), (&self.tails, tails)] {
            let (at, _) = self.part(buffer, slot);
            self.device.0.upload(at, &bytes).map_err(|error| self.told(error))?;
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
            for buffer in [&self.s, &self.sums, &self.tails] {
                let ((source, bytes), (to, _)) = (self.part(buffer, from), self.part(buffer, slot));
                if bytes > 0 {
                    self.device.0.copy(to, source, bytes)?;
                }
            }
            (self.tokens[slot], self.torn[slot]) = (tokens, false);
        }
        Ok(())
    }

    /// Where a slot's part of a buffer is, and its bytes.
    fn part(&self, buffer: &Buffer, slot: usize) -> (u64, usize) {
        let bytes = buffer.bytes / self.slots();
        (buffer.at + (slot * bytes) as u64, bytes)
    }

    fn read(&self, buffer: &Buffer, slot: usize) -> candle_core::Result<Vec<u8>> {
        let (at, len) = self.part(buffer, slot);
        let mut bytes = vec![0; len];
        self.device.0.download(at, &mut bytes).map_err(|error| self.told(error))?;
        Ok(bytes)
    }

    /// Where one layer's states are.
    pub(super) fn layer(&self, layer: usize) -> Layer {
        let of = self.layout;
        let (s, sums, tails) =
            (of.heads * self.head_dim * column(self.features), of.heads * (self.features + 1), of.taps * of.channels);
        Layer {
            state: self.state,
            s: self.s.at + (layer * s * width(self.state)) as u64,
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
        let bytes = input_bytes(rows, tokens, if rope { self.head_dim } else { 0 });
        (Step { rows, time, ids, slots, places, angles, one_slot: None }, bytes)
    }

    /// Begins a step of these slots -> the place of each row's first token. Until [`Self::advance`] they count as torn.
    pub(super) fn begin(&mut self, slots: &[usize]) -> candle_core::Result<Vec<u64>> {
        for (i, &slot) in slots.iter().enumerate() {
            if slot < self.slots() && !self.torn[slot] {
                self.torn[slot] = true;
                continue;
            }
            // As it was before: those that come before this one were whole.
            for &slot in &slots[..i] {
                self.torn[slot] = false;
            }
            self.check(slot)?;
            if slots[..i].contains(&slot) {
                bail!("slot {slot} is named twice");
            }
            bail!("slot {slot} was left half way by a step that failed, and must be reset");
        }
        Ok(slots.iter().map(|&slot| self.tokens[slot]).collect())
    }

    /// Ends a step: counts the tokens that the slots have taken in.
    pub(super) fn advance(&mut self, slots: &[usize], by: usize) {
        for &slot in slots {
            self.tokens[slot] += by as u64;
            self.torn[slot] = false;
        }
        self.denominators.all += (slots.len() * by * self.layout.layers * self.layout.heads) as u64;
    }

    fn check(&self, slot: usize) -> candle_core::Result<()> {
        if slot < self.slots() {
            return Ok(());
        }
        bail!("slot {slot} is out of range: the pool has {}", self.slots())
    }
}

pub(super) fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b))
}
