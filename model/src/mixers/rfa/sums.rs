//! The state of random feature attention: S in f32 or bf16; z, c and FAVOR+'s maximum in f32.

use crate::config::DecoderConfig;
use crate::error::{ModelError, Result};
use crate::feature_map::Features;
use crate::memory::StateType;
use crate::mixers::layer::SlotState;
use crate::mixers::matrices::Matrices;

/// The sizes of the sums of a layer's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumsShape {
    /// Number of heads.
    pub heads: usize,
    /// Number of features per head (F).
    pub features: usize,
    /// Length of a head's values (d).
    pub head_dim: usize,
    /// Whether S and z are relative to the largest feature of the head's keys, whose logarithm is then stored too.
    pub maximum: bool,
}

impl SumsShape {
    /// The shape that a config asks for.
    pub(crate) fn of(config: &DecoderConfig, maximum: bool) -> Self {
        let (heads, features) = (config.num_attention_heads, super::features::count(config));
        Self { heads, features, head_dim: config.head_dim, maximum }
    }

    /// Elements of S: (F, d).
    pub(crate) fn matrix(self) -> usize {
        self.features * self.head_dim
    }

    /// Elements of the rest: z (F), c, and the maximum.
    pub(crate) fn rest_len(self) -> usize {
        self.features + 1 + usize::from(self.maximum)
    }

    /// Elements per head of a slot.
    pub(crate) fn head_numbers(self) -> usize {
        self.matrix() + self.rest_len()
    }
}

/// The sums of one layer's heads.
#[derive(Debug)]
pub struct Sums {
    pub(crate) s: Matrices, // (slots, heads, F, d)
    /// z (F), c and, for FAVOR+, the maximum of every head: (slots, heads, [`SumsShape::rest_len`])
    pub(crate) rest: Vec<f32>,
    /// The updates of the last draft step: (rows, heads, elements), as `recurrent` writes them
    pub(crate) drafts: Vec<f32>,
    slots: usize,
    shape: SumsShape,
    /// The upper bound of each head's key maximum: (heads), or empty without maxima.
    greatest_maxima: Vec<f32>,
}

impl Sums {
    /// The sums of empty texts.
    pub fn zeros(slots: usize, shape: SumsShape, state: StateType) -> Self {
        let s = Matrices::zeros(slots * shape.heads * shape.matrix(), state);
        let rest = vec![0.0; slots * shape.heads * shape.rest_len()];
        Self { s, rest, drafts: Vec::new(), slots, shape, greatest_maxima: Vec::new() }
    }

    /// The sums of empty texts, for the features of this map.
    pub(crate) fn of_features(slots: usize, map: &Features, state: StateType) -> Self {
        let (heads, features, head_dim) = map.dims();
        let shape = SumsShape { heads, features, head_dim, maximum: map.has_maximum() };
        Self { greatest_maxima: map.greatest_maxima().to_vec(), ..Self::zeros(slots, shape, state) }
    }

    /// The number of slots, and the shape of each.
    pub(crate) fn dims(&self) -> (usize, SumsShape) {
        (self.slots, self.shape)
    }

    /// Elements per slot.
    pub(crate) fn numbers(&self) -> usize {
        self.shape.heads * self.shape.head_numbers()
    }

    /// Appends the elements of one head: S row by row, z, c, and the maximum.
    pub(crate) fn read_head(&self, slot: usize, head: usize, out: &mut Vec<f32>) {
        let (matrix, rest, head) = (self.shape.matrix(), self.shape.rest_len(), slot * self.shape.heads + head);
        self.s.read(head * matrix..(head + 1) * matrix, out);
        out.extend_from_slice(&self.rest[head * rest..][..rest]);
    }

    /// Sets the elements of one head. An S in bf16 rounds to nearest, so elements that were read from it are restored
    /// exactly.
    pub(crate) fn write_head(&mut self, slot: usize, head: usize, numbers: &[f32]) {
        let (matrix, rest, head) = (self.shape.matrix(), self.shape.rest_len(), slot * self.shape.heads + head);
        let (from, sums) = numbers.split_at(matrix);
        self.s.write(head * matrix..(head + 1) * matrix, from);
        self.rest[head * rest..][..rest].copy_from_slice(sums);
    }
}

impl SlotState for Sums {
    fn bytes(&self) -> usize {
        let width = self.s.number_bytes();
        self.shape.heads * (self.shape.matrix() * width + self.shape.rest_len() * size_of::<f32>())
    }

    fn reset(&mut self, slot: usize) {
        let (own, rest) = (self.shape.heads * self.shape.matrix(), self.shape.heads * self.shape.rest_len());
        self.s.clear(slot * own..(slot + 1) * own);
        self.rest[slot * rest..][..rest].fill(0.0);
    }

    fn read(&self, slot: usize, out: &mut Vec<f32>) {
        (0..self.shape.heads).for_each(|head| self.read_head(slot, head, out));
    }

    /// A maximum that is too low is accepted: the next key replaces it, which only makes the head forget older tokens.
    fn check(&self, layer: usize, numbers: &[f32], _: u64) -> Result<()> {
        let heads = numbers.chunks_exact(self.shape.head_numbers()).map(|head| head[head.len() - 1]);
        match heads.zip(&self.greatest_maxima).enumerate().find(|(_, (found, max))| found > max) {
            Some((head, (found, max))) => {
                let parameter = format!("the maximum of layer {layer}, head {head}");
                Err(ModelError::argument(parameter, format!("at most {max}"), found))
            }
            None => Ok(()),
        }
    }

    fn write(&mut self, slot: usize, numbers: &[f32], _: u64) {
        for (head, numbers) in numbers.chunks_exact(self.shape.head_numbers()).enumerate() {
            self.write_head(slot, head, numbers);
        }
    }
}
