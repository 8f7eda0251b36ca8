//! The tensors that a config asks for, as each layer declares them: the contract between trainer and server.

use std::collections::BTreeMap;

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    pub(crate) shape: Vec<usize>,
    /// Whether it is a weight matrix, which quantization converts.
    pub(crate) quantised: bool,
    /// Whether a file may store it quantized; all other tensors are floats.
    pub(crate) packed: bool,
    /// Whether it is trained; only random matrices are not.
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
    /// Names of matrices that are computed together, so their quantized types must be equal.
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

    /// Adds a weight matrix.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, columns: usize) {
        self.add(name, TensorSpec::matrix(rows, columns));
    }

    /// Adds matrices of one input that are computed together.
    pub(crate) fn stack(&mut self, names: &[&str], rows: usize, columns: usize) {
        let names = names.iter().map(|name| self.add(name, TensorSpec::matrix(rows, columns))).collect();
        self.stacks.push(names);
    }

    /// Adds a matrix that quantization leaves unchanged, although published files may have it quantized.
    pub(crate) fn kept(&mut self, name: &str, rows: usize, columns: usize) {
        self.add(name, TensorSpec { quantised: false, ..TensorSpec::matrix(rows, columns) });
    }

    /// Adds a trained float tensor.
    pub(crate) fn floats(&mut self, name: &str, shape: &[usize]) {
        self.add(name, TensorSpec::floats(shape));
    }

    /// Adds a float tensor that training does not change.
    pub(crate) fn fixed(&mut self, name: &str, shape: &[usize]) {
        self.add(name, TensorSpec { trained: false, ..TensorSpec::floats(shape) });
    }
}
