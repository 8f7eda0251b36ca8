//! AVX2: q8_0 in `whole_bytes`; q4_0 and q4_k in `half_bytes`, which keeps sums in registers and so is faster for one
//! and two rows.

mod half_bytes;
mod whole_bytes;

use std::ops::Range;

use super::activations::Activations;
use super::format::{Form, Kind, Panel};
use crate::kernels::panels::Output;

/// Multiplies some rows of `x` by a panel.
///
/// # Safety
/// The machine has AVX2, FMA and F16C. The rows are in `x`, which has as many columns as the panel; `out` has these
/// rows and the panel's outputs, and no other thread accesses them.
pub(super) unsafe fn panel<F: Form>(x: &Activations, rows: Range<usize>, w: &Panel<'_>, out: Output<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match F::KIND {
            Kind::Q8_0 => whole_bytes::panel(x, rows, w, out),
            Kind::Q4_0 | Kind::Q4K => half_bytes::panel::<F>(x, rows, w, out),
        }
    }
}
