//! Loads a checkpoint folder, or a file that is a whole model, and starts its engine, on the CPU or on a CUDA device.

mod choice;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod error;
mod supported;
mod whole;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
#[cfg(feature = "cuda")]
use tidegate_model::checkpoint::LoadError;
use tidegate_model::checkpoint::{FileKind, Stored};
#[cfg(feature = "cuda")]
use tidegate_model::cuda::CudaDecoder;
use tidegate_model::{Backend, Decoder, ModelRunner, Pool, PoolOptions, StateType, checkpoint};

use crate::api::Served;
use crate::engine::{EngineOptions, EngineThread, Limits, Sources, TextRules, recommended_sampling, spawn};
use crate::ram::ModelMemory;
use crate::session::{Codec, Fingerprint, Keys, PrefixIndex, hex};
use crate::text::{ChatTemplate, Grammars, HelperCommand, Tokenizer, tokenizer_file, vocabulary_beside};

pub use choice::{DeviceChoice, DeviceChoiceError};
#[cfg(feature = "cuda")]
pub use cuda::OpenCuda;
pub use device::OpenDevice;
pub use error::{DeviceError, OpenError};
pub use supported::{refused_config, refused_gguf, refused_type};

/// Default number of conversations that run at once on a CPU: more of them slow each other down.
pub const CPU_SLOTS: usize = 64;

/// Most slots that a CUDA device gets by default: with more, each token takes the time of several steps.
pub const MOST_GPU_SLOTS: usize = 1 << 14;

/// How a checkpoint is served.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The model name of requests; [`model_name`] by default.
    pub name: Option<String>,
    /// Whether it answers to every other name as well.
    pub any_name: bool,
    /// The device that computes.
    pub device: DeviceChoice,
    /// Conversations that run at once; 0 means 64 on the CPU, and as many as fit into a CUDA device's memory.
    pub slots: usize,
    /// The number format of their states.
    pub state: StateType,
    /// Longest prompt, in tokens; the model bounds a source as well.
    pub max_prompt_tokens: usize,
    /// Longest answer, in tokens.
    pub max_tokens: usize,
    /// Bytes of the prefix cache; 0 disables it.
    pub prefix_bytes: usize,
    /// Most prefixes of one owner.
    pub prefixes_per_owner: usize,
    /// The secret that snapshots are signed and encrypted with, if any.
    pub secret: Option<Vec<u8>>,
    /// The process that tries grammars before the server compiles them; without one, they are compiled at once.
    pub grammar_helper: Option<HelperCommand>,
    /// The engine's settings.
    pub engine: EngineOptions,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            name: None,
            any_name: false,
            device: DeviceChoice::default(),
            slots: 0,
            state: StateType::F32,
            max_prompt_tokens: 1_000_000,
            max_tokens: 1_000_000,
            prefix_bytes: 256 << 20,
            prefixes_per_owner: 64,
            secret: None,
            grammar_helper: None,
            engine: EngineOptions::default(),
        }
    }
}

/// The folder in `data` for the conversations of this model: those of another model are useless to it.
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
    // Opening a GPU takes longer.
    supported::check(folder)?;
    open_on(folder, &options.device.open()?, options)
}

/// Whether [`open`] would take what is in `folder`: reads the config and the headers of the weights.
///
/// # Errors
/// The reason.
pub fn check(folder: &Path) -> Result<(), OpenError> {
    supported::check(folder)?;
    Ok(Stored::open(folder).map(drop)?)
}

/// What the checkpoint in `folder` is going to take of the process's memory; zeros if it runs on another device.
///
/// # Errors
/// The folder has no checkpoint of ours.
pub fn size(folder: &Path, options: &OpenOptions) -> Result<ModelMemory, OpenError> {
    let config = supported::config(folder)?;
    if !matches!(options.device.open(), Ok(OpenDevice::Cpu)) {
        return Ok(ModelMemory::default());
    }
    let files = checkpoint::weights_files(folder)?;
    let bytes = |path: PathBuf| match std::fs::metadata(&path) {
        Ok(file) => Ok(file.len()),
        Err(source) => Err(OpenError::Read { path, source }),
    };
    let weights = files.into_iter().map(bytes).sum::<Result<_, _>>()?;
    let slots = if options.slots == 0 { CPU_SLOTS } else { options.slots };
    let state = match options.state {
        StateType::F32 => config.state_bytes(),
        StateType::Bf16 => config.state_bytes() / 2,
    };
    Ok(ModelMemory { weights, slots: (slots * state) as u64 })
}

/// [`open`] on a device that has been opened; with `auto`, on the CPU if that device lacks kernels or memory.
///
/// # Errors
/// As for [`open`].
pub fn open_on(folder: &Path, device: &OpenDevice, options: &OpenOptions) -> Result<(Served, EngineThread), OpenError> {
    #[cfg(feature = "cuda")]
    if let OpenDevice::Cuda(cuda) = device {
        let served = on_cuda(folder, cuda, options).and_then(|loaded| serve(folder, device, loaded, options));
        return match served {
            Err(error) if !cuda::is_of_the_device(&error) => Err(error),
            Err(error) if options.device == DeviceChoice::Auto => {
                tracing::warn!(%device, "using the CPU: {error}");
                serve(folder, &OpenDevice::Cpu, on_cpu(folder, options)?, options)
            }
            Err(error @ OpenError::Device(_)) => Err(error),
            Err(error) => Err(DeviceError::Unable { device: device.to_string(), reason: error.to_string() }.into()),
            served => served,
        };
    }
    serve(folder, device, on_cpu(folder, options)?, options)
}

/// A decoder and its slots.
type Loaded<B> = (B, Pool<<B as Backend>::States>);

fn on_cpu(folder: &Path, options: &OpenOptions) -> Result<Loaded<Decoder>, OpenError> {
    let stored = Stored::open(folder)?;
    let decoder = stored.decoder()?;
    for repacked in stored.repacked()? {
        tracing::info!(model = %folder.display(), "{repacked}");
    }
    let slots = if options.slots == 0 { CPU_SLOTS } else { options.slots };
    let pool = decoder.new_pool_with(PoolOptions { state: options.state, ..PoolOptions::new(slots) });
    Ok((decoder, pool.map_err(|source| OpenError::Slots { slots, source })?))
}

#[cfg(feature = "cuda")]
fn on_cuda(folder: &Path, device: &OpenCuda, options: &OpenOptions) -> Result<Loaded<CudaDecoder>, OpenError> {
    let decoder = device.load(folder)?;
    let slots = match options.slots {
        0 => decoder.room(options.state, MOST_GPU_SLOTS).map_err(LoadError::from)?,
        slots => slots,
    };
    let pool = decoder.new_pool(slots, options.state).map_err(|source| OpenError::Slots { slots, source })?;
    Ok((decoder, pool))
}

/// Starts the engine of a loaded model.
fn serve<B: Backend + 'static>(
    folder: &Path,
    device: &OpenDevice,
    (decoder, pool): Loaded<B>,
    options: &OpenOptions,
) -> Result<(Served, EngineThread), OpenError> {
    let (config, greatest) = (decoder.config().clone(), decoder.greatest_maxima());
    let longest_source = config.source().map_or(0, |source| source.max_positions);
    let (vocab_size, layout, state_bytes) = (config.vocab_size, config.state_layout(), config.state_bytes() as u64);
    let eos = config.eos_token_id.as_slice();
    let (tokenizer, template) = if folder.is_file() {
        whole::text(folder, vocab_size, eos)?
    } else {
        let tokenizer = Tokenizer::load(folder, vocab_size, eos)?;
        let template = ChatTemplate::load_for(folder, &tokenizer)?;
        (tokenizer, template)
    };
    let sampling = recommended_sampling(tokenizer.defaults(), vocab_size)?;
    let sources = config.source().map(|source| Sources { longest: source.max_positions, start: source.start });
    // A source is not a conversation, even if the checkpoint has a chat template.
    let template = if sources.is_some() { None } else { template.map(Arc::new) };
    let fingerprint = model_fingerprint(folder, options.state)?;
    let system_fingerprint = system_fingerprint(folder, &fingerprint, &device.class())?;
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
    let weights = resident_weights(folder, &decoder);
    let (engine, thread) = spawn(ModelRunner::new(decoder, pool), rules, options.engine)?;
    let stats = engine.stats();
    let memory = match device {
        OpenDevice::Cpu => ModelMemory { weights, slots: stats.slots * stats.slot_bytes },
        #[cfg(feature = "cuda")]
        OpenDevice::Cuda(_) => ModelMemory::default(),
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
        // The encoding of a source cannot start from a prefix's.
        prefixes: Arc::new(PrefixIndex::new(
            if sources.is_some() { 0 } else { options.prefix_bytes },
            options.prefixes_per_owner,
        )),
        engine,
    };
    Ok((served, thread))
}

/// Bytes of a model's weights on the CPU. A decoder counts what a token reads, which may be less than the file has.
fn resident_weights(folder: &Path, decoder: &impl Backend) -> u64 {
    let files = checkpoint::weights_files(folder).unwrap_or_default();
    let stored = files.iter().map(|path| std::fs::metadata(path).map_or(0, |file| file.len())).sum::<u64>();
    stored.max(decoder.weight_bytes() as u64)
}

/// The name of a model that is given none: its folder's; of a GGUF file the one that it has, or else the file's.
pub fn model_name(model: &Path) -> String {
    let text = |name: &OsStr| name.to_string_lossy().into_owned();
    let name = if model.is_file() {
        whole::name(model).or_else(|| model.file_stem().map(text))
    } else {
        model.canonicalize().unwrap_or_else(|_| model.into()).file_name().map(text)
    };
    name.unwrap_or_else(|| "tidegate".into())
}

/// What a snapshot must match to continue here.
///
/// A rounded state continues differently from an exact one, so the number format of states is part of the architecture.
/// The device is not: a session can move between the CPU and CUDA.
fn model_fingerprint(folder: &Path, state: StateType) -> Result<Fingerprint, OpenError> {
    // The checkpoint has been loaded: a missing file is not needed.
    let of = |path: &Path| -> Result<_, OpenError> { Ok(digest(path)?.unwrap_or_default()) };
    let [mut architecture, weights, tokenizer] = if folder.is_file() {
        // A GGUF file has all three; others have all but the vocabulary.
        let vocabulary = if FileKind::of(folder)? == FileKind::Gguf { None } else { vocabulary_beside(folder) };
        let file = of(folder)?;
        [file, file, vocabulary.map_or(Ok(file), |path| of(&path))?]
    } else {
        let weights = checkpoint::weights_files(folder)?;
        let digests: Vec<[u8; 32]> = weights.iter().map(|path| of(path)).collect::<Result<_, _>>()?;
        let weights = match digests.as_slice() {
            [one] => *one,
            all => Sha256::digest(all.concat()).into(),
        };
        [of(&folder.join("config.json"))?, weights, of(&tokenizer_file(folder))?]
    };
    if state == StateType::Bf16 {
        architecture = Sha256::new().chain_update(architecture).chain_update("states in bf16").finalize().into();
    }
    Ok(Fingerprint { architecture: hex(&architecture), weights: hex(&weights), tokenizer: hex(&tokenizer) })
}

/// A short name for the weights, the tokenizer, the recommended settings, the server's version and the class of device: if
/// it is the same, the same request and seed give the same text.
fn system_fingerprint(folder: &Path, model: &Fingerprint, class: &str) -> Result<String, OpenError> {
    let mut hash = Sha256::new().chain_update(env!("CARGO_PKG_VERSION"));
    for part in [&model.architecture, &model.weights, &model.tokenizer] {
        hash.update(part);
    }
    for name in ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"] {
        hash.update(digest(&folder.join(name))?.unwrap_or_default());
    }
    hash.update(class);
    Ok(format!("fp_{}", &hex(&hash.finalize())[..16]))
}

/// The SHA-256 of a file; `None` if there is no such file.
fn digest(path: &Path) -> Result<Option<[u8; 32]>, OpenError> {
    let failed = |source| OpenError::Read { path: path.into(), source };
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).map_err(failed)? {
            0 => return Ok(Some(hash.finalize().into())),
            count => hash.update(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_its_sha_256() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        assert_eq!(digest(&path).unwrap(), None);
        std::fs::write(&path, "abc").unwrap();
        assert!(hex(&digest(&path).unwrap().unwrap()).starts_with("ba7816bf8f01cfea414140de5dae2223"));
    }

    #[test]
    fn the_fingerprint_covers_the_weights_that_are_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let of = |state| model_fingerprint(folder.path(), state).unwrap();
        let fingerprint = || of(StateType::F32);
        write("config.json", "{}");
        write("model.gguf", "quantised");
        let quantised = fingerprint();
        write("model.gguf", "quantised otherwise");
        let otherwise = fingerprint();
        assert_ne!(quantised.weights, otherwise.weights);
        assert_eq!(quantised.architecture, otherwise.architecture);
        // If both exist, the safetensors are loaded.
        write("model.safetensors", "quantised");
        assert_eq!(fingerprint(), quantised);
        // Rounded states continue differently.
        assert_ne!(of(StateType::Bf16).architecture, quantised.architecture);
        assert_eq!(of(StateType::Bf16).weights, quantised.weights);
        let system = |model: &Fingerprint, class: &str| system_fingerprint(folder.path(), model, class).unwrap();
        assert_ne!(system(&quantised, "cpu"), system(&otherwise, "cpu"));
        // Another device gives another text, and continues the same sessions.
        assert_ne!(system(&quantised, "cpu"), system(&quantised, "cuda NVIDIA H200"));
    }

    #[test]
    fn the_fingerprint_covers_a_vocabulary_file() {
        let folder = tempfile::tempdir().unwrap();
        let of = |text: &str| {
            std::fs::write(folder.path().join("rwkv_vocab_v20230424.txt"), text).unwrap();
            model_fingerprint(folder.path(), StateType::F32).unwrap().tokenizer
        };
        assert_ne!(of("1 'a' 1"), of("1 'b' 1"));
    }

    #[test]
    fn a_folder_without_a_checkpoint_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = open(folder.path(), &OpenOptions::default()).err().unwrap().to_string();
        assert!(error.contains("config.json"), "{error}");
    }
}
