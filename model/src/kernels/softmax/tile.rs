//! The matrix product that computes both scores and sums of values: rows of `x` times rows of lanes, with all sums of a
//! tile in registers.

use super::block::{BLOCK, Block};
use crate::kernels::activation::exp_lane;
use crate::kernels::element::Element;
use crate::kernels::panels::{GROUP, PANEL};
use crate::kernels::plain::reduce;
use crate::kernels::prefetch::{LINE, prefetch};
use crate::kernels::vector::Vector;
use crate::kernels::{Isa, LANES, multiversion};

/// Queries per tile: with four AVX-512 registers each, these are 24 sums.
pub(super) const TILE: usize = 6;

/// How many bytes ahead a single query prefetches: the hardware prefetcher stops at the end of each page, and with
/// narrow registers the next page is reached late.
const AHEAD: usize = 4096;

#[inline(always)]
fn weigh_body(scores: &mut [f32], filled: usize, ends: &mut [f32]) {
    let lanes = filled.next_multiple_of(LANES);
    scores[filled..lanes].fill(f32::NEG_INFINITY);
    let (groups, _) = scores[..lanes].as_chunks_mut::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for group in groups.iter() {
        for l in 0..LANES {
            most[l] = most[l].max(group[l]);
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            most[l] = most[l].max(most[l + width]);
        }
        width /= 2;
    }
    let most = most[0];
    for group in groups.iter_mut() {
        for score in group {
            *score = exp_lane(*score - most);
        }
    }
    // The exponential is clamped, so lanes without a key are not exactly 0.
    scores[filled..lanes].fill(0.0);
    let mut sums = [0.0f32; LANES];
    for group in scores[..lanes].as_chunks::<LANES>().0 {
        for l in 0..LANES {
            sums[l] += group[l];
        }
    }
    (ends[0], ends[1]) = (most, reduce(sums));
}

multiversion! {
    /// Turns the first `filled` scores into weights `exp(score - largest)`, and zeroes the rest of their lanes.
    ///
    /// ends: the largest score and the sum of weights
    fn weigh(scores: &mut [f32], filled: usize, ends: &mut [f32]) = weigh_body;
}

/// The product `out (m, lanes) = x (m, k) . w (k, lanes)`, each sum a chain over k; rows are a stride apart.
struct Product<W> {
    x: *const f32,
    x_stride: usize,
    k: usize,
    w: *const W,
    w_stride: usize,
    out: *mut f32,
    out_stride: usize,
}

impl<W: Element> Product<W> {
    /// Computes `M` rows by `R` registers from lane `at` on.
    ///
    /// # Safety
    /// The machine has the instruction set of `V`, and all reads and writes are in bounds.
    #[inline(always)]
    unsafe fn tile<V: Vector, const M: usize, const R: usize>(&self, at: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[V::splat(0.0); R]; M];
            for i in 0..self.k {
                let row = self.w.add(i * self.w_stride + at);
                if M == 1 {
                    for line in 0..(R * V::LANES * size_of::<W>()).div_ceil(LINE) {
                        prefetch(row.wrapping_byte_add(AHEAD + line * LINE));
                    }
                }
                let mut lanes = [V::splat(0.0); R];
                for r in 0..R {
                    lanes[r] = W::load::<V>(row.add(r * V::LANES));
                }
                for m in 0..M {
                    let x = V::splat(*self.x.add(m * self.x_stride + i));
                    for r in 0..R {
                        sums[m][r] = x.mul_add(lanes[r], sums[m][r]);
                    }
                }
            }
            for (m, sums) in sums.iter().enumerate() {
                for (r, sum) in sums.iter().enumerate() {
                    sum.store(self.out.add(m * self.out_stride + at + r * V::LANES));
                }
            }
        }
    }

    /// Computes `m` rows, at most [`TILE`], by `R` registers.
    ///
    /// # Safety
    /// As for [`Self::tile`].
    #[inline(always)]
    unsafe fn rows<V: Vector, const R: usize>(&self, m: usize, at: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match m {
                1 => self.tile::<V, 1, R>(at),
                2 => self.tile::<V, 2, R>(at),
                3 => self.tile::<V, 3, R>(at),
                4 => self.tile::<V, 4, R>(at),
                5 => self.tile::<V, 5, R>(at),
                _ => self.tile::<V, TILE, R>(at),
            }
        }
    }

    /// Computes `m` rows by `lanes`, whole groups. `ONE`, `MANY`: registers per tile of one row and of several;
    /// `GROUPED`: registers of a group.
    ///
    /// # Safety
    /// As for [`Self::tile`].
    #[inline(always)]
    unsafe fn sweep<V: Vector, const ONE: usize, const MANY: usize, const GROUPED: usize>(
        &self,
        m: usize,
        lanes: usize,
    ) {
        let mut at = 0;
        while at < lanes {
            // SAFETY: the caller's promise.
            unsafe {
                if m == 1 && lanes - at >= ONE * V::LANES {
                    self.tile::<V, 1, ONE>(at);
                    at += ONE * V::LANES;
                } else if m > 1 && lanes - at >= MANY * V::LANES {
                    self.rows::<V, MANY>(m, at);
                    at += MANY * V::LANES;
                } else {
                    self.rows::<V, GROUPED>(m, at);
                    at += GROUP;
                }
            }
        }
    }
}

/// Queries, and the first keys of a block, to which they attend.
pub(super) struct Queries<'a, W> {
    /// [`Block::numbers`]
    pub(super) block: &'a [W],
    pub(super) shape: Block,
    pub(super) filled: usize,
    /// (queries, d)
    pub(super) q: &'a [f32],
    /// (queries, [`Block::partial_len`])
    pub(super) out: &'a mut [f32],
    /// The instruction set for [`weigh`].
    pub(super) isa: Isa,
}

/// Computes all queries.
///
/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn run<V: Vector, W: Element, const ONE: usize, const MANY: usize, const GROUPED: usize>(
    queries: Queries<'_, W>,
) {
    let Queries { block, shape, filled, q, out, isa } = queries;
    let (d, columns, partial) = (shape.d, shape.columns(), shape.partial_len());
    let (keys, values) = block.split_at(shape.places * d);
    assert!(
        filled <= shape.places && shape.places <= BLOCK && values.len() == shape.places * columns,
        "softmax: lengths do not fit"
    );
    let mut scores = [0.0f32; TILE * BLOCK];
    for (q, out) in q.chunks(TILE * d).zip(out.chunks_mut(TILE * partial)) {
        let m = q.len() / d;
        assert!(out.len() == m * partial, "softmax: lengths do not fit");
        for (p, panel) in keys.chunks_exact(PANEL * d).take(filled.div_ceil(PANEL)).enumerate() {
            let (w, out) = (panel.as_ptr(), scores[p * PANEL..].as_mut_ptr());
            let product = Product { x: q.as_ptr(), x_stride: d, k: d, w, w_stride: PANEL, out, out_stride: BLOCK };
            // SAFETY: m queries of d, d rows of a panel's lanes, and m rows of scores that hold all panels.
            unsafe { product.sweep::<V, ONE, MANY, GROUPED>(m, PANEL) };
        }
        for (scores, out) in scores.chunks_exact_mut(BLOCK).zip(out.chunks_exact_mut(partial)) {
            weigh(isa, scores, filled, &mut out[columns..]);
        }
        let (x, w, out) = (scores.as_ptr(), values.as_ptr(), out.as_mut_ptr());
        let product = Product { x, x_stride: BLOCK, k: filled, w, w_stride: columns, out, out_stride: partial };
        // SAFETY: m rows of weights, `filled` of each used; `filled` rows of values, with `columns` lanes; and m rows
        // of the output, which begin with `columns` numbers.
        unsafe { product.sweep::<V, ONE, MANY, GROUPED>(m, columns) };
    }
}
