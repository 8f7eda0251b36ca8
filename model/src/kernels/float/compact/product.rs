//! Products with compact weights, for any instruction set that can unpack a step.

use std::ops::Range;

use half::bf16;

use super::format::{COLUMNS, Compact, Escape, STEP, place};
use crate::kernels::panels::{self, GROUP, Output, PANEL};
use crate::kernels::prefetch::{LINE, prefetch};
use crate::kernels::vector::Vector;

/// How many bytes ahead the stream is prefetched. An Intel Xeon reads fastest at 3 to 6 KiB, and at two thirds of that
/// speed without prefetching. Not tuned for other processors.
const AHEAD: usize = 6 << 10;

/// Registers that hold one part of a column, one for each group of the panel.
pub(super) const REGISTERS: usize = PANEL / GROUP;

/// A vector type that can unpack compact weights.
///
/// # Safety
/// As for [`Vector`].
pub(super) trait Unpack: Vector {
    /// A register of bytes.
    type Bytes: Copy;
    /// Loads the table of high bytes.
    unsafe fn table(bytes: &[u8; 16]) -> Self::Bytes;
    /// Returns the low and high bytes of a step's weights, joined to 16-bit numbers in the order of `place`, in two
    /// registers per column: of each group the lanes from `part * LANES` on, which fill one register in f32. A step is
    /// readable at `at`, and `part` is less than [`parts`].
    unsafe fn pairs(at: *const u8, table: Self::Bytes, part: usize) -> [[Self::Bytes; 2]; COLUMNS];
    /// Widens a column to f32.
    unsafe fn widened(pairs: [Self::Bytes; 2]) -> [Self; REGISTERS];
}

/// Returns the number of parts of a panel: the f32 registers that hold one group.
pub(super) const fn parts<V: Vector>() -> usize {
    GROUP / V::LANES
}

/// Returns the row, within the panel, of the first lane of register `r` of a part.
pub(super) const fn lane<V: Vector>(part: usize, r: usize) -> usize {
    r * GROUP + part * V::LANES
}

/// Writes the true values of the escaped weights into a part of a column. Works in memory and is never inlined, so that
/// the compiler keeps the sums in registers where there is nothing to correct.
///
/// weights: register after register; lanes: lanes per register; lows: the column's low bytes; escapes: the column's
/// escapes
#[cold]
#[inline(never)]
fn correct(weights: &mut [f32; PANEL], lanes: usize, part: usize, lows: &[u8; PANEL], escapes: &[Escape]) {
    for escape in escapes {
        let row = usize::from(escape.row);
        if row % GROUP / lanes == part {
            let value = bf16::from_le_bytes([lows[place(row)], escape.high]);
            weights[row / GROUP * lanes + row % lanes] = value.to_f32();
        }
    }
}

/// Takes the escapes of a step off the list, column by column. first: the step's first column
#[cold]
#[inline(never)]
fn take<'a>(escapes: &mut &'a [Escape], first: usize) -> [&'a [Escape]; COLUMNS] {
    let mut taken: [&[Escape]; COLUMNS] = [&[]; COLUMNS];
    for (column, taken) in (first..).zip(&mut taken) {
        let count = escapes.iter().take_while(|escape| escape.column as usize == column).count();
        (*taken, *escapes) = escapes.split_at(count);
    }
    taken
}

/// Returns the column of the first escape; if there is none, a column that no panel has.
fn next(escapes: &[Escape]) -> usize {
    escapes.first().map_or(usize::MAX, |escape| escape.column as usize)
}

/// Visits the columns of a panel. A trait, because the compiler may call a closure instead of inlining it, and then
/// vector instructions, outside a function that enables their instruction set, become calls too: four rows took 30
/// times as long.
///
/// # Safety
/// As for [`Vector`]: methods are `#[inline(always)]`.
pub(super) trait Visitor<V: Unpack> {
    /// Visits one part of a column. part: counted from the first part requested
    unsafe fn visit(&mut self, column: usize, part: usize, weights: [V; REGISTERS]);
}

/// A cursor over the steps of a panel, in order.
pub(super) struct Steps<'a, V: Unpack> {
    w: &'a Compact,
    p: usize,
    table: V::Bytes,
    /// The escapes of the columns still to come.
    escapes: &'a [Escape],
}

impl<'a, V: Unpack> Steps<'a, V> {
    /// Starts at the first step of panel `p`.
    ///
    /// # Safety
    /// The machine has the instruction set of `V`.
    #[inline(always)]
    pub(super) unsafe fn new(w: &'a Compact, p: usize) -> Self {
        // SAFETY: the caller's promise.
        Self { w, p, table: unsafe { V::table(&w.table) }, escapes: w.escapes(p) }
    }

    /// Passes some columns to `visitor`, in order, `P` parts of each from `part` on. ask: whether to prefetch, because
    /// the panel is not in the cache
    ///
    /// # Safety
    /// The machine has the instruction set of `V`; the columns, a whole number of steps, and the parts are in the
    /// panel.
    #[inline(always)]
    pub(super) unsafe fn columns<const P: usize>(
        &mut self,
        (columns, part, ask): (Range<usize>, usize, bool),
        visitor: &mut impl Visitor<V>,
    ) {
        let mut first = columns.start;
        while first < columns.end {
            // The common loop has no test for escapes, and its sums stay in registers.
            let escape = next(self.escapes).min(columns.end) / COLUMNS * COLUMNS;
            for first in (first..escape).step_by(COLUMNS) {
                // SAFETY: the step is in the panel, by the caller's promise.
                unsafe {
                    let at = self.step(first, ask);
                    for i in 0..P {
                        let pairs = V::pairs(at, self.table, part + i);
                        for c in 0..COLUMNS {
                            visitor.visit(first + c, i, V::widened(pairs[c]));
                        }
                    }
                }
            }
            if escape < columns.end {
                let escapes = take(&mut self.escapes, escape);
                // SAFETY: as above.
                unsafe {
                    let at = self.step(escape, ask);
                    for i in 0..P {
                        let pairs = V::pairs(at, self.table, part + i);
                        for c in 0..COLUMNS {
                            let mut stored = [0.0f32; PANEL];
                            let mut weights = V::widened(pairs[c]);
                            for r in 0..REGISTERS {
                                weights[r].store(stored[r * V::LANES..][..V::LANES].as_mut_ptr());
                            }
                            correct(&mut stored, V::LANES, part + i, &*at.add(c * PANEL).cast(), escapes[c]);
                            for r in 0..REGISTERS {
                                weights[r] = V::load(stored[r * V::LANES..][..V::LANES].as_ptr());
                            }
                            visitor.visit(escape + c, i, weights);
                        }
                    }
                }
            }
            first = escape + COLUMNS;
        }
    }

    /// Returns the address of the step of column `first`. ask: whether to prefetch the bytes that follow
    ///
    /// # Safety
    /// The step is in the panel.
    #[inline(always)]
    unsafe fn step(&self, first: usize, ask: bool) -> *const u8 {
        // SAFETY: the caller's promise.
        let at = unsafe { self.w.panel(self.p).as_ptr().add(first / COLUMNS * STEP) };
        if ask {
            for line in (0..STEP).step_by(LINE) {
                prefetch(at.wrapping_add(AHEAD + line));
            }
        }
        at
    }
}

/// The sums of `M` rows of `x` in `P` parts of a panel. x: the first row, of `k` numbers
struct Tile<V, const M: usize, const P: usize> {
    x: *const f32,
    k: usize,
    sums: [[[V; REGISTERS]; P]; M],
}

impl<V: Unpack, const M: usize, const P: usize> Visitor<V> for Tile<V, M, P> {
    #[inline(always)]
    unsafe fn visit(&mut self, column: usize, part: usize, weights: [V; REGISTERS]) {
        for m in 0..M {
            // SAFETY: the machine has the instruction set of `V`, and the column is inside the rows of x.
            unsafe {
                let x = V::splat(*self.x.add(m * self.k + column));
                for r in 0..REGISTERS {
                    self.sums[m][part][r] = x.mul_add(weights[r], self.sums[m][part][r]);
                }
            }
        }
    }
}

/// Multiplies `M` rows of `x` by `P` parts of a panel. x: the first row; ask: whether to prefetch the panel
///
/// # Safety
/// The machine has the instruction set of `V`; `M` rows are readable at `x`, and the parts are in the panel.
#[inline(always)]
unsafe fn tile<V: Unpack, const M: usize, const P: usize>(
    x: *const f32,
    (w, p): (&Compact, usize),
    (part, ask): (usize, bool),
    sums: &mut [[f32; PANEL]; M],
) {
    // SAFETY: columns are inside the rows of x, and lanes inside the panel.
    unsafe {
        let mut tile = Tile { x, k: w.k, sums: [[[V::splat(0.0); REGISTERS]; P]; M] };
        Steps::<V>::new(w, p).columns::<P>((0..w.k, part, ask), &mut tile);
        for m in 0..M {
            for i in 0..P {
                for r in 0..REGISTERS {
                    tile.sums[m][i][r].store(sums[m][lane::<V>(part + i, r)..][..V::LANES].as_mut_ptr());
                }
            }
        }
    }
}

/// Multiplies `M` rows of `x`, from `row` on, by a panel, `P` parts at a time.
///
/// # Safety
/// The machine has the instruction set of `V`; rows and panel are in bounds, and no other thread accesses this part of
/// `out`.
#[inline(always)]
pub(super) unsafe fn few<V: Unpack, const M: usize, const P: usize>(
    (x, row): (&[f32], usize),
    (w, p): (&Compact, usize),
    out: Output<'_>,
) {
    const { assert!(parts::<V>().is_multiple_of(P), "parts of a panel") };
    let mut sums = [[0.0f32; PANEL]; M];
    for part in (0..parts::<V>()).step_by(P) {
        // SAFETY: the caller's promise.
        unsafe { tile::<V, M, P>(x[row * w.k..(row + M) * w.k].as_ptr(), (w, p), (part, part == 0), &mut sums) };
    }
    let (columns, _) = panels::rows(p, w.n);
    for (m, sums) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { out.part(row + m, columns.clone()) }.copy_from_slice(&sums[..columns.len()]);
    }
}
