//! Loads checkpoints. A checkpoint is a folder as on the Hugging Face hub, with `config.json` and `model.safetensors`
//! (one file or several shards) or, quantized, `model.gguf`; or one file that is a whole model: GGUF as llama.cpp
//! writes it, or RWKV-7's tensors as its author publishes them.
//!
//! Everything is checked before any weight is loaded.

mod gguf;
mod native;
mod pth;
mod shards;
mod whole;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use crate::config::DecoderConfig;
use crate::decoder::Decoder;
use crate::schema;
use crate::weights::{Bytes, Entry, Errors, File, Parts, Reading, Source, TensorList, WeightType, Weights};
pub use crate::weights::{LoadError, Metadata, MetadataError, Repacked, Texts};
pub use shards::{INDEX, shards};
pub use whole::gguf_architectures;

/// Reads and checks `config.json`.
fn load_config(folder: &Path) -> Result<DecoderConfig, LoadError> {
    let path = folder.join(CONFIG);
    let text = std::fs::read_to_string(&path).map_err(|source| LoadError::Io { path, source })?;
    Ok(DecoderConfig::from_json(&text)?)
}

/// Loads a checkpoint folder, or a file that is a whole model ([`FileKind`]). Weights keep their stored type, except
/// that types without a kernel become q8_0. If a folder has both kinds of weight files, `model.safetensors` is used.
///
/// # Errors
/// [`LoadError`] when a tensor is missing, unknown, or has a different shape or type than the config asks for.
pub fn load(model: &Path, device: &Device) -> Result<Decoder, LoadError> {
    if !device.is_cpu() {
        return Err(LoadError::Device);
    }
    load_with(model, None)
}

/// Like [`load`], but converts all float matrices to type `weights`, or to f16 if their rows are not whole blocks of
/// it. The result is the same as [`load`] of a quantized copy.
///
/// # Errors
/// As for [`load`].
pub fn load_as(model: &Path, weights: WeightType) -> Result<Decoder, LoadError> {
    load_with(model, Some(weights))
}

fn load_with(model: &Path, weights: Option<WeightType>) -> Result<Decoder, LoadError> {
    Stored::open(model)?.decoder_with(weights)
}

/// Like [`load`], for a decoder on another device.
#[cfg(feature = "cuda")]
pub(crate) fn load_onto<D>(
    model: &Path,
    new: impl FnOnce(DecoderConfig, &Weights<'_>) -> Result<D, LoadError>,
) -> Result<D, LoadError> {
    let Stored { config, file } = Stored::open(model)?;
    new(config, &Weights::new(&Source::File(file, None)))
}

/// Returns the weight files that [`load`] reads. For a folder: `model.safetensors`, or else the files that
/// `model.safetensors.index.json` lists, or else `model.gguf`.
///
/// # Errors
/// [`LoadError`] when the index cannot be read or is wrong.
pub fn weights_files(model: &Path) -> Result<Vec<PathBuf>, LoadError> {
    if model.is_file() {
        return Ok(vec![model.into()]);
    }
    let [floats, index, quantised] = [SAFETENSORS, INDEX, GGUF].map(|name| model.join(name));
    if !floats.exists() && index.exists() {
        return Ok(shards(&index)?.iter().map(|file| model.join(file)).collect());
    }
    Ok(vec![if quantised.exists() && !floats.exists() { quantised } else { floats }])
}

/// The tensors in a folder's safetensors files, not checked against a config.
pub(crate) fn unchecked(folder: &Path) -> Result<Source, LoadError> {
    let files = weights_files(folder)?;
    if let [path] = files.as_slice()
        && path.ends_with(GGUF)
    {
        let reason = format!("the candle backend reads {SAFETENSORS}");
        return Err(LoadError::Format { file: GGUF.into(), reason });
    }
    Ok(Source::File(Arc::new(safetensors(&files)?), None))
}

/// A checkpoint that has passed the checks of [`load`]; no model has been built.
#[derive(Debug)]
pub struct Stored {
    config: DecoderConfig,
    file: Arc<File>,
}

/// A tensor in a checkpoint file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredTensor<'a> {
    /// The name.
    pub name: &'a str,
    /// The element type.
    pub kind: WeightType,
    /// The dimensions.
    pub shape: &'a [usize],
    /// Size in the file, in bytes.
    pub bytes: usize,
    /// Whether quantization converts it. All other tensors stay floats.
    pub quantised: bool,
}

impl Stored {
    /// Reads the config and the headers of the weight files, and checks them against each other.
    ///
    /// # Errors
    /// As for [`load`].
    pub fn open(model: &Path) -> Result<Self, LoadError> {
        if model.is_file() {
            return Self::whole(model);
        }
        let (config, files) = (load_config(model)?, weights_files(model)?);
        let mut file = match files.as_slice() {
            [path] if path.ends_with(GGUF) => gguf(path)?,
            files => safetensors(files)?,
        };
        schema::unpack(&config, &mut file.entries);
        check(&config, &file, &[], &|name| name.into())?;
        Ok(Self { config, file: Arc::new(file) })
    }

    /// [`Self::open`] for a single-file model.
    fn whole(path: &Path) -> Result<Self, LoadError> {
        let (file, described) = match FileKind::of(path)? {
            FileKind::Gguf => {
                let (mut file, metadata) = whole::parse(name(path), Arc::new(map(path)?))?;
                let described = whole::describe(&mut file, &metadata)?;
                (file, described)
            }
            FileKind::Pth => {
                let mut file = native::parse(name(path), Arc::new(map(path)?))?;
                let described = native::describe(&mut file)?;
                (file, described)
            }
            FileKind::Safetensors => {
                let mut file = File { name: name(path), config: "RWKV-7", ..safetensors(&[path.into()])? };
                let described = native::describe(&mut file)?;
                (file, described)
            }
        };
        let whole::Described { config, names, unknown } = described;
        check(&config, &file, &unknown, &|name| names.theirs(name))?;
        Ok(Self { config, file: Arc::new(file) })
    }

    /// The config of the model.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The source of the stored tensors.
    pub(crate) fn source(&self) -> Source {
        Source::File(Arc::clone(&self.file), None)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = StoredTensor<'_>> {
        let list = schema::tensors(&self.config).all;
        self.file.entries.iter().filter_map(move |(name, entry)| {
            let quantised = list.get(name)?.quantised;
            Some(StoredTensor { name, kind: entry.kind?, shape: &entry.shape, bytes: entry.range.len(), quantised })
        })
    }

    /// Builds the decoder, as [`load`] does.
    ///
    /// # Errors
    /// As for [`load`].
    pub fn decoder(&self) -> Result<Decoder, LoadError> {
        self.decoder_with(None)
    }

    fn decoder_with(&self, weights: Option<WeightType>) -> Result<Decoder, LoadError> {
        Decoder::new(self.config.clone(), &Weights::new(&Source::File(Arc::clone(&self.file), weights)))
    }

    /// Lists the stored types that have no kernel and become another type in memory, and the error this adds. Reads the
    /// tensors that [`Self::decoder`] has not already measured.
    ///
    /// # Errors
    /// A tensor cannot be repacked.
    pub fn repacked(&self) -> Result<Vec<Repacked>, LoadError> {
        let (source, mut all) = (Source::File(Arc::clone(&self.file), None), BTreeMap::<&str, Repacked>::new());
        for (name, entry) in self.file.entries.iter().filter(|(_, entry)| entry.repacked.is_some()) {
            let Some(to) = entry.kind else { continue };
            let error = Weights::new(&source).repacking_error(name)?;
            let from = entry.stored.to_lowercase();
            let of_type = all.entry(&entry.stored).or_insert(Repacked { from, to, tensors: 0, relative_error: 0.0 });
            of_type.tensors += 1;
            of_type.relative_error = of_type.relative_error.max(error);
        }
        Ok(all.into_values().collect())
    }

    /// A tensor's values, row-major.
    ///
    /// # Errors
    /// [`LoadError::Tensors`] when there is no tensor of that name, or it is quantized.
    pub fn floats(&self, name: &str) -> Result<Vec<f32>, LoadError> {
        let shape = self.file.entries.get(name).map_or(&[][..], |entry| &entry.shape);
        Weights::new(&Source::File(Arc::clone(&self.file), None)).numbers(name, shape)
    }
}

/// The name of a file of unquantized weights.
pub const SAFETENSORS: &str = "model.safetensors";
/// The name of a file of quantized weights.
pub const GGUF: &str = "model.gguf";
/// The name of a folder's config file.
const CONFIG: &str = "config.json";

/// Reads the metadata of a GGUF file. Does not check the tensors against a config.
///
/// # Errors
/// [`LoadError`] when the file cannot be read or breaks the format.
pub fn metadata(path: &Path) -> Result<Metadata, LoadError> {
    whole::parse(name(path), Arc::new(map(path)?)).map(|(_, metadata)| metadata)
}

/// A path's file name, for messages.
fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A kind of file that is a whole model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// GGUF, with a vocabulary.
    Gguf,
    /// RWKV-7's tensors in PyTorch's archive format, with the vocabulary file next to it.
    Pth,
    /// RWKV-7's tensors in safetensors.
    Safetensors,
}

impl FileKind {
    /// Detects the kind: safetensors, which begin with a length, by file name; the others by their first bytes (`.pth`
    /// also by name). Anything else counts as GGUF, whose reader reports what is wrong.
    ///
    /// # Errors
    /// The file cannot be read, or has a format that PyTorch no longer writes.
    pub fn of(path: &Path) -> Result<Self, LoadError> {
        let (failed, mut head) = (|source| LoadError::Io { path: path.to_owned(), source }, Vec::new());
        std::fs::File::open(path).map_err(failed)?.take(16).read_to_end(&mut head).map_err(failed)?;
        if head.starts_with(pth::OLD_MAGIC) {
            let reason = "was written by PyTorch before 1.6: load it and save it again".into();
            return Err(LoadError::Format { file: name(path), reason });
        }
        let is_named = |end: &str| path.extension().is_some_and(|extension| extension == end);
        Ok(match head {
            head if head.starts_with(b"GGUF") => Self::Gguf,
            head if head.starts_with(pth::MAGIC) || is_named("pth") => Self::Pth,
            _ if is_named("safetensors") => Self::Safetensors,
            _ => Self::Gguf,
        })
    }
}

/// Maps a file into memory.
fn map(path: &Path) -> Result<Mmap, LoadError> {
    let failed = |source| LoadError::Io { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    // SAFETY: the map is only read, and no program may write to a checkpoint while it is loaded or served. (A writer that
    // truncates the file ends this process, as it does any program that maps the file.)
    unsafe { Mmap::map(&file) }.map_err(failed)
}

/// Maps the safetensors files of one checkpoint, and reads their headers.
fn safetensors(paths: &[PathBuf]) -> Result<File, LoadError> {
    let (mut parts, mut entries, mut end): (Vec<Bytes>, _, _) = (Vec::new(), BTreeMap::new(), 0);
    for path in paths {
        let bytes = map(path)?;
        let broken = |reason: String| LoadError::Format { file: name(path), reason };
        let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| broken(error.to_string()))?;
        // The header follows an eight-byte length.
        let start = end + header + 8;
        for (name, info) in metadata.tensors() {
            let kind = match info.dtype {
                Dtype::F32 => Some(WeightType::F32),
                Dtype::F16 => Some(WeightType::F16),
                Dtype::BF16 => Some(WeightType::Bf16),
                _ => None,
            };
            let range = start + info.data_offsets.0..start + info.data_offsets.1;
            let (stored, shape) = (format!("{:?}", info.dtype), info.shape.clone());
            let entry = Entry { kind, repacked: None, stored, shape, range, reading: Reading::Plain };
            if entries.insert(name.clone(), entry).is_some() {
                return Err(broken(format!("{name} is in another file as well")));
            }
        }
        end += bytes.len();
        parts.push(Arc::new(bytes));
    }
    let name = if paths.len() == 1 { SAFETENSORS } else { INDEX };
    let parts = Parts::new(parts);
    Ok(File { name: name.into(), config: CONFIG, parts, entries, errors: Errors::default() })
}

/// Maps a GGUF file and reads its header.
fn gguf(path: &Path) -> Result<File, LoadError> {
    let bytes = map(path)?;
    let header = gguf::header(&bytes).map_err(|reason| LoadError::Format { file: GGUF.into(), reason })?;
    let (parts, entries) = (Parts::new(vec![Arc::new(bytes)]), header.entries);
    Ok(File { name: GGUF.into(), config: CONFIG, parts, entries, errors: Errors::default() })
}

/// Returns the tensors that a config asks for, with their shapes: the contract between trainer and server.
pub fn tensors(config: &DecoderConfig) -> BTreeMap<String, Vec<usize>> {
    schema::tensors(config).all.into_iter().map(|(name, tensor)| (name, tensor.shape)).collect()
}

/// Lists the types that a tensor may have: all of them if a file may store it quantized, else the float types.
fn supported(packed: bool) -> String {
    let kinds = WeightType::ALL.into_iter().filter(|kind| packed || !kind.is_quantised());
    kinds.map(|kind| kind.name().to_uppercase()).collect::<Vec<_>>().join(", ")
}

/// Checks the file's header against the tensors that the config asks for, without reading any tensor. `unknown` lists
/// names that the family does not have; `shown` maps one of our names to the name in the file.
fn check(
    config: &DecoderConfig,
    file: &File,
    unknown: &[String],
    shown: &dyn Fn(&str) -> String,
) -> Result<(), LoadError> {
    let TensorList { all: mut expected, stacks, .. } = schema::tensors(config);
    let mut problems: Vec<String> = unknown.iter().map(|name| format!("unknown tensor {name}")).collect();
    let mut extra = BTreeMap::new();
    for (name, entry) in &file.entries {
        match expected.remove(name) {
            None => drop(extra.insert(shown(name), entry)),
            Some(tensor) if tensor.shape != entry.shape => {
                let [found, expected] = [&entry.shape, &tensor.shape].map(|shape| entry.in_file(shape));
                problems.push(format!("{} has shape {found:?}, expected {expected:?}", shown(name)));
            }
            Some(tensor) if entry.kind.is_none_or(|kind| kind.is_quantised() && !tensor.packed) => {
                let supported = supported(tensor.packed);
                problems.push(format!("{} has dtype {}, expected {supported}", shown(name), entry.stored));
            }
            Some(_) => {}
        }
    }
    let mut missing: BTreeSet<String> = expected.keys().map(|name| shown(name)).collect();
    for (name, entry) in extra {
        // A stored tensor can stand for several of ours, but is only split if its shape is right.
        if missing.remove(&name) {
            problems.push(format!("{name} has shape {:?}, which is not that of the model", entry.shape));
        } else {
            problems.push(format!("unknown tensor {name}"));
        }
    }
    problems.extend(missing.iter().map(|name| format!("missing tensor {name}")));
    problems.sort();
    // The same stored tensor can be wrong for several of ours.
    problems.dedup();
    for names in stacks {
        let mut kinds = names.iter().filter_map(|name| file.entries.get(name)).map(|entry| entry.kind);
        let first = kinds.next().flatten();
        let quantised = |kind: Option<WeightType>| kind.is_some_and(WeightType::is_quantised);
        if kinds.any(|kind| kind != first && (quantised(kind) || quantised(first))) {
            problems.push(format!("{} must have one type", names.join(", ")));
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(file.refuse(problems)) }
}
