//! Scores and sums of values as one product of two: some rows of `x` against rows of lanes, their sums in registers
//! from the first to the last.

use super::{BLOCK, Block, PANEL, weigh};
use crate::kernels::Isa;
use crate::kernels::float::tile::Load;
use crate::kernels::panels::GROUP;
use crate::kernels::vector::Vector;

/// Queries that pass together: by four registers of AVX-512 they are 24 sums.
pub(super) const TILE: usize = 6;

/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes that one query asks for before it needs them: the machine's own prefetching stops at the end of each page,
/// and narrow registers are too busy to come to the next one early.
const AHEAD: usize = 4096;

/// Asks for a line that will be read; advice only, of any address.
#[inline(always)]
fn ahead<W>(at: *const W) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that could be seen and never faults, and every x86-64 has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    let _ = at;
}

/// `out (m, lanes) = x (m, k) . w (k, lanes)`, each a chain over k; neighbours in a column are a stride apart.
struct Product<W> {
    x: *const f32,
    x_stride: usize,
    k: usize,
    w: *const W,
    w_stride: usize,
    out: *mut f32,
    out_stride: usize,
}

impl<W: Load> Product<W> {
    /// `M` rows by `R` registers from lane `at` on.
    ///
    /// # Safety
    /// The machine has the set of `V`, and all that is read and written lies in what the pointers belong to.
    #[inline(always)]
    unsafe fn tile<V: Vector, const M: usize, const R: usize>(&self, at: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[V::splat(0.0); R]; M];
            for i in 0..self.k {
                let row = self.w.add(i * self.w_stride + at);
                if M == 1 {
                    for line in 0..(R * V::LANES * size_of::<W>()).div_ceil(LINE) {
                        ahead(row.wrapping_byte_add(AHEAD + line * LINE));
                    }
                }
                let mut lanes = [V::splat(0.0); R];
                for (r, lanes) in lanes.iter_mut().enumerate() {
                    *lanes = W::load::<V>(row.add(r * V::LANES));
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let x = V::splat(*self.x.add(m * self.x_stride + i));
                    for (sum, lanes) in sums.iter_mut().zip(&lanes) {
                        *sum = x.mul_add(*lanes, *sum);
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

    /// `m` rows, at most [`TILE`], by `R` registers.
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

    /// `m` rows by so many lanes, whole groups. `ONE`, `MANY`: registers that one row and several meet at a time;
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

/// What queries take from the first places of a block.
pub(super) struct Job<'a, W> {
    /// [`Block::numbers`]
    pub(super) block: &'a [W],
    pub(super) shape: Block,
    pub(super) held: usize,
    /// (queries, d)
    pub(super) q: &'a [f32],
    /// (queries, [`Block::taken`])
    pub(super) out: &'a mut [f32],
    /// For the weights.
    pub(super) isa: Isa,
}

/// The whole job.
///
/// # Safety
/// The machine has the set of `V`.
#[inline(always)]
pub(super) unsafe fn run<V: Vector, W: Load, const ONE: usize, const MANY: usize, const GROUPED: usize>(
    job: Job<'_, W>,
) {
    let Job { block, shape, held, q, out, isa } = job;
    let (d, columns, taken) = (shape.d, shape.columns(), shape.taken());
    let (keys, values) = block.split_at(shape.places * d);
    assert!(
        held <= shape.places && shape.places <= BLOCK && values.len() == shape.places * columns,
        "softmax: lengths"
    );
    let mut scores = [0.0f32; TILE * BLOCK];
    for (q, out) in q.chunks(TILE * d).zip(out.chunks_mut(TILE * taken)) {
        let m = q.len() / d;
        assert!(out.len() == m * taken, "softmax: lengths");
        for (p, panel) in keys.chunks_exact(PANEL * d).take(held.div_ceil(PANEL)).enumerate() {
            let (w, out) = (panel.as_ptr(), scores[p * PANEL..].as_mut_ptr());
            let product = Product { x: q.as_ptr(), x_stride: d, k: d, w, w_stride: PANEL, out, out_stride: BLOCK };
            // SAFETY: m queries of d, d rows of a panel's lanes, and m rows of scores that hold all panels.
            unsafe { product.sweep::<V, ONE, MANY, GROUPED>(m, PANEL) };
        }
        for (scores, out) in scores.chunks_exact_mut(BLOCK).zip(out.chunks_exact_mut(taken)) {
            weigh(isa, scores, held, &mut out[columns..]);
        }
        let (x, w, out) = (scores.as_ptr(), values.as_ptr(), out.as_mut_ptr());
        let product = Product { x, x_stride: BLOCK, k: held, w, w_stride: columns, out, out_stride: taken };
        // SAFETY: m rows of weights, of which `held` are used; as many rows of values, whose lanes are `columns`; and m
        // rows of the output that begin with as many.
        unsafe { product.sweep::<V, ONE, MANY, GROUPED>(m, columns) };
    }
}
