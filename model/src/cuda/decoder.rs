//! The decoder on a device: token ids in, logits out. The kernels of a step are recorded as a graph, once for each
//! number of rows (a power of two), and replayed: states have a constant size, so a recording stays valid.

use std::ops::Range;
use std::sync::Arc;

use super::block::Block;
use super::choose;
use super::device::CudaDevice;
use super::gpu::Result;
use super::mixer;
use super::ops::{Linear, Mode, RmsNorm, Rows};
use super::plan::{self, OUTPUT_HEAD, PREFILL, ROWS};
use super::pool::{CudaPool, CudaStates, PADDING, Step, floats};
use crate::config::{DecoderConfig, PositionEmbedding, SourceConfig};
use crate::error::ModelError;
use crate::memory::StateType;
use crate::runner::Backend;
use crate::sampling::{Plans, Sampled};
use crate::weights::{LoadError, Source, WeightType, Weights};

type ModelResult<T> = std::result::Result<T, ModelError>;

/// A decoder whose weights are on a device. They are read-only: one decoder serves any number of pools.
#[derive(Debug)]
pub struct CudaDecoder {
    pub(super) device: CudaDevice,
    config: DecoderConfig,
    embedding: Option<Linear>, // (vocab, hidden); None if tied to the head
    blocks: Vec<Block>,
    norm: RmsNorm, // (hidden)
    head: Linear,  // (vocab, hidden)
    frequencies: Vec<f64>,
    /// Identifies this decoder to its pools.
    own: Arc<()>,
}

impl CudaDecoder {
    /// Returns the config of the decoder.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    pub(crate) fn new(
        config: DecoderConfig,
        weights: &Weights<'_>,
        device: &CudaDevice,
    ) -> std::result::Result<Self, LoadError> {
        mixer::supported(&config)?;
        let model = weights.pp("model");
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let table = model.matrix("embed_tokens.weight", vocab, hidden)?;
        let (embedding, head) = if config.tie_word_embeddings {
            (None, table)
        } else {
            (Some(Linear::new(device, &[&table], Mode::Store)?), weights.matrix("lm_head.weight", vocab, hidden)?)
        };
        let head = Linear::new(device, &[&head], Mode::Store)?;
        let blocks = (0..config.num_hidden_layers)
            .map(|i| Block::new(device, &config, &model.pp(&format!("layers.{i}")), i))
            .collect::<std::result::Result<_, _>>()?;
        let norm = RmsNorm::new(device, &model.numbers("norm.weight", &[hidden])?, config.rms_norm_eps)?;
        let half = config.head_dim / 2;
        let frequencies = match config.position_embedding {
            PositionEmbedding::Rope => (0..half).map(|i| config.rope_theta.powf(-(i as f64) / half as f64)).collect(),
            PositionEmbedding::None => Vec::new(),
        };
        Ok(Self { device: device.clone(), config, embedding, blocks, norm, head, frequencies, own: Arc::default() })
    }

    /// Creates a decoder of random weights for measurements, like [`crate::Decoder::random`].
    ///
    /// # Errors
    /// If the configuration is out of bounds or has no CUDA kernels, or the device has too little memory.
    pub fn random(
        config: DecoderConfig,
        weights: WeightType,
        seed: u64,
        device: &CudaDevice,
    ) -> std::result::Result<Self, LoadError> {
        config.validate()?;
        Self::new(config, &Weights::new(&Source::Random(weights, seed)), device)
    }

    /// Returns how many slots, with the buffers of their steps, fit into nine tenths of the device's free memory: from
    /// 1 to `most`.
    ///
    /// # Errors
    /// [`crate::cuda::CudaError::Failed`] if the driver does not report the device's memory.
    pub fn room(&self, state: StateType, most: usize) -> Result<usize> {
        let (free, _) = self.device.memory()?;
        Ok(plan::fitting(&self.config, state, free / 10 * 9, most.max(1)))
    }

    /// Creates a pool of empty conversations for this decoder, on its device.
    ///
    /// # Errors
    /// If `slots` is 0, or the device does not have the memory for them.
    pub fn new_pool(&self, slots: usize, state: StateType) -> ModelResult<CudaPool> {
        if slots == 0 {
            return Err(ModelError::argument("slots", "at least 1", 0));
        }
        let states = CudaStates::new(&self.device, &self.config, &self.own, slots, state)?;
        Ok(CudaPool::of(states, slots, false))
    }

    fn check(&self, ids: &[u32], pool: &CudaPool) -> ModelResult<()> {
        if !Arc::ptr_eq(&self.own, &pool.states.owner) {
            return Err(ModelError::argument("the pool", "of this decoder", "another's"));
        }
        match ids.iter().find(|&&id| id as usize >= self.config.vocab_size) {
            Some(id) => {
                Err(ModelError::argument("a token id", format!("in the vocabulary of {}", self.config.vocab_size), id))
            }
            None => Ok(()),
        }
    }

    /// Reads one token into each slot, at most [`ROWS`] slots at a time. `finish` gets the range of rows after each
    /// part.
    fn steps(
        &self,
        ids: &[u32],
        pool: &mut CudaPool,
        slots: &[usize],
        mut finish: impl FnMut(&mut CudaStates, Range<usize>) -> ModelResult<()>,
    ) -> ModelResult<()> {
        if ids.len() != slots.len() || ids.is_empty() {
            let found = format!("{} ids and {} slots", ids.len(), slots.len());
            return Err(ModelError::argument("ids", "one token for each slot, and at least one", found));
        }
        self.check(ids, pool)?;
        pool.begin(slots)?;
        let positions: Vec<u64> = pool.positions(slots).collect();
        let states = &mut pool.states;
        for start in (0..slots.len()).step_by(ROWS) {
            let rows = start..slots.len().min(start + ROWS);
            let step = self.step(&ids[rows.clone()], states, &slots[rows.clone()], &positions[rows.clone()]);
            step.map_err(|error| states.failed(error))?;
            finish(states, rows)?;
        }
        states.count(slots.len());
        pool.advance(slots, 1);
        Ok(())
    }

    /// Prefills a slot with tokens of a prompt, at most [`PREFILL`].
    fn read(&self, ids: &[u32], states: &mut CudaStates, slot: usize, position: u64) -> Result<()> {
        self.inputs(states.input.bytes()?, ids, &[slot as u32], &[position]);
        self.send(1, ids.len(), states)?;
        self.piece(&self.device, slot, ids.len(), states)
    }

    /// Copies the inputs of `rows` rows, `time` tokens each, to the device.
    pub(super) fn send(&self, rows: usize, time: usize, states: &CudaStates) -> Result<()> {
        let (step, bytes) = states.step(rows, time, !self.frequencies.is_empty());
        states.input.send(0, step.positions, bytes)
    }

    /// Runs the blocks on `tokens` tokens of one slot, whose inputs are on the device.
    pub(super) fn piece(&self, device: &CudaDevice, slot: usize, tokens: usize, states: &CudaStates) -> Result<()> {
        let (step, _) = states.step(1, tokens, !self.frequencies.is_empty());
        self.hidden(device, Step { one_slot: Some(slot), ..step }, states)
    }

    /// Runs a step of at most [`ROWS`] rows, padded to a power of two; the logits stay on the device.
    fn step(&self, ids: &[u32], states: &mut CudaStates, slots: &[usize], positions: &[u64]) -> Result<()> {
        let rows = ids.len().next_power_of_two();
        let filled = |of: &mut dyn Iterator<Item = u32>, with| -> Vec<u32> {
            let mut all: Vec<u32> = of.collect();
            all.resize(rows, with);
            all
        };
        let ids = filled(&mut ids.iter().copied(), 0);
        let positions: Vec<u64> = positions.iter().copied().chain(std::iter::repeat(0)).take(rows).collect();
        let all_slots = filled(&mut slots.iter().map(|&slot| slot as u32), PADDING);
        self.inputs(states.input.bytes()?, &ids, &all_slots, &positions);
        if !states.steps.contains_key(&rows) {
            // The first run is not recorded and reads only padding: nothing may be loaded or set up during a recording.
            let padding = vec![PADDING; rows];
            self.inputs(states.input.bytes()?, &ids, &padding, &positions);
            self.whole(rows, states)?;
            self.inputs(states.input.bytes()?, &ids, &all_slots, &positions);
            let device = self.device.clone();
            let recorded = device.0.record(&mut || self.whole(rows, states))?;
            states.steps.insert(rows, recorded);
        }
        states.steps[&rows].launch()
    }

    /// Waits for a step, and appends the logits of its rows.
    fn all_logits(&self, states: &mut CudaStates, rows: usize, logits: &mut Vec<f32>) -> Result<()> {
        let (head, bytes) = (states.work.head, rows * self.config.vocab_size * size_of::<f32>());
        states.output.receive(0, states.work.output.at, head + bytes)?;
        logits.extend(floats(&states.received()?[head..head + bytes]));
        Ok(())
    }

    /// Samples the tokens of a step's rows as planned, waits for them, and appends the outcome of each.
    fn sample(&self, states: &mut CudaStates, (sampled, logits): (&mut Vec<Sampled>, &mut Vec<f32>)) -> Result<()> {
        let (work, row_bytes) = (&states.work, self.config.vocab_size * size_of::<f32>());
        let rows_at = choose::Rows { logits: work.logits(), chosen: work.chosen() };
        let (head, rows) = (work.head, states.choices.plans.len());
        if !(0..rows).all(|row| states.choices.plans.wants_logits(row)) {
            states.choices.forward(&self.device, rows_at)?;
        }
        states.output.receive(0, states.work.output.at, head)?;
        let wanted: Vec<_> =
            states.choices.wanted().map(|(row, rows)| (head + row * row_bytes, rows * row_bytes)).collect();
        for &(at, bytes) in &wanted {
            states.output.receive(at, states.work.output.at + at as u64, bytes)?;
        }
        let output = states.received()?;
        for (at, bytes) in wanted {
            logits.extend(floats(&output[at..at + bytes]));
        }
        let sampled_words = output[OUTPUT_HEAD..head].to_vec();
        sampled.extend((0..rows).map(|row| states.choices.sampled(row, &sampled_words)));
        Ok(())
    }

    /// The recorded part of a step: inputs to the device, the blocks, the head.
    fn whole(&self, rows: usize, states: &CudaStates) -> Result<()> {
        self.send(rows, 1, states)?;
        self.logits(&self.device, rows, states)
    }

    /// Runs the blocks and the head on `rows` rows, whose inputs are on the device; the logits stay there.
    pub(super) fn logits(&self, device: &CudaDevice, rows: usize, states: &CudaStates) -> Result<()> {
        let (step, _) = states.step(rows, 1, !self.frequencies.is_empty());
        self.hidden(device, step, states)?;
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let work = &states.work;
        debug_assert_eq!(work.hidden, hidden);
        self.norm.forward(device, rows, work.x.at, &work.normed, (self.head.kind, false))?;
        let logits = Rows { at: work.logits(), stride: vocab };
        self.head.forward(device, rows, work.normed.rows(self.head.kind), logits)
    }

    /// Runs the blocks on a step whose inputs are on the device; leaves its residual stream in the workspace.
    fn hidden(&self, device: &CudaDevice, step: Step, states: &CudaStates) -> Result<()> {
        let table = self.embedding.as_ref().unwrap_or(&self.head);
        table.embed(device, step.rows * step.time, step.ids, states.work.x.at)?;
        for (i, block) in self.blocks.iter().enumerate() {
            block.forward(device, step, &states.work, states.layer(i))?;
        }
        Ok(())
    }

    /// Writes the inputs of a step: positions, slots, ids, angles.
    pub(super) fn inputs(&self, to: &mut [u8], ids: &[u32], slots: &[u32], positions: &[u64]) {
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            to[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        for position in positions {
            put(&position.to_le_bytes());
        }
        for number in slots.iter().chain(ids) {
            put(&number.to_le_bytes());
        }
        let time = ids.len() / slots.len() * usize::from(!self.frequencies.is_empty());
        for &start in positions {
            for t in 0..time as u64 {
                for frequency in &self.frequencies {
                    // In f64: at position ten million an f32 angle would be off by whole turns.
                    let (sin, cos) = ((start + t) as f64 * frequency).sin_cos();
                    put(&(cos as f32).to_le_bytes());
                    put(&(sin as f32).to_le_bytes());
                }
            }
        }
    }
}

impl Backend for CudaDecoder {
    type States = CudaStates;

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn eos(&self) -> &[u32] {
        self.config.eos_token_id.as_slice()
    }

    fn source(&self) -> Option<SourceConfig> {
        self.config.source()
    }

    fn weight_bytes(&self) -> usize {
        self.blocks.iter().map(Block::bytes).sum::<usize>() + self.head.bytes()
    }

    fn prefill(&self, ids: &[u32], pool: &mut CudaPool, slot: usize) -> ModelResult<()> {
        if ids.is_empty() {
            return Err(ModelError::argument("ids", "at least one token", "none"));
        }
        self.check(ids, pool)?;
        for ids in ids.chunks(PREFILL) {
            pool.begin(&[slot])?;
            let position = pool.positions(&[slot]).sum();
            let states = &mut pool.states;
            self.read(ids, states, slot, position).map_err(|error| states.failed(error))?;
            states.count(ids.len());
            pool.advance(&[slot], ids.len());
        }
        Ok(())
    }

    fn decode_into(&self, ids: &[u32], pool: &mut CudaPool, slots: &[usize], logits: &mut Vec<f32>) -> ModelResult<()> {
        logits.clear();
        self.steps(ids, pool, slots, |states, rows| {
            self.all_logits(states, rows.len(), logits).map_err(|error| states.failed(error))
        })
    }

    fn samples(&self) -> bool {
        true
    }

    fn decode_and_sample(
        &self,
        ids: &[u32],
        pool: &mut CudaPool,
        slots: &[usize],
        plan: &mut dyn FnMut(Range<usize>, &mut Plans),
        (sampled, logits): (&mut Vec<Sampled>, &mut Vec<f32>),
    ) -> ModelResult<()> {
        sampled.clear();
        logits.clear();
        self.steps(ids, pool, slots, |states, rows| {
            let (plans, count) = (&mut states.choices.plans, rows.len());
            plans.clear();
            plan(rows, plans);
            if plans.len() != count {
                return Err(ModelError::argument("the rows planned", count.to_string(), plans.len()));
            }
            self.sample(states, (&mut *sampled, &mut *logits)).map_err(|error| states.failed(error))
        })
    }
}
