//! The definition: an output is one chain of fused multiply-adds, in the order of k.

use half::{bf16, f16};

use super::tile::Job;
use crate::kernels::panels::{self, PANEL, Plain};

/// A weight as it is stored; `widen` is exact.
pub(in crate::kernels) trait Element: Plain + Send + Sync {
    /// The value in f32.
    fn widen(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// `sum_i x_i w_i`, fused, in the order of i. w: the weights of one row, `stride` apart.
pub(super) fn dot<W: Element>(x: &[f32], w: &[W], stride: usize) -> f32 {
    x.iter().zip(w.iter().step_by(stride)).fold(0.0, |sum, (x, w)| x.mul_add(w.widen(), sum))
}

/// One dot product after another.
///
/// # Safety
/// The job's rows and panels are there, and nobody else touches its part of the output.
pub(super) unsafe fn run<W: Element>(job: &Job<'_, W>) {
    for p in job.panels.clone() {
        let (columns, width) = panels::rows(p, job.n);
        let panel = &job.w[p * PANEL * job.k..][..width * job.k];
        for row in job.rows.clone() {
            let x = &job.x[row * job.k..][..job.k];
            // SAFETY: the caller's promise.
            let out = unsafe { job.out.part(row, columns.clone()) };
            for (lane, out) in out.iter_mut().enumerate() {
                *out = dot(x, &panel[lane..], width);
            }
        }
    }
}
