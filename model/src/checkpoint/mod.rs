//! A checkpoint folder as on the Hugging Face hub: `config.json` and `model.safetensors` or, quantised, `model.gguf`.
//! All of it is checked before any of it is loaded.

mod gguf;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use crate::config::DecoderConfig;
use crate::decoder::Decoder;
use crate::schema;
pub use crate::weights::LoadError;
use crate::weights::{Entry, File, Source, TensorList, WeightType, Weights};

/// Reads and checks `config.json`.
fn load_config(folder: &Path) -> Result<DecoderConfig, LoadError> {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|source| LoadError::Io { path, source })?;
    Ok(DecoderConfig::from_json(&text)?)
}

/// Loads a checkpoint folder; weights keep their stored type. If the folder has both files of weights, this reads
/// `model.safetensors`.
///
/// # Errors
/// [`LoadError`] when a tensor is missing or unknown, or has another shape or type than the config asks for.
pub fn load(folder: &Path, device: &Device) -> Result<Decoder, LoadError> {
    if !device.is_cpu() {
        return Err(LoadError::Device);
    }
    load_with(folder, None)
}

/// [`load`] with all matrices of floats converted to another type, or to f16 where their rows are not whole blocks of it:
/// the same as [`load`] of a quantised copy of the folder.
///
/// # Errors
/// As for [`load`].
pub fn load_as(folder: &Path, weights: WeightType) -> Result<Decoder, LoadError> {
    load_with(folder, Some(weights))
}

fn load_with(folder: &Path, weights: Option<WeightType>) -> Result<Decoder, LoadError> {
    let Stored { config, file } = Stored::open(folder)?;
    Decoder::new(config, &Weights::new(&Source::File(file, weights)))
}

/// [`load`] for a decoder on another device.
#[cfg(feature = "cuda")]
pub(crate) fn load_onto<D>(
    folder: &Path,
    new: impl FnOnce(DecoderConfig, &Weights<'_>) -> Result<D, LoadError>,
) -> Result<D, LoadError> {
    let Stored { config, file } = Stored::open(folder)?;
    new(config, &Weights::new(&Source::File(file, None)))
}

/// The file of weights that [`load`] reads: `model.gguf` if it is the only one, else `model.safetensors`.
pub fn weights_file(folder: &Path) -> PathBuf {
    let (floats, quantised) = (folder.join(SAFETENSORS), folder.join(GGUF));
    if quantised.exists() && !floats.exists() { quantised } else { floats }
}

/// A checkpoint folder that has passed the checks of [`load`], without a model.
#[derive(Debug)]
pub struct Stored {
    config: DecoderConfig,
    file: Arc<File>,
}

/// A tensor of a checkpoint's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredTensor<'a> {
    /// The name.
    pub name: &'a str,
    /// The type of its numbers.
    pub kind: WeightType,
    /// The dimensions.
    pub shape: &'a [usize],
    /// Bytes in the file.
    pub bytes: usize,
    /// Whether quantisation converts it. All other tensors stay floats.
    pub quantised: bool,
}

impl Stored {
    /// Reads the config and the header of the weights, and compares them.
    ///
    /// # Errors
    /// As for [`load`].
    pub fn open(folder: &Path) -> Result<Self, LoadError> {
        let (config, path) = (load_config(folder)?, weights_file(folder));
        let file = if path.ends_with(GGUF) { gguf(&path)? } else { safetensors(&path)? };
        check(&config, &file)?;
        Ok(Self { config, file: Arc::new(file) })
    }

    /// The config of the model.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = StoredTensor<'_>> {
        let list = schema::tensors(&self.config).all;
        self.file.entries.iter().filter_map(move |(name, entry)| {
            let quantised = list.get(name)?.quantised;
            Some(StoredTensor { name, kind: entry.kind?, shape: &entry.shape, bytes: entry.range.len(), quantised })
        })
    }

    /// A tensor's numbers, row-major.
    ///
    /// # Errors
    /// [`LoadError::Tensors`] when there is no tensor of that name, or it is quantised.
    pub fn floats(&self, name: &str) -> Result<Vec<f32>, LoadError> {
        let shape = self.file.entries.get(name).map_or(&[][..], |entry| &entry.shape);
        Weights::new(&Source::File(Arc::clone(&self.file), None)).numbers(name, shape)
    }
}

/// The name of a file of unquantised weights.
pub const SAFETENSORS: &str = "model.safetensors";
/// The name of a file of quantised weights.
pub const GGUF: &str = "model.gguf";

fn map(path: &Path) -> Result<Mmap, LoadError> {
    let failed = |source| LoadError::Io { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    // SAFETY: the map is only read, and nobody writes to a checkpoint while it is loaded or served. (A writer that
    // truncates the file ends this process, as it does any program that maps the file.)
    unsafe { Mmap::map(&file) }.map_err(failed)
}

/// Maps a safetensors file and reads its header.
fn safetensors(path: &Path) -> Result<File, LoadError> {
    let bytes = map(path)?;
    let broken = |reason: String| LoadError::Format { file: SAFETENSORS, reason };
    let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| broken(error.to_string()))?;
    // Eight bytes with its length come before the header.
    let start = header + 8;
    let entries = metadata.tensors().into_iter().map(|(name, info)| {
        let kind = match info.dtype {
            Dtype::F32 => Some(WeightType::F32),
            Dtype::F16 => Some(WeightType::F16),
            Dtype::BF16 => Some(WeightType::Bf16),
            _ => None,
        };
        let range = start + info.data_offsets.0..start + info.data_offsets.1;
        (name, Entry { kind, stored: format!("{:?}", info.dtype), shape: info.shape.clone(), range })
    });
    let entries = entries.collect();
    Ok(File { name: SAFETENSORS, bytes: Box::new(bytes), entries })
}

/// Maps a GGUF file and reads its header.
fn gguf(path: &Path) -> Result<File, LoadError> {
    let bytes = map(path)?;
    let entries = gguf::entries(&bytes).map_err(|reason| LoadError::Format { file: GGUF, reason })?;
    Ok(File { name: GGUF, bytes: Box::new(bytes), entries })
}

/// The tensors that a config asks for, with their shapes: the contract between trainer and server.
pub fn tensors(config: &DecoderConfig) -> BTreeMap<String, Vec<usize>> {
    schema::tensors(config).all.into_iter().map(|(name, tensor)| (name, tensor.shape)).collect()
}

/// The types that a tensor may have: all of them if quantisation converts it.
fn supported(quantised: bool) -> String {
    let kinds = WeightType::ALL.into_iter().filter(|kind| quantised || !kind.is_quantised());
    kinds.map(|kind| kind.name().to_uppercase()).collect::<Vec<_>>().join(", ")
}

/// Compares the file's header with the tensors that the config asks for; reads no tensor.
fn check(config: &DecoderConfig, file: &File) -> Result<(), LoadError> {
    let TensorList { all: mut expected, stacks, .. } = schema::tensors(config);
    let mut problems = Vec::new();
    for (name, entry) in &file.entries {
        match expected.remove(name) {
            None => problems.push(format!("unknown tensor {name}")),
            Some(tensor) if tensor.shape != entry.shape => {
                problems.push(format!("{name} has shape {:?}, expected {:?}", entry.shape, tensor.shape));
            }
            Some(tensor) if entry.kind.is_none_or(|kind| kind.is_quantised() && !tensor.quantised) => {
                problems.push(format!("{name} has dtype {}, expected {}", entry.stored, supported(tensor.quantised)));
            }
            Some(_) => {}
        }
    }
    problems.extend(expected.keys().map(|name| format!("missing tensor {name}")));
    problems.sort();
    for names in stacks {
        let mut kinds = names.iter().filter_map(|name| file.entries.get(name)).map(|entry| entry.kind);
        let first = kinds.next().flatten();
        let quantised = |kind: Option<WeightType>| kind.is_some_and(WeightType::is_quantised);
        if kinds.any(|kind| kind != first && (quantised(kind) || quantised(first))) {
            problems.push(format!("{} must have one type", names.join(", ")));
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(LoadError::Tensors { file: file.name, problems }) }
}
