//! Rows of activations quantized to signed bytes, in blocks of 32 with one scale each.

use crate::kernels::threads::Threads;
use crate::kernels::{Isa, multiversion};

use super::format::BLOCK;

/// Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the lowest bits.
const ROUND: f32 = 12_582_912.0;
/// Numbers below which one thread is faster than several.
const SERIAL: usize = 1 << 15;
/// Rows that a thread claims at a time.
const ROWS: usize = 16;

/// The bytes of one block.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Quants([i8; BLOCK]);

/// The scale and the sums of a block.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct BlockSums {
    /// The factor that turns the bytes into values.
    pub(super) scale: f32,
    /// The sum of the bytes, times the scale.
    pub(super) total: f32,
    /// Minus the sum of the bytes; times 128 or 8, it corrects for weights stored with that offset.
    pub(super) negative: i32,
}

/// Some rows of activations as bytes. The buffers are reused from call to call.
///
/// All rows of a block are adjacent, (k / 32, rows, 32), so that a tile of rows is read with one pointer.
#[derive(Debug, Default)]
pub(crate) struct Activations {
    rows: usize,
    k: usize,
    /// Rows per block. From eight rows on, padded so that it is no power of two, which would map all blocks to the same
    /// cache sets.
    stride: usize,
    quants: Vec<Quants>,
    block_sums: Vec<BlockSums>,
}

impl Activations {
    /// Quantizes `x (rows, k)`.
    ///
    /// A block's scale is its largest magnitude over 127, and each number becomes the nearest multiple of the scale,
    /// ties to even. If the scale is too small to have an inverse, the scale and all numbers are 0. If a number in the
    /// block is not finite, neither is the scale, and every product with the row is NaN.
    ///
    /// # Panics
    /// If `x` does not consist of rows of `k` numbers, or a row of blocks of 32.
    pub(crate) fn quantise(&mut self, isa: Isa, x: &[f32], k: usize, threads: &Threads) {
        assert!(k > 0 && k.is_multiple_of(BLOCK) && x.len().is_multiple_of(k), "{} in rows of {k}", x.len());
        let rows = x.len() / k;
        let stride = if rows < 8 { rows } else { rows.next_multiple_of(4) + 2 };
        let blocks = k / BLOCK * stride;
        if self.quants.len() < blocks {
            self.quants.resize(blocks, Quants([0; BLOCK]));
            self.block_sums.resize(blocks, BlockSums::default());
        }
        (self.rows, self.k, self.stride) = (rows, k, stride);
        let to = Target { quants: self.quants.as_mut_ptr(), block_sums: self.block_sums.as_mut_ptr(), stride, blocks };
        if x.len() < SERIAL {
            return quantise_rows(isa, x, k, 0, to);
        }
        threads.run(rows.div_ceil(ROWS), &|piece| {
            let range = piece * ROWS..rows.min((piece + 1) * ROWS);
            quantise_rows(isa, &x[range.start * k..range.end * k], k, range.start, to);
        });
    }

    /// Returns the number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.k
    }

    /// Returns the rows per block, padded.
    #[inline]
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Returns the bytes of one row in a block; those of the next rows follow.
    pub(super) fn quants(&self, block: usize, row: usize) -> &[i8; BLOCK] {
        &self.quants[block * self.stride + row].0
    }

    /// Returns the scale and the sums of one row in a block; those of the next rows follow.
    pub(super) fn block_sums(&self, block: usize, row: usize) -> &BlockSums {
        &self.block_sums[block * self.stride + row]
    }

    /// Returns pointers to the bytes and to the sums of one row in a block; everything after it follows.
    #[inline]
    pub(super) fn from(&self, block: usize, row: usize) -> (*const i8, *const BlockSums) {
        let at = block * self.stride + row;
        (self.quants[at..].as_ptr().cast(), self.block_sums[at..].as_ptr())
    }
}

/// Where threads write blocks, each thread to different rows.
#[derive(Clone, Copy)]
struct Target {
    quants: *mut Quants,
    block_sums: *mut BlockSums,
    stride: usize,
    blocks: usize,
}

// SAFETY: `quantise` gives every thread different rows, and no thread reads until all are done.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

#[inline(always)]
fn quantise_block(x: &[f32; BLOCK]) -> (Quants, BlockSums) {
    let mut largest = 0u32;
    for v in x {
        // As integers: NaN is larger than all numbers.
        largest = largest.max(v.to_bits() & 0x7fff_ffff);
    }
    let scale = f32::from_bits(largest) / 127.0;
    let inverse = 1.0 / scale;
    if !scale.is_finite() {
        return (Quants([0; BLOCK]), BlockSums { scale, total: scale, negative: 0 });
    }
    if !inverse.is_finite() {
        return (Quants([0; BLOCK]), BlockSums::default());
    }
    let mut quants = [0i8; BLOCK];
    let mut sum = 0i32;
    for l in 0..BLOCK {
        let rounded = (x[l] * inverse + ROUND).to_bits().cast_signed();
        sum += rounded - ROUND.to_bits().cast_signed();
        quants[l] = rounded as i8;
    }
    (Quants(quants), BlockSums { scale, total: sum as f32 * scale, negative: -sum })
}

#[inline(always)]
fn quantise_body(x: &[f32], k: usize, first: usize, to: Target) {
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (block, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
            let (quants, block_sums) = quantise_block(x);
            let at = block * to.stride + first + row;
            debug_assert!(at < to.blocks);
            // SAFETY: the block and the row are in bounds, and no other thread has the row.
            unsafe {
                *to.quants.add(at) = quants;
                *to.block_sums.add(at) = block_sums;
            }
        }
    }
}

multiversion! {
    /// Quantizes x (some rows, k) into the rows from `first` on.
    fn quantise_rows(x: &[f32], k: usize, first: usize, to: Target) = quantise_body;
}
