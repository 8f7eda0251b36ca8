//! Matrix products for AVX2: two registers are the sixteen lanes of `plain::dot`.

use std::arch::x86_64::{
    __m128i, __m256, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_loadu_si128, _mm_movehl_ps, _mm_shuffle_ps,
    _mm256_add_ps, _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps,
    _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_slli_epi32,
};

use half::{bf16, f16};

use super::{LANES, matmul::Columns, plain::Element};

/// Eight weights, widened to f32.
pub(crate) trait Load: Element {
    /// Reads `at[0..8]`.
    ///
    /// # Safety
    /// Eight elements are readable at `at`, and the machine has AVX2, FMA and F16C.
    unsafe fn load(at: *const Self) -> __m256;
}

impl Load for f32 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(at: *const Self) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(at) }
    }
}

impl Load for bf16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(at: *const Self) -> __m256 {
        // SAFETY: the caller's promise: 16 readable bytes.
        let bits: __m128i = unsafe { _mm_loadu_si128(at.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
    }
}

impl Load for f16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(at: *const Self) -> __m256 {
        // SAFETY: the caller's promise: 16 readable bytes.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }
}

/// The lanes' sum in the order of `plain::reduce`; `low` holds lanes 0 to 7.
#[inline]
#[target_feature(enable = "avx2")]
fn reduce(low: __m256, high: __m256) -> f32 {
    let v8 = _mm256_add_ps(low, high);
    let v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps::<1>(v8));
    let v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
    _mm_cvtss_f32(_mm_add_ss(v2, _mm_shuffle_ps::<1>(v2, v2)))
}

/// The last elements of a row, widened and filled up with zeros.
///
/// # Safety
/// `len` (at most 16) elements are readable at `at`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rest<W: Element>(at: *const W, len: usize) -> [__m256; 2] {
    let mut lanes = [0.0f32; LANES];
    for (i, lane) in lanes.iter_mut().enumerate().take(len) {
        // SAFETY: i < len.
        *lane = unsafe { *at.add(i) }.widen();
    }
    // SAFETY: `lanes` holds sixteen numbers.
    unsafe { [_mm256_loadu_ps(lanes.as_ptr()), _mm256_loadu_ps(lanes.as_ptr().add(8))] }
}

/// `M` rows of `x` against `N` rows of `w`: M x N pairs of accumulators, each pair the lanes of one dot product.
///
/// # Safety
/// `x` holds M rows of `k`, `w` holds N rows of `k`; `(row, column)` and the block after it lie inside `out`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block<const M: usize, const N: usize, W: Load>(
    x: *const f32,
    w: *const W,
    k: usize,
    out: Columns,
    (row, column): (usize, usize),
) {
    let mut sums = [[[_mm256_setzero_ps(); 2]; N]; M];
    let whole = k / LANES * LANES;
    let mut i = 0;
    while i < whole {
        for half in 0..2 {
            let mut ws = [_mm256_setzero_ps(); N];
            for (n, lanes) in ws.iter_mut().enumerate() {
                // SAFETY: i + 16 <= k, inside row n of w.
                *lanes = unsafe { W::load(w.add(n * k + i + 8 * half)) };
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                // SAFETY: i + 16 <= k, inside row m of x.
                let lanes = unsafe { _mm256_loadu_ps(x.add(m * k + i + 8 * half)) };
                for n in 0..N {
                    sums[n][half] = _mm256_fmadd_ps(lanes, ws[n], sums[n][half]);
                }
            }
        }
        i += LANES;
    }
    if i < k {
        for (m, sums) in sums.iter_mut().enumerate() {
            // SAFETY: k - i < 16 elements are left in row m of x.
            let x_lanes = unsafe { rest(x.add(m * k + i), k - i) };
            for (n, sums) in sums.iter_mut().enumerate() {
                // SAFETY: k - i < 16 elements are left in row n of w.
                let w_lanes = unsafe { rest(w.add(n * k + i), k - i) };
                for half in 0..2 {
                    sums[half] = _mm256_fmadd_ps(x_lanes[half], w_lanes[half], sums[half]);
                }
            }
        }
    }
    for (m, sums) in sums.iter().enumerate() {
        for (n, &[low, high]) in sums.iter().enumerate() {
            // SAFETY: the caller keeps the block inside `out`.
            unsafe { out.put(row + m, column + n, reduce(low, high)) };
        }
    }
}

/// All rows of `x` against `N` rows of `w`, `M` rows at a time.
///
/// # Safety
/// As for `block`, for every row of `x`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn stripe<const M: usize, const N: usize, W: Load>(
    x: &[f32],
    w: *const W,
    k: usize,
    out: Columns,
    column: usize,
) {
    let rows = x.len() / k;
    let mut row = 0;
    while row + M <= rows {
        // SAFETY: M rows are left from `row` on.
        unsafe { block::<M, N, W>(x[row * k..].as_ptr(), w, k, out, (row, column)) };
        row += M;
    }
    while row < rows {
        // SAFETY: one row is left at least.
        unsafe { block::<1, N, W>(x[row * k..].as_ptr(), w, k, out, (row, column)) };
        row += 1;
    }
}

/// All rows of `x` (rows, k) against all rows of `w` (n, k).
///
/// # Safety
/// The machine has AVX2, FMA and F16C; `out` has `x.len() / k` rows and at least `w.len() / k` columns.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn panel<W: Load>(x: &[f32], w: &[W], k: usize, out: Columns) {
    // Sixteen registers: two rows of x by three of w are twelve sums, or one row by four are eight.
    let step = if x.len() == k { 4 } else { 3 };
    let n = w.len() / k;
    let mut column = 0;
    while column < n {
        let at = w[column * k..].as_ptr();
        // SAFETY: `at` begins the weight rows that are left, and each arm takes no more than there are.
        unsafe {
            match n - column {
                4.. if step == 4 => {
                    stripe::<1, 4, W>(x, at, k, out, column);
                    column += 4;
                }
                3.. => {
                    stripe::<2, 3, W>(x, at, k, out, column);
                    column += 3;
                }
                _ => {
                    stripe::<2, 1, W>(x, at, k, out, column);
                    column += 1;
                }
            }
        }
    }
}
