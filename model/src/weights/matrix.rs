//! Matrices and their element types.

use std::borrow::Cow;

/// The element type of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightType {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// GGUF's blocks of 32 8-bit weights with a scale: 8.5 bits per weight.
    Q8_0,
    /// GGUF's blocks of 32 4-bit weights with a scale: 4.5 bits per weight.
    Q4_0,
    /// GGUF's blocks of 256 4-bit weights, with scales and minima for eight groups: 4.5 bits per weight.
    Q4K,
}

impl WeightType {
    /// All types.
    pub const ALL: [Self; 6] = [Self::F32, Self::Bf16, Self::F16, Self::Q8_0, Self::Q4_0, Self::Q4K];

    /// The name in commands and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4K => "q4_k",
        }
    }

    /// Weights per block, and bytes per block.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::Bf16 | Self::F16 => (1, 2),
            Self::Q8_0 => (32, 34),
            Self::Q4_0 => (32, 18),
            Self::Q4K => (256, 144),
        }
    }

    /// Bytes of `weights` weights, in whole blocks.
    pub fn bytes(self, weights: usize) -> usize {
        let (block, bytes) = self.block();
        weights / block * bytes
    }

    /// Returns this type if rows of `columns` elements are whole blocks of it, else f16.
    #[must_use]
    pub fn for_rows_of(self, columns: usize) -> Self {
        if columns.is_multiple_of(self.block().0) { self } else { Self::F16 }
    }

    /// Whether the weights come in blocks.
    pub fn is_quantised(self) -> bool {
        self.block().0 > 1
    }
}

impl std::fmt::Display for WeightType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for WeightType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| format!("must be one of {}", names()))
    }
}

/// A matrix (rows, columns) in its stored type, row-major.
#[derive(Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) kind: WeightType,
    pub(crate) bytes: Cow<'a, [u8]>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Matrix<'_> {
    /// Whether the byte length matches the shape.
    pub(crate) fn is_whole(&self) -> bool {
        let block = self.kind.block().0;
        self.columns.is_multiple_of(block)
            && self.columns > 0
            && self.bytes.len() == self.kind.bytes(self.rows * self.columns)
    }
}
