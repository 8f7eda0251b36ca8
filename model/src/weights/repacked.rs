//! What repacking costs: quantised types without a kernel become another type while they are loaded, which rounds again.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::matrix::WeightType;

/// The tensors of one type that were repacked.
#[derive(Clone, Debug, PartialEq)]
pub struct Repacked {
    /// Their type in the file, such as `q6_k`.
    pub from: String,
    /// Their type in memory.
    pub to: WeightType,
    /// Their number.
    pub tensors: usize,
    /// The greatest relative error of a tensor: the root mean square of the differences from what the file says, divided by
    /// that of its numbers.
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

/// The relative errors of the tensors that were repacked so far, by name.
#[derive(Debug, Default)]
pub(crate) struct Errors(Mutex<BTreeMap<String, f64>>);

impl Errors {
    pub(super) fn record(&self, name: &str, error: f64) {
        self.all().insert(name.to_owned(), error);
    }

    /// The error of a tensor; `None` if it has not been repacked yet.
    pub(crate) fn of(&self, name: &str) -> Option<f64> {
        self.all().get(name).copied()
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, f64>> {
        // An entry is whole whatever else happens.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
