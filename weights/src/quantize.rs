//! Writes a copy of a checkpoint folder whose matrices are quantised, in one GGUF file.
//!
//! A [`Draft`] lies beside the folder that is to be, under a name of its own: it can be loaded and measured there, and
//! becomes the folder only when it is finished. The numbers are those of `checkpoint::load_as`, bit for bit.

use std::fs::File;
use std::io::{BufWriter, ErrorKind};
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Device, Tensor};
use serde::{Serialize, Serializer};
use tidegate_model::WeightType;
use tidegate_model::checkpoint::{self, LoadError, Stored, StoredTensor};

use crate::card;
use crate::eval::EvalReport;
use crate::inspect::{kind, kinds};

/// Why a checkpoint was not quantised.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    /// The checkpoint folder, or the draft when it is read again.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A file or folder.
    #[error("{path}: {source}")]
    Io {
        /// Its place.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The checkpoint has no other weights than quantised ones.
    #[error("{0} is quantised already; quantise from the folder with model.safetensors")]
    Already(PathBuf),
    /// The folder to write is none, or holds something.
    #[error("out: must name a new or empty folder, found {0}")]
    Occupied(PathBuf),
    /// Numbers too large for a type, or none at all.
    #[error("{name} has numbers that {to} cannot hold")]
    Number {
        /// The tensor.
        name: String,
        /// The type.
        to: WeightType,
    },
    /// The library that quantises.
    #[error("quantize: {0}")]
    Candle(#[from] candle_core::Error),
}

/// Bytes of the tensors of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupBytes {
    /// What they are.
    pub name: &'static str,
    /// How many tensors.
    pub tensors: u64,
    /// Their bytes in `model.safetensors`.
    pub before: u64,
    /// Their bytes in `model.gguf`.
    pub after: u64,
}

/// What quantising did to the matrices of one name, those of all layers together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MatrixError {
    /// The name without its layer.
    pub name: String,
    /// How many matrices.
    pub tensors: u64,
    /// Numbers of a row.
    pub columns: usize,
    /// What they are stored as: f16 where `columns` are no whole blocks of what was asked for.
    #[serde(serialize_with = "name")]
    pub stored_as: WeightType,
    /// `sqrt(sum (quantised - w)^2 / sum w^2)`.
    pub relative_error: f64,
}

/// What a text costs the model before and after.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OnText {
    /// The text's file name.
    pub text: String,
    /// How many of its tokens were to be predicted; all of them where absent.
    pub limit: Option<u64>,
    /// The checkpoint as it was.
    pub before: EvalReport,
    /// The quantised one.
    pub after: EvalReport,
    /// Perplexity after less before.
    pub perplexity_difference: f64,
    /// Bits per byte after less before.
    pub bits_per_byte_difference: f64,
}

impl OnText {
    /// Two evaluations of one text.
    pub fn new(text: &Path, limit: Option<u64>, before: EvalReport, after: EvalReport) -> Self {
        Self {
            text: file_name(text),
            limit,
            perplexity_difference: after.perplexity - before.perplexity,
            bits_per_byte_difference: after.bits_per_byte - before.bits_per_byte,
            before,
            after,
        }
    }
}

/// What was done.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QuantizeReport {
    /// The type asked for.
    #[serde(serialize_with = "name")]
    pub to: WeightType,
    /// Bytes by kind.
    pub groups: Vec<GroupBytes>,
    /// Errors by name.
    pub matrices: Vec<MatrixError>,
    /// Where a text was given.
    pub on_text: Option<OnText>,
}

impl QuantizeReport {
    /// The matrices whose rows are no whole blocks of what was asked for.
    pub fn in_f16(&self) -> impl Iterator<Item = &MatrixError> {
        self.matrices.iter().filter(|matrix| matrix.stored_as != self.to)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn name<S: Serializer>(kind: &WeightType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(kind.name())
}

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeOptions<'a> {
    /// The checkpoint folder.
    pub model: &'a Path,
    /// What its matrices become.
    pub to: WeightType,
    /// The new folder.
    pub out: &'a Path,
}

impl QuantizeOptions<'_> {
    /// Whether there are weights to quantise and a place for the folder.
    ///
    /// # Errors
    /// [`QuantizeError::Already`] and [`QuantizeError::Occupied`].
    pub fn check(&self) -> Result<(), QuantizeError> {
        let weights = checkpoint::weights_file(self.model);
        if weights.ends_with(checkpoint::GGUF) {
            return Err(QuantizeError::Already(weights));
        }
        let empty = |mut entries: std::fs::ReadDir| entries.next().is_none();
        let free = std::fs::read_dir(self.out).map_or_else(|error| error.kind() == ErrorKind::NotFound, empty);
        if free && self.out.file_name().is_some() { Ok(()) } else { Err(QuantizeError::Occupied(self.out.into())) }
    }
}

/// How far the weights are.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// Bytes of the old file that were quantised.
    pub bytes: u64,
    /// Bytes of its tensors.
    pub of: u64,
}

/// A quantised folder under a passing name; it goes when it is dropped unfinished.
#[derive(Debug)]
pub struct Draft {
    folder: PathBuf,
    out: PathBuf,
    model: String,
    report: QuantizeReport,
}

/// What goes along with the weights, where it is there; pictures do too, as the card shows them, and licenses.
const BESIDE: [&str; 6] =
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", CARD];
const PICTURES: [&str; 4] = ["png", "jpg", "jpeg", "svg"];
const CARD: &str = "README.md";

impl Draft {
    /// Quantises a checkpoint into a folder beside `out`.
    ///
    /// # Errors
    /// [`QuantizeError`]: then nothing is left behind.
    pub fn write(options: &QuantizeOptions<'_>, progress: &mut dyn FnMut(Written)) -> Result<Self, QuantizeError> {
        options.check()?;
        let QuantizeOptions { model, to, out } = *options;
        let stored = Stored::open(model)?;
        let name = file_name(&model.canonicalize().map_err(io(model))?);
        let folder = passing_folder(out)?;
        let report = QuantizeReport { to, groups: Vec::new(), matrices: Vec::new(), on_text: None };
        // From here on the folder goes with the draft.
        let mut draft = Self { folder, out: out.to_owned(), model: name, report };
        let tensors = draft.quantise(&stored, progress)?;
        draft.save(&tensors)?;
        draft.copy(model)?;
        Ok(draft)
    }

    /// Where it lies until it is finished.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes the model card and gives the folder its name.
    ///
    /// # Errors
    /// [`QuantizeError`] where something has come to lie in that place meanwhile.
    pub fn finish(mut self, on_text: Option<OnText>) -> Result<QuantizeReport, QuantizeError> {
        self.report.on_text = on_text;
        let path = self.folder.join(CARD);
        let old = if path.exists() { std::fs::read_to_string(&path).map_err(io(&path))? } else { String::new() };
        let card = card::with_section(&old, &self.model, &file_name(&self.out), &self.report);
        std::fs::write(&path, card).map_err(io(&path))?;
        // The weights must read as what was meant before they get the name.
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
        progress: &mut dyn FnMut(Written),
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
            progress(Written { bytes, of });
        }
        groups.retain(|group| group.tensors > 0);
        self.report.groups = groups;
        self.report.matrices = errors.0.into_iter().map(|(matrix, ..)| matrix).collect();
        Ok(all)
    }

    fn save(&self, tensors: &[(String, QTensor)]) -> Result<(), QuantizeError> {
        use gguf_file::Value::{String, U32};

        let path = self.folder.join(checkpoint::GGUF);
        // What the format's specification asks for and recommends. An architecture's name has letters and digits
        // only; 2 is the version of ggml's block layouts.
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
            if path.is_file() && (picture || name.starts_with("LICENSE") || BESIDE.contains(&name.as_str())) {
                std::fs::copy(&path, self.folder.join(&name)).map_err(io(&path))?;
            }
        }
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // After a rename nothing of this name is there.
        std::fs::remove_dir_all(&self.folder).ok();
    }
}

/// Squared errors and squared numbers of the matrices of each name.
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
        // A matrix of zeros has no error.
        matrix.relative_error = (*errors / squares.max(f64::MIN_POSITIVE)).sqrt();
        Ok(())
    }
}

/// `model.layers.3.mlp.up_proj.weight` as `mlp.up_proj`.
fn short_name(name: &str) -> String {
    let parts: Vec<_> = name.split('.').filter(|part| part.parse::<usize>().is_err()).collect();
    parts.into_iter().filter(|part| !["model", "layers", "weight"].contains(part)).collect::<Vec<_>>().join(".")
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

/// llama.cpp's number of a file most of whose tensors are of this type.
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

/// Makes a folder beside `out`: two folders of one disk, so that the one can become the other.
fn passing_folder(out: &Path) -> Result<PathBuf, QuantizeError> {
    if let Some(parent) = out.parent() {
        std::fs::create_dir_all(parent).map_err(io(parent))?;
    }
    let (name, mut number) = (file_name(out), 0u32);
    loop {
        let folder = out.with_file_name(format!(".{name}.{}.{number}.part", std::process::id()));
        match std::fs::create_dir(&folder) {
            // A run that was killed has left it.
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
