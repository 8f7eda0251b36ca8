//! The decoder: token ids in, logits out, states of constant size taken forward.

use candle_core::{Device, Result, Tensor, bail};

use crate::attention::Rows;
use crate::block::Block;
use crate::compute::sized;
use crate::config::{DecoderConfig, PositionEmbedding};
use crate::encoder::Encoder;
use crate::error::ModelError;
use crate::nn::{Linear, RmsNorm, Table};
use crate::probe::Probe;
use crate::runner::Backend;
use crate::state::{HostStates, PoolOptions, StatePool, Workspace, could_be_had};
use crate::weights::{LoadError, Source, WeightType, Weights};

/// A decoder of pre-norm blocks. Its weights are read-only: one decoder serves any number of pools.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    embedding: Option<Table>, // (vocab, hidden); none where the head's rows are it
    encoder: Option<Encoder>,
    blocks: Vec<Block>,
    norm: RmsNorm, // (hidden)
    head: Linear,  // (vocab, hidden)
    weight_type: WeightType,
}

impl Decoder {
    pub(crate) fn new(config: DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let model = weights.pp("model");
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let (embedding, head) = if config.tie_word_embeddings {
            (None, model.matrix("embed_tokens.weight", vocab, hidden)?)
        } else {
            let head = weights.matrix("lm_head.weight", vocab, hidden)?;
            (Some(Table::new(&model, "embed_tokens.weight", vocab, hidden)?), head)
        };
        let (weight_type, head) = (head.kind, Linear::new(&head, None)?);
        let encoder = config.source().map(|source| Encoder::new(&config, source.layers, &weights.pp("encoder")));
        let encoder = encoder.transpose()?;
        let blocks = (0..config.num_hidden_layers)
            .map(|i| Block::new(&config, &model.pp(&format!("layers.{i}"))))
            .collect::<std::result::Result<_, _>>()?;
        let norm = RmsNorm::new(model.numbers("norm.weight", &[hidden])?, config.rms_norm_eps);
        Ok(Self { config, embedding, encoder, blocks, norm, head, weight_type })
    }

    /// A decoder of random weights, for measurements: matrices in `weights`, or in f16 where their rows are not whole
    /// blocks of it.
    ///
    /// # Errors
    /// The config is out of its bounds.
    pub fn random(config: DecoderConfig, weights: WeightType, seed: u64) -> std::result::Result<Self, LoadError> {
        config.validate()?;
        Self::new(config, &Weights::new(&Source::Random(weights, seed)))
    }

    /// What the decoder is made of.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// How the weights of the output head are held; those of the layers too, but for matrices whose rows are not whole
    /// blocks of it.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Bytes of the matrices that a token reads as they lie in memory, each counted once; but for an embedding of its own, of
    /// which it reads a row.
    pub fn weight_bytes(&self) -> usize {
        self.blocks.iter().map(Block::bytes).sum::<usize>() + self.head.bytes()
    }

    /// What no maximum in a state is above, whatever was read: (layers, heads), or empty where heads remember none.
    ///
    /// One that is above it came from no text, and would outweigh every key to come.
    pub fn greatest_maxima(&self) -> Vec<f32> {
        self.blocks.iter().flat_map(Block::greatest).copied().collect()
    }

    /// A pool of `slots` empty conversations for this decoder, states in f32.
    ///
    /// # Errors
    /// As for [`Self::new_pool_with`].
    pub fn new_pool(&self, slots: usize) -> std::result::Result<StatePool, ModelError> {
        self.new_pool_with(PoolOptions::new(slots))
    }

    /// A pool of empty conversations for this decoder.
    ///
    /// # Errors
    /// When there are no slots, or the system has not as much memory as they would take.
    pub fn new_pool_with(&self, options: PoolOptions) -> std::result::Result<StatePool, ModelError> {
        StatePool::new(&self.config, self.greatest_maxima(), options)
    }

    /// All logits of some new tokens of each row.
    ///
    /// ids: (batch, time) u32; slots: one for each row, all different, their states taken `time` tokens forward.
    /// -> (batch, time, vocab) f32
    ///
    /// Where a text is cut into calls changes no bit of its logits and states (on the CPU), nor does what else is in
    /// the batch: a token after a prompt, after a restored state and after decoding is one and the same.
    ///
    /// # Errors
    /// When an id is outside the vocabulary, a slot is out of range, named twice or without the source that the texts of
    /// an encoder-decoder begin with, `ids` is empty, or the pool is another decoder's: then nothing has changed. After any other error the slots are part way, and are refused until
    /// they are reset.
    pub fn forward(&self, ids: &Tensor, pool: &mut StatePool, slots: &[usize]) -> Result<Tensor> {
        self.all_logits(ids, pool, slots, None)
    }

    /// [`Self::forward`] by the chunked form of the recurrence, with every layer's denominators and gates counted in
    /// `probe`; equal to it but for rounding (under 1e-4; a state in bf16 is rounded to the nearest at every call's end).
    /// Softmax and the hybrid have one form alone, and the same bits; so has cross attention, of which nothing is counted.
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
        probe.resize_with(self.blocks.len(), Default::default);
        self.all_logits(ids, pool, slots, Some(probe))
    }

    /// Takes in some tokens of one conversation -> the logits after the last of them (vocab).
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn prefill(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<Vec<f32>> {
        self.hidden(ids, pool, &[slot], None)?;
        let mut logits = Vec::new();
        self.logits(pool, 1, ids.len() - 1..ids.len(), &mut logits);
        Ok(logits)
    }

    /// Takes in some tokens of one conversation and makes no logits.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn absorb(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<()> {
        self.hidden(ids, pool, &[slot], None)
    }

    /// Reads the source of an encoder-decoder into a slot, which is emptied before: its cross attention's sums (or keys
    /// and values) are the first state of the text that [`Self::decode`] of the decoder's start token begins.
    ///
    /// # Errors
    /// When the model has no encoder, `ids` are none or more than the config's `max_source_positions`, an id is outside
    /// the vocabulary, the slot is out of range, the pool is another decoder's, or the system has not as much memory as
    /// reading takes: then nothing has changed. After any other error the slot is refused until it is reset or has read
    /// another source.
    pub fn read_source(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<()> {
        let (Some(encoder), Some(source)) = (&self.encoder, self.config.source()) else {
            bail!("the model reads no source: it is a decoder alone")
        };
        if ids.is_empty() || ids.len() > source.max_positions {
            bail!("a source must have 1 to {} tokens, found {}", source.max_positions, ids.len());
        }
        self.check_ids(ids)?;
        self.check_pool(pool)?;
        let hidden = self.config.hidden_size;
        let bytes = encoder.working_bytes(ids.len(), hidden);
        if !could_be_had(bytes) {
            bail!(
                "a source of {} tokens takes {bytes} bytes while it is read, which the system does not have",
                ids.len()
            );
        }
        pool.begin_source(slot)?;
        let (layers, Workspace { cx, .. }) = pool.parts();
        let mut x = vec![0.0; ids.len() * hidden];
        self.embed(ids, &mut x);
        encoder.forward(cx, &mut x, hidden)?;
        for (block, state) in self.blocks.iter().zip(layers) {
            block.keep(cx, &x, state, slot)?;
        }
        pool.source_was_read(slot, ids.len());
        Ok(())
    }

    /// Takes every row one token further -> logits (rows, vocab), row after row.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn decode(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize]) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        self.decode_into(ids, pool, slots, &mut logits)?;
        Ok(logits)
    }

    /// [`Self::decode`] into a buffer that is kept: from the second step of so many rows on, nothing is allocated.
    ///
    /// A row's logits are the same bits whatever the other rows and slots are (on the CPU).
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn decode_into(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        if ids.len() != slots.len() {
            bail!("every row needs a token and a slot, found {} ids and {} slots", ids.len(), slots.len());
        }
        self.hidden(ids, pool, slots, None)?;
        self.logits(pool, ids.len(), 0..1, logits);
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
            bail!("ids must be (rows, tokens) with a slot for each row, found {batch} rows and {} slots", slots.len());
        }
        self.hidden(&ids.flatten_all()?.to_vec1()?, pool, slots, probe)?;
        let mut logits = Vec::new();
        self.logits(pool, batch, 0..time, &mut logits);
        Tensor::from_vec(logits, (batch, time, self.config.vocab_size), &Device::Cpu)
    }

    /// The logits of some of the tokens of each row that [`Self::hidden`] has just taken in.
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

    /// Takes the rows forward; the residual stream (rows, time, hidden) is left in the pool.
    fn hidden(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize], mut probe: Option<&mut Probe>) -> Result<()> {
        let (batch, hidden) = (slots.len(), self.config.hidden_size);
        if ids.is_empty() || batch == 0 || !ids.len().is_multiple_of(batch) {
            bail!("there must be at least one row and one token, found {} ids and {batch} slots", ids.len());
        }
        self.check_ids(ids)?;
        self.check_pool(pool)?;
        pool.begin(slots)?;
        let time = ids.len() / batch;
        pool.place(slots);
        let (layers, Workspace { cx, x, positions, blocks, angles, .. }) = pool.parts();
        x.resize(ids.len() * hidden, 0.0);
        self.embed(ids, x);
        let rope = self.config.position_embedding == PositionEmbedding::Rope;
        if rope {
            angles.turn(positions, time);
        }
        let angles = rope.then_some(&*angles);
        for (layer, (block, state)) in self.blocks.iter().zip(layers).enumerate() {
            let rows = Rows { slots, positions, time, angles, layer };
            block.forward(cx, x, state, rows, blocks, probe.as_deref_mut().map(|p| &mut p[layer]))?;
        }
        pool.advance(slots, time);
        Ok(())
    }

    fn check_pool(&self, pool: &StatePool) -> Result<()> {
        let (own, found) = (self.config.state_layout(), pool.layout());
        if own == found {
            return Ok(());
        }
        bail!("the pool must be of this decoder: its states are {found:?}, the decoder's {own:?}")
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|&&id| id as usize >= self.config.vocab_size) {
            Some(id) => bail!("token id {id} is outside the vocabulary of {}", self.config.vocab_size),
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

impl Backend for Decoder {
    type States = HostStates;

    fn config(&self) -> &DecoderConfig {
        &self.config
    }

    fn weight_bytes(&self) -> usize {
        Self::weight_bytes(self)
    }

    fn greatest_maxima(&self) -> Vec<f32> {
        Self::greatest_maxima(self)
    }

    fn absorb(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> std::result::Result<(), ModelError> {
        Ok(Self::absorb(self, ids, pool, slot)?)
    }

    fn read_source(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> std::result::Result<(), ModelError> {
        Ok(Self::read_source(self, ids, pool, slot)?)
    }

    fn prefill(
        &self,
        ids: &[u32],
        pool: &mut StatePool,
        slot: usize,
        logits: &mut Vec<f32>,
    ) -> std::result::Result<(), ModelError> {
        *logits = Self::prefill(self, ids, pool, slot)?;
        Ok(())
    }

    fn decode_into(
        &self,
        ids: &[u32],
        pool: &mut StatePool,
        slots: &[usize],
        logits: &mut Vec<f32>,
    ) -> std::result::Result<(), ModelError> {
        Ok(Self::decode_into(self, ids, pool, slots, logits)?)
    }
}
