//! Matrices and vectors of a checkpoint by name, and the errors of loading one.

mod convert;
mod error;
mod list;
mod matrix;
mod random;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

pub(crate) use convert::widen;
pub use error::LoadError;
pub(crate) use list::TensorList;
pub(crate) use matrix::Matrix;
pub use matrix::WeightType;

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
