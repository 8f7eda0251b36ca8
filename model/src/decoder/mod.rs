//! The decoder: reads token ids, advances constant-size states, and returns logits.

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

/// Tokens per prefill chunk. Smaller chunks read the weights more often; the intermediate results of larger ones do not
/// fit into a core's cache.
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

/// How a step reads its tokens.
enum Reading<'a> {
    Text,
    /// Uses the chunked form of the recurrence, which collects statistics.
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

    /// Creates a decoder with random weights, for benchmarks. Matrices have type `weights`, or f16 if their rows are
    /// not whole blocks of it.
    ///
    /// # Errors
    /// [`LoadError::Config`] when the config is out of bounds.
    pub fn random(config: DecoderConfig, weights: WeightType, seed: u64) -> std::result::Result<Self, LoadError> {
        config.validate()?;
        Self::new(config, &Weights::new(&Source::Random(weights, seed)))
    }

    /// The config of the decoder.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The type of the output head's weights. The layers' weights have the same type, except for matrices whose rows
    /// are not whole blocks of it.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Bytes in memory of the matrices that a token reads. A separate embedding does not count, because a token reads
    /// only one of its rows.
    pub fn weight_bytes(&self) -> usize {
        self.layers.bytes() + self.head.bytes()
    }

    /// The upper bound of each head's key maximum: (layers, heads), or empty if states have no maxima.
    ///
    /// A larger maximum in a state cannot come from any text, and would outweigh every later key.
    pub fn greatest_maxima(&self) -> Vec<f32> {
        self.layers.greatest_maxima()
    }

    /// Creates a pool of `slots` empty conversations for this decoder, with f32 states.
    ///
    /// # Errors
    /// As for [`Self::new_pool_with`].
    pub fn new_pool(&self, slots: usize) -> Result<StatePool> {
        self.new_pool_with(PoolOptions::new(slots))
    }

    /// Creates a pool of empty conversations for this decoder.
    ///
    /// # Errors
    /// [`ModelError::Argument`] when there are no slots or not enough memory.
    pub fn new_pool_with(&self, options: PoolOptions) -> Result<StatePool> {
        StatePool::new(&self.config, &*self.layers, options)
    }

    /// Reads new tokens in each row and returns the logits after every one of them.
    ///
    /// ids: (batch, time) u32; slots: one per row, all different, whose states advance by `time` tokens.
    /// -> (batch, time, vocab) f32
    ///
    /// The bits of logits and states depend only on the text: not on how it is divided into calls, nor on the other
    /// rows of the batch.
    ///
    /// # Errors
    /// After these errors nothing has changed: an id is outside the vocabulary; a slot is out of range, named twice,
    /// incomplete, or lacks the source that a text of an encoder-decoder begins with; `ids` is empty; or the pool
    /// belongs to another decoder. After any other error the slots are incomplete, and are rejected until a reset.
    pub fn forward(&self, ids: &Tensor, pool: &mut StatePool, slots: &[usize]) -> Result<Tensor> {
        self.all_logits(ids, pool, slots, None)
    }

    /// Like [`Self::forward`], but uses the chunked form of the recurrence and records the denominators and gates of
    /// every layer in `probe`. Logits differ by rounding (under 1e-4; a bf16 state is rounded to nearest at the end of
    /// each call). Softmax, hybrid and cross attention have only one form, with the same bits; cross attention is not
    /// recorded.
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

    /// Reads tokens into one conversation -> the logits after the last one (vocab)
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn prefill_logits(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        self.prefill_logits_into(ids, pool, slot, &mut logits)?;
        Ok(logits)
    }

    /// Like [`Self::prefill_logits`], with a buffer that the caller reuses.
    fn prefill_logits_into(&self, ids: &[u32], pool: &mut StatePool, slot: usize, logits: &mut Vec<f32>) -> Result<()> {
        let last = self.read(ids, pool, slot)?;
        self.logits(pool, 1, last - 1..last, logits);
        Ok(())
    }

    /// Reads tokens into one conversation without computing logits.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn prefill(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<()> {
        self.read(ids, pool, slot).map(|_| ())
    }

    /// Reads tokens chunk by chunk. Returns the length of the last chunk.
    fn read(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<usize> {
        self.check_ids(ids)?;
        let (before, last) = ids.split_at(ids.len().saturating_sub(1) / CHUNK * CHUNK);
        for chunk in before.chunks(CHUNK).chain([last]) {
            self.hidden(chunk, pool, &[slot], Reading::Text)?;
        }
        Ok(last.len())
    }

    /// Resets a slot and reads the source of an encoder-decoder into it. The text must then begin with the decoder's
    /// start token.
    ///
    /// # Errors
    /// After these errors nothing has changed: the model has no encoder, `ids` is empty or longer than the config's
    /// `max_source_positions`, an id is outside the vocabulary, the slot is out of range, the pool belongs to another
    /// decoder, or there is not enough memory. After any other error the slot is rejected until it is reset or reads
    /// another source.
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

    /// Reads one token in each row -> logits (rows, vocab), row-major
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn decode(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize]) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        self.decode_into(ids, pool, slots, &mut logits)?;
        Ok(logits)
    }

    /// Like [`Self::decode`], with a buffer that the caller reuses. After the first step with as many rows, nothing is
    /// allocated.
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

    /// Whether the decoder can verify draft tokens. Mixers with a window cannot.
    pub fn speculates(&self) -> bool {
        self.layers.speculate()
    }

    /// Reads the same number of draft tokens in each row in one step, without changing the states: the caller decides
    /// from the logits how many drafts each slot keeps. Until [`Self::keep`] or a reset, all other calls reject these
    /// slots.
    ///
    /// ids: (rows, time), row-major -> logits: (rows, time, vocab), with the same bits that [`Self::decode`] gives
    /// token by token
    ///
    /// # Errors
    /// The decoder cannot verify drafts, or as for [`Self::forward`].
    pub fn verify_into(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        if !self.speculates() {
            return Err(ModelError::NoSpeculation);
        }
        self.hidden(ids, pool, slots, Reading::Drafts)?;
        self.logits(pool, slots.len(), 0..ids.len() / slots.len(), logits);
        Ok(())
    }

    /// Appends the first `count` draft tokens of a slot to its text. The state then has the same bits as if the tokens
    /// had been decoded one by one.
    ///
    /// # Errors
    /// After these errors nothing has changed: the slot has read no drafts since its last change, it has read fewer
    /// than `count`, or other slots have read drafts since. After any other error the slot must be reset.
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

    /// Computes the logits of the tokens `tokens` of each row, after [`Self::hidden`].
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

    /// Runs the layers for the rows' tokens, and leaves the residual stream (rows, time, hidden) in the pool.
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
            // This step reuses the buffers of earlier drafts.
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

    /// Looks up the tokens' rows of the embedding. x: (tokens, hidden)
    fn embed(&self, ids: &[u32], x: &mut [f32]) {
        for (&id, x) in ids.iter().zip(x.chunks_exact_mut(self.config.hidden_size)) {
            match &self.embedding {
                None => self.head.row(id as usize, x),
                Some(table) => table.row(id as usize, x),
            }
        }
    }
}
