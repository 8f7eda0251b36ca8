//! Matrix products for AVX-512: one register is the sixteen lanes of `plain::dot`.

use std::arch::x86_64::{
    __m256i, __m512, __mmask16, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps, _mm_shuffle_ps, _mm256_add_ps,
    _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_loadu_si256, _mm256_maskz_loadu_epi16,
    _mm512_castps512_ps256, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_extractf32x8_ps,
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_maskz_loadu_ps, _mm512_setzero_ps, _mm512_slli_epi32,
};

use half::{bf16, f16};

use super::{LANES, matmul::Columns};

/// Sixteen weights, widened to f32.
pub(crate) trait Load: Copy {
    /// Reads `at[0..16]`.
    ///
    /// # Safety
    /// Sixteen elements are readable at `at`, and the machine has AVX-512 F, BW, DQ and VL.
    unsafe fn load(at: *const Self) -> __m512;

    /// Reads the elements whose bit is set; the other lanes are zero.
    ///
    /// # Safety
    /// The elements whose bit is set are readable, and the machine has AVX-512 F, BW, DQ and VL.
    unsafe fn load_some(at: *const Self, mask: __mmask16) -> __m512;
}

impl Load for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load(at: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(at) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_some(at: *const Self, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise; masked elements are not touched.
        unsafe { _mm512_maskz_loadu_ps(mask, at) }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn widen_bf16(bits: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
}

impl Load for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load(at: *const Self) -> __m512 {
        // SAFETY: the caller's promise: 32 readable bytes.
        widen_bf16(unsafe { _mm256_loadu_si256(at.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_some(at: *const Self, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise; masked elements are not touched.
        widen_bf16(unsafe { _mm256_maskz_loadu_epi16(mask, at.cast()) })
    }
}

impl Load for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load(at: *const Self) -> __m512 {
        // SAFETY: the caller's promise: 32 readable bytes.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn load_some(at: *const Self, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise; masked elements are not touched.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at.cast())) }
    }
}

/// The lanes' sum in the order of `plain::reduce`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn reduce(v: __m512) -> f32 {
    let v8 = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
    let v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps::<1>(v8));
    let v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
    _mm_cvtss_f32(_mm_add_ss(v2, _mm_shuffle_ps::<1>(v2, v2)))
}

/// `M` rows of `x` against `N` rows of `w`: M x N accumulators, each the lanes of one dot product.
///
/// # Safety
/// `x` holds M rows of `k`, `w` holds N rows of `k`; `(row, column)` and the block after it lie inside `out`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn block<const M: usize, const N: usize, W: Load>(
    x: *const f32,
    w: *const W,
    k: usize,
    out: Columns,
    (row, column): (usize, usize),
) {
    let mut sums = [[_mm512_setzero_ps(); N]; M];
    let whole = k / LANES * LANES;
    let mut i = 0;
    while i < whole {
        let mut xs = [_mm512_setzero_ps(); M];
        for (m, x_lanes) in xs.iter_mut().enumerate() {
            // SAFETY: i + 16 <= k, inside row m of x.
            *x_lanes = unsafe { _mm512_loadu_ps(x.add(m * k + i)) };
        }
        for n in 0..N {
            // SAFETY: i + 16 <= k, inside row n of w.
            let lanes = unsafe { W::load(w.add(n * k + i)) };
            for (sums, &x_lanes) in sums.iter_mut().zip(&xs) {
                sums[n] = _mm512_fmadd_ps(x_lanes, lanes, sums[n]);
            }
        }
        i += LANES;
    }
    if i < k {
        let mask: __mmask16 = (1 << (k - i)) - 1;
        for n in 0..N {
            // SAFETY: the mask keeps to the k - i elements left in the row.
            let lanes = unsafe { W::load_some(w.add(n * k + i), mask) };
            for (m, sums) in sums.iter_mut().enumerate() {
                // SAFETY: as above, for row m of x.
                let x_lanes = unsafe { _mm512_maskz_loadu_ps(mask, x.add(m * k + i)) };
                sums[n] = _mm512_fmadd_ps(x_lanes, lanes, sums[n]);
            }
        }
    }
    for (m, sums) in sums.iter().enumerate() {
        for (n, &sum) in sums.iter().enumerate() {
            // SAFETY: the caller keeps the block inside `out`.
            unsafe { out.put(row + m, column + n, reduce(sum)) };
        }
    }
}

/// All rows of `x` against `N` rows of `w`, four rows at a time.
///
/// # Safety
/// As for `block`, for every row of `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn stripe<const N: usize, W: Load>(x: &[f32], w: *const W, k: usize, out: Columns, column: usize) {
    let rows = x.len() / k;
    let mut row = 0;
    while row < rows {
        let at = x[row * k..].as_ptr();
        // SAFETY: `at` begins the rows that are left, and each arm takes no more than there are.
        unsafe {
            match rows - row {
                1 => block::<1, N, W>(at, w, k, out, (row, column)),
                2 => block::<2, N, W>(at, w, k, out, (row, column)),
                3 => block::<3, N, W>(at, w, k, out, (row, column)),
                _ => block::<4, N, W>(at, w, k, out, (row, column)),
            }
        }
        row += 4;
    }
}

/// All rows of `x` (rows, k) against all rows of `w` (n, k).
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL; `out` has `x.len() / k` rows and at least `w.len() / k` columns.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn panel<W: Load>(x: &[f32], w: &[W], k: usize, out: Columns) {
    // One row of x needs eight independent sums to hide the latency of a fused multiply-add; four rows of x by
    // six of w keep 24 of the 32 registers busy.
    let step = if x.len() == k { 8 } else { 6 };
    let n = w.len() / k;
    let mut column = 0;
    while column < n {
        let at = w[column * k..].as_ptr();
        // SAFETY: `at` begins the weight rows that are left, and each arm takes no more than there are.
        unsafe {
            match n - column {
                8.. if step == 8 => {
                    stripe::<8, W>(x, at, k, out, column);
                    column += 8;
                }
                6.. => {
                    stripe::<6, W>(x, at, k, out, column);
                    column += 6;
                }
                2.. => {
                    stripe::<2, W>(x, at, k, out, column);
                    column += 2;
                }
                _ => {
                    stripe::<1, W>(x, at, k, out, column);
                    column += 1;
                }
            }
        }
    }
}
