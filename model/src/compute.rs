//! The instruction set, threads and buffers that all layers share. They are created once, so that a token allocates
//! nothing.

use std::sync::Arc;

use crate::kernels::Isa;
use crate::kernels::parts::{Marks, Parts};
use crate::kernels::prefetch::LINE;
use crate::kernels::products::{self, Product};
use crate::kernels::quantized::Activations;
use crate::kernels::threads::Threads;

/// The instruction set and threads of a computation.
#[derive(Debug)]
pub(crate) struct Compute {
    pub(crate) isa: Isa,
    pub(crate) threads: Arc<Threads>,
    /// Flags for the parts that pieces of work have taken.
    pub(crate) marks: [Marks; 3],
    /// The inputs of quantized products.
    pub(crate) activations: Vec<Activations>,
}

/// The minimum number of elements in one piece of element-wise work, which takes a few microseconds.
const PIECE: usize = 1 << 14;

impl Compute {
    pub(crate) fn new(threads: Arc<Threads>) -> Self {
        Self { isa: Isa::detect(), threads, marks: Default::default(), activations: Vec::new() }
    }

    /// Computes independent products in one job.
    pub(crate) fn products(&mut self, products: &[Product<'_>]) {
        products::run(self.isa, products, &mut self.activations, &self.threads);
    }

    /// Calls `work(first row, rows of out)` for blocks of rows of `out`, on several threads if `out` is large.
    pub(crate) fn each(&mut self, out: &mut [f32], stride: usize, work: &(dyn Fn(usize, &mut [f32]) + Sync)) {
        let rows = out.len() / stride;
        let block = PIECE.div_ceil(stride);
        if rows <= block {
            return work(0, out);
        }
        let parts = Parts::new(out, block * stride, &mut self.marks[0]);
        self.threads.run(rows.div_ceil(block), &|i| {
            // Every piece runs exactly once, so its part is available.
            if let Some(out) = parts.take(i) {
                work(i * block, out);
            }
        });
    }
}

/// A step that touches fewer state elements than this runs on one thread.
pub(crate) const SERIAL: usize = 1 << 15;

/// Runs `work` for each head. The heads touch `numbers` state elements in total.
pub(crate) fn run_heads(threads: &Threads, heads: usize, numbers: usize, work: &(dyn Fn(usize) + Sync)) {
    if numbers < SERIAL {
        (0..heads).for_each(work);
    } else {
        threads.run(heads, work);
    }
}

/// Returns `len` elements of a buffer, starting at a cache line boundary rather than at the first element. The buffer
/// grows if needed. The elements' values are unspecified.
///
/// Threads write panels of the same matrix at the same time. If panels did not start on cache line boundaries, they
/// would share lines, and the threads would contend for them (false sharing).
pub(crate) fn sized<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    let spare = LINE / size_of::<T>();
    if buffer.len() < len + spare {
        buffer.resize(len + spare, T::default());
    }
    let skip = buffer.as_ptr().align_offset(LINE).min(spare);
    &mut buffer[skip..][..len]
}
