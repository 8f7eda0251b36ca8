//! The decoder: takes token ids, advances states of constant size, and returns logits.

mod backend;

use candle_core::{Device, Tensor};

use crate::compute::sized;
use crate::config::{DecoderConfig, PositionEmbedding};
use crate::encoder::Encoder;
use crate::error::{ModelError, Result, SlotError};
use crate::mixers::family;
use crate::mixers::layer::{Kept, Layers, Rows, Step};
use crate::nn::{Linear, Norm, Table};
use crate::probe::Probe;
use crate::state::{PoolOptions, StatePool, Workspace, can_allocate};
use crate::weights::{LoadError, Source, WeightType, Weights};

/// Tokens of a text that are computed together. Fewer would read the weights more often; the intermediate results of more
/// do not fit into a core's cache.
const CHUNK: usize = 128;

/// A decoder. Its weights are read-only: one decoder serves any number of pools.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    embedding: Option<Table>, // (vocab, hidden); none if the head's rows are the embedding
    encoder: Option<Encoder>,
    layers: Box<dyn Layers>,
    norm: Norm,   // (hidden)
    head: Linear, // (vocab, hidden)
    weight_type: WeightType,
}

/// What a step reads.
enum Reading<'a> {
    Text,
    /// By the form of the recurrence that counts.
    Probed(&'a mut Probe),
    Drafts,
}

impl Decoder {
    pub(crate) fn new(config: DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let (family, frame) = (family(config.attention), family(config.attention).frame);
        let model = weights.pp(frame.body);
        let (embedding, head) = if config.tie_word_embeddings {
            (None, model.matrix(frame.embedding, vocab, hidden)?)
        } else {
            let head = weights.matrix("lm_head.weight", vocab, hidden)?;
            (Some(Table::new(&model, frame.embedding, vocab, hidden)?), head)
        };
        let (weight_type, head) = (head.kind, Linear::new(&head, None)?);
        let encoder = config.source().map(|source| Encoder::load(&config, source.layers, &weights.pp("encoder")));
        let encoder = encoder.transpose()?;
        let layers = (family.load)(&config, &model)?;
        let norm = Norm::load(frame.norm, &model, frame.norm_name, hidden, config.rms_norm_eps)?;
        Ok(Self { config, embedding, encoder, layers, norm, head, weight_type })
    }

    /// A decoder of random weights, for measurements: matrices are of type `weights`, or f16 where their rows are not
    /// whole blocks of it.
    ///
    /// # Errors
    /// [`LoadError::Config`] when the config is out of its bounds.
    pub fn random(config: DecoderConfig, weights: WeightType, seed: u64) -> std::result::Result<Self, LoadError> {
        config.validate()?;
        Self::new(config, &Weights::new(&Source::Random(weights, seed)))
    }

    /// The config of the decoder.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The type of the output head's weights, and of the layers' weights except matrices whose rows are not whole blocks
    /// of it.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Bytes in memory of the matrices that a token reads. A separate embedding is not counted: a token reads one row of
    /// it.
    pub fn weight_bytes(&self) -> usize {
        self.layers.bytes() + self.head.bytes()
    }

    /// The largest maximum that a key of each head can have: (layers, heads), or empty if states have no maxima.
    ///
    /// A larger one in a state came from no text, and would outweigh every key to come.
    pub fn greatest_maxima(&self) -> Vec<f32> {
        self.layers.greatest_maxima()
    }

    /// A pool of `slots` empty conversations for this decoder, states in f32.
    ///
    /// # Errors
    /// As for [`Self::new_pool_with`].
    pub fn new_pool(&self, slots: usize) -> Result<StatePool> {
        self.new_pool_with(PoolOptions::new(slots))
    }

    /// A pool of empty conversations for this decoder.
    ///
    /// # Errors
    /// [`ModelError::Argument`] when there are no slots, or the system does not have enough memory.
    pub fn new_pool_with(&self, options: PoolOptions) -> Result<StatePool> {
        StatePool::new(&self.config, &*self.layers, options)
    }

    /// All logits of some new tokens of each row.
    ///
    /// ids: (batch, time) u32; slots: one for each row, all different, whose states advance by `time` tokens.
    /// -> (batch, time, vocab) f32
    ///
    /// The bits of logits and states depend on the text alone: not on how it is cut into calls, nor on the other rows of
    /// the batch.
    ///
    /// # Errors
    /// When an id is outside the vocabulary, a slot is out of range, named twice, incomplete or without the source that a
    /// text of an encoder-decoder begins with, `ids` is empty, or the pool belongs to another decoder: then nothing has
    /// changed. After any other error the slots are incomplete, and are refused until they are reset.
    pub fn forward(&self, ids: &Tensor, pool: &mut StatePool, slots: &[usize]) -> Result<Tensor> {
        self.all_logits(ids, pool, slots, None)
    }

    /// [`Self::forward`] by the chunked form of the recurrence, which counts the denominators and gates of every layer in
    /// `probe`. Logits differ by rounding (under 1e-4; a state in bf16 is rounded to the nearest at the end of each call).
    /// Softmax, the hybrid and cross attention have one form and the same bits; cross attention is not counted.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn forward_probed(
        &self,
        ids: &Tensor,
        pool: &mut StatePool,
        slots: &[usize],
        probe: &mut Probe,
    ) -> Result<Tensor> {
        probe.resize_with(self.config.num_hidden_layers, Default::default);
        self.all_logits(ids, pool, slots, Some(probe))
    }

    /// Reads some tokens of one conversation -> the logits after the last one (vocab)
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn prefill_logits(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        self.prefill_logits_into(ids, pool, slot, &mut logits)?;
        Ok(logits)
    }

    /// [`Self::prefill_logits`] into a buffer that the caller keeps.
    fn prefill_logits_into(&self, ids: &[u32], pool: &mut StatePool, slot: usize, logits: &mut Vec<f32>) -> Result<()> {
        let last = self.read(ids, pool, slot)?;
        self.logits(pool, 1, last - 1..last, logits);
        Ok(())
    }

    /// Reads some tokens of one conversation without computing logits.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn prefill(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<()> {
        self.read(ids, pool, slot).map(|_| ())
    }

    /// Reads tokens chunk by chunk; returns the length of the last chunk.
    fn read(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<usize> {
        self.check_ids(ids)?;
        let (before, last) = ids.split_at(ids.len().saturating_sub(1) / CHUNK * CHUNK);
        for chunk in before.chunks(CHUNK).chain([last]) {
            self.hidden(chunk, pool, &[slot], Reading::Text)?;
        }
        Ok(last.len())
    }

    /// Empties a slot and reads the source of an encoder-decoder into it. The text then begins with the decoder's start
    /// token.
    ///
    /// # Errors
    /// When the model has no encoder, `ids` is empty or longer than the config's `max_source_positions`, an id is outside
    /// the vocabulary, the slot is out of range, the pool belongs to another decoder, or the system does not have enough
    /// memory: then nothing has changed. After any other error the slot is refused until it is reset or reads another
    /// source.
    pub fn read_source(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<()> {
        let (Some(encoder), Some(source)) = (&self.encoder, self.config.source()) else {
            return Err(ModelError::NoEncoder);
        };
        if ids.is_empty() || ids.len() > source.max_positions {
            let bound = format!("1 to {} tokens long", source.max_positions);
            return Err(ModelError::argument("a source", bound, ids.len()));
        }
        self.check_ids(ids)?;
        self.check_pool(pool)?;
        let hidden = self.config.hidden_size;
        let bytes = encoder.working_bytes(ids.len(), hidden);
        if !can_allocate(bytes) {
            let bound = format!("so short that the system has the {bytes} bytes that reading it needs");
            return Err(ModelError::argument("a source", bound, format!("{} tokens", ids.len())));
        }
        pool.begin_source(slot)?;
        let (states, Workspace { cx, .. }) = pool.parts();
        let mut x = vec![0.0; ids.len() * hidden];
        self.embed(ids, &mut x);
        encoder.forward(cx, &mut x, hidden)?;
        self.layers.keep_source(cx, &x, states, slot)?;
        pool.source_was_read(slot, ids.len());
        Ok(())
    }

    /// Reads one token of each row -> logits (rows, vocab), row after row
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn decode(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize]) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        self.decode_into(ids, pool, slots, &mut logits)?;
        Ok(logits)
    }

    /// [`Self::decode`] into a buffer that the caller keeps. After the first step of as many rows, nothing is allocated.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn decode_into(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        if ids.len() != slots.len() {
            return Err(ModelError::Rows { ids: ids.len(), rows: slots.len() });
        }
        self.hidden(ids, pool, slots, Reading::Text)?;
        self.logits(pool, ids.len(), 0..1, logits);
        Ok(())
    }

    /// Whether the decoder reads drafts: all mixers but those with a window.
    pub fn speculates(&self) -> bool {
        self.layers.speculate()
    }

    /// Reads as many drafts of each row in one step, and leaves the states as they are: how many of them each slot keeps is
    /// decided in view of the logits. Until [`Self::keep`] or a reset, all other calls refuse these slots.
    ///
    /// ids: (rows, time), row after row -> logits: (rows, time, vocab), of the bits that [`Self::decode`] gives token by
    /// token
    ///
    /// # Errors
    /// The decoder reads no drafts, or as for [`Self::forward`].
    pub fn verify_into(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        if !self.speculates() {
            return Err(ModelError::NoSpeculation);
        }
        self.hidden(ids, pool, slots, Reading::Drafts)?;
        self.logits(pool, slots.len(), 0..ids.len() / slots.len(), logits);
        Ok(())
    }

    /// Makes the first `count` of a slot's drafts a part of its text, whose state then has the bits of reading them one after
    /// another.
    ///
    /// # Errors
    /// The slot has read no drafts since its last change, or not so many, or another step of drafts has followed: then
    /// nothing has changed. After any other error the slot must be reset.
    pub fn keep(&self, pool: &mut StatePool, slot: usize, count: usize) -> Result<()> {
        self.check_pool(pool)?;
        let Some(row) = pool.parts().1.drafted.iter().position(|&drafted| drafted == slot) else {
            return Err(ModelError::Slot { slot, reason: SlotError::NoDrafts });
        };
        let time = pool.begin_keeping(slot, count)?;
        let position = pool.positions(&[slot]).next().unwrap_or(0);
        let (states, Workspace { cx, .. }) = pool.parts();
        self.layers.keep(cx, states, Kept { slot, row, time, count, position, layer: 0 })?;
        pool.advance(&[slot], count);
        Ok(())
    }

    fn all_logits(
        &self,
        ids: &Tensor,
        pool: &mut StatePool,
        slots: &[usize],
        probe: Option<&mut Probe>,
    ) -> Result<Tensor> {
        let (batch, time) = ids.dims2()?;
        if batch != slots.len() {
            return Err(ModelError::Rows { ids: batch * time, rows: slots.len() });
        }
        self.hidden(&ids.flatten_all()?.to_vec1()?, pool, slots, probe.map_or(Reading::Text, Reading::Probed))?;
        let mut logits = Vec::new();
        self.logits(pool, batch, 0..time, &mut logits);
        Ok(Tensor::from_vec(logits, (batch, time, self.config.vocab_size), &Device::Cpu)?)
    }

    /// The logits of some tokens of each row, after [`Self::hidden`].
    fn logits(&self, pool: &mut StatePool, rows: usize, tokens: std::ops::Range<usize>, logits: &mut Vec<f32>) {
        let hidden = self.config.hidden_size;
        let Workspace { cx, x, last, .. } = pool.parts().1;
        let time = x.len() / (rows * hidden);
        let last = sized(last, rows * tokens.len() * hidden);
        for (x, last) in x.chunks_exact(time * hidden).zip(last.chunks_exact_mut(tokens.len() * hidden)) {
            self.norm.forward(cx, &x[tokens.start * hidden..tokens.end * hidden], last);
        }
        logits.resize(rows * tokens.len() * self.config.vocab_size, 0.0);
        self.head.forward(cx, last, logits);
    }

    /// Takes the rows forward; leaves the residual stream (rows, time, hidden) in the pool.
    fn hidden(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize], reading: Reading<'_>) -> Result<()> {
        let (rows, hidden) = (slots.len(), self.config.hidden_size);
        if ids.is_empty() || rows == 0 || !ids.len().is_multiple_of(rows) {
            return Err(ModelError::Rows { ids: ids.len(), rows });
        }
        self.check_ids(ids)?;
        self.check_pool(pool)?;
        pool.begin(slots)?;
        pool.set_positions(slots);
        let time = ids.len() / rows;
        let (states, Workspace { cx, x, positions, angles, denominators, drafted, .. }) = pool.parts();
        x.resize(ids.len() * hidden, 0.0);
        self.embed(ids, x);
        let rope = self.config.position_embedding == PositionEmbedding::Rope;
        if rope {
            angles.turn(positions, time);
        }
        let drafts = matches!(reading, Reading::Drafts);
        let probe = if let Reading::Probed(probe) = reading { Some(probe) } else { None };
        if drafts {
            // The buffers of earlier drafts are used again.
            drafted.clear();
        }
        let rows = Rows { slots, positions, time, angles: rope.then_some(&*angles), layer: 0, drafts };
        self.layers.forward(&mut Step { cx, rows, denominators, probe }, x, states)?;
        if drafts {
            drafted.extend_from_slice(slots);
            pool.drafted(slots, time);
        } else {
            pool.advance(slots, time);
        }
        Ok(())
    }

    fn check_pool(&self, pool: &StatePool) -> Result<()> {
        let (expected, found) = (self.config.state_layout(), pool.layout());
        if expected == found {
            Ok(())
        } else {
            Err(ModelError::ForeignPool { expected: Box::new(expected), found: Box::new(found) })
        }
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        let vocab_size = self.config.vocab_size;
        match ids.iter().find(|&&id| id as usize >= vocab_size) {
            Some(&id) => Err(ModelError::TokenOutOfRange { id, vocab_size }),
            None => Ok(()),
        }
    }

    /// The tokens' rows of the embedding. x: (tokens, hidden)
    fn embed(&self, ids: &[u32], x: &mut [f32]) {
        for (&id, x) in ids.iter().zip(x.chunks_exact_mut(self.config.hidden_size)) {
            match &self.embedding {
                None => self.head.row(id as usize, x),
                Some(table) => table.row(id as usize, x),
            }
        }
    }
}
