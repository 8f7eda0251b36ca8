//! Maps of low rank: `up(f(down x)) + bias`.

use crate::compute::{Compute, sized};
use crate::kernels::Isa;
use crate::nn::Linear;
use crate::weights::{LoadError, TensorList, Weights};

/// An activation in place.
pub(super) type Activation = fn(Isa, &mut [f32]);

/// A map from hidden to hidden. Its matrices are few numbers that decide about much, so quantisation leaves them as they
/// are.
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

    /// Reads the map called `name`.
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

    /// x, out: (tokens, hidden)
    pub(super) fn forward(&self, cx: &mut Compute, x: &[f32], buffer: &mut Vec<f32>, out: &mut [f32]) {
        let (isa, rank) = (cx.isa, self.down.width());
        let inner = sized(buffer, x.len() / self.up.width() * rank);
        self.down.forward(cx, x, inner);
        if let Some(activation) = self.activation {
            cx.each(inner, rank, &|_, inner| activation(isa, inner));
        }
        self.up.forward(cx, inner, out);
    }
}
