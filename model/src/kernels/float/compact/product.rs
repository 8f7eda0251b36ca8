//! Products with compact weights, for any instruction set that can unpack a step.

use std::ops::Range;

use half::bf16;

use super::format::{COLUMNS, Compact, Escape, STEP, place};
use crate::kernels::panels::{self, GROUP, Output, PANEL};
use crate::kernels::prefetch::{LINE, prefetch};
use crate::kernels::vector::Vector;

/// Bytes by which the stream is asked for ahead. An Intel Xeon reads fastest at 3 to 6 KiB, and at two thirds of that speed if
/// not asked.
const AHEAD: usize = 6 << 10;

/// Registers of a column that are unpacked together: register r has the same lanes of group r.
pub(super) const REGISTERS: usize = 4;

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
    /// registers: of each group the lanes from `part * LANES` on, which are one register in f32. A step is readable at `at`.
    unsafe fn pairs(at: *const u8, table: Self::Bytes, part: usize) -> [[Self::Bytes; 2]; COLUMNS];
    /// A column in f32.
    unsafe fn widened(pairs: [Self::Bytes; 2]) -> [Self; REGISTERS];
    /// [`correct`] as a call, so that the compiler keeps sums in registers where there is nothing to correct.
    unsafe fn corrected(weights: [Self; REGISTERS], at: At<'_>) -> [Self; REGISTERS];
}

/// A part of a column.
#[derive(Clone, Copy)]
pub(super) struct At<'a> {
    column: usize,
    part: usize,
    /// The column's low bytes.
    lows: &'a [u8; PANEL],
    /// The escapes from the column's step on.
    escapes: &'a [Escape],
}

/// Parts of a panel.
pub(super) const fn parts<V: Vector>() -> usize {
    GROUP / V::LANES
}

/// Where register `r` of a part is among the rows of a panel.
pub(super) const fn lane<V: Vector>(part: usize, r: usize) -> usize {
    r * GROUP + part * V::LANES
}

/// A part of a column's weights with the true values of those whose codes stand for others.
///
/// # Safety
/// The machine has the set of `V`.
#[inline(always)]
pub(super) unsafe fn correct<V: Unpack>(mut weights: [V; REGISTERS], at: At<'_>) -> [V; REGISTERS] {
    for escape in at.escapes.iter().take_while(|escape| escape.column as usize <= at.column) {
        let row = usize::from(escape.row);
        if escape.column as usize == at.column && row % GROUP / V::LANES == at.part {
            let mut lanes = [0.0f32; GROUP];
            // SAFETY: the machine has the set, and a register's lanes fit.
            unsafe {
                weights[row / GROUP].store(lanes.as_mut_ptr());
                lanes[row % V::LANES] = bf16::from_le_bytes([at.lows[place(row)], escape.high]).to_f32();
                weights[row / GROUP] = V::load(lanes.as_ptr());
            }
        }
    }
    weights
}

/// The column of the first escape; a column that no panel has without one.
fn next(escapes: &[Escape]) -> usize {
    escapes.first().map_or(usize::MAX, |escape| escape.column as usize)
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

    /// Calls `each` for some columns, in their order, and `P` parts from `part` on: with the column, the part counted from
    /// `part`, and its weights. ask: whether the panel is not in the cache
    ///
    /// # Safety
    /// The machine has the set of `V`; the columns are the panel's, whole steps.
    #[inline(always)]
    pub(super) unsafe fn columns<const P: usize>(
        &mut self,
        (columns, part, ask): (Range<usize>, usize, bool),
        mut each: impl FnMut(usize, usize, [V; REGISTERS]),
    ) {
        let stream = self.w.panel(self.p);
        let mut escape = next(self.escapes);
        for first in columns.step_by(COLUMNS) {
            let rare = escape < first + COLUMNS;
            // SAFETY: the step is the panel's, by the caller's promise.
            unsafe {
                let at = stream.as_ptr().add(first / COLUMNS * STEP);
                if ask {
                    for line in (0..STEP).step_by(LINE) {
                        prefetch(at.wrapping_add(AHEAD + line));
                    }
                }
                for i in 0..P {
                    let pairs = V::pairs(at, self.table, part + i);
                    for c in 0..COLUMNS {
                        let mut weights = V::widened(pairs[c]);
                        if rare {
                            let (lows, escapes) = (&*at.add(c * PANEL).cast(), self.escapes);
                            weights = V::corrected(weights, At { column: first + c, part: part + i, lows, escapes });
                        }
                        each(first + c, i, weights);
                    }
                }
            }
            if rare {
                let past = self.escapes.iter().take_while(|escape| (escape.column as usize) < first + COLUMNS).count();
                self.escapes = &self.escapes[past..];
                escape = next(self.escapes);
            }
        }
    }
}

/// `M` rows of `x` against `P` parts of a panel. x: the first row; ask: whether the panel is not in the cache
///
/// # Safety
/// The machine has the set of `V`; `M` rows are readable at `x`, and no other thread accesses their outputs in this panel.
#[inline(always)]
unsafe fn tile<V: Unpack, const M: usize, const P: usize>(
    x: *const f32,
    (w, p): (&Compact, usize),
    (part, ask): (usize, bool),
    sums: &mut [[f32; PANEL]; M],
) {
    // SAFETY: columns are inside the rows of x, and lanes inside the panel.
    unsafe {
        let mut own = [[[V::splat(0.0); REGISTERS]; P]; M];
        Steps::<V>::new(w, p).columns::<P>((0..w.k, part, ask), |column, i, weights| {
            for m in 0..M {
                let x = V::splat(*x.add(m * w.k + column));
                for r in 0..REGISTERS {
                    own[m][i][r] = x.mul_add(weights[r], own[m][i][r]);
                }
            }
        });
        for m in 0..M {
            for i in 0..P {
                for r in 0..REGISTERS {
                    own[m][i][r].store(sums[m][lane::<V>(part + i, r)..][..V::LANES].as_mut_ptr());
                }
            }
        }
    }
}

/// `M` rows of `x`, from `row` on, against a panel, `P` parts at a time.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
pub(super) unsafe fn few<V: Unpack, const M: usize, const P: usize>(
    (x, row): (&[f32], usize),
    (w, p): (&Compact, usize),
    ask: bool,
    out: Output<'_>,
) {
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
