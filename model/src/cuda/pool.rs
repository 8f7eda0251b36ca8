//! The states of a pool's slots on the device, and the buffers of a step.
//!
//! A slot's numbers are in three contiguous parts: S of all layers, z and c of all layers, the convolutions' inputs of
//! all layers (`states`). They are copied in three pieces: here while the caller waits, or by `transfer` while other
//! slots continue.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::choose::Choices;
use super::device::{Buffer, CudaDevice};
use super::gpu::{Graph, Pinned, Result};
use super::ops::Inputs;
use super::plan::{OUTPUT_HEAD, Plan, column, input_bytes, slot_bytes, width};
use super::states::Shape;
pub(super) use super::states::floats;
use super::transfer::{Direction, Transfers};
use crate::config::DecoderConfig;
use crate::cuda_error::CudaError;
use crate::error::ModelError;
use crate::language_model::{SharedState, Transfer};
use crate::layout::StateLayout;
use crate::memory::{Denominators, StateType};
use crate::pool::{Pool, SlotStates, TextLength};

type ModelResult<T> = std::result::Result<T, ModelError>;

/// Stands for the slot in a row that pads a recorded step.
pub(super) const PADDING: u32 = u32::MAX;

/// The addresses of one layer's states on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer {
    pub(super) state: StateType,
    /// The address for slot 0; `s_stride` numbers separate two slots.
    pub(super) s: u64,
    pub(super) s_stride: usize,
    pub(super) sums: u64,
    pub(super) sums_stride: usize,
    pub(super) tails: u64,
    pub(super) tails_stride: usize,
}

/// The rows of a step, and the addresses of their inputs on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) rows: usize,
    /// Tokens of each row.
    pub(super) time: usize,
    pub(super) ids: u64,       // (rows time)
    pub(super) slots: u64,     // (rows)
    pub(super) positions: u64, // (rows)
    pub(super) angles: u64,    // (rows time, d / 2, 2)
    /// The slot, if the step has one row.
    pub(super) one_slot: Option<usize>,
}

/// The buffers of a step, which uses the first rows of each.
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
    /// The inputs of a step: positions, slots, ids, angles.
    pub(super) input: Buffer,
    /// The outputs of a step: denominators clamped since the pool was created, the sampled tokens, the logits.
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

/// A pool of slots for conversations on a device.
pub type CudaPool = Pool<CudaStates>;

/// The states of a pool's slots on a device, and the buffers of its steps.
#[derive(Debug)]
pub struct CudaStates {
    // Dropped in this order: transfers and recorded steps use the memory that follows.
    transfers: Transfers,
    pub(super) steps: HashMap<usize, Box<dyn Graph>>,
    pub(super) work: Workspace,
    pub(super) input: Box<dyn Pinned>,
    pub(super) output: Box<dyn Pinned>,
    pub(super) choices: Choices,
    pub(super) device: CudaDevice,
    shape: Shape,
    s: Buffer,     // (slots, layers, heads, d, column)
    sums: Buffer,  // (slots, layers, heads, F + 1)
    tails: Buffer, // (slots, layers, taps, channels)
    /// Identifies the decoder of the pool: recorded steps read its weights.
    pub(super) owner: Arc<()>,
    /// Whether the device has failed for good.
    lost: AtomicBool,
    denominators: Denominators,
}

impl CudaStates {
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
            // Last, when the device is known to have the memory for that many slots.
            transfers: Transfers::new(&device.0, shape, slots),
            owner: Arc::clone(owner),
            lost: AtomicBool::new(false),
            denominators: Denominators::default(),
        })
    }

    /// Returns the outputs of a step, once the device has written them.
    pub(super) fn received(&mut self) -> Result<&[u8]> {
        let output = self.output.bytes()?;
        self.denominators.clamped = u64::from_le_bytes(*output.first_chunk().unwrap_or(&[0; 8]));
        Ok(output)
    }

    /// Counts the denominators of `tokens` tokens.
    pub(super) fn count(&mut self, tokens: usize) {
        self.denominators.all += (tokens * self.shape.layout.layers * self.shape.layout.heads) as u64;
    }

    /// Converts an error for the caller, and notes whether the device is lost.
    pub(super) fn failed(&self, error: CudaError) -> ModelError {
        self.lost.fetch_or(matches!(error, CudaError::Lost { .. }), Ordering::Relaxed);
        error.into()
    }

    /// Copies one slot's state to another slot, on the device.
    pub(super) fn copy(&self, from: usize, to: usize) -> Result<()> {
        for ((source, to), bytes) in self.parts(from).into_iter().zip(self.parts(to)).zip(self.shape.parts()) {
            if bytes > 0 {
                self.device.0.copy(to, source, bytes)?;
            }
        }
        Ok(())
    }

    /// Returns the addresses of a slot's parts.
    fn parts(&self, slot: usize) -> [u64; 3] {
        let [s, sums, tails] = self.shape.parts().map(|bytes| (slot * bytes) as u64);
        [self.s.at + s, self.sums.at + sums, self.tails.at + tails]
    }

    /// Returns the addresses of one layer's states.
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

    /// Returns the addresses of a step's inputs on the device, and their size in bytes.
    pub(super) fn step(&self, rows: usize, time: usize, rope: bool) -> (Step, usize) {
        let tokens = rows * time;
        let positions = self.work.input.at;
        let slots = positions + (rows * size_of::<u64>()) as u64;
        let ids = slots + (rows * size_of::<u32>()) as u64;
        let angles = ids + (tokens * size_of::<u32>()) as u64;
        let bytes = input_bytes(rows, tokens, if rope { self.shape.head_dim } else { 0 });
        (Step { rows, time, ids, slots, positions, angles, one_slot: None }, bytes)
    }
}

impl SlotStates for CudaStates {
    fn layout(&self) -> StateLayout {
        self.shape.layout
    }

    fn slot_bytes(&self) -> usize {
        let Shape { layout, features, head_dim, state } = self.shape;
        slot_bytes(layout, features, head_dim, state)
    }

    /// Counts clamped denominators of the last prompts only after the next step.
    fn denominators(&self) -> Denominators {
        self.denominators
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    fn clear(&mut self, slot: usize) -> ModelResult<()> {
        let mut parts = self.parts(slot).into_iter().zip(self.shape.parts());
        parts.try_for_each(|(at, bytes)| self.device.0.clear(at, bytes)).map_err(|error| self.failed(error))
    }

    fn read(&self, slot: usize, _: TextLength) -> ModelResult<Vec<f32>> {
        let mut parts = self.shape.parts().map(|bytes| vec![0; bytes]);
        let mut copies = parts.iter_mut().zip(self.parts(slot));
        copies.try_for_each(|(bytes, at)| self.device.0.download(at, bytes)).map_err(|error| self.failed(error))?;
        Ok(self.shape.numbers(parts.each_ref().map(Vec::as_slice)))
    }

    fn write(&mut self, slot: usize, numbers: &[f32], _: TextLength) -> ModelResult<()> {
        let mut parts = self.shape.parts().map(|bytes| vec![0; bytes]);
        self.shape.fill(numbers, parts.each_mut().map(Vec::as_mut_slice));
        let mut copies = parts.iter().zip(self.parts(slot));
        copies.try_for_each(|(bytes, at)| self.device.0.upload(at, bytes)).map_err(|error| self.failed(error))
    }

    fn start_read(&mut self, slot: usize, _: TextLength) -> ModelResult<Transfer> {
        let parts = self.parts(slot);
        self.transfers.start(slot, parts, Direction::ToHost).map_err(|error| self.failed(error))
    }

    fn start_write(&mut self, slot: usize, state: SharedState, _: TextLength) -> ModelResult<Transfer> {
        let parts = self.parts(slot);
        self.transfers.start(slot, parts, Direction::ToDevice(state)).map_err(|error| self.failed(error))
    }

    fn poll(&mut self, slot: usize) -> ModelResult<Transfer> {
        self.transfers.poll(slot).map_err(|error| self.failed(error))
    }

    fn on_transfer_end(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.transfers.on_end(wake);
    }
}
