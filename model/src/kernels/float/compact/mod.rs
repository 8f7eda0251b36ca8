//! bf16 in three quarters of the bytes, without loss.
//!
//! The high byte of a trained weight (the sign and seven bits of the exponent) is nearly always one of a few. A matrix has
//! a table of the sixteen most frequent ones: the stream holds each weight's low byte and a code of four bits, 12 bits
//! instead of 16. The rare weights with other high bytes are escapes, listed apart in the order of the stream.
//!
//! Few rows meet the weights as they are unpacked: memory bounds such a product, which so takes as much less time. For many
//! rows, some columns at a time are unpacked into the first cache, and are not converted for every tile as plain bf16 is. Every sum
//! is a chain over the columns in their order, whether it stays in a register or is kept from block to block.

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

/// Fewest weights of a matrix that is packed. Models of smaller ones stay in the caches: one row would still gain a sixth, but
/// eight rows lose up to a fifth where two threads share a core (Intel Xeon).
const LEAST: usize = 1 << 20;

/// Whether there is a kernel for this instruction set.
#[cfg(target_arch = "x86_64")]
fn has_kernel(isa: Isa) -> bool {
    isa != Isa::Plain
}

#[cfg(not(target_arch = "x86_64"))]
fn has_kernel(_: Isa) -> bool {
    false
}

/// Whether so many weights are read faster if packed.
pub(super) fn pays(isa: Isa, weights: usize) -> bool {
    has_kernel(isa) && weights >= LEAST
}

/// Some of the rows of `x` against some panels of the weights.
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
        // SAFETY: the machine has the set, and the rest is the caller's promise.
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
