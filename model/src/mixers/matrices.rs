//! The large parts of a state, in f32 or bf16.

use std::ops::Range;

use half::bf16;
use half::vec::HalfBitsVecExt;

use crate::kernels::element::Element;
use crate::kernels::{advise_huge_later, nearest};
use crate::memory::StateType;

/// S of all heads of a layer: (slots, heads, rows, d)
#[derive(Debug)]
pub(crate) enum Matrices {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// The seed for rounding a 16-bit S; it depends only on the position, the layer and the head.
pub(super) fn seed(position: u64, layer: usize, head: usize, heads: usize) -> u64 {
    position ^ ((layer * heads + head) as u64) << 40
}

/// Copies of S for draft tokens: (rows, heads, rows of S, d)
#[derive(Debug, Default)]
pub(super) struct Copies {
    pub(super) f32: Vec<f32>,
    pub(super) bf16: Vec<bf16>,
}

impl Matrices {
    /// `len` zeros.
    pub(super) fn zeros(len: usize, state: StateType) -> Self {
        // The system provides zeroed pages lazily, when they are first touched.
        match state {
            StateType::F32 => {
                let mut s = vec![0.0; len];
                advise_huge_later(&mut s);
                Self::F32(s)
            }
            StateType::Bf16 => {
                let mut s = vec![0u16; len];
                advise_huge_later(&mut s);
                Self::Bf16(s.reinterpret_into())
            }
        }
    }

    /// Bytes per element.
    pub(super) fn number_bytes(&self) -> usize {
        if matches!(self, Self::F32(_)) { size_of::<f32>() } else { size_of::<bf16>() }
    }

    /// Zeroes a range of elements.
    pub(super) fn clear(&mut self, range: Range<usize>) {
        match self {
            Self::F32(s) => s[range].fill(0.0),
            Self::Bf16(s) => s[range].fill(bf16::ZERO),
        }
    }

    /// Appends a range of elements to `out`.
    pub(super) fn read(&self, range: Range<usize>, out: &mut Vec<f32>) {
        match self {
            Self::F32(s) => out.extend_from_slice(&s[range]),
            Self::Bf16(s) => out.extend(s[range].iter().map(|v| v.widen())),
        }
    }

    /// Sets a range of elements. bf16 rounds to nearest, so elements that were read from it are restored exactly.
    pub(super) fn write(&mut self, range: Range<usize>, numbers: &[f32]) {
        match self {
            Self::F32(s) => s[range].copy_from_slice(numbers),
            Self::Bf16(s) => s[range].iter_mut().zip(numbers).for_each(|(s, &number)| *s = nearest(number)),
        }
    }
}
