//! Serves the tensors of a checkpoint to candle's models, under the names and in the shapes that they ask for, as f32.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder};

use crate::weights::{LoadError, Source, Weights};

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

/// What became of a model's requests for tensors.
#[derive(Default)]
struct Seen {
    /// The stored names of the tensors that exist.
    found: BTreeSet<String>,
    /// What is wrong with tensors.
    problems: Vec<String>,
    /// An error that is not about a tensor's name, shape or values.
    failure: Option<LoadError>,
}

/// Builds a candle model from a checkpoint whose tensors have been checked. `named` maps the model's tensor names to
/// stored tensors.
///
/// # Errors
/// [`LoadError::Tensors`] lists everything that is wrong with the tensors.
pub(super) fn load<M>(
    source: &Source,
    named: fn(&str) -> Named,
    device: &Device,
    new: impl FnOnce(VarBuilder<'_>) -> Result<M>,
) -> std::result::Result<M, LoadError> {
    build(source, named, device, new, |_| Vec::new())
}

/// Like [`load`], for a checkpoint that nothing has checked: tensors that the model does not ask for are wrong, too.
pub(super) fn load_unchecked<M>(
    source: &Source,
    named: fn(&str) -> Named,
    device: &Device,
    new: impl FnOnce(VarBuilder<'_>) -> Result<M>,
) -> std::result::Result<M, LoadError> {
    build(source, named, device, new, |found| {
        // A head that is tied to the embedding may be stored a second time.
        let unknown = |name: &&str| !found.contains(*name) && *name != "lm_head.weight";
        source.names().filter(unknown).map(|name| format!("unknown tensor {name}")).collect()
    })
}

/// `unknown` lists what is wrong with the stored tensors that the model did not ask for.
fn build<M>(
    source: &Source,
    named: fn(&str) -> Named,
    device: &Device,
    new: impl FnOnce(VarBuilder<'_>) -> Result<M>,
    unknown: impl FnOnce(&BTreeSet<String>) -> Vec<String>,
) -> std::result::Result<M, LoadError> {
    let seen = Mutex::default();
    let tensors = Tensors { source, named, seen: &seen };
    let made = new(VarBuilder::from_backend(Box::new(tensors), DType::F32, device.clone()));
    let Seen { found, mut problems, failure } = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(failure) = failure {
        return Err(failure);
    }
    // A model that was not finished has not asked for all of its tensors.
    if made.is_ok() {
        problems.extend(unknown(&found));
    }
    if problems.is_empty() { Ok(made?) } else { Err(source.refuse(problems)) }
}

impl Tensors<'_> {
    /// Returns a tensor's values and shape. `wanted` may differ from the stored shape in dimensions of size 1.
    fn read(&self, name: &str, wanted: Option<&[usize]>) -> std::result::Result<(Vec<f32>, Vec<usize>), LoadError> {
        let Named { names, transposed, scale } = (self.named)(name);
        let stored = |name: &String| Some((name.clone(), self.source.shape(name)?.to_vec()));
        let (name, stored) = match names.iter().find_map(stored) {
            Some(found) => {
                self.seen().found.insert(found.0.clone());
                found
            }
            // The read below fails and reports the name as missing.
            None => (names.join(" or "), wanted.unwrap_or_default().to_vec()),
        };
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
        let fits = longer(&stored) == longer(&own) || as_many && (is_vector(&stored) || is_vector(&own));
        let mut numbers = Weights::new(self.source).finite(&name, if fits { &stored } else { &own })?;
        if let (true, &[rows, columns]) = (transposed, &shape[..]) {
            numbers = (0..rows * columns).map(|i| numbers[i % columns * rows + i / columns]).collect();
        }
        if scale != 1.0 {
            for number in &mut numbers {
                *number *= scale;
            }
        }
        Ok((numbers, shape))
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tensor(&self, name: &str, wanted: Option<&[usize]>, dtype: DType, device: &Device) -> Result<Tensor> {
        let error = match self.read(name, wanted) {
            Ok((numbers, shape)) => return Tensor::from_vec(numbers, shape, device)?.to_dtype(dtype),
            Err(error) => error,
        };
        let message = Error::Msg(error.to_string());
        let LoadError::Tensors { problems, .. } = error else {
            self.seen().failure = Some(error);
            return Err(message);
        };
        self.seen().problems.extend(problems);
        // Let the model ask for its other tensors, so that all problems are found. The placeholder is a single zero,
        // whatever its shape: a wrong config may ask for more memory than there is.
        wanted.map_or(Err(message), |wanted| Tensor::zeros((), dtype, device)?.broadcast_as(wanted))
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
