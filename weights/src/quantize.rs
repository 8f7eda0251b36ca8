//! Writes a copy of a checkpoint folder whose matrices are quantized, in one GGUF file.
//!
//! A [`Draft`] is a temporary folder next to the output folder, where it can be loaded and measured; `finish` renames
//! it. The weights are bit-identical to those of `checkpoint::load_as`.

mod card;
mod report;

use std::fs::File;
use std::io::{BufWriter, ErrorKind};
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Device, Tensor};
use tidegate_model::WeightType;
use tidegate_model::checkpoint::{self, LoadError, Stored, StoredTensor};

pub use report::{Comparison, GroupBytes, MatrixError, QuantizeReport};

use crate::inspect::{kind, kinds};

/// Why a checkpoint was not quantized.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    /// The checkpoint or the draft cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A file or folder cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The checkpoint is already quantized.
    #[error("{0} is already quantised; start from a folder with model.safetensors")]
    Already(PathBuf),
    /// The checkpoint is a single GGUF file.
    #[error("{0} is one file; start from a folder with model.safetensors (llama-quantize converts GGUF files)")]
    File(PathBuf),
    /// The output folder is a file or not empty.
    #[error("out: must name a new or empty folder, found {0}")]
    Occupied(PathBuf),
    /// A tensor has NaNs or values outside the type's range.
    #[error("{name} has values that {to} cannot represent")]
    Number {
        /// The tensor.
        name: String,
        /// The type.
        to: WeightType,
    },
    /// Candle failed to quantize.
    #[error("quantize: {0}")]
    Candle(#[from] candle_core::Error),
}

/// What to quantize.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeOptions<'a> {
    /// The checkpoint folder.
    pub model: &'a Path,
    /// The type of the matrices.
    pub to: WeightType,
    /// The output folder.
    pub out: &'a Path,
}

impl QuantizeOptions<'_> {
    /// Checks that there are weights to quantize and that the output folder is free.
    ///
    /// # Errors
    /// [`QuantizeError::Already`], [`QuantizeError::File`], [`QuantizeError::Occupied`] and [`QuantizeError::Load`].
    pub fn check(&self) -> Result<(), QuantizeError> {
        if self.model.is_file() {
            return Err(QuantizeError::File(self.model.into()));
        }
        let quantised = |path: &PathBuf| path.ends_with(checkpoint::GGUF);
        if let Some(weights) = checkpoint::weights_files(self.model)?.into_iter().find(quantised) {
            return Err(QuantizeError::Already(weights));
        }
        let empty = |mut entries: std::fs::ReadDir| entries.next().is_none();
        let free = std::fs::read_dir(self.out).map_or_else(|error| error.kind() == ErrorKind::NotFound, empty);
        // A link cannot be replaced at the end.
        if free && !self.out.is_symlink() && self.out.file_name().is_some() {
            Ok(())
        } else {
            Err(QuantizeError::Occupied(self.out.into()))
        }
    }

    /// Returns the matrices that the type's blocks do not fit. Reads only the file's header and quantizes nothing.
    ///
    /// # Errors
    /// [`QuantizeError::Load`] if the checkpoint cannot be read.
    pub fn misfit(&self) -> Result<Option<Misfit>, QuantizeError> {
        let stored = Stored::open(self.model)?;
        let rows: Vec<(&str, &[usize])> =
            stored.tensors().filter(|tensor| tensor.quantised).map(|tensor| (tensor.name, tensor.shape)).collect();
        let columns = |shape: &[usize]| shape.last().copied().unwrap_or(1);
        let bytes = |to: WeightType| -> u64 {
            rows.iter().map(|(_, shape)| to.for_rows_of(columns(shape)).bytes(shape.iter().product()) as u64).sum()
        };
        let mut matrices = Vec::new();
        for (name, shape) in &rows {
            let found = (short_name(name), columns(shape));
            if self.to.for_rows_of(found.1) != self.to && !matrices.contains(&found) {
                matrices.push(found);
            }
        }
        let all = bytes(self.to);
        // q4_0 has equally few bits per weight, in blocks of 32, which fit more rows.
        let other = (WeightType::Q4_0, bytes(WeightType::Q4_0));
        let smaller = (self.to == WeightType::Q4K && other.1 < all).then_some(other);
        Ok((!matrices.is_empty()).then_some(Misfit { to: self.to, matrices, bytes: all, smaller }))
    }
}

/// A type whose blocks do not fit all matrices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// The type.
    pub to: WeightType,
    /// Matrices that become f16: their names without the layer, and the length of their rows.
    pub matrices: Vec<(String, usize)>,
    /// Bytes that all matrices take when stored.
    pub bytes: u64,
    /// A type with equally few bits whose smaller blocks make a smaller file, and the bytes of all matrices in it.
    pub smaller: Option<(WeightType, u64)>,
}

/// The progress of writing the weights.
#[derive(Clone, Copy, Debug)]
pub struct WriteProgress {
    /// Bytes of the original file that have been quantized.
    pub bytes: u64,
    /// Bytes of all its tensors.
    pub of: u64,
}

/// A quantized folder under a temporary name. Dropping it unfinished removes the folder.
#[derive(Debug)]
pub struct Draft {
    folder: PathBuf,
    out: PathBuf,
    model: String,
    report: QuantizeReport,
}

/// Files to copy along with the weights if they exist. Licenses are copied too, and pictures, because the card shows
/// them.
const BESIDE: [&str; 6] =
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", CARD];
/// Also copied if it exists, into a folder of the same name.
const WITH_TOOLS: [&str; 2] = ["additional_chat_templates", "tool_use.jinja"];
const PICTURES: [&str; 4] = ["png", "jpg", "jpeg", "svg"];
const CARD: &str = "README.md";

impl Draft {
    /// Quantizes a checkpoint into a folder next to `out`.
    ///
    /// # Errors
    /// [`QuantizeError`]; then nothing is left behind.
    pub fn write(
        options: &QuantizeOptions<'_>,
        progress: &mut dyn FnMut(WriteProgress),
    ) -> Result<Self, QuantizeError> {
        options.check()?;
        let QuantizeOptions { model, to, out } = *options;
        let stored = Stored::open(model)?;
        let name = file_name(&model.canonicalize().map_err(io(model))?);
        let folder = temporary_folder(out)?;
        let report = QuantizeReport { to, groups: Vec::new(), matrices: Vec::new(), on_text: None };
        // From here on, dropping the draft removes the folder.
        let mut draft = Self { folder, out: out.to_owned(), model: name, report };
        let tensors = draft.quantise(&stored, progress)?;
        draft.save(&tensors)?;
        draft.copy(model)?;
        Ok(draft)
    }

    /// The temporary folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes the model card and renames the folder to its final name.
    ///
    /// # Errors
    /// [`QuantizeError`] if the output folder is no longer free.
    pub fn finish(mut self, on_text: Option<Comparison>) -> Result<QuantizeReport, QuantizeError> {
        self.report.on_text = on_text;
        let path = self.folder.join(CARD);
        let old = if path.exists() { std::fs::read(&path).map_err(io(&path))? } else { Vec::new() };
        let card = card::with_section(&String::from_utf8_lossy(&old), &self.model, &file_name(&self.out), &self.report);
        std::fs::write(&path, card).map_err(io(&path))?;
        // The weights must load before the folder gets its name.
        Stored::open(&self.folder)?;
        if self.out.exists() {
            std::fs::remove_dir(&self.out).map_err(io(&self.out))?;
        }
        std::fs::rename(&self.folder, &self.out).map_err(io(&self.out))?;
        Ok(self.report.clone())
    }

    fn quantise(
        &mut self,
        stored: &Stored,
        progress: &mut dyn FnMut(WriteProgress),
    ) -> Result<Vec<(String, QTensor)>, QuantizeError> {
        let to = self.report.to;
        let of = stored.tensors().map(|tensor| tensor.bytes as u64).sum();
        let mut groups: Vec<GroupBytes> =
            kinds().map(|name| GroupBytes { name, tensors: 0, before: 0, after: 0 }).collect();
        let (mut errors, mut bytes, mut all) = (Errors::default(), 0, Vec::new());
        for tensor in stored.tensors() {
            let StoredTensor { name, kind: stored_as, shape, bytes: before, quantised: changes } = tensor;
            let numbers = Tensor::from_vec(stored.floats(name)?, shape, &Device::Cpu)?;
            let columns = shape.last().copied().unwrap_or(1);
            let becomes = if changes { to.for_rows_of(columns) } else { stored_as };
            let quantised = QTensor::quantize(&numbers, ggml(becomes))?;
            if changes {
                errors.add(name, columns, becomes, &numbers, &quantised)?;
            }
            for group in groups.iter_mut().filter(|group| group.name == kind(name)) {
                group.tensors += 1;
                group.before += before as u64;
                group.after += quantised.storage_size_in_bytes() as u64;
            }
            all.push((name.to_owned(), quantised));
            bytes += before as u64;
            progress(WriteProgress { bytes, of });
        }
        groups.retain(|group| group.tensors > 0);
        self.report.groups = groups;
        self.report.matrices = errors.0.into_iter().map(|(matrix, ..)| matrix).collect();
        Ok(all)
    }

    fn save(&self, tensors: &[(String, QTensor)]) -> Result<(), QuantizeError> {
        use gguf_file::Value::{String, U32};

        let path = self.folder.join(checkpoint::GGUF);
        // Required and recommended by the GGUF specification. Architecture names contain only letters and digits; 2 is
        // the version of ggml's block layouts.
        let metadata = [
            ("general.architecture", String("rfagate".into())),
            ("general.name", String(self.model.clone())),
            ("general.alignment", U32(32)),
            ("general.file_type", U32(file_type(self.report.to))),
            ("general.quantization_version", U32(2)),
        ];
        let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut file = BufWriter::new(File::create(&path).map_err(io(&path))?);
        gguf_file::write(&mut file, &metadata, &tensors)?;
        let file = file.into_inner().map_err(|error| io(&path)(error.into_error()))?;
        file.sync_all().map_err(io(&path))
    }

    fn copy(&self, model: &Path) -> Result<(), QuantizeError> {
        for entry in std::fs::read_dir(model).map_err(io(model))? {
            let path = entry.map_err(io(model))?.path();
            let name = file_name(&path);
            let picture = path.extension().is_some_and(|kind| PICTURES.iter().any(|known| kind == *known));
            if path.is_file()
                && (picture || name.starts_with("LICENSE") || is_vocabulary(&name) || BESIDE.contains(&name.as_str()))
            {
                std::fs::copy(&path, self.folder.join(&name)).map_err(io(&path))?;
            }
        }
        let [folder, name] = WITH_TOOLS;
        let (template, folder) = (model.join(folder).join(name), self.folder.join(folder));
        if template.is_file() {
            std::fs::create_dir(&folder).map_err(io(&folder))?;
            std::fs::copy(&template, folder.join(name)).map_err(io(&template))?;
        }
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // A finished draft has been renamed, so there is nothing to remove.
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// Sums of squared errors and squared values by matrix name.
#[derive(Default)]
struct Errors(Vec<(MatrixError, f64, f64)>);

impl Errors {
    fn add(
        &mut self,
        name: &str,
        columns: usize,
        stored_as: WeightType,
        numbers: &Tensor,
        quantised: &QTensor,
    ) -> Result<(), QuantizeError> {
        let (mut error, mut square) = (0.0, 0.0);
        let got = quantised.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        for (got, want) in got.into_iter().zip(numbers.flatten_all()?.to_vec1::<f32>()?) {
            error += f64::from(got - want).powi(2);
            square += f64::from(want).powi(2);
        }
        if !(error.is_finite() && square.is_finite()) {
            return Err(QuantizeError::Number { name: name.into(), to: stored_as });
        }
        let short = short_name(name);
        let place = self.0.iter().position(|(matrix, ..)| matrix.name == short).unwrap_or_else(|| {
            let matrix = MatrixError { name: short, tensors: 0, columns, stored_as, relative_error: 0.0 };
            self.0.push((matrix, 0.0, 0.0));
            self.0.len() - 1
        });
        let (matrix, errors, squares) = &mut self.0[place];
        matrix.tensors += 1;
        *errors += error;
        *squares += square;
        // A zero matrix has no error.
        matrix.relative_error = (*errors / squares.max(f64::MIN_POSITIVE)).sqrt();
        Ok(())
    }
}

/// Shortens `model.layers.3.mlp.up_proj.weight` to `mlp.up_proj`.
fn short_name(name: &str) -> String {
    let parts: Vec<_> = name.split('.').filter(|part| part.parse::<usize>().is_err()).collect();
    parts
        .into_iter()
        .filter(|part| !["model", "backbone", "layers", "weight"].contains(part))
        .collect::<Vec<_>>()
        .join(".")
}

fn ggml(kind: WeightType) -> GgmlDType {
    match kind {
        WeightType::F32 => GgmlDType::F32,
        WeightType::F16 => GgmlDType::F16,
        WeightType::Bf16 => GgmlDType::BF16,
        WeightType::Q8_0 => GgmlDType::Q8_0,
        WeightType::Q4_0 => GgmlDType::Q4_0,
        WeightType::Q4K => GgmlDType::Q4K,
    }
}

/// llama.cpp's number for files that mostly have this type.
fn file_type(kind: WeightType) -> u32 {
    match kind {
        WeightType::F32 => 0,
        WeightType::F16 => 1,
        WeightType::Q4_0 => 2,
        WeightType::Q8_0 => 7,
        WeightType::Q4K => 14,
        WeightType::Bf16 => 32,
    }
}

/// Whether a file is RWKV's vocabulary, judging by its name.
fn is_vocabulary(name: &str) -> bool {
    name.starts_with("rwkv_vocab_v") && Path::new(name).extension().is_some_and(|kind| kind == "txt")
}

/// Creates a temporary folder next to `out`, on the same file system, so that it can be renamed.
fn temporary_folder(out: &Path) -> Result<PathBuf, QuantizeError> {
    if let Some(parent) = out.parent() {
        std::fs::create_dir_all(parent).map_err(io(parent))?;
    }
    let (name, mut number) = (file_name(out), 0u32);
    loop {
        let folder = out.with_file_name(format!(".{name}.{}.{number}.part", std::process::id()));
        match std::fs::create_dir(&folder) {
            // A killed run left it behind.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            made => return made.map_err(io(&folder)).map(|()| folder),
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> QuantizeError {
    move |source| QuantizeError::Io { path: path.into(), source }
}
