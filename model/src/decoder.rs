//! The decoder: token ids in, logits out, states of constant size taken forward.

use candle_core::{D, DType, Device, Result, Tensor, bail};

use crate::attention::Rows;
use crate::block::Block;
use crate::config::DecoderConfig;
use crate::nn::{Linear, RmsNorm};
use crate::probe::Probe;
use crate::state::StatePool;
use crate::weights::{LoadError, Weights};

/// A decoder of pre-norm blocks. Its weights are read-only: one decoder serves any number of pools.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    embedding: Tensor, // (vocab, hidden), as stored
    blocks: Vec<Block>,
    norm: RmsNorm, // (hidden)
    head: Linear,  // (vocab, hidden)
    device: Device,
}

impl Decoder {
    pub(crate) fn new(config: DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let table = [config.vocab_size, config.hidden_size];
        let model = weights.pp("model");
        let embedding = model.get("embed_tokens.weight", &table)?;
        let head =
            if config.tie_word_embeddings { embedding.clone() } else { weights.get("lm_head.weight", &table)? };
        let blocks = (0..config.num_hidden_layers)
            .map(|i| Block::new(&config, &model.pp(&format!("layers.{i}"))))
            .collect::<std::result::Result<_, _>>()?;
        Ok(Self {
            blocks,
            norm: RmsNorm::new(&model.get("norm.weight", &[config.hidden_size])?, config.rms_norm_eps)?,
            head: Linear::new(&head, None)?,
            embedding,
            device: weights.device().clone(),
            config,
        })
    }

    /// What the decoder is made of.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// A pool of `slots` empty conversations for this decoder.
    ///
    /// # Errors
    /// As for [`StatePool::new`].
    pub fn new_pool(&self, slots: usize) -> Result<StatePool> {
        StatePool::new(&self.config, slots, &self.device)
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
    /// When an id is outside the vocabulary, a slot is out of range or named twice, or `ids` is empty: then nothing
    /// has changed. After any other error (the device's) the slots are part way, and are
    /// refused until they are reset.
    pub fn forward(&self, ids: &Tensor, pool: &mut StatePool, slots: &[usize]) -> Result<Tensor> {
        self.head.forward(&self.hidden(ids, pool, slots, None)?)
    }

    /// [`Self::forward`] by the chunked form of the recurrence, with every layer's denominators and gates counted in
    /// `probe`; equal to it but for rounding (under 1e-4).
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
        self.head.forward(&self.hidden(ids, pool, slots, Some(probe))?)
    }

    /// Takes in some tokens of one conversation -> the logits after the last of them (vocab).
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn prefill(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<Vec<f32>> {
        let hidden = self.hidden(&self.row(ids)?, pool, &[slot], None)?;
        self.head.forward(&hidden.narrow(1, ids.len() - 1, 1)?)?.flatten_all()?.to_vec1()
    }

    /// Takes in some tokens of one conversation and makes no logits.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn absorb(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<()> {
        self.hidden(&self.row(ids)?, pool, &[slot], None).map(|_| ())
    }

    /// Takes every row one token further -> logits (rows, vocab), row after row.
    ///
    /// A row's logits are the same bits whatever the other rows and slots are (on the CPU).
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn decode(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize]) -> Result<Vec<f32>> {
        let ids = Tensor::from_slice(ids, (ids.len(), 1), &self.device)?;
        self.forward(&ids, pool, slots)?.flatten_all()?.to_vec1()
    }

    fn row(&self, ids: &[u32]) -> Result<Tensor> {
        Tensor::from_slice(ids, (1, ids.len()), &self.device)
    }

    /// The last norm's output: (batch, time, hidden) f32.
    fn hidden(
        &self,
        ids: &Tensor,
        pool: &mut StatePool,
        slots: &[usize],
        mut probe: Option<&mut Probe>,
    ) -> Result<Tensor> {
        let (batch, time) = ids.dims2()?;
        if batch != slots.len() || batch == 0 || time == 0 {
            bail!(
                "ids must be (rows, tokens) with a slot for each row, found {batch} x {time} and {} slots",
                slots.len()
            );
        }
        let flat = ids.flatten_all()?;
        let highest = flat.max(D::Minus1)?.to_scalar::<u32>()?;
        if highest as usize >= self.config.vocab_size {
            bail!("token id {highest} is outside the vocabulary of {}", self.config.vocab_size);
        }
        pool.begin(slots)?;
        let positions: Vec<u64> = slots.iter().map(|&slot| pool.tokens(slot)).collect();
        let rows = Rows { slots, positions: &positions };
        let x = self.embedding.index_select(&flat, 0)?.to_dtype(DType::F32)?;
        let mut x = x.reshape((batch, time, self.config.hidden_size))?;
        for (i, (block, state)) in self.blocks.iter().zip(pool.layers()).enumerate() {
            x = block.forward(&x, state, rows, probe.as_deref_mut().map(|p| &mut p[i]))?;
        }
        pool.advance(slots, time);
        self.norm.forward(&x)
    }
}
