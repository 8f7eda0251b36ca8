//! `x . w^T` with both operands contiguous along k, weights in f32, bf16 or f16, any number of rows.
//!
//! A block of weight rows is read once and meets all rows of `x`. Every output is one dot product over sixteen
//! lanes (see `plain::dot`), so a row's result does not depend on how many rows there are, on the thread, or on
//! the machine. Several threads share the weight rows, where there is work enough to pay for waking them.

use half::{bf16, f16};
use rayon::prelude::*;

use super::{Isa, plain};

/// Weights (n, k), row-major, as stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Weights<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// IEEE half precision.
    F16(&'a [f16]),
}

impl<'a> Weights<'a> {
    fn len(self) -> usize {
        match self {
            Self::F32(w) => w.len(),
            Self::Bf16(w) => w.len(),
            Self::F16(w) => w.len(),
        }
    }

    fn slice(self, range: std::ops::Range<usize>) -> Weights<'a> {
        match self {
            Self::F32(w) => Weights::F32(&w[range]),
            Self::Bf16(w) => Weights::Bf16(&w[range]),
            Self::F16(w) => Weights::F16(&w[range]),
        }
    }
}

/// Where a block of output columns is written: the whole matrix and its row length.
///
/// Threads hold the same matrix and write disjoint columns of it.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    base: *mut f32,
    rows: usize,
    stride: usize,
}

// SAFETY: `matmul_nt` hands every thread columns that no other thread writes, and nobody reads until all are done.
unsafe impl Send for Columns {}
// SAFETY: as above.
unsafe impl Sync for Columns {}

impl Columns {
    /// The columns of a whole matrix `out` with rows of `stride`.
    fn new(out: &mut [f32], stride: usize) -> Self {
        Self { base: out.as_mut_ptr(), rows: out.len() / stride, stride }
    }

    /// The same matrix seen from column `by` on.
    fn shifted(self, by: usize) -> Self {
        assert!(by < self.stride);
        // SAFETY: column `by` of row 0 lies inside the matrix.
        Self { base: unsafe { self.base.add(by) }, ..self }
    }

    /// Writes one output.
    ///
    /// # Safety
    /// `row` is below the number of rows, `column` inside the columns that this thread was given.
    #[inline(always)]
    pub(crate) unsafe fn put(self, row: usize, column: usize, value: f32) {
        debug_assert!(row < self.rows && column < self.stride);
        // SAFETY: the caller keeps row and column inside.
        unsafe { *self.base.add(row * self.stride + column) = value };
    }
}

/// Multiply-adds under which waking a second thread costs more than it saves.
const SERIAL: usize = 1 << 21;
/// Weight rows that a thread takes at a time; a multiple of the micro-kernels' blocks.
const PANEL: usize = 48;
/// Bytes of `x` that stay in a core's second-level cache while a panel of weights passes.
const X_BYTES: usize = 384 << 10;

/// `out (rows, n) = x (rows, k) . w (n, k)^T`.
///
/// # Panics
/// When the lengths do not fit: the callers are ops that have checked their shapes.
pub(crate) fn matmul_nt(x: &[f32], w: Weights<'_>, k: usize, out: &mut [f32]) {
    matmul_nt_with(Isa::detect(), x, w, k, out);
}

fn matmul_nt_with(isa: Isa, x: &[f32], w: Weights<'_>, k: usize, out: &mut [f32]) {
    let n = w.len() / k;
    let rows = x.len() / k;
    assert!(x.len() == rows * k && w.len() == n * k && out.len() == rows * n, "matmul: lengths do not fit");
    if n == 0 || rows == 0 {
        return;
    }
    let block = (X_BYTES / (4 * k)).max(8) & !3;
    for (x, out) in x.chunks(block * k).zip(out.chunks_mut(block * n)) {
        let columns = Columns::new(out, n);
        if x.len() * n < SERIAL || rayon::current_num_threads() == 1 {
            panel(isa, x, w, k, columns);
            continue;
        }
        (0..n.div_ceil(PANEL)).into_par_iter().for_each(|p| {
            let range = p * PANEL..n.min((p + 1) * PANEL);
            panel(isa, x, w.slice(range.start * k..range.end * k), k, columns.shifted(range.start));
        });
    }
}

/// All rows of `x` against some rows of the weights.
fn panel(isa: Isa, x: &[f32], w: Weights<'_>, k: usize, out: Columns) {
    match w {
        Weights::F32(w) => typed(isa, x, w, k, out),
        Weights::Bf16(w) => typed(isa, x, w, k, out),
        Weights::F16(w) => typed(isa, x, w, k, out),
    }
}

/// A weight type that every instruction set can load.
#[cfg(target_arch = "x86_64")]
pub(crate) trait Simd: plain::Element + super::avx2::Load + super::avx512::Load {}
#[cfg(target_arch = "x86_64")]
impl<T: plain::Element + super::avx2::Load + super::avx512::Load> Simd for T {}
/// A weight type that every instruction set can load.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) trait Simd: plain::Element {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: plain::Element> Simd for T {}

fn typed<W: Simd>(isa: Isa, x: &[f32], w: &[W], k: usize, out: Columns) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields Avx2 only where the machine has AVX2, FMA and F16C.
        Isa::Avx2 => return unsafe { super::avx2::panel(x, w, k, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields these only where the machine has AVX-512 F, BW, DQ and VL.
        Isa::Avx512 | Isa::Avx512Vnni => return unsafe { super::avx512::panel(x, w, k, out) },
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::NeonDot => {}
        Isa::Plain => {}
    }
    for (row, x) in x.chunks_exact(k).enumerate() {
        for (column, w) in w.chunks_exact(k).enumerate() {
            // SAFETY: row and column count the rows of `x` and of this panel's weights.
            unsafe { out.put(row, column, plain::dot(x, w)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn numbers(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|v| v.to_bits()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_instruction_set_gives_the_plain_bits(rows in 1usize..19, n in 1usize..70, k in 1usize..150, seed: u32) {
            let x = numbers(rows * k, seed);
            let w = numbers(n * k, seed ^ 1);
            let b: Vec<bf16> = w.iter().map(|&v| bf16::from_f32(v)).collect();
            let h: Vec<f16> = w.iter().map(|&v| f16::from_f32(v)).collect();
            let mut want = [vec![0.0; rows * n], vec![0.0; rows * n], vec![0.0; rows * n]];
            plain::matmul_nt(&x, &w, k, &mut want[0]);
            plain::matmul_nt(&x, &b, k, &mut want[1]);
            plain::matmul_nt(&x, &h, k, &mut want[2]);
            for isa in Isa::available() {
                for (weights, want) in [Weights::F32(&w), Weights::Bf16(&b), Weights::F16(&h)].into_iter().zip(&want) {
                    let mut got = vec![f32::NAN; rows * n];
                    matmul_nt_with(isa, &x, weights, k, &mut got);
                    prop_assert_eq!(bits(&got), bits(want), "{:?}", isa);
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_many_threads() {
        let (rows, n, k) = (301, 257, 96);
        let (x, w) = (numbers(rows * k, 7), numbers(n * k, 8));
        let mut all = vec![0.0; rows * n];
        matmul_nt(&x, Weights::F32(&w), k, &mut all);
        for row in [0, 1, 150, 300] {
            let mut one = vec![0.0; n];
            matmul_nt(&x[row * k..(row + 1) * k], Weights::F32(&w), k, &mut one);
            assert_eq!(bits(&one), bits(&all[row * n..(row + 1) * n]));
        }
    }

    #[test]
    fn against_f64() {
        let (rows, n, k) = (5, 9, 1000);
        let (x, w) = (numbers(rows * k, 3), numbers(n * k, 4));
        let mut got = vec![0.0; rows * n];
        matmul_nt(&x, Weights::F32(&w), k, &mut got);
        for r in 0..rows {
            for c in 0..n {
                let want: f64 = (0..k).map(|i| f64::from(x[r * k + i]) * f64::from(w[c * k + i])).sum();
                assert!((f64::from(got[r * n + c]) - want).abs() < 1e-4);
            }
        }
    }
}
