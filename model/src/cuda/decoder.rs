//! The decoder on a device: token ids in, logits out. A step's kernels are recorded once for every number of rows (a
//! power of two) and replayed: states have a constant size, so what is recorded is right for ever.

use std::ops::Range;
use std::sync::Arc;

use candle_core::bail;

use super::block::Block;
use super::choose;
use super::device::{CudaDevice, Result};
use super::mixer;
use super::ops::{Linear, Mode, RmsNorm, Rows};
use super::plan::{self, OUTPUT_HEAD, PREFILL, ROWS};
use super::pool::{CudaPool, NOBODY, Step, floats};
use crate::config::{DecoderConfig, PositionEmbedding};
use crate::memory::StateType;
use crate::sampling::{Plans, Sampled};
use crate::weights::{LoadError, Source, WeightType, Weights};

/// A decoder whose weights and states are on a device. Its weights are read-only: one decoder serves any number of pools.
#[derive(Debug)]
pub struct CudaDecoder {
    pub(super) device: CudaDevice,
    config: DecoderConfig,
    embedding: Option<Linear>, // (vocab, hidden); none where the head's rows are it
    blocks: Vec<Block>,
    norm: RmsNorm, // (hidden)
    head: Linear,  // (vocab, hidden)
    frequencies: Vec<f64>,
    /// What pools of this decoder know it by.
    own: Arc<()>,
}

impl CudaDecoder {
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

    /// A decoder of random weights, for measurements, as [`crate::Decoder::random`].
    ///
    /// # Errors
    /// The config is out of its bounds or has no kernels here, or the device has too little memory.
    pub fn random(
        config: DecoderConfig,
        weights: WeightType,
        seed: u64,
        device: &CudaDevice,
    ) -> std::result::Result<Self, LoadError> {
        config.validate()?;
        Self::new(config, &Weights::new(&Source::Random(weights, seed)), device)
    }

    /// What the decoder is made of.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Bytes of the matrices that a token reads, but for an embedding of its own, of which it reads a row.
    pub fn weight_bytes(&self) -> usize {
        self.blocks.iter().map(Block::bytes).sum::<usize>() + self.head.bytes()
    }

    /// What no maximum in a state is above, as [`crate::Decoder::greatest_maxima`]: none of the maps here has one.
    #[allow(clippy::unused_self, reason = "as the CPU's decoder")]
    pub fn greatest_maxima(&self) -> Vec<f32> {
        Vec::new()
    }

    /// How many slots fit into nine tenths of the device's free memory, with what their steps hold: at least 1, at most
    /// `most`.
    ///
    /// # Errors
    /// [`crate::cuda::CudaError::Failed`]
    pub fn room(&self, state: StateType, most: usize) -> Result<usize> {
        let (free, _) = self.device.memory()?;
        Ok(plan::fitting(&self.config, state, free / 10 * 9, most.max(1)))
    }

    /// A pool of empty conversations for this decoder, on its device.
    ///
    /// # Errors
    /// When there are no slots, or the device has not as much memory as they would take: it says how much is free.
    pub fn new_pool(&self, slots: usize, state: StateType) -> candle_core::Result<CudaPool> {
        if slots == 0 {
            bail!("slots must be at least 1, found 0");
        }
        CudaPool::new(&self.device, &self.config, &self.own, slots, state).map_err(candle_core::Error::wrap)
    }

    /// Takes in some tokens of one conversation and makes no logits. Where a text is cut into calls changes no bit.
    ///
    /// # Errors
    /// As for [`crate::Decoder::forward`], or when the device fails.
    pub fn absorb(&self, ids: &[u32], pool: &mut CudaPool, slot: usize) -> candle_core::Result<()> {
        if ids.is_empty() {
            bail!("there must be at least one token, found none");
        }
        self.check(ids, pool)?;
        for ids in ids.chunks(PREFILL) {
            let places = pool.begin(&[slot])?;
            self.read(ids, pool, slot, places[0]).map_err(|error| pool.told(error))?;
            pool.advance(&[slot], ids.len());
        }
        Ok(())
    }

    /// Takes every row one token further; `logits` becomes (rows, vocab), row by row.
    ///
    /// A row's logits are the same bits whatever the other rows and slots are.
    ///
    /// # Errors
    /// As for [`crate::Decoder::forward`], or when the device fails.
    pub fn decode_into(
        &self,
        ids: &[u32],
        pool: &mut CudaPool,
        slots: &[usize],
        logits: &mut Vec<f32>,
    ) -> candle_core::Result<()> {
        if ids.len() != slots.len() || ids.is_empty() {
            bail!("every row needs a token and a slot, found {} ids and {} slots", ids.len(), slots.len());
        }
        self.check(ids, pool)?;
        let places = pool.begin(slots)?;
        logits.clear();
        let rows = ids.chunks(ROWS).zip(slots.chunks(ROWS)).zip(places.chunks(ROWS));
        for ((ids, slots), places) in rows {
            let step = self.step(ids, pool, slots, places).and_then(|()| self.all_logits(pool, slots.len(), logits));
            step.map_err(|error| pool.told(error))?;
        }
        pool.advance(slots, 1);
        Ok(())
    }

    /// Takes every row one token further, and chooses the next tokens on the device. `sampled` becomes one for each row,
    /// `logits` (rows whose logits are wanted, vocab).
    ///
    /// `plan` is called while the step is under way, for some rows at a time, in their order: it has to add as many to
    /// the [`Plans`].
    ///
    /// # Errors
    /// As for [`crate::Decoder::forward`], when the device fails, or `plan` has added another number of rows.
    pub fn decode_and_sample(
        &self,
        ids: &[u32],
        pool: &mut CudaPool,
        slots: &[usize],
        plan: &mut dyn FnMut(Range<usize>, &mut Plans),
        (sampled, logits): (&mut Vec<Sampled>, &mut Vec<f32>),
    ) -> candle_core::Result<()> {
        if ids.len() != slots.len() || ids.is_empty() {
            bail!("every row needs a token and a slot, found {} ids and {} slots", ids.len(), slots.len());
        }
        self.check(ids, pool)?;
        let places = pool.begin(slots)?;
        sampled.clear();
        logits.clear();
        let rows = ids.chunks(ROWS).zip(slots.chunks(ROWS)).zip(places.chunks(ROWS));
        for ((ids, slots), places) in rows {
            self.step(ids, pool, slots, places).map_err(|error| pool.told(error))?;
            let plans = &mut pool.choices.plans;
            plans.clear();
            plan(sampled.len()..sampled.len() + slots.len(), plans);
            if plans.len() != slots.len() {
                bail!("the choice of every row must be planned, found {} of {}", plans.len(), slots.len());
            }
            self.choose(pool, (sampled, logits)).map_err(|error| pool.told(error))?;
        }
        pool.advance(slots, 1);
        Ok(())
    }

    fn check(&self, ids: &[u32], pool: &CudaPool) -> candle_core::Result<()> {
        if !Arc::ptr_eq(&self.own, &pool.owner) {
            bail!("the pool must be of this decoder, and is another's");
        }
        match ids.iter().find(|&&id| id as usize >= self.config.vocab_size) {
            Some(id) => bail!("token id {id} is outside the vocabulary of {}", self.config.vocab_size),
            None => Ok(()),
        }
    }

    /// Takes in a prompt's tokens, not more than [`PREFILL`].
    fn read(&self, ids: &[u32], pool: &mut CudaPool, slot: usize, place: u64) -> Result<()> {
        self.inputs(pool.input.bytes()?, ids, &[slot as u32], &[place]);
        self.send(1, ids.len(), pool)?;
        self.piece(&self.device, slot, ids.len(), pool)
    }

    /// What `inputs` wrote for so many rows, and tokens of each: to the device.
    pub(super) fn send(&self, rows: usize, time: usize, pool: &CudaPool) -> Result<()> {
        let (step, bytes) = pool.step(rows, time, !self.frequencies.is_empty());
        pool.input.send(0, step.places, bytes)
    }

    /// So many tokens of one slot, whose inputs are on the device: through the blocks.
    pub(super) fn piece(&self, device: &CudaDevice, slot: usize, tokens: usize, pool: &CudaPool) -> Result<()> {
        let (step, _) = pool.step(1, tokens, !self.frequencies.is_empty());
        self.hidden(device, Step { one_slot: Some(slot), ..step }, pool)
    }

    /// One step of at most [`ROWS`] rows, filled up to a power of two; the logits stay on the device.
    fn step(&self, ids: &[u32], pool: &mut CudaPool, slots: &[usize], places: &[u64]) -> Result<()> {
        let rows = ids.len().next_power_of_two();
        let filled = |of: &mut dyn Iterator<Item = u32>, with| -> Vec<u32> {
            let mut all: Vec<u32> = of.collect();
            all.resize(rows, with);
            all
        };
        let ids = filled(&mut ids.iter().copied(), 0);
        let places: Vec<u64> = places.iter().copied().chain(std::iter::repeat(0)).take(rows).collect();
        let all_slots = filled(&mut slots.iter().map(|&slot| slot as u32), NOBODY);
        self.inputs(pool.input.bytes()?, &ids, &all_slots, &places);
        if !pool.steps.contains_key(&rows) {
            // Once as it is, so that nothing is loaded or set up while the step is recorded; of nobody's slots.
            let nobody = vec![NOBODY; rows];
            self.inputs(pool.input.bytes()?, &ids, &nobody, &places);
            self.whole(rows, pool)?;
            self.inputs(pool.input.bytes()?, &ids, &all_slots, &places);
            let device = self.device.clone();
            let recorded = device.0.record(&mut || self.whole(rows, pool))?;
            pool.steps.insert(rows, recorded);
        }
        pool.steps[&rows].replay()
    }

    /// Waits for a step, and adds the logits of its rows.
    fn all_logits(&self, pool: &mut CudaPool, rows: usize, logits: &mut Vec<f32>) -> Result<()> {
        let (head, bytes) = (pool.work.head, rows * self.config.vocab_size * size_of::<f32>());
        pool.output.receive(0, pool.work.output.at, head + bytes)?;
        logits.extend(floats(&pool.received()?[head..head + bytes]));
        Ok(())
    }

    /// Chooses the tokens of a step's rows as they are planned, and waits for them; adds what each has come to.
    fn choose(&self, pool: &mut CudaPool, (sampled, logits): (&mut Vec<Sampled>, &mut Vec<f32>)) -> Result<()> {
        let (work, row_bytes) = (&pool.work, self.config.vocab_size * size_of::<f32>());
        let at = choose::Rows { logits: work.logits(), chosen: work.chosen() };
        let (head, rows) = (work.head, pool.choices.plans.len());
        if !(0..rows).all(|row| pool.choices.plans.wants_logits(row)) {
            pool.choices.forward(&self.device, at)?;
        }
        pool.output.receive(0, pool.work.output.at, head)?;
        let wanted: Vec<_> =
            pool.choices.wanted().map(|(row, rows)| (head + row * row_bytes, rows * row_bytes)).collect();
        for &(place, bytes) in &wanted {
            pool.output.receive(place, pool.work.output.at + place as u64, bytes)?;
        }
        let output = pool.received()?;
        for (place, bytes) in wanted {
            logits.extend(floats(&output[place..place + bytes]));
        }
        let chosen = output[OUTPUT_HEAD..head].to_vec();
        sampled.extend((0..rows).map(|row| pool.choices.sampled(row, &chosen)));
        Ok(())
    }

    /// All of a step that is recorded: inputs to the device, the blocks, the head.
    fn whole(&self, rows: usize, pool: &CudaPool) -> Result<()> {
        self.send(rows, 1, pool)?;
        self.logits(&self.device, rows, pool)
    }

    /// A step of so many rows, whose inputs are on the device: through the blocks and the head. The logits stay there.
    pub(super) fn logits(&self, device: &CudaDevice, rows: usize, pool: &CudaPool) -> Result<()> {
        let (step, _) = pool.step(rows, 1, !self.frequencies.is_empty());
        self.hidden(device, step, pool)?;
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let work = &pool.work;
        debug_assert_eq!(work.hidden, hidden);
        self.norm.forward(device, rows, work.x.at, &work.normed, (self.head.kind, false))?;
        let logits = Rows { at: work.logits(), stride: vocab };
        self.head.forward(device, rows, work.normed.rows(self.head.kind), logits)
    }

    /// The residual stream of a step whose inputs are on the device; its slots are taken forward.
    fn hidden(&self, device: &CudaDevice, step: Step, pool: &CudaPool) -> Result<()> {
        let table = self.embedding.as_ref().unwrap_or(&self.head);
        table.embed(device, step.rows * step.time, step.ids, pool.work.x.at)?;
        for (i, block) in self.blocks.iter().enumerate() {
            block.forward(device, step, &pool.work, pool.layer(i))?;
        }
        Ok(())
    }

    /// Writes what a step is given: places, slots, ids, angles.
    pub(super) fn inputs(&self, to: &mut [u8], ids: &[u32], slots: &[u32], places: &[u64]) {
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            to[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        for place in places {
            put(&place.to_le_bytes());
        }
        for number in slots.iter().chain(ids) {
            put(&number.to_le_bytes());
        }
        let time = ids.len() / slots.len() * usize::from(!self.frequencies.is_empty());
        for &start in places {
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
