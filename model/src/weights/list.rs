//! The tensors that a config asks for, as each layer declares them: the contract between trainer and server.

use std::collections::BTreeMap;

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    pub(crate) shape: Vec<usize>,
    /// Whether it is a matrix of weights, which quantisation converts.
    pub(crate) quantised: bool,
    /// Whether its numbers may be quantised in a file; all other tensors are floats.
    pub(crate) packed: bool,
    /// Whether training changes it: all but the random matrices.
    pub(crate) trained: bool,
}

impl TensorSpec {
    fn matrix(rows: usize, columns: usize) -> Self {
        Self { shape: vec![rows, columns], quantised: true, packed: true, trained: true }
    }

    fn floats(shape: &[usize]) -> Self {
        Self { shape: shape.to_vec(), quantised: false, packed: false, trained: true }
    }
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

    fn add(&mut self, name: &str, tensor: TensorSpec) -> String {
        let name = format!("{}{name}", self.prefix);
        self.all.insert(name.clone(), tensor);
        name
    }

    /// A matrix of weights.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, columns: usize) {
        self.add(name, TensorSpec::matrix(rows, columns));
    }

    /// Matrices of one input that are computed together.
    pub(crate) fn stack(&mut self, names: &[&str], rows: usize, columns: usize) {
        let names = names.iter().map(|name| self.add(name, TensorSpec::matrix(rows, columns))).collect();
        self.stacks.push(names);
    }

    /// A matrix that quantisation leaves as it is; others may have quantised it.
    pub(crate) fn kept(&mut self, name: &str, rows: usize, columns: usize) {
        self.add(name, TensorSpec { quantised: false, ..TensorSpec::matrix(rows, columns) });
    }

    /// A trained tensor of floats.
    pub(crate) fn floats(&mut self, name: &str, shape: &[usize]) {
        self.add(name, TensorSpec::floats(shape));
    }

    /// A tensor of floats that training does not change.
    pub(crate) fn fixed(&mut self, name: &str, shape: &[usize]) {
        self.add(name, TensorSpec { trained: false, ..TensorSpec::floats(shape) });
    }
}
