//! The reference implementation: the values of a stored block, and the order in which blocks are added.

use std::ops::Range;

use half::f16;

use super::activations::Activations;
use super::format::{BLOCK, Form, Kind, Panel};
use crate::kernels::panels::Output;

/// 32 columns of one row of a panel.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    kind: Kind,
    /// The stored block of all the panel's rows.
    bytes: &'a [u8],
    width: usize,
    row: usize,
    /// Which 32 of the stored block's columns.
    part: usize,
}

impl<'a> Block<'a> {
    /// Returns block `block` of the panel's row `row`.
    pub(super) fn new(kind: Kind, panel: &Panel<'a>, row: usize, block: usize) -> Self {
        let len = kind.block_bytes() * panel.width;
        let bytes = &panel.bytes[block / kind.parts() * len..][..len];
        Self { kind, bytes, width: panel.width, row, part: block % kind.parts() }
    }

    fn half(self, i: usize) -> f32 {
        let at = 2 * (i * self.width + self.row);
        f16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]).to_f32()
    }

    /// Returns byte `i` of the words.
    fn byte(self, i: usize) -> u8 {
        self.bytes[2 * self.kind.halves() * self.width + 4 * (i / 4 * self.width + self.row) + i % 4]
    }

    /// Returns the integer of column `i`.
    fn quant(self, i: usize) -> i32 {
        match self.kind {
            Kind::Q8_0 => i32::from(self.byte(i)) - 128,
            Kind::Q4_0 => i32::from(self.byte(i % 16) >> (i / 16 * 4) & 15) - 8,
            Kind::Q4K => i32::from(self.byte(12 + self.part / 2 * BLOCK + i) >> (self.part % 2 * 4) & 15),
        }
    }

    /// Returns the factor of the integers and the minimum that is subtracted from each column; both are exact.
    fn scale_and_minimum(self) -> (f32, f32) {
        let part = self.part;
        let (scale, minimum) = match self.kind {
            Kind::Q8_0 | Kind::Q4_0 => return (self.half(0), 0.0),
            Kind::Q4K if part < 4 => (self.byte(part) & 63, self.byte(part + 4) & 63),
            Kind::Q4K => (
                self.byte(part + 4) & 15 | self.byte(part - 4) >> 6 << 4,
                self.byte(part + 4) >> 4 | self.byte(part) >> 6 << 4,
            ),
        };
        (self.half(0) * f32::from(scale), self.half(1) * f32::from(minimum))
    }

    /// Writes the columns as floats.
    pub(super) fn widen(self, out: &mut [f32; BLOCK]) {
        let (scale, minimum) = self.scale_and_minimum();
        for (i, out) in out.iter_mut().enumerate() {
            *out = scale * self.quant(i) as f32 - minimum;
        }
    }
}

/// Multiplies some rows of `x` by a panel: the reference for every product with quantized weights.
///
/// # Safety
/// The rows are in `x`, which has as many columns as the panel; `out` has these rows and the panel's outputs, and no
/// other thread accesses them.
pub(super) unsafe fn panel<F: Form>(x: &Activations, rows: Range<usize>, w: &Panel<'_>, out: Output<'_>) {
    for row in rows {
        // SAFETY: the caller's promise.
        let out = unsafe { out.part(row, w.rows.clone()) };
        for (column, out) in out.iter_mut().enumerate() {
            let mut sum = 0.0f32;
            for block in 0..w.blocks {
                let weights = Block::new(F::KIND, w, column, block);
                let (quants, block_sums) = (x.quants(block, row), x.block_sums(block, row));
                let product: i32 = quants.iter().enumerate().map(|(i, q)| i32::from(*q) * weights.quant(i)).sum();
                let (scale, minimum) = weights.scale_and_minimum();
                sum = (product as f32).mul_add(scale * block_sums.scale, sum);
                if F::KIND == Kind::Q4K {
                    sum = block_sums.total.mul_add(-minimum, sum);
                }
            }
            *out = sum;
        }
    }
}
