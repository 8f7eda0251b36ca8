//! The register tile that all instruction sets share: some rows of `x` against some registers of weight rows, their
//! sums in registers from the first column to the last.

use std::ops::Range;

use half::{bf16, f16};

use super::plain::Element;
use crate::kernels::panels::{self, GROUP, Output, PANEL};
use crate::kernels::vector::Vector;

/// Bytes that weights are asked for before they are needed, where each is used for the first time: the machine's own
/// guesses come late at the start of every panel, and stop at the end of a page.
const AHEAD: usize = 8 << 10;

/// Asks for the line `AHEAD` bytes on.
#[inline(always)]
fn ask(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: nothing is read, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.wrapping_add(AHEAD).cast());
    }
    let _ = at;
}

/// Weights that a register can be filled with.
pub(in crate::kernels) trait Load: Element {
    /// Reads as many as `V` has lanes, widened.
    ///
    /// # Safety
    /// So many elements are readable, and the machine has the instruction set of `V`.
    unsafe fn load<V: Vector>(at: *const Self) -> V;
}

impl Load for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(at) }
    }
}

impl Load for bf16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(at) }
    }
}

impl Load for f16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(at) }
    }
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
    pub(super) out: Output<'a>,
}

/// `M` rows of `x` against `R` registers of one panel.
///
/// x: the first row; w: the panel's first column at the first of these rows; width: elements from column to column;
/// first: whether these weights have not been used before.
///
/// # Safety
/// The machine has the set of `V`; `M` rows of `k` are readable at `x`, and `k` columns at `w`.
#[inline(always)]
unsafe fn tile<V: Vector, W: Load, const M: usize, const R: usize>(
    x: *const f32,
    w: *const W,
    k: usize,
    width: usize,
    first: bool,
) -> [[V; R]; M] {
    // SAFETY: pointers stay inside rows of k and columns of `width`, by the caller's promise.
    unsafe {
        let mut sums = [[V::splat(0.0); R]; M];
        for i in 0..k {
            let column = w.add(i * width);
            if first {
                for line in (0..R * V::LANES * size_of::<W>()).step_by(64) {
                    ask(column.cast::<u8>().wrapping_add(line));
                }
            }
            let mut weights = [V::splat(0.0); R];
            for (r, weights) in weights.iter_mut().enumerate() {
                *weights = W::load::<V>(column.add(r * V::LANES));
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

/// Writes a tile's rows, without the lanes that pad the panel.
///
/// # Safety
/// The rows from `row` on and the columns are the job's own.
#[inline(always)]
unsafe fn write<V: Vector, const M: usize, const R: usize>(
    sums: &[[V; R]; M],
    out: Output<'_>,
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
unsafe fn strip<V: Vector, W: Load, const R: usize>(
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
                let sums = tile::<V, W, $m, R>(job.x[row * k..].as_ptr(), w, k, width, row == job.rows.start);
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
pub(super) unsafe fn run<V: Vector, W: Load, const ONE: usize, const MANY: usize, const GROUPED: usize>(
    job: &Job<'_, W>,
) {
    let (many, end) = (job.rows.len() > 1, job.panels.end);
    let panel = |p: usize| job.w[p * PANEL * job.k..].as_ptr();
    let mut p = job.panels.start;
    while p < end {
        let (columns, width) = panels::rows(p, job.n);
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
