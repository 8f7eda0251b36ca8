//! The cost of repacking: quantized types without a kernel are converted to another type while loading, which rounds
//! again.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::matrix::WeightType;

/// The repacked tensors of one type.
#[derive(Clone, Debug, PartialEq)]
pub struct Repacked {
    /// The type in the file, such as `q6_k`.
    pub from: String,
    /// The type in memory.
    pub to: WeightType,
    /// The number of tensors.
    pub tensors: usize,
    /// The largest relative error of a tensor: the root mean square of the differences from the stored values, divided
    /// by that of the stored values.
    pub relative_error: f64,
}

impl Display for Repacked {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Self { from, to, tensors, relative_error } = self;
        let plural = if *tensors == 1 { "" } else { "s" };
        let percent = 100.0 * relative_error;
        write!(f, "{from}: {tensors} tensor{plural} repacked to {to}, relative error at most {percent:.2} %")
    }
}

/// The relative errors of the tensors repacked so far, by name.
#[derive(Debug, Default)]
pub(crate) struct Errors(Mutex<BTreeMap<String, f64>>);

impl Errors {
    pub(super) fn record(&self, name: &str, error: f64) {
        self.all().insert(name.to_owned(), error);
    }

    /// Returns the error of a tensor; `None` if it has not been repacked yet.
    pub(crate) fn of(&self, name: &str) -> Option<f64> {
        self.all().get(name).copied()
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, f64>> {
        // Each entry is complete even if another thread panicked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
