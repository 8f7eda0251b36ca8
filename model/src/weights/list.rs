//! The tensors that a config asks for, as each layer declares them: the contract between trainer and server.

use std::collections::BTreeMap;

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    pub(crate) shape: Vec<usize>,
    /// Whether it is a matrix of weights, which quantisation converts; all other tensors are floats.
    pub(crate) quantised: bool,
    /// Whether training changes it: all but the random matrices.
    pub(crate) trained: bool,
}

/// Tensors by name, added layer by layer.
#[derive(Debug, Default)]
pub(crate) struct TensorList {
    prefix: String,
    pub(crate) all: BTreeMap<String, TensorSpec>,
    /// Names of matrices that are computed together, so that their quantised types must be equal.
    pub(crate) stacks: Vec<Vec<String>>,
}

impl TensorList {
    /// Adds tensors below `prefix.name`.
    pub(crate) fn at(&mut self, name: &str, add: impl FnOnce(&mut Self)) {
        let length = self.prefix.len();
        self.prefix = format!("{}{name}.", self.prefix);
        add(self);
        self.prefix.truncate(length);
    }

    fn add(&mut self, name: &str, shape: &[usize], quantised: bool, trained: bool) -> String {
        let name = format!("{}{name}", self.prefix);
        self.all.insert(name.clone(), TensorSpec { shape: shape.to_vec(), quantised, trained });
        name
    }

    /// A matrix of weights.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, columns: usize) {
        self.add(name, &[rows, columns], true, true);
    }

    /// Matrices of one input that are computed together.
    pub(crate) fn stack(&mut self, names: &[&str], rows: usize, columns: usize) {
        let names = names.iter().map(|name| self.add(name, &[rows, columns], true, true)).collect();
        self.stacks.push(names);
    }

    /// A trained tensor of floats.
    pub(crate) fn floats(&mut self, name: &str, shape: &[usize]) {
        self.add(name, shape, false, true);
    }

    /// A tensor of floats that training does not change.
    pub(crate) fn fixed(&mut self, name: &str, shape: &[usize]) {
        self.add(name, shape, false, false);
    }
}
