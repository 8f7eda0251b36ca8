//! A product of rows with packed weights, or one thread's part of it.

use std::ops::Range;

use crate::kernels::panels::Output;

/// Some rows of `x` to be multiplied by some panels of weights.
pub(super) struct Product<'a, W> {
    /// (all rows, k)
    pub(super) x: &'a [f32],
    /// The rows to compute.
    pub(super) rows: Range<usize>,
    /// All panels.
    pub(super) w: &'a [W],
    pub(super) n: usize,
    pub(super) k: usize,
    /// The panels to compute.
    pub(super) panels: Range<usize>,
    /// (all rows, n)
    pub(super) out: Output<'a>,
}
