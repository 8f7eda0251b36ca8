//! The register tile that all instruction sets share: it multiplies some rows of `x` by some registers of weight rows
//! and keeps the sums in registers from the first column to the last.

use std::ops::Range;

use super::product::Product;
use crate::kernels::element::Element;
use crate::kernels::panels::{self, GROUP, Output, PANEL};
use crate::kernels::prefetch::{LINE, prefetch, stream_ahead};
use crate::kernels::vector::Vector;

/// How many bytes ahead weights are prefetched when more rows use them than one tile has.
const AHEAD: usize = 8 << 10;

/// The most rows of a tile: six rows by four AVX-512 registers are 24 sums, which with the weights fill the 32
/// registers.
pub(super) const MOST: usize = 6;

/// Runs `body` for each tile of some rows; in it, `row` is the tile's first row and the constant `M` its number of
/// rows.
macro_rules! tiles {
    ($rows:expr, |$row:ident, $M:ident| $body:expr) => {{
        let rows = $rows;
        let mut $row = rows.start;
        while $row < rows.end {
            tiles!(@height rows.end - $row, $row, $M, $body, 1, 2, 3, 4, 5);
        }
    }};
    (@height $left:expr, $row:ident, $M:ident, $body:expr, $($height:literal),*) => {
        match $left {
            $($height => {
                const $M: usize = $height;
                $body;
                $row += $M;
            })*
            _ => {
                const $M: usize = $crate::kernels::float::tile::MOST;
                $body;
                $row += $M;
            }
        }
    };
}
pub(super) use tiles;

/// Multiplies `M` rows of `x` by `R` registers of one panel, or of two whole panels.
///
/// x: the first row; w: the panel's first column at the first of these lanes; width: elements from column to column;
/// ahead: how many bytes ahead these weights are prefetched, or 0.
///
/// # Safety
/// The machine has the instruction set of `V`; `M` rows of `k` numbers are readable at `x`, and `k` columns at `w`.
#[inline(always)]
unsafe fn tile<V: Vector, W: Element, const M: usize, const R: usize>(
    x: *const f32,
    w: *const W,
    k: usize,
    width: usize,
    ahead: usize,
) -> [[V; R]; M] {
    // The offset of a register in a column: the second panel lies behind the first.
    let whole = PANEL / V::LANES;
    let place = |r: usize| r / whole * k * PANEL + r % whole * V::LANES;
    // SAFETY: pointers stay inside rows of k and columns of `width`, by the caller's promise.
    unsafe {
        let mut sums = [[V::splat(0.0); R]; M];
        for i in 0..k {
            let column = w.add(i * width);
            if ahead > 0 {
                for r in (0..R).step_by((LINE / size_of::<W>() / V::LANES).max(1)) {
                    prefetch(column.wrapping_add(place(r)).wrapping_byte_add(ahead));
                }
            }
            let mut weights = [V::splat(0.0); R];
            for r in 0..R {
                weights[r] = W::load::<V>(column.add(place(r)));
            }
            for m in 0..M {
                let x = V::splat(*x.add(m * k + i));
                for r in 0..R {
                    sums[m][r] = x.mul_add(weights[r], sums[m][r]);
                }
            }
        }
        sums
    }
}

/// Writes a tile's rows, without the lanes that pad the panel.
///
/// # Safety
/// No other thread accesses the rows from `row` on in these columns.
#[inline(always)]
pub(super) unsafe fn write<V: Vector, const M: usize, const R: usize>(
    sums: &[[V; R]; M],
    out: Output<'_>,
    row: usize,
    columns: Range<usize>,
) {
    for (m, sums) in sums.iter().enumerate() {
        let mut lanes = [0.0f32; 2 * PANEL];
        for (r, sum) in sums.iter().enumerate() {
            // SAFETY: R registers are no more than two panels.
            unsafe { sum.store(lanes[r * V::LANES..].as_mut_ptr()) };
        }
        // SAFETY: the caller's promise.
        unsafe { out.part(row + m, columns.clone()) }.copy_from_slice(&lanes[..columns.len()]);
    }
}

/// Multiplies all rows of the product by `R` registers of one panel, or of two whole panels.
///
/// # Safety
/// As for [`tile`] and [`write`].
#[inline(always)]
unsafe fn strip<V: Vector, W: Element, const R: usize>(
    product: &Product<'_, W>,
    w: *const W,
    width: usize,
    columns: &Range<usize>,
) {
    let k = product.k;
    // If there are more rows than one tile has, the weights are used again, so there is time to prefetch them.
    let mut ahead = if product.rows.len() > MOST { AHEAD } else { stream_ahead(size_of::<W>()) };
    tiles!(product.rows.clone(), |row, M| {
        // SAFETY: that many rows remain from `row` on.
        unsafe {
            let sums = tile::<V, W, M, R>(product.x[row * k..].as_ptr(), w, k, width, ahead);
            write(&sums, product.out, row, columns.clone());
        }
        // The first tile has brought the weights into the cache.
        ahead = 0;
    });
}

/// Computes the whole product.
///
/// `PAIR`: registers of two whole panels, which a single row reads at once because memory serves two streams faster
/// than one, or 0 where there are too few registers; `ONE`: registers of a whole panel, for a single row; `FEW` and
/// `MANY`: registers used at a time for two or three rows, and for more; `GROUPED`: registers of a group.
///
/// # Safety
/// The machine has the instruction set of `V`, and no other thread accesses the product's part of the output.
#[inline(always)]
pub(super) unsafe fn run<
    V: Vector,
    W: Element,
    const PAIR: usize,
    const ONE: usize,
    const FEW: usize,
    const MANY: usize,
    const GROUPED: usize,
>(
    product: &Product<'_, W>,
) {
    let (one, end) = (product.rows.len() == 1, product.panels.end);
    // Registers used at a time; what remains of a panel is done group by group.
    let registers = match product.rows.len() {
        1 => ONE,
        2 | 3 => FEW,
        _ => MANY,
    };
    let panel = |p: usize| product.w[p * PANEL * product.k..].as_ptr();
    let mut p = product.panels.start;
    while p < end {
        let (columns, width) = panels::rows(p, product.n);
        if PAIR > 0 && one && p + 2 <= end && columns.start + 2 * PANEL <= product.n {
            // SAFETY: both panels are whole.
            unsafe { strip::<V, W, PAIR>(product, panel(p), width, &(columns.start..columns.start + 2 * PANEL)) };
            p += 2;
            continue;
        }
        let mut lane = 0;
        while lane < width {
            let step = if width - lane >= registers * V::LANES { registers * V::LANES } else { GROUP };
            let from = columns.start + lane;
            let part = from..columns.end.min(from + step);
            let w = panel(p).wrapping_add(lane);
            // SAFETY: the lanes lie inside the panel, whose columns are `width` apart.
            unsafe {
                match (step, product.rows.len()) {
                    (GROUP, _) => strip::<V, W, GROUPED>(product, w, width, &part),
                    (_, 1) => strip::<V, W, ONE>(product, w, width, &part),
                    (_, 2 | 3) => strip::<V, W, FEW>(product, w, width, &part),
                    _ => strip::<V, W, MANY>(product, w, width, &part),
                }
            }
            lane += step;
        }
        p += 1;
    }
}
