//! Products with quantized weights: GGUF's q8_0, q4_0 and q4_k, interleaved in panels.
//!
//! The rows of `x` are quantized too, in blocks of 32 (see `activations`). The product of two blocks is an integer, so
//! it does not depend on the order of additions. It is scaled and added to the row's sum, block after block. `plain`
//! defines this sum; each other file computes the same bits with one instruction set.
//!
//! A stored block has some f16 numbers, followed by four-byte words. A panel stores one block after another. Each block
//! holds the first f16 of all rows, then the second of all rows, then the first word of all rows, and so on:
//!
//! | kind | columns | f16 | words |
//! |---|---|---|---|
//! | q8_0 | 32 | scale | 8 of quants, each plus 128 |
//! | q4_0 | 32 | scale | 4 of quants, each plus 8: columns 4i.. in the low halves of bytes, 16 + 4i.. in the high |
//! | q4_k | 256 | scale, minimum | 3 of 6-bit scales and minima, 32 of quants: of every 64 columns the first 32 low |

#[cfg(test)]
mod tests;

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod format;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

pub(crate) use activations::Activations;
pub(crate) use format::{BLOCK, Kind};
use format::{Form, Panel, Q4_0, Q4K, Q8_0};

use super::Isa;
use super::lines::Lines;
use super::panels::{self, GROUP, Output, PANEL};
use super::threads::Threads;

/// A quantized matrix (n, k) in panels.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    kind: Kind,
    n: usize,
    k: usize,
    lines: Lines,
}

impl Packed {
    /// Packs a matrix (n, k) from GGUF blocks, stored row by row.
    ///
    /// # Errors
    /// If `k` is not a multiple of the kind's block, or the number of bytes is wrong.
    pub(crate) fn pack(kind: Kind, blocks: &[u8], n: usize, k: usize, threads: &Threads) -> Result<Self, String> {
        if !k.is_multiple_of(kind.columns()) {
            return Err(format!("rows of {k} are not made of blocks of {}", kind.columns()));
        }
        let row_bytes = k / kind.columns() * kind.block_bytes();
        if row_bytes.checked_mul(n) != Some(blocks.len()) {
            return Err(format!("{} bytes are not {n} rows of {row_bytes}", blocks.len()));
        }
        let mut lines = Lines::zeroed(n.next_multiple_of(GROUP) * row_bytes);
        if !blocks.is_empty() {
            let sources = blocks.chunks(PANEL * row_bytes);
            let pieces: Vec<_> = lines.bytes_mut().chunks_mut(PANEL * row_bytes).zip(sources).map(Mutex::new).collect();
            threads.run(pieces.len(), &|p| {
                let mut piece = pieces[p].lock().unwrap_or_else(PoisonError::into_inner);
                let (panel, rows) = &mut *piece;
                interleave(kind, rows, row_bytes, panel);
            });
        }
        Ok(Self { kind, n, k, lines })
    }

    /// Returns the size in bytes, including the padding of the last panel.
    pub(crate) fn bytes(&self) -> usize {
        self.lines.bytes().len()
    }

    /// Returns n, the number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.n
    }

    /// Returns k, the number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.k
    }

    /// Writes one row as floats. out: (k)
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n && out.len() == self.k, "row {row} of {}, {} of {}", self.n, out.len(), self.k);
        let panel = self.panels(row / PANEL, 1);
        for (block, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            plain::Block::new(self.kind, &panel, row % PANEL, block).widen(out);
        }
    }

    /// Returns panel `p`, and if `count` is 2 also the next one; then both must be whole.
    fn panels(&self, p: usize, count: usize) -> Panel<'_> {
        let (first, width) = panels::rows(p, self.n);
        let rows = first.start..first.end + (count - 1) * PANEL;
        let row_bytes = self.k / self.kind.columns() * self.kind.block_bytes();
        let bytes = &self.lines.bytes()[rows.start * row_bytes..][..count * width * row_bytes];
        Panel { bytes, rows, width, count, blocks: self.k / BLOCK }
    }
}

/// Interleaves some rows into a panel.
fn interleave(kind: Kind, rows: &[u8], row_bytes: usize, panel: &mut [u8]) {
    let width = panel.len() / row_bytes;
    let block_bytes = kind.block_bytes();
    for (block, panel) in panel.chunks_exact_mut(width * block_bytes).enumerate() {
        let (halves, words) = panel.split_at_mut(2 * kind.halves() * width);
        let (halves, words) = (halves.as_chunks_mut::<2>().0, words.as_chunks_mut::<4>().0);
        for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
            let (row_halves, row_words) = bytes[block * block_bytes..][..block_bytes].split_at(2 * kind.halves());
            for (half, to) in row_halves.as_chunks::<2>().0.iter().zip(halves[row..].iter_mut().step_by(width)) {
                *to = *half;
            }
            for (word, to) in row_words.as_chunks::<4>().0.iter().zip(words[row..].iter_mut().step_by(width)) {
                *to = (u32::from_ne_bytes(*word) ^ kind.flip()).to_ne_bytes();
            }
        }
    }
}

/// Computes some panels of `out = x . w^T` for some rows of `x`: row r of `x` gives row r of `out (rows of x, n)`.
///
/// # Panics
/// If the shapes do not fit.
///
/// # Safety
/// No other thread accesses this part of `out`.
pub(crate) unsafe fn panels(
    isa: Isa,
    x: &Activations,
    rows: Range<usize>,
    w: &Packed,
    panels: Range<usize>,
    out: Output<'_>,
) {
    assert!(x.columns() == w.k && rows.end <= x.rows() && out.holds(rows.end, w.n), "quantized: shapes do not fit");
    if rows.is_empty() {
        return;
    }
    let mut p = panels.start;
    while p < panels.end {
        // One row of `x` reads two panels at once, because memory serves two streams faster than one.
        let pair = reads_pairs(isa) && rows.len() == 1 && p + 2 <= panels.end && (p + 2) * PANEL <= w.n;
        let panel = w.panels(p, if pair { 2 } else { 1 });
        p += panel.count;
        // SAFETY: the caller's promise, and the shapes fit.
        unsafe {
            match w.kind {
                Kind::Q8_0 => form::<Q8_0>(isa, x, rows.clone(), &panel, out),
                Kind::Q4_0 => form::<Q4_0>(isa, x, rows.clone(), &panel, out),
                Kind::Q4K => form::<Q4K>(isa, x, rows.clone(), &panel, out),
            }
        }
    }
}

/// Returns whether the kernel of this instruction set takes two panels at once.
fn reads_pairs(isa: Isa) -> bool {
    #[cfg(target_arch = "x86_64")]
    return isa == Isa::Avx512Vnni;
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        false
    }
}

/// Runs the kernel for `isa`.
///
/// # Safety
/// The shapes fit, and no other thread accesses this part of `out`.
unsafe fn form<F: Form>(isa: Isa, x: &Activations, rows: Range<usize>, w: &Panel<'_>, out: Output<'_>) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields it only where the machine has its features; `panels` has checked the shapes.
        Isa::Avx512Vnni => unsafe { avx512::panel::<F>(x, rows, w, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 | Isa::Avx2 => unsafe { avx2::panel::<F>(x, rows, w, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Isa::NeonDot => unsafe { neon::panel::<F, true>(x, rows, w, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Isa::Neon => unsafe { neon::panel::<F, false>(x, rows, w, out) },
        // SAFETY: `panels` has checked the shapes.
        Isa::Plain => unsafe { plain::panel::<F>(x, rows, w, out) },
    }
}
