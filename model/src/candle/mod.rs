//! Models that run on candle, on any of its devices, behind the same interface as the native kernels: families without
//! native kernels, and second implementations of some that have them. Most are models of `candle-transformers`.
//!
//! Each sequence is computed separately, token by token, so its bits do not depend on other sequences.
//!
//! Module dependencies: family -> mamba, mamba2, recurrent_gemma, rfa, rwkv, rwkv7 -> config; states; all of them -> this file.
//! `tensors` gives the models their weights.

mod config;
mod family;
mod keys;
mod mamba;
mod mamba2;
mod recurrent_gemma;
mod rfa;
mod rwkv;
mod rwkv7;
mod states;
mod tensors;

use std::path::Path;

use candle_core::{Device, Tensor};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::checkpoint::{self, LoadError, Stored};
use crate::error::{ModelError, Result};
use crate::portable;
use crate::runner::Backend;
use crate::weights::Source;
pub use config::{Config, ONLY_CANDLE, is_only_candle};
use family::{Family, LayerState};
pub use states::{CandlePool, CandleStates};

/// Tokens per prefill call. They run one after another, so a longer chunk only makes other sequences wait.
const CHUNK: usize = 8;

/// The widest vector instruction set of this CPU. Candle's matrix products may sum in another order on another set.
pub fn instruction_set() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        let fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        match (is_x86_feature_detected!("avx512f"), fma) {
            (true, _) => "avx512",
            (_, true) => "avx2",
            _ => "sse2",
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::env::consts::ARCH
}

/// A checkpoint whose config has been checked; no model has been built.
#[derive(Debug)]
pub struct Checkpoint {
    config: Config,
    source: Source,
}

impl Checkpoint {
    /// Reads the config and the headers of the weight files.
    ///
    /// # Errors
    /// As for [`checkpoint::load`], or candle does not support the model. [`Self::decoder`] checks the tensors of
    /// families that only candle has.
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

    /// Bytes of the weights in memory, as f32.
    pub fn bytes(&self) -> u64 {
        self.parameters() * size_of::<f32>() as u64
    }

    /// The number of weights.
    pub fn parameters(&self) -> u64 {
        self.source.tensors().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum()
    }

    /// Loads the weights as f32.
    ///
    /// # Errors
    /// A tensor is missing or has another shape or type than the config asks for, or the device failed.
    pub fn decoder(&self, device: &Device) -> std::result::Result<CandleDecoder, LoadError> {
        let (config, source) = (self.config.clone(), &self.source);
        let family: Box<dyn Family> = match &config.family {
            config::Family::Mamba(config) => Box::new(mamba::Mamba::load(config, source, device)?),
            config::Family::Mamba2(config) => Box::new(mamba2::Mamba2::load(config, source, device)?),
            config::Family::RecurrentGemma(config) => {
                Box::new(recurrent_gemma::RecurrentGemma::load(config, source, device)?)
            }
            config::Family::Rfa(config) => Box::new(portable::Decoder::open(config, source, device)?),
            config::Family::Rwkv(kind, config) => Box::new(rwkv::Rwkv::load(kind, config, source, device)?),
            config::Family::Rwkv7(config) => Box::new(rwkv7::Rwkv7::load(config, source, device)?),
        };
        // If the embedding and the head are separate, a token reads the whole head but only one row of the embedding.
        let head = ["lm_head.weight", "head.weight"].into_iter().find_map(|name| source.shape(name));
        let unread = head.map_or(0, |shape| shape.iter().product::<usize>());
        let weight_bytes = (self.parameters() as usize - unread) * size_of::<f32>();
        let resident_bytes = self.bytes() as usize;
        Ok(CandleDecoder { config, family, device: device.clone(), weight_bytes, resident_bytes })
    }
}

/// One token to feed to one sequence.
struct Row<'a> {
    id: u32,
    position: u64,
    text: &'a mut [LayerState],
}

/// A decoder that runs on candle. Its weights are read-only: one decoder serves any number of pools.
pub struct CandleDecoder {
    config: Config,
    family: Box<dyn Family>,
    device: Device,
    weight_bytes: usize,
    resident_bytes: usize,
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

    /// Creates a pool of empty conversations for this decoder, with f32 states. On a CPU, `threads` threads compute the
    /// sequences.
    ///
    /// # Errors
    /// There are no slots, or the system has no memory or threads for them.
    pub fn new_pool(&self, slots: usize, threads: usize) -> Result<CandlePool> {
        CandlePool::new(self.family.state(), &self.device, slots, threads)
    }

    /// Feeds one token at `position` of a sequence -> logits (vocab)
    fn step(&self, id: u32, position: u64, text: &mut [LayerState]) -> candle_core::Result<Tensor> {
        let id = Tensor::new(&[id], &self.device)?;
        self.family.step(&id, position, text)?.flatten_all()
    }

    /// Feeds one token to each sequence -> its logits (vocab)
    fn rows(&self, rows: Vec<Row<'_>>, threads: &ThreadPool) -> candle_core::Result<Vec<Vec<f32>>> {
        let row = |row: Row<'_>| self.step(row.id, row.position, row.text)?.to_vec1();
        // A GPU runs its work in order, so threads would not help.
        if self.device.is_cpu() {
            threads.install(|| rows.into_par_iter().map(row).collect())
        } else {
            rows.into_iter().map(row).collect()
        }
    }

    /// Rejects ids outside the vocabulary, and pools of other decoders.
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

    fn resident_bytes(&self) -> usize {
        self.resident_bytes
    }

    fn longest_chunk(&self) -> usize {
        CHUNK
    }

    fn prefill(&self, ids: &[u32], pool: &mut CandlePool, slot: usize) -> Result<()> {
        if ids.is_empty() {
            return Err(ModelError::Rows { ids: 0, rows: 1 });
        }
        self.check(ids, pool)?;
        pool.begin(&[slot])?;
        let position = pool.tokens(slot);
        let CandleStates { texts, threads, .. } = &mut pool.states;
        let text = &mut texts[slot];
        let mut read = (position..).zip(ids);
        threads.install(|| {
            read.try_for_each(|(position, &id)| self.family.read(&Tensor::new(&[id], &self.device)?, position, text))
        })?;
        pool.advance(&[slot], ids.len());
        Ok(())
    }

    fn decode_into(&self, ids: &[u32], pool: &mut CandlePool, slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        if ids.len() != slots.len() || ids.is_empty() {
            return Err(ModelError::Rows { ids: ids.len(), rows: slots.len() });
        }
        self.check(ids, pool)?;
        pool.begin(slots)?;
        let positions: Vec<u64> = slots.iter().map(|&slot| pool.tokens(slot)).collect();
        let CandleStates { texts, threads, .. } = &mut pool.states;
        let mut texts: Vec<_> = texts.iter_mut().map(Some).collect();
        let rows = ids.iter().zip(slots).zip(positions);
        let rows = rows.filter_map(|((&id, &slot), position)| Some(Row { id, position, text: texts[slot].take()? }));
        let rows = rows.collect();
        let rows = self.rows(rows, threads)?;
        logits.clear();
        logits.extend(rows.into_iter().flatten());
        pool.advance(slots, 1);
        Ok(())
    }
}
