//! Products with many rows of `x`: a block of columns of a panel is unpacked into the L1 cache as f32 and multiplied
//! there by up to [`KEPT`] rows.

use std::ops::Range;

use super::format::{COLUMNS, Compact, STEP};
use super::product::{REGISTERS, Steps, Unpack, Visitor, lane, parts};
use crate::kernels::float::tile::{MOST, tiles};
use crate::kernels::panels::{self, Output, PANEL};
use crate::kernels::prefetch::{LINE, Stretch};
use crate::kernels::vector::Vector;

/// Columns unpacked at a time, 16 KiB in f32. With the sums of [`KEPT`] rows they fill a 32 KiB L1 cache.
const BLOCK: usize = 64;
/// The most rows whose sums are kept from block to block.
const KEPT: usize = 64;

/// Cache lines of a packed block.
const LINES: usize = BLOCK / COLUMNS * STEP / LINE;

/// Columns in f32, one after another.
#[repr(align(64))]
struct Block([f32; BLOCK * PANEL]);

/// A visitor that stores columns in a block as they are unpacked. start: the block's first column
struct Unpacked<'a> {
    block: &'a mut Block,
    start: usize,
}

impl<V: Unpack> Visitor<V> for Unpacked<'_> {
    #[inline(always)]
    unsafe fn visit(&mut self, column: usize, part: usize, weights: [V; REGISTERS]) {
        for r in 0..REGISTERS {
            let to = (column - self.start) * PANEL + lane::<V>(part, r);
            // SAFETY: the machine has the instruction set of `V`, and the block has room for the column, as `unpack`
            // asserts.
            unsafe { weights[r].store(self.block.0.as_mut_ptr().add(to)) };
        }
    }
}

impl Block {
    /// Unpacks the next columns, a whole number of steps.
    ///
    /// # Safety
    /// The machine has the instruction set of `V`, and the panel has these columns.
    #[inline(always)]
    unsafe fn unpack<V: Unpack, const P: usize>(&mut self, steps: &mut Steps<'_, V>, columns: Range<usize>) {
        assert!(columns.len() <= BLOCK, "unpack: a block");
        let start = columns.start;
        // SAFETY: the caller's promise; the block has room for the columns.
        unsafe { steps.columns::<P>((columns, 0, false), &mut Unpacked { block: self, start }) };
    }
}

/// Adds some columns' products to the sums of `M` rows in `R` registers. x: the first of these columns in the first
/// row; sums: `M` rows of a panel; next: prefetched meanwhile
///
/// # Safety
/// The machine has the instruction set of `V`; `M` rows of `columns` numbers are readable at `x`, `k` numbers apart.
#[inline(always)]
unsafe fn add<V: Vector, const M: usize, const R: usize>(
    x: *const f32,
    k: usize,
    columns: usize,
    (block, lane): (&Block, usize),
    sums: &mut [[f32; PANEL]],
    next: &mut Stretch,
) {
    assert!(sums.len() == M && columns <= BLOCK && lane + R * V::LANES <= PANEL, "add: a tile");
    // SAFETY: the assertion bounds the accesses to the block and the sums; the rest is the caller's promise.
    unsafe {
        let mut own = [[V::splat(0.0); R]; M];
        for m in 0..M {
            for r in 0..R {
                own[m][r] = V::load(sums[m].as_ptr().add(lane + r * V::LANES));
            }
        }
        for c in 0..columns {
            next.advance();
            let mut weights = [V::splat(0.0); R];
            for r in 0..R {
                weights[r] = V::load(block.0.as_ptr().add(c * PANEL + lane + r * V::LANES));
            }
            for m in 0..M {
                let x = V::splat(*x.add(m * k + c));
                for r in 0..R {
                    own[m][r] = x.mul_add(weights[r], own[m][r]);
                }
            }
        }
        for m in 0..M {
            for r in 0..R {
                own[m][r].store(sums[m].as_mut_ptr().add(lane + r * V::LANES));
            }
        }
    }
}

/// Multiplies rows of `x` by some panels, `R` registers of a panel at a time. `P`: the number of parts of a panel
///
/// # Safety
/// The machine has the instruction set of `V`; rows and panels are in bounds, and no other thread accesses this part of
/// `out`.
#[inline(always)]
pub(super) unsafe fn run<V: Unpack, const P: usize, const R: usize>(
    x: &[f32],
    rows: Range<usize>,
    w: &Compact,
    panels: Range<usize>,
    out: Output<'_>,
) {
    const { assert!(P == parts::<V>(), "all parts of a panel") };
    let (mut block, mut kept) = (Block([0.0; BLOCK * PANEL]), [[0.0f32; PANEL]; KEPT]);
    for p in panels {
        let (outputs, width) = panels::rows(p, w.n);
        for first in rows.clone().step_by(KEPT) {
            let sums = &mut kept[..KEPT.min(rows.end - first)];
            sums.fill([0.0; PANEL]);
            // SAFETY: the machine has the instruction set; rows and columns are inside `x` and the panel.
            unsafe {
                let mut steps = Steps::<V>::new(w, p);
                for start in (0..w.k).step_by(BLOCK) {
                    let columns = start..w.k.min(start + BLOCK);
                    block.unpack::<V, P>(&mut steps, columns.clone());
                    // The next block is prefetched while this one is in use. If it were prefetched while this one is
                    // unpacked, the unpacking would wait for memory: 7 to 12 rows took 1.1 to 1.6 times as long.
                    let after = w.panel(p).as_ptr().wrapping_add(columns.end / COLUMNS * STEP);
                    let end = after.wrapping_add(LINES * LINE);
                    let uses = columns.len() * sums.len().div_ceil(MOST) * width.div_ceil(R * V::LANES);
                    let mut next = Stretch { at: after, lines: LINES.div_ceil(uses) };
                    tiles!(0..sums.len(), |row, M| {
                        let x = x[(first + row) * w.k + start..].as_ptr();
                        if next.at >= end {
                            next.lines = 0;
                        }
                        for lane in (0..width).step_by(R * V::LANES) {
                            add::<V, M, R>(x, w.k, columns.len(), (&block, lane), &mut sums[row..][..M], &mut next);
                        }
                    });
                }
            }
            for (row, sums) in (first..).zip(&*sums) {
                // SAFETY: the caller's promise.
                unsafe { out.part(row, outputs.clone()) }.copy_from_slice(&sums[..outputs.len()]);
            }
        }
    }
}
