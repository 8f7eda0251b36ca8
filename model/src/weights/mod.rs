//! A checkpoint's matrices and vectors by name, and the errors of loading it.

mod convert;
mod error;
mod list;
mod matrix;
mod metadata;
mod random;
mod repacked;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use candle_core::quantized::GgmlDType;

pub(crate) use convert::widen;
pub use error::LoadError;
pub(crate) use list::TensorList;
pub(crate) use matrix::Matrix;
pub use matrix::WeightType;
pub(crate) use metadata::{Bytes, Value};
pub use metadata::{Metadata, MetadataError, Texts};
pub(crate) use repacked::Errors;
pub use repacked::Repacked;

/// How the values in a file relate to ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reading {
    /// They are equal.
    #[default]
    Plain,
    /// Each stored value is -exp(x) of our value x.
    NegativeExp,
    /// The stored matrix is transposed. [`Entry::shape`] is ours.
    Transposed,
}

/// One tensor in a file.
#[derive(Debug)]
pub(crate) struct Entry {
    /// The type in memory; `None` for a type that no layer supports.
    pub(crate) kind: Option<WeightType>,
    /// The type in the file, if it has no kernel and is repacked to `kind`.
    pub(crate) repacked: Option<GgmlDType>,
    /// The name of the type in the file.
    pub(crate) stored: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<usize>,
    pub(crate) reading: Reading,
}

impl Entry {
    /// Converts one of our shapes to that in the file.
    pub(crate) fn in_file(&self, shape: &[usize]) -> Vec<usize> {
        match self.reading {
            Reading::Transposed => shape.iter().rev().copied().collect(),
            Reading::Plain | Reading::NegativeExp => shape.into(),
        }
    }
}

/// A mapped file of tensors, or several files that belong together.
pub(crate) struct File {
    /// The file's name in messages.
    pub(crate) name: String,
    /// What its tensors must match, in messages.
    pub(crate) config: &'static str,
    pub(crate) parts: Parts,
    pub(crate) entries: BTreeMap<String, Entry>,
    /// The relative errors of tensors that were repacked.
    pub(crate) errors: Errors,
}

/// The bytes of a file, or of several files as if they were concatenated.
pub(crate) struct Parts(Vec<Bytes>);

impl Parts {
    pub(crate) fn new(parts: Vec<Bytes>) -> Self {
        Self(parts)
    }

    /// Returns a range that lies within one of the files.
    fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        let mut start = 0;
        for part in &self.0 {
            let bytes = (**part).as_ref();
            if range.start < start + bytes.len() {
                return bytes.get(range.start - start..range.end.checked_sub(start)?);
            }
            start += bytes.len();
        }
        range.is_empty().then_some(&[])
    }
}

impl File {
    /// Makes an error that rejects tensors for these reasons.
    pub(crate) fn refuse(&self, problems: Vec<String>) -> LoadError {
        LoadError::Tensors { file: self.name.clone(), config: self.config, problems }
    }
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("File").field("name", &self.name).field("tensors", &self.entries.len()).finish_non_exhaustive()
    }
}

/// The source of tensors.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// A checkpoint file. Its matrices stay as they are or are converted to a type (to f16 if their rows are not whole
    /// blocks of it).
    File(Arc<File>, Option<WeightType>),
    /// Random weights from a seed, for benchmarks. Matrices have one type (f16 if their rows are not whole blocks of
    /// it).
    Random(WeightType, u64),
}

impl Source {
    fn file(&self) -> Option<&File> {
        if let Self::File(file, _) = self { Some(file) } else { None }
    }

    /// The shape of a tensor, if the source is a file that has it.
    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.file()?.entries.get(name)?.shape)
    }

    /// The names and shapes of all tensors in a file.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.file().into_iter().flat_map(|file| &file.entries).map(|(name, entry)| (name.as_str(), &*entry.shape))
    }

    /// Returns whether two tensors in a file have the same type, shape and bytes.
    pub(crate) fn are_equal(&self, one: &str, other: &str) -> bool {
        let Some(file) = self.file() else { return false };
        let (Some(one), Some(other)) = (file.entries.get(one), file.entries.get(other)) else { return false };
        let bytes = |entry: &Entry| file.parts.get(entry.range.clone());
        one.shape == other.shape && one.kind == other.kind && bytes(one) == bytes(other)
    }

    /// Makes an error that rejects tensors for these reasons.
    pub(crate) fn refuse(&self, problems: Vec<String>) -> LoadError {
        match self.file() {
            Some(file) => file.refuse(problems),
            None => LoadError::Tensors { file: "random weights".into(), config: "the config", problems },
        }
    }
}

/// The tensors of a source below a name prefix.
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

    /// Finds a tensor in a file. `checkpoint` has already checked the file, so errors are not expected here.
    fn entry(file: &'a File, name: &str, shape: &[usize]) -> Result<(WeightType, &'a Entry), LoadError> {
        let refused = |problem: String| file.refuse(vec![problem]);
        let entry = file.entries.get(name).ok_or_else(|| refused(format!("missing tensor {name}")))?;
        if entry.shape != shape {
            return Err(refused(format!("{name} has shape {:?}, expected {shape:?}", entry.shape)));
        }
        let kind = entry.kind.ok_or_else(|| refused(format!("{name} has dtype {}", entry.stored)))?;
        Ok((kind, entry))
    }

    /// Returns the type and bytes of a tensor in a file.
    fn bytes(file: &'a File, name: &str, shape: &[usize]) -> Result<(WeightType, Cow<'a, [u8]>), LoadError> {
        let (kind, entry) = Self::entry(file, name, shape)?;
        let bytes = file.parts.get(entry.range.clone());
        let bytes = bytes.ok_or_else(|| file.refuse(vec![format!("{name} lies outside the file")]))?;
        let bytes = match entry.repacked {
            None if entry.reading == Reading::Transposed => {
                convert::transposed(bytes, kind.block().1, shape.first().copied().unwrap_or(1)).into()
            }
            None => bytes.into(),
            Some(from) => {
                let (bytes, error) = convert::repacked(bytes, from, kind, shape.last().copied().unwrap_or(1))?;
                file.errors.record(name, error);
                bytes.into()
            }
        };
        Ok((kind, bytes))
    }

    /// Returns the relative error of a repacked tensor.
    pub(crate) fn repacking_error(&self, name: &str) -> Result<f64, LoadError> {
        let Source::File(file, _) = self.source else { return Ok(0.0) };
        let shape = file.entries.get(name).map_or(&[][..], |entry| &entry.shape);
        if file.errors.of(name).is_none() {
            Self::bytes(file, name, shape)?;
        }
        Ok(file.errors.of(name).unwrap_or(0.0))
    }

    /// Returns a weight matrix in its stored type, or in the type that the source converts matrices to.
    pub(crate) fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix<'a>, LoadError> {
        let stored = self.stored_matrix(name, rows, columns)?;
        let Source::File(_, Some(wanted)) = *self.source else { return Ok(stored) };
        match widen(stored.kind, &stored.bytes) {
            Some(numbers) if stored.kind != wanted => convert::matrix(&numbers, wanted, rows, columns),
            _ => Ok(stored),
        }
    }

    /// Returns a matrix in its stored type, even if the source converts matrices.
    pub(crate) fn stored_matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix<'a>, LoadError> {
        let name = format!("{}{name}", self.prefix);
        match self.source {
            Source::File(file, _) => {
                let (kind, bytes) = Self::bytes(file, &name, &[rows, columns])?;
                Ok(Matrix { kind, bytes, rows, columns })
            }
            Source::Random(kind, seed) => random::matrix(*kind, *seed, &name, rows, columns),
        }
    }

    /// Returns a tensor's values in f32.
    pub(crate) fn numbers(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let name = format!("{}{name}", self.prefix);
        match self.source {
            Source::File(file, _) => {
                let (kind, bytes) = Self::bytes(file, &name, shape)?;
                let problem = || vec![format!("{name} has dtype {kind}, expected f32, f16 or bf16")];
                let numbers = widen(kind, &bytes).ok_or_else(|| file.refuse(problem()))?;
                match file.entries[&name].reading {
                    Reading::Plain | Reading::Transposed => Ok(numbers),
                    Reading::NegativeExp => convert::logarithms(&numbers).map_err(|found| {
                        file.refuse(vec![format!("{name} must be stored as negative numbers, found {found}")])
                    }),
                }
            }
            Source::Random(_, seed) => Ok(random::numbers(*seed, &name, shape)),
        }
    }

    /// Like [`Self::numbers`], but requires finite values: a NaN among them would not show in the logits.
    pub(crate) fn finite(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let numbers = self.numbers(name, shape)?;
        let (Source::File(file, _), Some(found)) = (self.source, numbers.iter().find(|v| !v.is_finite())) else {
            return Ok(numbers);
        };
        let problem = format!("{}{name} must have finite numbers, found {found}", self.prefix);
        Err(file.refuse(vec![problem]))
    }

    /// Returns matrices (heads, rows, columns) with blocks of `columns` orthogonal rows.
    pub(crate) fn orthogonal(&self, name: &str, shape: [usize; 3]) -> Result<Vec<f32>, LoadError> {
        match self.source {
            Source::File(..) => self.numbers(name, &shape),
            Source::Random(_, seed) => Ok(random::orthogonal(*seed, &format!("{}{name}", self.prefix), shape)),
        }
    }

    /// Returns a float matrix that is read from the mapped file row by row; `None` if it is quantized or converted.
    pub(crate) fn mapped(&self, name: &str, rows: usize, columns: usize) -> Result<Option<Mapped>, LoadError> {
        let name = format!("{}{name}", self.prefix);
        let Source::File(file, None) = self.source else { return Ok(None) };
        let (kind, entry) = Self::entry(file, &name, &[rows, columns])?;
        let start = entry.range.start;
        let is_plain = !kind.is_quantised() && entry.reading == Reading::Plain;
        Ok(is_plain.then(|| Mapped { file: Arc::clone(file), kind, start, columns }))
    }
}

/// A float matrix in the mapped file.
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
        let start = self.start + row * width;
        // The range exists: `checkpoint` has checked the tensor against the file.
        let bytes = self.file.parts.get(start..start + width).unwrap_or_default();
        convert::widen_into(self.kind, bytes, out);
    }
}
