//! Matrices as model files store them.

use half::{bf16, f16};

/// The type of a matrix's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Type {
    pub(super) fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

/// A stored matrix (n, k), row by row: little-endian bytes, not aligned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) kind: Type,
    pub(crate) bytes: &'a [u8],
}

impl Rows<'_> {
    pub(super) fn len(self) -> usize {
        self.bytes.len() / self.kind.size()
    }
}

/// Returns the bits of one 16-bit number.
pub(super) fn half(part: Rows<'_>, at: usize) -> u16 {
    u16::from_le_bytes([part.bytes[2 * at], part.bytes[2 * at + 1]])
}

/// Returns one number, widened to f32.
pub(super) fn widened(part: Rows<'_>, at: usize) -> f32 {
    match part.kind {
        Type::F32 => f32::from_le_bytes(std::array::from_fn(|i| part.bytes[4 * at + i])),
        Type::Bf16 => bf16::from_bits(half(part, at)).to_f32(),
        Type::F16 => f16::from_bits(half(part, at)).to_f32(),
    }
}
