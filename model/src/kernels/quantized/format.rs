//! GGUF's formats of quantised weights, and how their blocks lie in a panel.

use std::ops::Range;

/// Columns that share a scale of the activations, and of the weights.
pub(crate) const BLOCK: usize = 32;

/// How weights are quantised: GGUF's formats of the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Blocks of 32: an f16 scale and 32 signed bytes.
    Q8_0,
    /// Blocks of 32: an f16 scale and 32 half bytes, 8 too large.
    Q4_0,
    /// Blocks of 256: eight parts of 32 with a scale and a minimum of 6 bits each, which two f16 scale, and half bytes.
    Q4K,
}

impl Kind {
    /// Columns of a stored block.
    pub(crate) const fn columns(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 => BLOCK,
            Self::Q4K => 8 * BLOCK,
        }
    }

    /// The f16 numbers that a stored block begins with.
    pub(super) const fn halves(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 => 1,
            Self::Q4K => 2,
        }
    }

    /// The words of four bytes that follow.
    pub(super) const fn words(self) -> usize {
        match self {
            Self::Q8_0 => 8,
            Self::Q4_0 => 4,
            Self::Q4K => 3 + 32,
        }
    }

    /// Bytes of a stored block of one row.
    pub(crate) const fn block_bytes(self) -> usize {
        2 * self.halves() + 4 * self.words()
    }

    /// Blocks of 32 in a stored block.
    pub(super) const fn parts(self) -> usize {
        self.columns() / BLOCK
    }

    /// Signed bytes are stored 128 too large, so that every kind's quants are unsigned.
    pub(super) const fn flip(self) -> u32 {
        match self {
            Self::Q8_0 => 0x8080_8080,
            Self::Q4_0 | Self::Q4K => 0,
        }
    }
}

/// A kind as a type, so that a kernel is compiled for each.
pub(super) trait Form {
    const KIND: Kind;
}

/// [`Kind::Q8_0`] as a type.
pub(super) struct Q8_0;
/// [`Kind::Q4_0`] as a type.
pub(super) struct Q4_0;
/// [`Kind::Q4K`] as a type.
pub(super) struct Q4K;

impl Form for Q8_0 {
    const KIND: Kind = Kind::Q8_0;
}

impl Form for Q4_0 {
    const KIND: Kind = Kind::Q4_0;
}

impl Form for Q4K {
    const KIND: Kind = Kind::Q4K;
}

/// One panel of the weights.
pub(super) struct Panel<'a> {
    pub(super) bytes: &'a [u8],
    /// Rows of the matrix: the columns of the product.
    pub(super) rows: Range<usize>,
    /// Rows that it has room for.
    pub(super) width: usize,
    /// Blocks of 32 columns.
    pub(super) blocks: usize,
}

/// Byte shuffles that widen the first byte of every four: its index, then three bytes of zeros.
#[cfg(target_arch = "x86_64")]
pub(super) const FIRST_BYTES: [i32; 4] = [
    0x8080_8000_u32.cast_signed(),
    0x8080_8004_u32.cast_signed(),
    0x8080_8008_u32.cast_signed(),
    0x8080_800c_u32.cast_signed(),
];

/// Bytes of weights that stay in a core's first-level cache while rows of `x` pass.
const CACHED: usize = 20 << 10;

/// Blocks of 32 columns that many rows of `x` meet before they go on to the next: whole stored blocks of some 20 KiB.
#[inline]
pub(super) fn cached_blocks(kind: Kind, width: usize) -> usize {
    (CACHED / (width * kind.block_bytes())).max(1) * kind.parts()
}

/// Rows cut in tiles of at most `most`, all about as high.
#[inline]
pub(super) fn tiles(rows: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = rows.len().div_ceil(most);
    let (start, len) = (rows.start, rows.len());
    (0..count).map(move |i| start + i * len / count..start + (i + 1) * len / count)
}
