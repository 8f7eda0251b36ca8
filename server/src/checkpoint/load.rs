//! Loads the parts of a checkpoint: the decoder and its slots, and the text files.

use std::path::{Path, PathBuf};

use tidegate_model::candle::{self, CandleDecoder};
#[cfg(feature = "cuda")]
use tidegate_model::checkpoint::LoadError;
use tidegate_model::checkpoint::Stored;
#[cfg(feature = "cuda")]
use tidegate_model::cuda::CudaDecoder;
use tidegate_model::sampling::SamplingParams;
use tidegate_model::{Backend, Decoder, Device, Pool, PoolOptions, StateType, Threads, checkpoint};

#[cfg(feature = "cuda")]
use super::cuda::OpenCuda;
use super::error::OpenError;
use super::whole;
use crate::engine::recommended_sampling;
use crate::text::{ChatTemplate, Tokenizer};

/// Default number of concurrent conversations on the CPU: more would slow each other down.
pub const CPU_SLOTS: usize = 64;

/// Maximum default number of slots on a CUDA device: with more, each token would take the time of several steps.
pub const MOST_GPU_SLOTS: usize = 1 << 14;

/// The files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The model's folder, or the file that holds the whole model.
    pub path: PathBuf,
    /// RWKV's vocabulary file, for a model in one file that has none in its folder.
    pub vocabulary: Option<PathBuf>,
}

/// The parts of a model besides its weights.
pub struct TextFiles {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// How conversations are formatted, if the model is a chat model.
    pub template: Option<ChatTemplate>,
    /// The default sampling parameters, used unless a request overrides them.
    pub sampling: SamplingParams,
}

impl TextFiles {
    /// Loads the text files of the model in `folder`, which has `vocab_size` tokens and the end-of-text ids `eos`.
    /// `vocabulary` is RWKV's vocabulary file, for a model in one file that has none in its folder.
    ///
    /// # Errors
    /// A file is missing or wrong.
    pub fn load(folder: &Path, vocabulary: Option<&Path>, vocab_size: usize, eos: &[u32]) -> Result<Self, OpenError> {
        let (tokenizer, template) = if folder.is_file() {
            whole::text(folder, vocabulary, vocab_size, eos)?
        } else {
            let tokenizer = Tokenizer::load(folder, vocab_size, eos)?;
            let template = ChatTemplate::load_for(folder, &tokenizer)?;
            (tokenizer, template)
        };
        let sampling = recommended_sampling(tokenizer.defaults(), vocab_size)?;
        Ok(Self { tokenizer, template, sampling })
    }
}

/// A decoder and its slots.
pub(super) type Loaded<B> = (B, Pool<<B as Backend>::States>);

/// Loads a model with our own kernels on the CPU, with this many slots; 0 means [`CPU_SLOTS`].
pub(super) fn on_cpu(folder: &Path, slots: usize, state: StateType) -> Result<Loaded<Decoder>, OpenError> {
    let stored = Stored::open(folder)?;
    let decoder = stored.decoder()?;
    for repacked in stored.repacked()? {
        tracing::info!(model = %folder.display(), "{repacked}");
    }
    let slots = if slots == 0 { CPU_SLOTS } else { slots };
    let pool = decoder.new_pool_with(PoolOptions { state, ..PoolOptions::new(slots) });
    Ok((decoder, pool.map_err(|source| OpenError::Slots { slots, source })?))
}

/// Like [`on_cpu`], but on a CUDA device; 0 slots means as many as fit into its memory.
#[cfg(feature = "cuda")]
pub(super) fn on_cuda(
    folder: &Path,
    device: &OpenCuda,
    slots: usize,
    state: StateType,
) -> Result<Loaded<CudaDecoder>, OpenError> {
    let decoder = device.load(folder)?;
    let slots = match slots {
        0 => decoder.room(state, MOST_GPU_SLOTS).map_err(LoadError::from)?,
        slots => slots,
    };
    let pool = decoder.new_pool(slots, state).map_err(|source| OpenError::Slots { slots, source })?;
    Ok((decoder, pool))
}

/// Like [`on_cpu`], but for a model that candle computes.
pub(super) fn by_candle(
    folder: &Path,
    device: &Device,
    slots: usize,
    state: StateType,
) -> Result<Loaded<CandleDecoder>, OpenError> {
    if state != StateType::F32 {
        let reason = "the candle backend keeps states in f32: --state must be f32".into();
        return Err(OpenError::Unsupported { path: folder.into(), reason });
    }
    let decoder = candle::Checkpoint::open(folder)?.decoder(device)?;
    tracing::info!(model = %folder.display(), "candle computes this model of {}", decoder.config().family());
    let slots = if slots == 0 { CPU_SLOTS } else { slots };
    let pool = decoder.new_pool(slots, Threads::global().count());
    Ok((decoder, pool.map_err(|source| OpenError::Slots { slots, source })?))
}

/// Returns the bytes of a model's weights on the CPU. The decoder counts what a token reads, which may be less than the
/// file holds.
pub(super) fn resident_weights(folder: &Path, decoder: &impl Backend) -> u64 {
    let files = checkpoint::weights_files(folder).unwrap_or_default();
    let stored = files.iter().map(|path| std::fs::metadata(path).map_or(0, |file| file.len())).sum::<u64>();
    stored.max(decoder.resident_bytes() as u64)
}
