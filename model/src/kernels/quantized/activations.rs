//! Rows of activations as signed bytes, in blocks of 32 with a scale each.

use crate::kernels::threads::Threads;
use crate::kernels::{Isa, multiversion};

use super::format::BLOCK;

/// Adding 1.5 * 2^23 rounds to the nearest whole number, ties to even, and leaves it in the lowest bits.
const ROUND: f32 = 12_582_912.0;
/// Numbers under which waking other threads costs more than it saves.
const SERIAL: usize = 1 << 15;
/// Rows that a thread takes at a time.
const ROWS: usize = 16;

/// The bytes of one block.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Quants([i8; BLOCK]);

/// What else the kernels need of a block.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Facts {
    /// What the bytes count.
    pub(super) scale: f32,
    /// The sum of the bytes, scaled.
    pub(super) total: f32,
    /// The sum of the bytes, its sign turned: times 128 or 8 it makes up for weights that are stored too large.
    pub(super) negative: i32,
}

/// Some rows of activations as bytes. The buffers are kept from call to call.
///
/// A block's rows lie side by side, (k / 32, rows, 32): a tile of rows is read with one pointer.
#[derive(Debug, Default)]
pub(crate) struct Activations {
    rows: usize,
    k: usize,
    /// Rows that a block has room for: not a power of two, which would put all blocks in the same sets of the cache.
    stride: usize,
    quants: Vec<Quants>,
    facts: Vec<Facts>,
}

impl Activations {
    /// Quantises `x (rows, k)`.
    ///
    /// A block's scale is its largest magnitude over 127, and a number becomes the nearest whole count of it, ties to
    /// even. Where that scale is too small to have an inverse, the scale and all numbers are 0; where the block holds
    /// what is not finite, neither is the scale, and every product with the row is NaN.
    ///
    /// # Panics
    /// When `x` is not made of rows of `k`, or `k` not of blocks of 32.
    pub(crate) fn quantise(&mut self, isa: Isa, x: &[f32], k: usize, threads: &Threads) {
        assert!(k > 0 && k.is_multiple_of(BLOCK) && x.len().is_multiple_of(k), "{} in rows of {k}", x.len());
        let rows = x.len() / k;
        let stride = if rows < 8 { rows } else { rows.next_multiple_of(4) + 2 };
        let blocks = k / BLOCK * stride;
        if self.quants.len() < blocks {
            self.quants.resize(blocks, Quants([0; BLOCK]));
            self.facts.resize(blocks, Facts::default());
        }
        (self.rows, self.k, self.stride) = (rows, k, stride);
        let to = Target { quants: self.quants.as_mut_ptr(), facts: self.facts.as_mut_ptr(), stride, blocks };
        if x.len() < SERIAL {
            return quantise_rows(isa, x, k, 0, to);
        }
        threads.run(rows.div_ceil(ROWS), &|piece| {
            let range = piece * ROWS..rows.min((piece + 1) * ROWS);
            quantise_rows(isa, &x[range.start * k..range.end * k], k, range.start, to);
        });
    }

    /// Rows that were quantised last.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Their columns.
    pub(crate) fn columns(&self) -> usize {
        self.k
    }

    /// Rows that a block has room for.
    #[inline]
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// The bytes of a block; those of the rows that follow lie behind.
    pub(super) fn quants(&self, block: usize, row: usize) -> &[i8; BLOCK] {
        &self.quants[block * self.stride + row].0
    }

    /// What else is known of a block; that of the rows that follow lies behind.
    pub(super) fn facts(&self, block: usize, row: usize) -> &Facts {
        &self.facts[block * self.stride + row]
    }

    /// Where the bytes and the facts of a block and all that follow begin.
    #[inline]
    pub(super) fn from(&self, block: usize, row: usize) -> (*const i8, *const Facts) {
        let at = block * self.stride + row;
        (self.quants[at..].as_ptr().cast(), self.facts[at..].as_ptr())
    }
}

/// Where blocks are written, by several threads, each its own rows.
#[derive(Clone, Copy)]
struct Target {
    quants: *mut Quants,
    facts: *mut Facts,
    stride: usize,
    blocks: usize,
}

// SAFETY: `quantise` hands every thread rows that no other has, and nobody reads until all are done.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

#[inline(always)]
fn quantise_block(x: &[f32; BLOCK]) -> (Quants, Facts) {
    let mut largest = 0u32;
    for v in x {
        // As whole numbers: what is not a number is larger than all.
        largest = largest.max(v.to_bits() & 0x7fff_ffff);
    }
    let scale = f32::from_bits(largest) / 127.0;
    let inverse = 1.0 / scale;
    if !scale.is_finite() {
        return (Quants([0; BLOCK]), Facts { scale, total: scale, negative: 0 });
    }
    if !inverse.is_finite() {
        return (Quants([0; BLOCK]), Facts::default());
    }
    let mut quants = [0i8; BLOCK];
    let mut sum = 0i32;
    for l in 0..BLOCK {
        let rounded = (x[l] * inverse + ROUND).to_bits().cast_signed();
        sum += rounded - ROUND.to_bits().cast_signed();
        quants[l] = rounded as i8;
    }
    (Quants(quants), Facts { scale, total: sum as f32 * scale, negative: -sum })
}

#[inline(always)]
fn quantise_body(x: &[f32], k: usize, first: usize, to: Target) {
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (block, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
            let (quants, facts) = quantise_block(x);
            let at = block * to.stride + first + row;
            debug_assert!(at < to.blocks);
            // SAFETY: the block and the row lie inside, and no other thread has the row.
            unsafe {
                *to.quants.add(at) = quants;
                *to.facts.add(at) = facts;
            }
        }
    }
}

multiversion! {
    /// Quantises x (some rows, k), which are the rows from `first` on.
    fn quantise_rows(x: &[f32], k: usize, first: usize, to: Target) = quantise_body;
}
