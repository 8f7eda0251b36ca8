//! Products with compact weights, for any instruction set that can unpack a step.

use std::ops::Range;

use half::bf16;

use super::format::{COLUMNS, Compact, Escape, STEP, place};
use crate::kernels::panels::{self, GROUP, Output, PANEL};
use crate::kernels::prefetch::{LINE, prefetch};
use crate::kernels::vector::Vector;

/// Bytes by which the stream is asked for ahead. An Intel Xeon reads fastest at 3 to 6 KiB, and at two thirds of that speed if
/// not asked. Not tuned for other processors.
const AHEAD: usize = 6 << 10;

/// Registers of a part of a column, one for each group of the panel.
pub(super) const REGISTERS: usize = PANEL / GROUP;

/// A register that unpacks compact weights.
///
/// # Safety
/// As for [`Vector`].
pub(super) trait Unpack: Vector {
    /// A register of bytes.
    type Bytes: Copy;
    /// The table of high bytes.
    unsafe fn table(bytes: &[u8; 16]) -> Self::Bytes;
    /// The low and the high byte of each weight of a step, as numbers of 16 bits in the order of `place`, of each column two
    /// registers: of each group the lanes from `part * LANES` on, which are one register in f32. A step is readable at `at`, and
    /// `part` is one of [`parts`].
    unsafe fn pairs(at: *const u8, table: Self::Bytes, part: usize) -> [[Self::Bytes; 2]; COLUMNS];
    /// A column in f32.
    unsafe fn widened(pairs: [Self::Bytes; 2]) -> [Self; REGISTERS];
}

/// Parts of a panel.
pub(super) const fn parts<V: Vector>() -> usize {
    GROUP / V::LANES
}

/// The first row in its panel of register `r` of a part.
pub(super) const fn lane<V: Vector>(part: usize, r: usize) -> usize {
    r * GROUP + part * V::LANES
}

/// Gives a part of a column the true values of the weights whose codes stand for others. A call, and in memory, so that the
/// compiler keeps the sums in registers where there is nothing to correct.
///
/// weights: register after register; lanes: of a register; lows: the column's low bytes; escapes: the column's
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

/// Takes the escapes of a step, column by column. first: the step's first column
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

/// The column of the first escape; a column that no panel has without one.
fn next(escapes: &[Escape]) -> usize {
    escapes.first().map_or(usize::MAX, |escape| escape.column as usize)
}

/// What visits the columns of a panel. A trait, because the compiler may call a closure instead of inlining it, and vector
/// instructions outside a function with their set become calls too: four rows took 30 times as long.
///
/// # Safety
/// As for [`Vector`]: methods are `#[inline(always)]`.
pub(super) trait Visitor<V: Unpack> {
    /// Takes a part of a column. part: counted from the first that is wanted
    unsafe fn visit(&mut self, column: usize, part: usize, weights: [V; REGISTERS]);
}

/// The steps of a panel, in their order.
pub(super) struct Steps<'a, V: Unpack> {
    w: &'a Compact,
    p: usize,
    table: V::Bytes,
    /// Those of the columns to come.
    escapes: &'a [Escape],
}

impl<'a, V: Unpack> Steps<'a, V> {
    /// # Safety
    /// The machine has the set of `V`.
    #[inline(always)]
    pub(super) unsafe fn new(w: &'a Compact, p: usize) -> Self {
        // SAFETY: the caller's promise.
        Self { w, p, table: unsafe { V::table(&w.table) }, escapes: w.escapes(p) }
    }

    /// Shows `visitor` some columns, in their order, and `P` parts of each from `part` on. ask: whether the panel is not in the cache
    ///
    /// # Safety
    /// The machine has the set of `V`; the columns, whole steps, and the parts are the panel's.
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
                // SAFETY: the step is the panel's, by the caller's promise.
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

    /// Where the step of a column lies. ask: for the bytes that follow
    ///
    /// # Safety
    /// The step is the panel's.
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
            // SAFETY: the machine has the set of `V`, and the column is inside the rows of x.
            unsafe {
                let x = V::splat(*self.x.add(m * self.k + column));
                for r in 0..REGISTERS {
                    self.sums[m][part][r] = x.mul_add(weights[r], self.sums[m][part][r]);
                }
            }
        }
    }
}

/// `M` rows of `x` against `P` parts of a panel. x: the first row; ask: whether the panel is not in the cache
///
/// # Safety
/// The machine has the set of `V`; `M` rows are readable at `x`, and the parts are the panel's.
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

/// `M` rows of `x`, from `row` on, against a panel, `P` parts at a time. ask: whether the panel is not in the cache
///
/// # Safety
/// The machine has the set of `V`; rows and panel are in bounds, and no other thread accesses this part of `out`.
#[inline(always)]
pub(super) unsafe fn few<V: Unpack, const M: usize, const P: usize>(
    (x, row): (&[f32], usize),
    (w, p): (&Compact, usize),
    ask: bool,
    out: Output<'_>,
) {
    const { assert!(parts::<V>().is_multiple_of(P), "parts of a panel") };
    let mut sums = [[0.0f32; PANEL]; M];
    for part in (0..parts::<V>()).step_by(P) {
        // SAFETY: the caller's promise.
        unsafe { tile::<V, M, P>(x[row * w.k..(row + M) * w.k].as_ptr(), (w, p), (part, ask && part == 0), &mut sums) };
    }
    let (columns, _) = panels::rows(p, w.n);
    for (m, sums) in sums.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { out.part(row + m, columns.clone()) }.copy_from_slice(&sums[..columns.len()]);
    }
}
