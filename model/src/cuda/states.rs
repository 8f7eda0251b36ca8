//! The layout of a slot's state on the device, in three parts, and its conversion to the numbers of an export and back.
//! This module only handles bytes; `pool` and `transfer` copy them.

use super::plan::{column, width};
use super::weights::nearest;
use crate::layout::StateLayout;
use crate::memory::StateType;

/// The shape of a slot's state. S is stored by columns, each padded with zeros for the kernels' threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) layout: StateLayout,
    /// The number format of S; everything else is f32.
    pub(super) state: StateType,
    pub(super) features: usize,
    pub(super) head_dim: usize,
}

impl Shape {
    /// Returns the bytes of a slot's parts: S (layers, heads, d, column); z and c (layers, heads, F + 1); the
    /// convolutions' inputs (layers, taps, channels).
    pub(super) fn parts(&self) -> [usize; 3] {
        let heads = self.layout.layers * self.layout.heads;
        let sums = heads * (self.features + 1) * size_of::<f32>();
        [heads * self.head_dim * self.column(), sums, self.layout.conv() * size_of::<f32>()]
    }

    /// Returns the bytes of a column of S.
    fn column(&self) -> usize {
        column(self.features) * width(self.state)
    }

    /// Returns the numbers of a slot's parts, in the order of an export.
    pub(super) fn numbers(&self, [s, sums, tails]: [&[u8]; 3]) -> Vec<f32> {
        let mut numbers = Vec::with_capacity(self.layout.numbers());
        let sums = sums.chunks_exact((self.features + 1) * size_of::<f32>());
        for (s, sums) in s.chunks_exact(self.head_dim * self.column()).zip(sums) {
            match self.state {
                StateType::F32 => self.rows(s.as_chunks::<4>().0, |&b| f32::from_le_bytes(b), &mut numbers),
                StateType::Bf16 => {
                    self.rows(s.as_chunks::<2>().0, |&b| half::bf16::from_le_bytes(b).to_f32(), &mut numbers);
                }
            }
            numbers.extend(floats(sums));
        }
        numbers.extend(floats(tails));
        numbers
    }

    /// Appends a head's S, row by row. s: (d, column)
    fn rows<T>(&self, s: &[T], number: impl Fn(&T) -> f32 + Copy, to: &mut Vec<f32>) {
        for row in 0..self.features {
            to.extend(s[row..].iter().step_by(column(self.features)).map(number));
        }
    }

    /// Fills a slot's parts with the numbers of an export, which must fit the layout. Numbers held as bf16 are rounded
    /// to nearest.
    pub(super) fn fill(&self, numbers: &[f32], [s, sums, tails]: [&mut [u8]; 3]) {
        let (memories, rest) = numbers.split_at(self.layout.memory());
        let heads = memories.chunks_exact(self.layout.head);
        let s = s.chunks_exact_mut(self.head_dim * self.column());
        for ((head, s), sums) in heads.zip(s).zip(sums.chunks_exact_mut((self.features + 1) * size_of::<f32>())) {
            let (matrix, rest) = head.split_at(self.features * self.head_dim);
            for (i, s) in s.chunks_exact_mut(self.column()).enumerate() {
                let column = matrix[i..].iter().step_by(self.head_dim);
                let (held, filling) = s.split_at_mut(self.features * width(self.state));
                match self.state {
                    StateType::F32 => put(column, held),
                    StateType::Bf16 => {
                        held.as_chunks_mut().0.iter_mut().zip(column).for_each(|(to, &v)| *to = nearest(v));
                    }
                }
                filling.fill(0);
            }
            put(rest.iter(), sums);
        }
        put(rest.iter(), tails);
    }
}

fn put<'a>(numbers: impl Iterator<Item = &'a f32>, to: &mut [u8]) {
    to.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(to, v)| *to = v.to_le_bytes());
}

pub(super) fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b))
}
