//! The register tile that all instruction sets share: some rows of `x` against some registers of weight rows, their
//! sums in registers from the first column to the last.

use std::ops::Range;

use super::plain::Element;
use crate::kernels::panels::{self, GROUP, Output, PANEL};

/// A register of f32 lanes.
///
/// # Safety
/// Every function needs the instruction set that the register belongs to.
pub(in crate::kernels) trait Vector: Copy {
    /// Its lanes; they divide [`GROUP`].
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn splat(value: f32) -> Self;
    /// `self * by + to`, rounded once.
    unsafe fn mul_add(self, by: Self, to: Self) -> Self;
    /// Writes the lanes to `at[0..LANES]`.
    unsafe fn store(self, at: *mut f32);
}

/// Weights that a register of `V` can be filled with.
pub(in crate::kernels) trait Load<V>: Element {
    /// Reads `at[0..LANES]`, widened.
    ///
    /// # Safety
    /// So many elements are readable, and the machine has the instruction set of `V`.
    unsafe fn load(at: *const Self) -> V;
}

/// Some rows of `x` against some panels.
pub(super) struct Job<'a, W> {
    /// (all rows, k)
    pub(super) x: &'a [f32],
    /// Rows that are wanted.
    pub(super) rows: Range<usize>,
    /// All panels.
    pub(super) w: &'a [W],
    pub(super) n: usize,
    pub(super) k: usize,
    /// Panels that are wanted.
    pub(super) panels: Range<usize>,
    /// (all rows, n)
    pub(super) out: Output,
}

/// `M` rows of `x` against `R` registers of one panel.
///
/// x: the first row; w: the panel's first column at the first of these rows; width: elements from column to column.
///
/// # Safety
/// The machine has the set of `V`; `M` rows of `k` are readable at `x`, and `k` columns at `w`.
#[inline(always)]
unsafe fn tile<V: Vector, W: Load<V>, const M: usize, const R: usize>(
    x: *const f32,
    w: *const W,
    k: usize,
    width: usize,
) -> [[V; R]; M] {
    // SAFETY: pointers stay inside rows of k and columns of `width`, by the caller's promise.
    unsafe {
        let mut sums = [[V::zero(); R]; M];
        for i in 0..k {
            let column = w.add(i * width);
            let mut weights = [V::zero(); R];
            for (r, weights) in weights.iter_mut().enumerate() {
                *weights = W::load(column.add(r * V::LANES));
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                let x = V::splat(*x.add(m * k + i));
                for (sum, weights) in sums.iter_mut().zip(&weights) {
                    *sum = x.mul_add(*weights, *sum);
                }
            }
        }
        sums
    }
}

/// One row of `x` against `R` registers of two whole panels: twice the chains, for the latency of an addition.
///
/// # Safety
/// As for [`tile`], for both panels.
#[inline(always)]
unsafe fn pair<V: Vector, W: Load<V>, const R: usize>(x: *const f32, w: [*const W; 2], k: usize) -> [[V; R]; 2] {
    // SAFETY: as in `tile`.
    unsafe {
        let mut sums = [[V::zero(); R]; 2];
        for i in 0..k {
            let x = V::splat(*x.add(i));
            for (sums, w) in sums.iter_mut().zip(w) {
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = x.mul_add(W::load(w.add(i * PANEL + r * V::LANES)), *sum);
                }
            }
        }
        sums
    }
}

/// Writes a tile's rows, without the lanes that pad the panel.
///
/// # Safety
/// The rows from `row` on and the columns are the job's own.
#[inline(always)]
unsafe fn write<V: Vector, const M: usize, const R: usize>(
    sums: &[[V; R]; M],
    out: Output,
    row: usize,
    columns: Range<usize>,
) {
    for (m, sums) in sums.iter().enumerate() {
        let mut lanes = [0.0f32; PANEL];
        for (r, sum) in sums.iter().enumerate() {
            // SAFETY: R registers are no more than a panel.
            unsafe { sum.store(lanes[r * V::LANES..].as_mut_ptr()) };
        }
        // SAFETY: the caller's promise.
        unsafe { out.part(row + m, columns.clone()) }.copy_from_slice(&lanes[..columns.len()]);
    }
}

/// All wanted rows against `R` registers of one panel.
///
/// # Safety
/// As for [`tile`] and [`write`].
#[inline(always)]
unsafe fn strip<V: Vector, W: Load<V>, const R: usize>(
    job: &Job<'_, W>,
    w: *const W,
    width: usize,
    columns: &Range<usize>,
) {
    let (mut row, k) = (job.rows.start, job.k);
    macro_rules! rows {
        ($m:literal) => {{
            // SAFETY: so many rows are left from `row` on.
            unsafe {
                let sums = tile::<V, W, $m, R>(job.x[row * k..].as_ptr(), w, k, width);
                write(&sums, job.out, row, columns.clone());
            }
            row += $m;
        }};
    }
    // Six rows by four registers of AVX-512 are 24 sums, which with the weights fill the 32 registers.
    while row < job.rows.end {
        match job.rows.end - row {
            1 => rows!(1),
            2 => rows!(2),
            3 => rows!(3),
            4 => rows!(4),
            5 => rows!(5),
            _ => rows!(6),
        }
    }
}

/// The whole job. `ONE`: registers of a whole panel; `MANY`: registers that many rows meet at a time; `GROUPED`:
/// registers of a group.
///
/// # Safety
/// The machine has the set of `V`, and nobody else touches the job's rows and panels of the output.
#[inline(always)]
pub(super) unsafe fn run<V: Vector, W: Load<V>, const ONE: usize, const MANY: usize, const GROUPED: usize>(
    job: &Job<'_, W>,
) {
    let (many, end) = (job.rows.len() > 1, job.panels.end);
    let panel = |p: usize| job.w[p * PANEL * job.k..].as_ptr();
    let mut p = job.panels.start;
    while p < end {
        let (columns, width) = panels::rows(p, job.n);
        if !many && ONE * V::LANES == PANEL && ONE < 8 && p + 1 < end && panels::rows(p + 1, job.n).1 == PANEL {
            let next = panels::rows(p + 1, job.n).0;
            let x = job.x[job.rows.start * job.k..].as_ptr();
            // SAFETY: both panels are whole, and a row of x has k numbers.
            unsafe {
                let [first, second] = pair::<V, W, ONE>(x, [panel(p), panel(p + 1)], job.k);
                write(&[first], job.out, job.rows.start, columns);
                write(&[second], job.out, job.rows.start, next);
            }
            p += 2;
            continue;
        }
        let mut lane = 0;
        while lane < width {
            let left = width - lane;
            let step = if !many && left == PANEL {
                PANEL
            } else if many && left >= MANY * V::LANES {
                MANY * V::LANES
            } else {
                GROUP
            };
            let from = columns.start + lane;
            let part = from..columns.end.min(from + step);
            let w = panel(p).wrapping_add(lane);
            // SAFETY: the lanes lie inside the panel, whose columns are `width` apart.
            unsafe {
                match step {
                    PANEL if !many => strip::<V, W, ONE>(job, w, width, &part),
                    GROUP if MANY != GROUPED => strip::<V, W, GROUPED>(job, w, width, &part),
                    _ => strip::<V, W, MANY>(job, w, width, &part),
                }
            }
            lane += step;
        }
        p += 1;
    }
}
