//! The reference implementation: an output is one chain of fused multiply-adds, in the order of k.

use super::product::Product;
use crate::kernels::element::Element;
use crate::kernels::panels::{self, PANEL};

/// Returns `sum_i x_i w_i`, fused, in the order of i. w: the weights of one row, `stride` apart.
pub(super) fn dot<W: Element>(x: &[f32], w: &[W], stride: usize) -> f32 {
    x.iter().zip(w.iter().step_by(stride)).fold(0.0, |sum, (x, w)| x.mul_add(w.widen(), sum))
}

/// Computes one dot product after another.
///
/// # Safety
/// The product's rows and panels are in bounds, and no other thread accesses its part of the output.
pub(super) unsafe fn run<W: Element>(product: &Product<'_, W>) {
    for p in product.panels.clone() {
        let (columns, width) = panels::rows(p, product.n);
        let panel = &product.w[p * PANEL * product.k..][..width * product.k];
        for row in product.rows.clone() {
            let x = &product.x[row * product.k..][..product.k];
            // SAFETY: the caller's promise.
            let out = unsafe { product.out.part(row, columns.clone()) };
            for (lane, out) in out.iter_mut().enumerate() {
                *out = dot(x, &panel[lane..], width);
            }
        }
    }
}
