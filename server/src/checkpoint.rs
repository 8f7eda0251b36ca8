//! Loads a checkpoint folder, or a file that holds a whole model, and starts its engine: with our own kernels on the
//! CPU or a CUDA device, or with candle.

mod backend;
mod choice;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod draft;
mod error;
mod fingerprint;
mod load;
mod model;
mod native;
mod options;
mod supported;
mod whole;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use tidegate_model::candle;
use tidegate_model::checkpoint::{FileKind, Stored};
use tidegate_model::{Backend, LanguageModel, ModelRunner, StateType, checkpoint};

use crate::api::Served;
use crate::engine::{Drafters, EngineThread, Limits, Sources, TextRules, spawn_with};
use crate::ram::ModelMemory;
use crate::session::{Codec, Fingerprint, Keys, PrefixIndex, hex};
use crate::text::Grammars;

pub use backend::{BackendChoice, BackendChoiceError};
pub use choice::{DeviceChoice, DeviceChoiceError};
#[cfg(feature = "cuda")]
pub use cuda::OpenCuda;
pub use device::OpenDevice;
pub use draft::open_draft_model;
pub use error::{DeviceError, OpenError};
use fingerprint::Digests;
#[cfg(feature = "cuda")]
use load::on_cuda;
pub use load::{CPU_SLOTS, Files, MOST_GPU_SLOTS, TextFiles};
use load::{Loaded, by_candle, on_cpu, resident_weights};
pub use model::{Model, open_model};
pub use native::refused_native;
pub use options::OpenOptions;
use supported::Described;
pub use supported::{refused_config, refused_gguf, refused_type};

/// Returns the folder in `data` for the conversations of this model. Other models cannot use them.
pub fn sessions_folder(data: &Path, fingerprint: &Fingerprint) -> PathBuf {
    let Fingerprint { architecture, weights, tokenizer } = fingerprint;
    let digest = Sha256::new().chain_update(architecture).chain_update(weights).chain_update(tokenizer).finalize();
    data.join("sessions").join(&hex(&digest)[..16])
}

/// Loads the checkpoint in `folder` and starts its engine; returns once the model has made its first steps.
///
/// # Errors
/// The device is not available, a file is missing or wrong, there is too little memory, or the model fails.
pub fn open(folder: &Path, options: &OpenOptions) -> Result<(Served, EngineThread), OpenError> {
    // Check first, because opening a GPU takes longer.
    supported::check(folder)?;
    open_on(folder, &options.backend.open(options.device, folder)?, options)
}

/// Checks whether [`open`] would accept what is in `folder`: reads the config, the headers of the weights, the
/// tokenizer and the chat template.
///
/// # Errors
/// Why [`open`] would refuse it.
pub fn check(folder: &Path) -> Result<(), OpenError> {
    match supported::checked(folder)? {
        Some(Described::Candle(_)) => candle::Checkpoint::open(folder).map(drop)?,
        _ => Stored::open(folder).map(drop)?,
    }
    // The vocabulary of RWKV-7 in one file may be elsewhere.
    if folder.is_file() && FileKind::of(folder)? != FileKind::Gguf {
        return Ok(());
    }
    check_text(folder)
}

/// The part of [`check`] that does not need the weights.
///
/// # Errors
/// Why [`open`] would refuse the text files.
pub fn check_text(folder: &Path) -> Result<(), OpenError> {
    let config = supported::config(folder)?;
    TextFiles::load(folder, None, config.vocab_size(), config.eos()).map(drop)
}

/// Returns the memory that the checkpoint in `folder` will take in this process; zeros if it runs on another device.
///
/// # Errors
/// The folder has no supported checkpoint, or a file cannot be read.
pub fn size(folder: &Path, options: &OpenOptions) -> Result<ModelMemory, OpenError> {
    let config = supported::config(folder)?;
    let device = match options.backend.open(options.device, folder) {
        Ok(device) if device.is_cpu() => device,
        _ => return Ok(ModelMemory::default()),
    };
    let bytes = |path: PathBuf| match std::fs::metadata(&path) {
        Ok(file) => Ok(file.len()),
        Err(source) => Err(OpenError::Read { path, source }),
    };
    let weights = if device.is_candle() {
        candle::Checkpoint::open(folder)?.bytes()
    } else {
        checkpoint::weights_files(folder)?.into_iter().map(bytes).sum::<Result<_, _>>()?
    };
    let slots = if options.slots == 0 { CPU_SLOTS } else { options.slots };
    let state = match options.state {
        StateType::F32 => config.state_bytes(),
        StateType::Bf16 => config.state_bytes() / 2,
    };
    Ok(ModelMemory { weights, slots: (slots * state) as u64 })
}

/// Like [`open`], but on a device that is already open; with `auto`, falls back to the CPU if that device lacks kernels
/// or memory.
///
/// # Errors
/// As for [`open`].
pub fn open_on(folder: &Path, device: &OpenDevice, options: &OpenOptions) -> Result<(Served, EngineThread), OpenError> {
    #[cfg(feature = "cuda")]
    if let OpenDevice::Cuda(cuda) = device {
        let served = serve(folder, device, options, || on_cuda(folder, cuda, options.slots, options.state));
        return match served {
            Err(error) if options.device == DeviceChoice::Auto && cuda::is_of_the_device(&error) => {
                tracing::warn!(%device, "using the CPU: {error}");
                serve(folder, &OpenDevice::Cpu, options, || on_cpu(folder, options.slots, options.state))
            }
            served => served.map_err(|error| cuda::unable(error, cuda)),
        };
    }
    if let OpenDevice::Candle(on) = device {
        return serve(folder, device, options, || by_candle(folder, on, options.slots, options.state));
    }
    serve(folder, device, options, || on_cpu(folder, options.slots, options.state))
}

/// Loads a model and starts its engine.
fn serve<B: Backend + 'static>(
    folder: &Path,
    device: &OpenDevice,
    options: &OpenOptions,
    load: impl FnOnce() -> Result<Loaded<B>, OpenError>,
) -> Result<(Served, EngineThread), OpenError> {
    let digests = Digests::start(folder, options.vocabulary.as_deref())?;
    let (decoder, pool) = load()?;
    let longest_source = decoder.source().map_or(0, |source| source.max_positions);
    let (vocab_size, layout, greatest) = (decoder.vocab_size(), pool.layout(), decoder.greatest_maxima());
    let (eos, state_bytes) = (decoder.eos(), (layout.numbers() * size_of::<f32>()) as u64);
    let TextFiles { tokenizer, template, sampling } =
        TextFiles::load(folder, options.vocabulary.as_deref(), vocab_size, eos)?;
    let sources = decoder.source().map(|source| Sources { longest: source.max_positions, start: source.start });
    // A source is not a conversation, even if the checkpoint has a chat template.
    let template = if sources.is_some() { None } else { template.map(Arc::new) };
    let digests = digests.wait()?;
    let fingerprint = digests.model(options.state, decoder.candle_family());
    let system_fingerprint = digests.system(&fingerprint, &device.class());
    let keys = options.secret.as_deref().map(Keys::new).transpose()?;
    let codec = Codec { fingerprint, layout, vocab_size, greatest, sources: longest_source, keys };
    let tokenizer = Arc::new(tokenizer);
    let encode = {
        let tokenizer = Arc::clone(&tokenizer);
        // The tokenizer accepts any text that a model has generated.
        Arc::new(move |text: &str| tokenizer.encode_more(text).unwrap_or_default())
    };
    let rules = TextRules { vocabulary: Arc::clone(tokenizer.vocabulary()), eos: Arc::clone(tokenizer.eos()), encode };
    let (vocabulary, eos) = (tokenizer.vocabulary(), tokenizer.eos());
    let grammars = Arc::new(match &options.grammar_helper {
        Some(helper) => Grammars::with_helper(vocabulary, eos, &rules.encode, helper.clone())?,
        None => Grammars::new(vocabulary, eos, &rules.encode)?,
    });
    let mut weights = resident_weights(folder, &decoder);
    let model = ModelRunner::new(decoder, pool);
    let mut drafters = if options.lookup { Drafters::by_lookup(None) } else { Drafters::default() };
    if let Some(files) = &options.draft_model {
        if !model.speculates() {
            let reason = format!("a draft model cannot propose tokens: the served one reads no drafts on {device}");
            return Err(OpenError::Unsupported { path: files.path.clone(), reason });
        }
        let (draft_model, bytes) = open_draft_model(files, vocabulary, vocab_size)?;
        drafters.model = Some(draft_model);
        weights += bytes;
    }
    let (engine, thread) = spawn_with(model, rules, options.engine, drafters)?;
    let stats = engine.stats();
    let memory = if device.is_cpu() {
        ModelMemory { weights, slots: stats.slots * stats.slot_bytes }
    } else {
        ModelMemory::default()
    };
    let served = Served {
        name: options.name.clone().unwrap_or_else(|| model_name(folder)),
        any_name: options.any_name,
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        fingerprint: system_fingerprint,
        device: device.to_string(),
        tokenizer,
        limits: Limits {
            vocab_size,
            max_prompt_tokens: options.max_prompt_tokens,
            max_tokens: options.max_tokens,
            sources,
        },
        sampling,
        template,
        grammars,
        codec: Arc::new(codec),
        state_bytes,
        memory,
        // Encoding a source cannot start from the encoding of a prefix.
        prefixes: Arc::new(PrefixIndex::new(
            if sources.is_some() { 0 } else { options.prefix_bytes },
            options.prefixes_per_owner,
        )),
        engine,
    };
    Ok((served, thread))
}

/// Returns the default name of a model: the folder's name; for a GGUF file, the name stored in it, or else the file's.
pub fn model_name(model: &Path) -> String {
    let text = |name: &OsStr| name.to_string_lossy().into_owned();
    let name = if model.is_file() {
        whole::name(model).or_else(|| model.file_stem().map(text))
    } else {
        model.canonicalize().unwrap_or_else(|_| model.into()).file_name().map(text)
    };
    name.unwrap_or_else(|| "tidegate".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_a_checkpoint_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = open(folder.path(), &OpenOptions::default()).err().unwrap().to_string();
        assert!(error.contains("config.json"), "{error}");
    }
}
