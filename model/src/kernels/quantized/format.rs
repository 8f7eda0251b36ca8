//! GGUF's quantized weight formats, and the layout of their blocks in a panel.

use std::ops::Range;

/// Columns that share one scale, both of the activations and of the weights.
pub(crate) const BLOCK: usize = 32;

/// The GGUF formats of these names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Blocks of 32: an f16 scale and 32 signed bytes.
    Q8_0,
    /// Blocks of 32: an f16 scale and 32 half bytes with an offset of 8.
    Q4_0,
    /// Blocks of 256: two f16 factors, a 6-bit scale and a 6-bit minimum for each of eight parts of 32, and half bytes.
    Q4K,
}

impl Kind {
    /// Returns the number of columns in a stored block.
    pub(crate) const fn columns(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 => BLOCK,
            Self::Q4K => 8 * BLOCK,
        }
    }

    /// Returns the number of f16 numbers at the start of a stored block.
    pub(super) const fn halves(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 => 1,
            Self::Q4K => 2,
        }
    }

    /// Returns the number of four-byte words after the f16 numbers.
    pub(super) const fn words(self) -> usize {
        match self {
            Self::Q8_0 => 8,
            Self::Q4_0 => 4,
            Self::Q4K => 3 + 32,
        }
    }

    /// Returns the number of bytes in a stored block of one row.
    pub(crate) const fn block_bytes(self) -> usize {
        2 * self.halves() + 4 * self.words()
    }

    /// Returns the number of blocks of 32 in a stored block.
    pub(super) const fn parts(self) -> usize {
        self.columns() / BLOCK
    }

    /// Returns the mask that is XORed into the words: it adds 128 to signed bytes, so that every kind's quants are
    /// unsigned.
    pub(super) const fn flip(self) -> u32 {
        match self {
            Self::Q8_0 => 0x8080_8080,
            Self::Q4_0 | Self::Q4K => 0,
        }
    }
}

/// A [`Kind`] as a type, so that kernels are compiled for each.
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

/// One panel of the weights, or two whole panels.
pub(super) struct Panel<'a> {
    pub(super) bytes: &'a [u8],
    /// The rows of the matrix, which are columns of the product.
    pub(super) rows: Range<usize>,
    /// Rows of each panel, padded to whole groups.
    pub(super) width: usize,
    /// The number of panels.
    pub(super) count: usize,
    /// The number of blocks of 32 columns.
    pub(super) blocks: usize,
}

/// The byte shuffle that widens the first byte of every four: its index, then three bytes of zeros.
#[cfg(target_arch = "x86_64")]
pub(super) const FIRST_BYTES: [i32; 4] = [
    0x8080_8000_u32.cast_signed(),
    0x8080_8004_u32.cast_signed(),
    0x8080_8008_u32.cast_signed(),
    0x8080_800c_u32.cast_signed(),
];

/// Bytes of weights that stay in the L1 cache while many rows of `x` use them.
const CACHED: usize = 20 << 10;

/// Returns how many blocks of 32 columns all rows of `x` use before the next ones: whole stored blocks of about
/// [`CACHED`] bytes.
#[inline]
pub(super) fn cached_blocks(kind: Kind, width: usize) -> usize {
    (CACHED / (width * kind.block_bytes())).max(1) * kind.parts()
}

/// Splits rows into tiles of about equal height and at most `most` rows.
#[inline]
pub(super) fn tiles(rows: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = rows.len().div_ceil(most);
    let (start, len) = (rows.start, rows.len());
    (0..count).map(move |i| start + i * len / count..start + (i + 1) * len / count)
}
