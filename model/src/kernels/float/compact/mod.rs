//! Lossless storage of bf16 weights in three quarters of the bytes.
//!
//! The high byte of a trained weight (the sign and seven bits of the exponent) is nearly always one of a few. Each
//! matrix has a table of the sixteen most frequent high bytes, and its stream holds the low byte of each weight and a
//! four-bit code: 12 bits instead of 16. The rare weights with other high bytes are escapes, listed separately in
//! stream order.
//!
//! For few rows, weights are used as they are unpacked: such a product is memory-bound, so its time shrinks with the
//! bytes. For many rows, a block of columns is unpacked once into the L1 cache, whereas plain bf16 is converted again
//! for every tile. Each sum adds up the columns in order, whether it stays in a register or is kept from block to
//! block.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod format;
#[cfg(target_arch = "x86_64")]
mod many;
#[cfg(target_arch = "x86_64")]
mod product;

use std::ops::Range;

use super::plain;
use crate::kernels::Isa;
use crate::kernels::panels::{self, Output};
pub(super) use format::Compact;

/// The fewest weights for which a matrix is packed. Models with smaller matrices stay in the caches: one row would
/// still be a sixth faster, but eight rows would be up to a fifth slower where two threads share a core (Intel Xeon).
const LEAST: usize = 1 << 20;

/// Returns whether there is a kernel for this instruction set.
#[cfg(target_arch = "x86_64")]
fn has_kernel(isa: Isa) -> bool {
    isa != Isa::Plain
}

#[cfg(not(target_arch = "x86_64"))]
fn has_kernel(_: Isa) -> bool {
    false
}

/// Returns whether a matrix of this many weights is read faster when packed.
pub(super) fn pays(isa: Isa, weights: usize) -> bool {
    has_kernel(isa) && weights >= LEAST
}

/// Multiplies some rows of `x` by some panels of the weights.
///
/// # Safety
/// Rows and panels are in bounds of `x`, `w` and `out`, and no other thread accesses this part of `out`.
pub(super) unsafe fn panels(
    isa: Isa,
    x: &[f32],
    rows: Range<usize>,
    w: &Compact,
    panels: Range<usize>,
    out: Output<'_>,
) {
    #[cfg(target_arch = "x86_64")]
    match isa {
        // SAFETY: the machine has the instruction set, and the rest is the caller's promise.
        Isa::Avx512 | Isa::Avx512Vnni => return unsafe { avx512::run(x, rows, w, panels, out) },
        // SAFETY: as above.
        Isa::Avx2 => return unsafe { avx2::run(x, rows, w, panels, out) },
        Isa::Plain => {}
    }
    let _ = isa;
    let mut weights = vec![0.0f32; w.k];
    for row in panels.flat_map(|p| panels::rows(p, w.n).0) {
        w.row(row, &mut weights);
        for r in rows.clone() {
            // SAFETY: the caller's promise.
            let out = unsafe { out.part(r, row..row + 1) };
            out[0] = plain::dot(&x[r * w.k..][..w.k], &weights, 1);
        }
    }
}

#[cfg(test)]
mod tests;
