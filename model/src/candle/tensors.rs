//! The tensors of a checkpoint as candle's models ask for them: under their names and in their shapes, in f32.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder};

use crate::weights::{LoadError, Source, Weights};

/// How a checkpoint has a tensor that a model asks for.
#[derive(Clone, Debug)]
pub(super) struct Named {
    /// Its name; the first that the checkpoint has counts.
    pub(super) names: Vec<String>,
    /// Whether the checkpoint has the matrix with rows for columns.
    pub(super) transposed: bool,
    /// What its numbers are multiplied with.
    pub(super) scale: f32,
}

impl Named {
    /// A tensor that is stored as it is.
    pub(super) fn plain(name: &str) -> Self {
        Self { names: vec![name.to_owned()], transposed: false, scale: 1.0 }
    }
}

/// A checkpoint under the names of a model.
struct Tensors<'a> {
    source: &'a Source,
    named: fn(&str) -> Named,
    /// Why the last tensor that could not be read was not.
    failure: &'a Mutex<Option<LoadError>>,
}

/// Makes a model of candle from a checkpoint. `named` says how the checkpoint has a tensor.
pub(super) fn load<M>(
    source: &Source,
    named: fn(&str) -> Named,
    device: &Device,
    new: impl FnOnce(VarBuilder<'_>) -> Result<M>,
) -> std::result::Result<M, LoadError> {
    let failure = Mutex::default();
    let tensors = Tensors { source, named, failure: &failure };
    let made = new(VarBuilder::from_backend(Box::new(tensors), DType::F32, device.clone()));
    let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    made.map_err(|error| failure.unwrap_or(error.into()))
}

impl Tensors<'_> {
    /// The numbers of a tensor, and its shape. `wanted` may have other dimensions of 1 than the checkpoint.
    fn read(&self, name: &str, wanted: Option<&[usize]>) -> std::result::Result<(Vec<f32>, Vec<usize>), LoadError> {
        let Named { names, transposed, scale } = (self.named)(name);
        let stored = |name: &String| Some((name.clone(), self.source.shape(name)?.to_vec()));
        let (name, stored) = match names.iter().find_map(stored) {
            Some(found) => found,
            // It is named as missing.
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
        // A vector may be stored in rows of heads.
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

    fn tensor(&self, name: &str, wanted: Option<&[usize]>, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.read(name, wanted) {
            Ok((numbers, shape)) => Tensor::from_vec(numbers, shape, device)?.to_dtype(dtype),
            Err(error) => {
                let message = Error::Msg(error.to_string());
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                Err(message)
            }
        }
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
