//! The memory layout of a block of cached keys and values.

use half::bf16;
use half::slice::HalfBitsSliceExt;

use crate::kernels::element::Element;
use crate::kernels::panels::PANEL;
use crate::kernels::{LANES, nearest};

/// Keys per block: few enough that one head's keys and values stay in the L2 cache while the queries of a prompt read
/// them, many enough that adding up blocks costs little.
pub(crate) const BLOCK: usize = 256;

/// A number type in which the cache stores keys and values.
pub(crate) trait Cached: Copy + Send + Sync + Default + 'static {
    /// The type that kernels load.
    #[allow(private_bounds, reason = "the kernels' own")]
    type Loaded: Element;

    /// Returns the numbers as that type.
    fn loaded(numbers: &[Self]) -> &[Self::Loaded];
    /// Converts the number to f32, exactly.
    fn widen(self) -> f32;
    /// Returns the stored number nearest to `value`.
    fn nearest(value: f32) -> Self;
}

impl Cached for f32 {
    type Loaded = Self;

    fn loaded(numbers: &[Self]) -> &[Self] {
        numbers
    }

    fn widen(self) -> f32 {
        self
    }

    fn nearest(value: f32) -> Self {
        value
    }
}

/// The bits of a bfloat16; an integer, because the system provides zeroed memory for integers, page by page as it is
/// written.
impl Cached for u16 {
    type Loaded = bf16;

    fn loaded(numbers: &[Self]) -> &[bf16] {
        numbers.reinterpret_cast()
    }

    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }

    fn nearest(value: f32) -> Self {
        nearest(value).to_bits()
    }
}

/// The shape of a block: keys (places / 64, d, 64), then values (places, d padded to whole lanes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// The length of a key and of a value.
    pub(crate) d: usize,
    /// The capacity in keys, a multiple of [`PANEL`].
    pub(crate) places: usize,
}

impl Block {
    /// Returns the columns of a stored value: d, padded.
    pub(crate) fn columns(self) -> usize {
        self.d.next_multiple_of(LANES)
    }

    /// Returns how many numbers the block has.
    pub(crate) fn numbers(self) -> usize {
        self.places * (self.d + self.columns())
    }

    /// Returns the length of a query's result: the weighted sum of values (columns), the largest score, the sum of
    /// weights.
    pub(crate) fn partial_len(self) -> usize {
        self.columns() + 2
    }

    /// Writes a key and a value (d each) to a place.
    pub(crate) fn write<S: Cached>(self, block: &mut [S], place: usize, k: &[f32], v: &[f32]) {
        let (keys, values) = block.split_at_mut(self.places * self.d);
        let panel = &mut keys[place / PANEL * PANEL * self.d..][..PANEL * self.d];
        for (coordinate, &k) in panel.chunks_exact_mut(PANEL).zip(k) {
            coordinate[place % PANEL] = S::nearest(k);
        }
        for (to, &v) in values[place * self.columns()..].iter_mut().zip(v) {
            *to = S::nearest(v);
        }
    }

    /// Returns the key at a place.
    pub(crate) fn key<S: Cached>(self, block: &[S], place: usize) -> impl Iterator<Item = f32> {
        let panel = &block[place / PANEL * PANEL * self.d..][..PANEL * self.d];
        panel.iter().skip(place % PANEL).step_by(PANEL).map(|v| v.widen())
    }

    /// Returns the value at a place.
    pub(crate) fn value<S: Cached>(self, block: &[S], place: usize) -> impl Iterator<Item = f32> {
        block[self.places * self.d + place * self.columns()..][..self.d].iter().map(|v| v.widen())
    }
}
