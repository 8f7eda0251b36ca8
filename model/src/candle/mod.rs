//! Models computed by candle, on any of its devices, behind the same interface as the kernels of our own: families that only
//! `candle-transformers` has, and a second implementation of some that have kernels.
//!
//! Every text is computed by itself, token after token, so its bits depend on nothing else.
//!
//! family -> mamba, mamba2, rfa, rwkv, rwkv7 -> config; states; all of them -> this file. `tensors` gives the models their
//! weights.

mod config;
mod family;
mod keys;
mod mamba;
mod mamba2;
mod rfa;
mod rwkv;
mod rwkv7;
mod states;
mod tensors;

use std::path::Path;

use candle_core::{Device, Tensor};

use crate::checkpoint::{self, LoadError, Stored};
use crate::error::{ModelError, Result};
use crate::portable;
use crate::runner::Backend;
use crate::weights::Source;
pub use config::{Config, ONLY_CANDLE, is_only_candle};
use family::{Family, LayerState};
pub use states::{CandlePool, CandleStates};

/// A checkpoint whose config has been checked, without a model.
#[derive(Debug)]
pub struct Checkpoint {
    config: Config,
    source: Source,
}

impl Checkpoint {
    /// Reads the config and the headers of the weights.
    ///
    /// # Errors
    /// As for [`checkpoint::load`], or candle does not support the model. Tensors of the families that only candle has are
    /// checked by [`Self::decoder`].
    pub fn open(model: &Path) -> std::result::Result<Self, LoadError> {
        if !model.is_file() {
            let path = model.join("config.json");
            let text = std::fs::read_to_string(&path).map_err(|source| LoadError::Io { path, source })?;
            if is_only_candle(&text) {
                return Ok(Self { config: Config::from_json(&text)?, source: checkpoint::unchecked(model)? });
            }
        }
        let stored = Stored::open(model)?;
        Ok(Self { config: Config::of(stored.config())?, source: stored.source() })
    }

    /// The config of the model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Bytes of the weights in memory.
    pub fn bytes(&self) -> u64 {
        self.parameters() * size_of::<f32>() as u64
    }

    /// The number of weights.
    pub fn parameters(&self) -> u64 {
        self.source.shapes().map(|shape| shape.iter().product::<usize>() as u64).sum()
    }

    /// Loads the weights, as f32.
    ///
    /// # Errors
    /// A tensor is missing or has another shape or type than the config asks for, or the device failed.
    pub fn decoder(&self, device: &Device) -> std::result::Result<CandleDecoder, LoadError> {
        let (config, source) = (self.config.clone(), &self.source);
        let family: Box<dyn Family> = match &config.family {
            config::Family::Mamba(config) => Box::new(mamba::Mamba::load(config, source, device)?),
            config::Family::Mamba2(config) => Box::new(mamba2::Mamba2::load(config, source, device)?),
            config::Family::Rfa(config) => Box::new(portable::Decoder::open(config, source, device)?),
            config::Family::Rwkv(kind, config) => Box::new(rwkv::Rwkv::load(kind, config, source, device)?),
            config::Family::Rwkv7(config) => Box::new(rwkv7::Rwkv7::load(config, source, device)?),
        };
        // Of an embedding and a head a token reads one, and a row of the other.
        let head = ["lm_head.weight", "head.weight"].into_iter().find_map(|name| source.shape(name));
        let unread = head.map_or(0, |shape| shape.iter().product::<usize>());
        let weight_bytes = (self.parameters() as usize - unread) * size_of::<f32>();
        Ok(CandleDecoder { config, family, device: device.clone(), weight_bytes })
    }
}

/// A decoder that candle computes. Its weights are read-only: one decoder serves any number of pools.
pub struct CandleDecoder {
    config: Config,
    family: Box<dyn Family>,
    device: Device,
    weight_bytes: usize,
}

impl std::fmt::Debug for CandleDecoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CandleDecoder").field("config", &self.config).finish_non_exhaustive()
    }
}

impl CandleDecoder {
    /// The config of the decoder.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A pool of empty conversations for this decoder, with states in f32. `threads` multiply matrices if the device is the
    /// CPU.
    ///
    /// # Errors
    /// There are no slots, or the system has no memory or threads for them.
    pub fn new_pool(&self, slots: usize, threads: usize) -> Result<CandlePool> {
        CandlePool::new(self.family.state(), &self.device, slots, threads)
    }

    /// Reads tokens into a slot -> the logits after the last: (vocab)
    fn read(&self, ids: &[u32], position: u64, states: &mut CandleStates, slot: usize) -> candle_core::Result<Tensor> {
        let CandleStates { texts, threads, .. } = states;
        let text: &mut Vec<LayerState> = &mut texts[slot];
        threads.install(|| {
            let mut logits = None;
            for (position, &id) in (position..).zip(ids) {
                let id = Tensor::new(&[id], &self.device)?;
                logits = Some(self.family.step(&id, position, text)?);
            }
            logits.map_or_else(|| candle_core::bail!("no tokens"), |logits| logits.flatten_all())
        })
    }

    /// Refuses ids outside the vocabulary and the pool of another decoder.
    fn check(&self, ids: &[u32], pool: &CandlePool) -> Result<()> {
        let vocab_size = self.config.vocab_size;
        if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(ModelError::TokenOutOfRange { id, vocab_size });
        }
        let (expected, found) = (self.family.state().layout(), pool.layout());
        if expected != found {
            return Err(ModelError::ForeignPool { expected: Box::new(expected), found: Box::new(found) });
        }
        Ok(())
    }
}

impl Backend for CandleDecoder {
    type States = CandleStates;

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn eos(&self) -> &[u32] {
        self.config.eos()
    }

    fn candle_family(&self) -> Option<&'static str> {
        Some(self.config.family())
    }

    fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    fn prefill(&self, ids: &[u32], pool: &mut CandlePool, slot: usize) -> Result<()> {
        if ids.is_empty() {
            return Err(ModelError::Rows { ids: 0, rows: 1 });
        }
        self.check(ids, pool)?;
        pool.begin(&[slot])?;
        let position = pool.tokens(slot);
        self.read(ids, position, &mut pool.states, slot)?;
        pool.advance(&[slot], ids.len());
        Ok(())
    }

    fn decode_into(&self, ids: &[u32], pool: &mut CandlePool, slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        if ids.len() != slots.len() || ids.is_empty() {
            return Err(ModelError::Rows { ids: ids.len(), rows: slots.len() });
        }
        self.check(ids, pool)?;
        pool.begin(slots)?;
        logits.clear();
        for (&id, &slot) in ids.iter().zip(slots) {
            let position = pool.tokens(slot);
            logits.extend(self.read(&[id], position, &mut pool.states, slot)?.to_vec1::<f32>()?);
        }
        pool.advance(slots, 1);
        Ok(())
    }
}
