//! From a checkpoint's folder to a model that is being served.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tidegate_model::checkpoint::LoadError;
use tidegate_model::sampling::SamplingError;
use tidegate_model::{Device, checkpoint};

use crate::api::Served;
use crate::engine::{
    DecoderModel, EngineError, EngineOptions, EngineThread, Limits, ModelError, TextRules, recommended_sampling, spawn,
};
use crate::text::{TextError, Tokenizer};

/// The shipped checkpoint, from the top of the source tree.
const SHIPPED: &str = "weights/checkpoints/tidegate-tiny";

/// The files of a checkpoint that change what is answered.
const FINGERPRINTED: [&str; 5] =
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"];

/// Why a checkpoint is not served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// None was named and none is where it is looked for.
    #[error("no checkpoint found, looked for {}; name a folder with --model", places(.0))]
    NotFound(Vec<PathBuf>),
    /// The weights.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The recommended sampling parameters.
    #[error("generation_config.json: {0}")]
    Sampling(#[from] SamplingError),
    /// The slots.
    #[error("the states of {slots} slots cannot be allocated: {source}")]
    Slots {
        /// How many were asked for.
        slots: usize,
        /// Why not.
        source: ModelError,
    },
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A file could not be read for the fingerprint.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

fn places(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// How a checkpoint is to be served.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The name that requests give; the folder's own where absent.
    pub name: Option<String>,
    /// Conversations that run at once.
    pub slots: usize,
    /// Longest prompt, in tokens.
    pub max_prompt_tokens: usize,
    /// Longest answer, in tokens.
    pub max_tokens: usize,
    /// The engine's settings.
    pub engine: EngineOptions,
}

impl Default for OpenOptions {
    fn default() -> Self {
        let (slots, most) = (64, 1_000_000);
        Self { name: None, slots, max_prompt_tokens: most, max_tokens: most, engine: EngineOptions::default() }
    }
}

/// Finds the shipped checkpoint: from the current folder, beside the executable, in the source tree it was built from.
///
/// # Errors
/// It is in none of these places.
pub fn locate() -> Result<PathBuf, OpenError> {
    let beside = std::env::current_exe().ok().and_then(|file| Some(file.parent()?.join(SHIPPED)));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(|top| top.join(SHIPPED));
    let places: Vec<PathBuf> = [Some(SHIPPED.into()), beside, source].into_iter().flatten().collect();
    match places.iter().find(|folder| folder.join("config.json").is_file()) {
        Some(folder) => Ok(folder.clone()),
        None => Err(OpenError::NotFound(places)),
    }
}

/// Loads the checkpoint in `folder` and starts its engine; returns once the model has taken its first steps.
///
/// # Errors
/// A file that is missing or wrong, too little memory, or a model that fails.
pub fn open(folder: &Path, options: &OpenOptions) -> Result<(Served, EngineThread), OpenError> {
    let decoder = checkpoint::load(folder, &Device::Cpu)?;
    let config = decoder.config();
    let vocab_size = config.vocab_size;
    let tokenizer = Tokenizer::load(folder, vocab_size, config.eos_token_id.as_slice())?;
    let sampling = recommended_sampling(tokenizer.defaults(), vocab_size)?;
    let slots = options.slots;
    let model = DecoderModel::new(decoder, slots).map_err(|source| OpenError::Slots { slots, source })?;
    let rules = TextRules { vocabulary: Arc::clone(tokenizer.vocabulary()), eos: Arc::clone(tokenizer.eos()) };
    let fingerprint = fingerprint(folder)?;
    let (engine, thread) = spawn(model, rules, options.engine)?;
    let served = Served {
        name: options.name.clone().unwrap_or_else(|| folder_name(folder)),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        fingerprint,
        tokenizer: Arc::new(tokenizer),
        limits: Limits { vocab_size, max_prompt_tokens: options.max_prompt_tokens, max_tokens: options.max_tokens },
        sampling,
        engine,
    };
    Ok((served, thread))
}

fn folder_name(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.into());
    whole.file_name().map_or_else(|| "tidegate".into(), |name| name.to_string_lossy().into_owned())
}

/// A short name for these weights, this tokenizer, what its makers recommend and this version of the server: where
/// it is the same, the same request and seed give the same text. It guards against mistakes, not against malice.
fn fingerprint(folder: &Path) -> Result<String, OpenError> {
    let mut hash = Fnv::new();
    hash.update(env!("CARGO_PKG_VERSION").as_bytes());
    for name in FINGERPRINTED {
        let path = folder.join(name);
        let read = |source| OpenError::Read { path: path.clone(), source };
        let mut file = match File::open(&path) {
            Ok(file) => file,
            // The checkpoint has been loaded: what is not there does not have to be.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(read(error)),
        };
        let mut buffer = vec![0; 1 << 20];
        loop {
            let count = file.read(&mut buffer).map_err(read)?;
            if count == 0 {
                break;
            }
            hash.update(&buffer[..count]);
        }
    }
    Ok(format!("fp_{:016x}", hash.0))
}

/// The 64-bit FNV-1a hash.
struct Fnv(u64);

impl Fnv {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_fnv_1a() {
        let mut hash = Fnv::new();
        hash.update(b"foo");
        hash.update(b"bar");
        assert_eq!(hash.0, 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_folder_without_a_checkpoint_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = open(folder.path(), &OpenOptions::default()).err().unwrap().to_string();
        assert!(error.contains("config.json"), "{error}");
    }
}
