//! Matrices and vectors of a checkpoint by name, and why a checkpoint may be refused.

mod convert;
mod random;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use crate::config::ConfigError;
#[cfg(feature = "cuda")]
use crate::cuda_error::CudaError;

pub(crate) use convert::widen;

/// Why a checkpoint was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is absent or cannot be read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// `config.json` was refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tensors are not those that `config.json` asks for: every difference, one a line.
    #[error("{file} does not fit config.json:\n  {}", .problems.join("\n  "))]
    Tensors {
        /// The weights' file.
        file: &'static str,
        /// Each difference.
        problems: Vec<String>,
    },
    /// This decoder is the CPU's; `cuda::load` gives another.
    #[error("device must be the CPU")]
    Device,
    /// The decoder has no kernels on CUDA, or the device has too little memory or fails.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The file is none of its format.
    #[error("{file}: {reason}")]
    Format {
        /// The weights' file.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor could not be made.
    #[error("weights: {0}")]
    Candle(#[from] candle_core::Error),
}

/// Whether a tensor becomes another type where weights do: matrices, but for the gates', which are small and decide
/// what is remembered.
pub(crate) fn is_quantised(name: &str, shape: &[usize]) -> bool {
    shape.len() == 2 && name.ends_with(".weight") && !name.ends_with("gate.weight")
}

/// How the numbers of a matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightType {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// GGUF's blocks of 32 bytes and a scale: 8.5 bits a weight.
    Q8_0,
    /// GGUF's blocks of 32 half bytes and a scale: 4.5 bits a weight.
    Q4_0,
    /// GGUF's blocks of 256 half bytes, with scales and minima of eight parts: 4.5 bits a weight.
    Q4K,
}

impl WeightType {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::F32, Self::Bf16, Self::F16, Self::Q8_0, Self::Q4_0, Self::Q4K];

    /// Its name in commands and tables.
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

    /// Weights of a block, and its bytes.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::Bf16 | Self::F16 => (1, 2),
            Self::Q8_0 => (32, 34),
            Self::Q4_0 => (32, 18),
            Self::Q4K => (256, 144),
        }
    }

    /// Bytes of so many weights.
    pub fn bytes(self, weights: usize) -> usize {
        let (block, bytes) = self.block();
        weights / block * bytes
    }

    /// This type where rows of so many numbers are whole blocks of it, else f16.
    #[must_use]
    pub fn for_rows_of(self, columns: usize) -> Self {
        if columns.is_multiple_of(self.block().0) { self } else { Self::F16 }
    }

    /// Whether its weights come in blocks.
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

/// A matrix (rows, columns) as it is stored, row by row.
#[derive(Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) kind: WeightType,
    pub(crate) bytes: Cow<'a, [u8]>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Matrix<'_> {
    /// Whether its bytes are those of its shape.
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
    /// None for a type that no layer can hold.
    pub(crate) kind: Option<WeightType>,
    /// The type's name in the file.
    pub(crate) stored: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<usize>,
}

/// A file of tensors in memory, mapped or read.
pub(crate) struct File {
    /// Its name in messages.
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
    /// A checkpoint's file, its matrices as they are stored or made into another type, where their rows are whole
    /// blocks of it (else into f16).
    File(Arc<File>, Option<WeightType>),
    /// Drawn for a measurement; matrices are of one type, where their rows are whole blocks of it.
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

    /// A file's tensor, whose shape is the one that is wanted: the checkpoint was checked before it is read.
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

    /// One matrix in its stored type.
    pub(crate) fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix<'a>, LoadError> {
        let name = format!("{}{name}", self.prefix);
        match self.source {
            Source::File(file, wanted) => {
                let (kind, bytes) = Self::entry(file, &name, &[rows, columns])?;
                let wanted = wanted.filter(|&wanted| wanted != kind && is_quantised(&name, &[rows, columns]));
                match wanted.zip(widen(kind, bytes)) {
                    Some((wanted, numbers)) => convert::matrix(&numbers, wanted, rows, columns),
                    None => Ok(Matrix { kind, bytes: bytes.into(), rows, columns }),
                }
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

    /// [`Self::numbers`], where one that is NaN or infinite would go unseen.
    pub(crate) fn finite(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let numbers = self.numbers(name, shape)?;
        let (Source::File(file, _), Some(found)) = (self.source, numbers.iter().find(|v| !v.is_finite())) else {
            return Ok(numbers);
        };
        let problem = format!("{}{name} must have finite numbers, found {found}", self.prefix);
        Err(LoadError::Tensors { file: file.name, problems: vec![problem] })
    }

    /// The numbers of some matrices (heads, rows, columns) whose rows are orthogonal in blocks of `columns`.
    pub(crate) fn orthogonal(&self, name: &str, shape: [usize; 3]) -> Result<Vec<f32>, LoadError> {
        match self.source {
            Source::File(..) => self.numbers(name, &shape),
            Source::Random(_, seed) => Ok(random::orthogonal(*seed, &format!("{}{name}", self.prefix), shape)),
        }
    }

    /// Where one row after another of a matrix of floats can be read from, as long as the file is there; none where
    /// its numbers are others than the file's.
    pub(crate) fn mapped(&self, name: &str, rows: usize, columns: usize) -> Result<Option<Mapped>, LoadError> {
        let name = format!("{}{name}", self.prefix);
        let Source::File(file, None) = self.source else { return Ok(None) };
        let (kind, _) = Self::entry(file, &name, &[rows, columns])?;
        let start = file.entries[&name].range.start;
        Ok((!kind.is_quantised()).then(|| Mapped { file: Arc::clone(file), kind, start, columns }))
    }
}

/// A matrix of floats in the file itself, which stays mapped.
#[derive(Debug)]
pub(crate) struct Mapped {
    file: Arc<File>,
    kind: WeightType,
    start: usize,
    columns: usize,
}

impl Mapped {
    /// One row, widened. out: (columns)
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let width = self.columns * self.kind.block().1;
        let bytes = &(*self.file.bytes).as_ref()[self.start + row * width..][..width];
        convert::widen_into(self.kind, bytes, out);
    }
}
