//! Serves the tensors of a checkpoint to candle's models, under the names and in the shapes that they ask for, as f32.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder};

use crate::weights::{LoadError, Source, Weights};

/// The name of the output head in most families.
const HEAD: &str = "lm_head.weight";
/// The number of problems after which a model is given up. Each problem costs the memory that the model derives from a
/// tensor.
const MOST_PROBLEMS: usize = 1000;

/// How a checkpoint stores a tensor that a model asks for.
#[derive(Clone, Debug)]
pub(super) struct Named {
    /// Candidate names; the first one in the checkpoint is used.
    pub(super) names: Vec<String>,
    /// Whether the checkpoint stores the matrix transposed.
    pub(super) transposed: bool,
    /// The factor to multiply the values by.
    pub(super) scale: f32,
}

impl Named {
    /// A tensor that is stored unchanged under this name.
    pub(super) fn plain(name: &str) -> Self {
        Self { names: vec![name.to_owned()], transposed: false, scale: 1.0 }
    }
}

/// A checkpoint, seen through the tensor names of a model.
struct Tensors<'a> {
    source: &'a Source,
    named: fn(&str) -> Named,
    seen: &'a Mutex<Seen>,
}

/// The results of a model's requests for tensors.
#[derive(Default)]
struct Seen {
    /// The stored names of the tensors that exist.
    found: BTreeSet<String>,
    /// What is wrong with tensors.
    problems: Vec<String>,
    /// An error that is not about a tensor's name, shape or values.
    failure: Option<LoadError>,
}

/// What to do about stored tensors that the model does not ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unknown {
    /// Refuse them: no schema has checked the checkpoint.
    Refused,
    /// Ignore them: a schema has checked the checkpoint.
    Ignored,
}

/// Builds a candle model from a checkpoint. `named` maps the model's tensor names to stored tensors.
///
/// # Errors
/// [`LoadError::Tensors`] lists everything that is wrong with the tensors.
pub(super) fn load<M>(
    source: &Source,
    unknown: Unknown,
    named: fn(&str) -> Named,
    device: &Device,
    new: impl FnOnce(VarBuilder<'_>) -> Result<M>,
) -> std::result::Result<M, LoadError> {
    let seen = Mutex::default();
    let tensors = Tensors { source, named, seen: &seen };
    let made = new(VarBuilder::from_backend(Box::new(tensors), DType::F32, device.clone()));
    let Seen { found, mut problems, failure } = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(failure) = failure {
        return Err(failure);
    }
    // A model that was not finished has not asked for all of its tensors.
    if made.is_ok() && unknown == Unknown::Refused {
        // A head that is tied to the embedding may be stored a second time.
        let is_copy = |name: &str| name == HEAD && found.iter().any(|other| source.are_equal(name, other));
        let others = source.tensors().filter(|(name, _)| !found.contains(*name) && !is_copy(name));
        problems.extend(others.map(|(name, _)| format!("unknown tensor {name}")));
    }
    if problems.is_empty() { Ok(made?) } else { Err(source.refuse(problems)) }
}

/// A stored tensor that a model asked for.
struct Found {
    name: String,
    stored: Vec<usize>,
    /// The shape that the model asked for.
    shape: Vec<usize>,
    transposed: bool,
    scale: f32,
}

impl Tensors<'_> {
    /// Finds a stored tensor and checks its shape. `wanted` may differ from the stored shape in dimensions of size 1.
    fn find(&self, name: &str, wanted: Option<&[usize]>) -> std::result::Result<Found, LoadError> {
        let Named { names, transposed, scale } = (self.named)(name);
        let stored = |name: &String| Some((name.clone(), self.source.shape(name)?.to_vec()));
        let Some((name, stored)) = names.iter().find_map(stored) else {
            return Err(self.source.refuse(vec![format!("missing tensor {}", names.join(" or "))]));
        };
        self.seen().found.insert(name.clone());
        let turned = |mut shape: Vec<usize>| {
            if transposed {
                shape.reverse();
            }
            shape
        };
        let shape = wanted.map_or_else(|| turned(stored.clone()), <[usize]>::to_vec);
        let longer = |shape: &[usize]| shape.iter().copied().filter(|&side| side != 1).collect::<Vec<_>>();
        // A vector may be stored as one row per head.
        let is_vector = |shape: &[usize]| longer(shape).len() < 2;
        let as_many = stored.iter().product::<usize>() == shape.iter().product::<usize>();
        let own = turned(shape.clone());
        if longer(&stored) == longer(&own) || as_many && (is_vector(&stored) || is_vector(&own)) {
            return Ok(Found { name, stored, shape, transposed, scale });
        }
        Err(self.source.refuse(vec![format!("{name} has shape {stored:?}, expected {own:?}")]))
    }

    /// Returns a tensor's values in the order of its shape.
    fn numbers(&self, found: &Found) -> std::result::Result<Vec<f32>, LoadError> {
        let mut numbers = Weights::new(self.source).finite(&found.name, &found.stored)?;
        if let (true, &[rows, columns]) = (found.transposed, &found.shape[..]) {
            numbers = (0..rows * columns).map(|i| numbers[i % columns * rows + i / columns]).collect();
        }
        if found.scale != 1.0 {
            for number in &mut numbers {
                *number *= found.scale;
            }
        }
        Ok(numbers)
    }

    fn tensor(&self, name: &str, wanted: Option<&[usize]>, dtype: DType, device: &Device) -> Result<Tensor> {
        let read = self.find(name, wanted).and_then(|found| {
            // Once there is a problem, the values do not matter any more.
            let numbers = if self.seen().problems.is_empty() { Some(self.numbers(&found)?) } else { None };
            Ok((numbers, found.shape))
        });
        let shape = match read {
            Ok((Some(numbers), shape)) => return Tensor::from_vec(numbers, shape, device)?.to_dtype(dtype),
            Ok((None, shape)) => Some(shape),
            Err(LoadError::Tensors { problems, .. }) => {
                self.seen().problems.extend(problems);
                wanted.map(<[usize]>::to_vec)
            }
            Err(error) => {
                let message = Error::Msg(error.to_string());
                self.seen().failure = Some(error);
                return Err(message);
            }
        };
        // Let the model ask for its other tensors, so that all problems are found. The placeholder is a single zero,
        // whatever its shape: a wrong config may ask for more memory than there is.
        match shape {
            Some(shape) if self.seen().problems.len() < MOST_PROBLEMS => {
                Tensor::zeros((), dtype, device)?.broadcast_as(shape)
            }
            _ => Err(Error::Msg(format!("{name} has no placeholder"))),
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl candle_nn::var_builder::SimpleBackend for Tensors<'_> {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.tensor(name, Some(shape.dims()), dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.tensor(name, None, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        (self.named)(name).names.iter().any(|name| self.source.shape(name).is_some())
    }
}
