//! Low-rank maps: `up(f(down x)) + bias`, split into steps so that the products of several maps run as one job.

use crate::compute::{Compute, sized};
use crate::kernels::Isa;
use crate::kernels::products::Product;
use crate::nn::Linear;
use crate::weights::{LoadError, TensorList, Weights};

/// An activation that works in place.
pub(super) type Activation = fn(Isa, &mut [f32]);

/// A low-rank map from hidden to hidden. Its matrices are small but have a large effect, so they are not quantized.
#[derive(Debug)]
pub(super) struct LowRank {
    down: Linear, // (rank, hidden)
    activation: Option<Activation>,
    up: Linear, // (hidden, rank), with its bias
}

impl LowRank {
    /// The tensors that [`Self::load`] reads.
    pub(super) fn tensors(list: &mut TensorList, name: &str, (hidden, rank): (usize, usize), bias: bool) {
        list.at(&format!("{name}_lora.lora"), |list| {
            list.kept("0.weight", rank, hidden);
            list.kept("2.weight", hidden, rank);
            if bias {
                list.floats("2.bias", &[hidden]);
            }
        });
    }

    /// Loads the map called `name`.
    pub(super) fn load(
        weights: &Weights<'_>,
        name: &str,
        (hidden, rank): (usize, usize),
        (activation, bias): (Option<Activation>, bool),
    ) -> Result<Self, LoadError> {
        let weights = weights.pp(&format!("{name}_lora.lora"));
        let bias = bias.then(|| weights.numbers("2.bias", &[hidden])).transpose()?;
        Ok(Self {
            down: Linear::new(&weights.stored_matrix("0.weight", rank, hidden)?, None)?,
            activation,
            up: Linear::new(&weights.stored_matrix("2.weight", hidden, rank)?, bias)?,
        })
    }

    /// Bytes of the matrices.
    pub(super) fn bytes(&self) -> usize {
        self.down.bytes() + self.up.bytes()
    }

    /// A buffer for the values between the products: (tokens, rank)
    pub(super) fn inner<'a>(&self, buffer: &'a mut Vec<f32>, tokens: usize) -> &'a mut [f32] {
        sized(buffer, tokens * self.down.width())
    }

    /// The first product. x: (tokens, hidden) -> inner: (tokens, rank)
    pub(super) fn down<'a>(&'a self, x: &'a [f32], inner: &'a mut [f32]) -> Product<'a> {
        self.down.product(x, inner)
    }

    /// Applies the activation between the products. inner: (tokens, rank)
    pub(super) fn activate(&self, cx: &mut Compute, inner: &mut [f32]) {
        let isa = cx.isa;
        if let Some(activation) = self.activation {
            cx.each(inner, self.down.width(), &|_, inner| activation(isa, inner));
        }
    }

    /// The second product. inner: (tokens, rank) -> out: (tokens, hidden)
    pub(super) fn up<'a>(&'a self, inner: &'a [f32], out: &'a mut [f32]) -> Product<'a> {
        self.up.product(inner, out)
    }
}
