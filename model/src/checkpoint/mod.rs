//! A checkpoint folder as on the Hugging Face hub: `config.json` and `model.safetensors` or, quantised, `model.gguf`;
//! checked, then loaded.

mod gguf;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Device;
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use crate::config::{Attention, DecoderConfig};
use crate::decoder::Decoder;
pub use crate::weights::LoadError;
use crate::weights::{Entry, File, Source, WeightType, Weights};

/// Reads and checks `config.json`.
fn load_config(folder: &Path) -> Result<DecoderConfig, LoadError> {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|source| LoadError::Io { path, source })?;
    Ok(DecoderConfig::from_json(&text)?)
}

/// Loads a checkpoint folder; weights keep the type they are stored in. Where both files of weights are there,
/// `model.safetensors` counts.
///
/// # Errors
/// [`LoadError`]; nothing is loaded unless every tensor is there, none is unknown, and all shapes fit.
pub fn load(folder: &Path, device: &Device) -> Result<Decoder, LoadError> {
    if !device.is_cpu() {
        return Err(LoadError::Device);
    }
    load_with(folder, None)
}

/// [`load`] with all matrices of floats made into another type, where their rows are whole blocks of it (else into
/// f16): what [`load`] of a quantised copy of the folder gives.
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

/// [`load`] of another decoder than the CPU's.
#[cfg(feature = "cuda")]
pub(crate) fn load_onto<D>(
    folder: &Path,
    new: impl FnOnce(DecoderConfig, &Weights<'_>) -> Result<D, LoadError>,
) -> Result<D, LoadError> {
    let Stored { config, file } = Stored::open(folder)?;
    new(config, &Weights::new(&Source::File(file, None)))
}

/// The file whose weights count in a checkpoint folder: `model.safetensors`, unless there is none but a `model.gguf`.
pub fn weights_file(folder: &Path) -> PathBuf {
    let (floats, quantised) = (folder.join(SAFETENSORS), folder.join(GGUF));
    if quantised.exists() && !floats.exists() { quantised } else { floats }
}

/// A checkpoint folder with all the checks of [`load`], of which no model is made.
#[derive(Debug)]
pub struct Stored {
    config: DecoderConfig,
    file: Arc<File>,
}

/// A tensor of a checkpoint's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// How its numbers are stored.
    pub kind: WeightType,
    /// Its dimensions.
    pub shape: &'a [usize],
    /// Bytes in the file.
    pub bytes: usize,
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

    /// What the folder's model is made of.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = StoredTensor<'_>> {
        self.file.entries.iter().filter_map(|(name, entry)| {
            Some(StoredTensor { name, kind: entry.kind?, shape: &entry.shape, bytes: entry.range.len() })
        })
    }

    /// A tensor's numbers, row-major.
    ///
    /// # Errors
    /// [`LoadError::Tensors`] where there is none of that name, or its numbers are quantised.
    pub fn floats(&self, name: &str) -> Result<Vec<f32>, LoadError> {
        let shape = self.file.entries.get(name).map_or(&[][..], |entry| &entry.shape);
        Weights::new(&Source::File(Arc::clone(&self.file), None)).numbers(name, shape)
    }
}

/// Whether the tensor becomes another type where a checkpoint is quantised; all others stay as they are.
pub fn is_quantised(name: &str, shape: &[usize]) -> bool {
    crate::weights::is_quantised(name, shape)
}

/// The name of a file of weights as they were trained.
pub const SAFETENSORS: &str = "model.safetensors";
/// The name of a file of quantised weights.
pub const GGUF: &str = "model.gguf";

fn map(path: &Path) -> Result<Mmap, LoadError> {
    let failed = |source| LoadError::Io { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    // SAFETY: the file is only read, and a checkpoint is not written to while it is loaded or served (a writer that
    // truncated it would end this process, as it would any program that maps its files).
    unsafe { Mmap::map(&file) }.map_err(failed)
}

/// Maps a safetensors file and reads its header.
fn safetensors(path: &Path) -> Result<File, LoadError> {
    let bytes = map(path)?;
    let broken = |reason: String| LoadError::Format { file: SAFETENSORS, reason };
    let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|error| broken(error.to_string()))?;
    // The header's length is eight bytes before it.
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
    let (hidden, inner, width) = (config.hidden_size, config.inner_size(), config.intermediate_size);
    let (heads, d) = (config.num_attention_heads, config.head_dim);
    let mut all = BTreeMap::new();
    all.insert("model.embed_tokens.weight".to_owned(), vec![config.vocab_size, hidden]);
    all.insert("model.norm.weight".to_owned(), vec![hidden]);
    if !config.tie_word_embeddings {
        all.insert("lm_head.weight".to_owned(), vec![config.vocab_size, hidden]);
    }
    source_tensors(config, &mut all);
    for layer in 0..config.num_hidden_layers {
        let mut add = |name: &str, shape: &[usize]| all.insert(format!("model.layers.{layer}.{name}"), shape.to_vec());
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        for name in ["q", "k", "v"] {
            add(&format!("self_attn.{name}_proj.weight"), &[inner, hidden]);
            if config.conv_kernel > 0 {
                add(&format!("self_attn.{name}_conv1d.weight"), &[inner, 1, config.conv_kernel]);
            }
        }
        add("self_attn.o_proj.weight", &[hidden, inner]);
        if config.attention != Attention::Softmax {
            if config.feature_map.has_sigma() {
                add("self_attn.sigma", &[heads, d]);
            }
            if config.feature_map.has_random_matrices() {
                add("self_attn.random_matrices", &[heads, config.proj_dim, d]);
            }
            if config.gate {
                add("self_attn.gate.weight", &[heads, hidden]);
                add("self_attn.gate.bias", &[heads]);
            }
        }
        if config.attention == Attention::Hybrid {
            add("self_attn.far_bias", &[heads]);
        }
        if config.output_norm {
            add("self_attn.o_norm.weight", &[d]);
        }
        add("mlp.gate_proj.weight", &[width, hidden]);
        add("mlp.up_proj.weight", &[width, hidden]);
        add("mlp.down_proj.weight", &[hidden, width]);
    }
    all
}

/// Those of an encoder-decoder besides the decoder's own.
fn source_tensors(config: &DecoderConfig, all: &mut BTreeMap<String, Vec<usize>>) {
    let Some(source) = config.source() else { return };
    let (hidden, inner, width) = (config.hidden_size, config.inner_size(), config.intermediate_size);
    let (heads, d) = (config.num_attention_heads, config.head_dim);
    let mut add = |name: String, shape: &[usize]| all.insert(name, shape.to_vec());
    let layers = (0..source.layers).map(|i| format!("encoder.layers.{i}.self_attn"));
    let cross = (0..config.num_hidden_layers).map(|i| format!("model.layers.{i}.cross_attn"));
    for attention in layers.chain(cross) {
        for name in ["q", "k", "v"] {
            add(format!("{attention}.{name}_proj.weight"), &[inner, hidden]);
        }
        add(format!("{attention}.o_proj.weight"), &[hidden, inner]);
    }
    for layer in (0..source.layers).map(|i| format!("encoder.layers.{i}")) {
        add(format!("{layer}.input_layernorm.weight"), &[hidden]);
        add(format!("{layer}.post_attention_layernorm.weight"), &[hidden]);
        add(format!("{layer}.mlp.gate_proj.weight"), &[width, hidden]);
        add(format!("{layer}.mlp.up_proj.weight"), &[width, hidden]);
        add(format!("{layer}.mlp.down_proj.weight"), &[hidden, width]);
    }
    add("encoder.norm.weight".to_owned(), &[hidden]);
    for layer in (0..config.num_hidden_layers).map(|i| format!("model.layers.{i}")) {
        add(format!("{layer}.cross_attn_layernorm.weight"), &[hidden]);
        if config.attention != Attention::Softmax {
            add(format!("{layer}.cross_attn.sigma"), &[heads, d]);
            add(format!("{layer}.cross_attn.random_matrices"), &[heads, config.proj_dim, d]);
        }
    }
}

/// The types that a tensor may have; only matrices may have all.
fn known(matrix: bool) -> String {
    let kinds = WeightType::ALL.into_iter().filter(|kind| matrix || !kind.is_quantised());
    kinds.map(|kind| kind.name().to_uppercase()).collect::<Vec<_>>().join(", ")
}

/// Compares the file's header with what the config asks for; no tensor is read.
fn check(config: &DecoderConfig, file: &File) -> Result<(), LoadError> {
    let mut wanted = tensors(config);
    let mut problems = Vec::new();
    for (name, entry) in &file.entries {
        let matrix = is_quantised(name, &entry.shape);
        match wanted.remove(name) {
            None => problems.push(format!("unknown tensor {name}")),
            Some(shape) if shape != entry.shape => {
                problems.push(format!("{name} has shape {:?}, expected {shape:?}", entry.shape));
            }
            Some(_) if entry.kind.is_none_or(|kind| kind.is_quantised() && !matrix) => {
                problems.push(format!("{name} has dtype {}, expected {}", entry.stored, known(matrix)));
            }
            Some(_) => {}
        }
    }
    problems.extend(wanted.keys().map(|name| format!("missing tensor {name}")));
    problems.sort();
    // What is computed together must be quantised alike.
    let encoder = (0..config.source().map_or(0, |source| source.layers)).map(|i| format!("encoder.layers.{i}"));
    for layer in encoder.chain((0..config.num_hidden_layers).map(|i| format!("model.layers.{i}"))) {
        let together = [&["self_attn.q", "self_attn.k", "self_attn.v"][..], &["cross_attn.k", "cross_attn.v"]];
        for names in together.into_iter().chain([&["mlp.gate", "mlp.up"][..]]) {
            let names: Vec<_> = names.iter().map(|name| format!("{layer}.{name}_proj.weight")).collect();
            let entries: Vec<_> = names.iter().filter_map(|name| file.entries.get(name)).collect();
            let quantised = entries.iter().any(|entry| entry.kind.is_some_and(WeightType::is_quantised));
            if quantised && entries.windows(2).any(|pair| pair[0].kind != pair[1].kind) {
                problems.push(format!("{} must have one type", names.join(", ")));
            }
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(LoadError::Tensors { file: file.name, problems }) }
}
