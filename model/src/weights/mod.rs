//! Matrices and vectors of a checkpoint by name, and the errors of loading one.

mod convert;
mod list;
mod random;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::config::ConfigError;
#[cfg(feature = "cuda")]
use crate::cuda_error::CudaError;
use crate::error::ModelError;

pub(crate) use convert::widen;
pub(crate) use list::TensorList;

/// Why a checkpoint was refused.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is absent or cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// `config.json` was refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tensors differ from those that `config.json` asks for.
    #[error("{file} does not fit config.json:\n  {}", .problems.join("\n  "))]
    Tensors {
        /// The file of weights.
        file: &'static str,
        /// Every difference.
        problems: Vec<String>,
    },
    /// [`crate::checkpoint::load`] loads onto the CPU; `cuda::load` loads onto a GPU.
    #[error("device must be the CPU")]
    Device,
    /// The decoder is not supported on CUDA, or the device has too little memory or fails.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The file breaks its format.
    #[error("{file}: {reason}")]
    Format {
        /// The file of weights.
        file: &'static str,
        /// The rule that it breaks.
        reason: String,
    },
    /// A matrix whose bytes are not those of its shape, or whose shape the kernels cannot hold.
    #[error("weights: a {kind} matrix of {rows} x {columns}: {reason}")]
    Matrix {
        /// The type of the matrix.
        kind: WeightType,
        /// Its rows.
        rows: usize,
        /// Its columns.
        columns: usize,
        /// Why it was refused.
        reason: String,
    },
    /// Matrices of one input that differ in columns or in their quantised type.
    #[error("weights: matrices of one input must have as many columns, and one type if quantised: found {0}")]
    Stack(String),
    /// A tensor could not be made.
    #[error("weights: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The numbers of a feature map do not fit together.
    #[error("weights: {0}")]
    Model(#[from] ModelError),
}

/// The type of the numbers of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightType {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// GGUF's blocks of 32 8-bit weights and a scale: 8.5 bits a weight.
    Q8_0,
    /// GGUF's blocks of 32 4-bit weights and a scale: 4.5 bits a weight.
    Q4_0,
    /// GGUF's blocks of 256 4-bit weights, with scales and minima of eight groups: 4.5 bits a weight.
    Q4K,
}

impl WeightType {
    /// All types.
    pub const ALL: [Self; 6] = [Self::F32, Self::Bf16, Self::F16, Self::Q8_0, Self::Q4_0, Self::Q4K];

    /// The name in commands and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4K => "q4_k",
        }
    }

    /// Weights of a block, and bytes of a block.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::Bf16 | Self::F16 => (1, 2),
            Self::Q8_0 => (32, 34),
            Self::Q4_0 => (32, 18),
            Self::Q4K => (256, 144),
        }
    }

    /// Bytes of `weights` weights, in whole blocks.
    pub fn bytes(self, weights: usize) -> usize {
        let (block, bytes) = self.block();
        weights / block * bytes
    }

    /// This type if rows of `columns` numbers are whole blocks of it, else f16.
    #[must_use]
    pub fn for_rows_of(self, columns: usize) -> Self {
        if columns.is_multiple_of(self.block().0) { self } else { Self::F16 }
    }

    /// Whether the weights come in blocks.
    pub fn is_quantised(self) -> bool {
        self.block().0 > 1
    }
}

impl std::fmt::Display for WeightType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for WeightType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| format!("must be one of {}", names()))
    }
}

/// A matrix (rows, columns) in its stored type, row by row.
#[derive(Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) kind: WeightType,
    pub(crate) bytes: Cow<'a, [u8]>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Matrix<'_> {
    /// Whether the number of bytes fits the shape.
    pub(crate) fn is_whole(&self) -> bool {
        let block = self.kind.block().0;
        self.columns.is_multiple_of(block)
            && self.columns > 0
            && self.bytes.len() == self.kind.bytes(self.rows * self.columns)
    }
}

/// One tensor of a file.
#[derive(Debug)]
pub(crate) struct Entry {
    /// `None` for a type that no layer supports.
    pub(crate) kind: Option<WeightType>,
    /// The name of the type in the file.
    pub(crate) stored: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<usize>,
}

/// A file of tensors, mapped into memory.
pub(crate) struct File {
    /// The name in messages.
    pub(crate) name: &'static str,
    pub(crate) bytes: Box<dyn AsRef<[u8]> + Send + Sync>,
    pub(crate) entries: BTreeMap<String, Entry>,
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File").field("name", &self.name).field("tensors", &self.entries.len()).finish_non_exhaustive()
    }
}

/// Where tensors come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// A file of a checkpoint; its matrices stay as they are or are converted to a type (to f16 where their rows are not
    /// whole blocks of it).
    File(Arc<File>, Option<WeightType>),
    /// Random numbers from a seed, for measurements; matrices are of one type (f16 where their rows are not whole blocks
    /// of it).
    Random(WeightType, u64),
}

/// Tensors by name below a prefix.
#[derive(Clone)]
pub(crate) struct Weights<'a> {
    source: &'a Source,
    prefix: String,
}

impl<'a> Weights<'a> {
    /// All tensors of a source.
    pub(crate) fn new(source: &'a Source) -> Self {
        Self { source, prefix: String::new() }
    }

    /// The tensors below `prefix.name`.
    pub(crate) fn pp(&self, name: &str) -> Self {
        Self { prefix: format!("{}{name}.", self.prefix), ..self.clone() }
    }

    /// A tensor of a file. The checkpoint was checked before: an error here is a second line of defence.
    fn entry(file: &'a File, name: &str, shape: &[usize]) -> Result<(WeightType, &'a [u8]), LoadError> {
        let refused = |problem: String| LoadError::Tensors { file: file.name, problems: vec![problem] };
        let entry = file.entries.get(name).ok_or_else(|| refused(format!("missing tensor {name}")))?;
        if entry.shape != shape {
            return Err(refused(format!("{name} has shape {:?}, expected {shape:?}", entry.shape)));
        }
        let kind = entry.kind.ok_or_else(|| refused(format!("{name} has dtype {}", entry.stored)))?;
        let bytes = (*file.bytes).as_ref().get(entry.range.clone());
        Ok((kind, bytes.ok_or_else(|| refused(format!("{name} lies outside of the file")))?))
    }

    /// One matrix of weights: in its stored type, or in the type that the source converts matrices to.
    pub(crate) fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix<'a>, LoadError> {
        let stored = self.stored_matrix(name, rows, columns)?;
        let Source::File(_, Some(wanted)) = *self.source else { return Ok(stored) };
        match widen(stored.kind, &stored.bytes) {
            Some(numbers) if stored.kind != wanted => convert::matrix(&numbers, wanted, rows, columns),
            _ => Ok(stored),
        }
    }

    /// One matrix in its stored type, whatever the source converts matrices to.
    pub(crate) fn stored_matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix<'a>, LoadError> {
        let name = format!("{}{name}", self.prefix);
        match self.source {
            Source::File(file, _) => {
                let (kind, bytes) = Self::entry(file, &name, &[rows, columns])?;
                Ok(Matrix { kind, bytes: bytes.into(), rows, columns })
            }
            Source::Random(kind, seed) => random::matrix(*kind, *seed, &name, rows, columns),
        }
    }

    /// One tensor's numbers in f32.
    pub(crate) fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let name = format!("{}{name}", self.prefix);
        match self.source {
            Source::File(file, _) => {
                let (kind, bytes) = Self::entry(file, &name, shape)?;
                widen(kind, bytes).ok_or_else(|| LoadError::Tensors {
                    file: file.name,
                    problems: vec![format!("{name} has dtype {kind}, expected f32, f16 or bf16")],
                })
            }
            Source::Random(_, seed) => Ok(random::numbers(*seed, &name, shape)),
        }
    }

    /// [`Self::numbers`] that must be finite: a NaN among them would not show in the logits.
    pub(crate) fn finite(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let numbers = self.numbers(name, shape)?;
        let (Source::File(file, _), Some(found)) = (self.source, numbers.iter().find(|v| !v.is_finite())) else {
            return Ok(numbers);
        };
        let problem = format!("{}{name} must have finite numbers, found {found}", self.prefix);
        Err(LoadError::Tensors { file: file.name, problems: vec![problem] })
    }

    /// Matrices (heads, rows, columns) whose rows are orthogonal in blocks of `columns` rows.
    pub(crate) fn orthogonal(&self, name: &str, shape: [usize; 3]) -> Result<Vec<f32>, LoadError> {
        match self.source {
            Source::File(..) => self.numbers(name, &shape),
            Source::Random(_, seed) => Ok(random::orthogonal(*seed, &format!("{}{name}", self.prefix), shape)),
        }
    }

    /// A matrix of floats that is read from the mapped file row by row; `None` if it is quantised or converted.
    pub(crate) fn mapped(&self, name: &str, rows: usize, columns: usize) -> Result<Option<Mapped>, LoadError> {
        let name = format!("{}{name}", self.prefix);
        let Source::File(file, None) = self.source else { return Ok(None) };
        let (kind, _) = Self::entry(file, &name, &[rows, columns])?;
        let start = file.entries[&name].range.start;
        Ok((!kind.is_quantised()).then(|| Mapped { file: Arc::clone(file), kind, start, columns }))
    }
}

/// A matrix of floats in the mapped file.
#[derive(Debug)]
pub(crate) struct Mapped {
    file: Arc<File>,
    kind: WeightType,
    start: usize,
    columns: usize,
}

impl Mapped {
    /// One row in f32. out: (columns)
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let width = self.columns * self.kind.block().1;
        let bytes = &(*self.file.bytes).as_ref()[self.start + row * width..][..width];
        convert::widen_into(self.kind, bytes, out);
    }
}
