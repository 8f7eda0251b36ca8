//! The tile in AVX2: two registers are a group of sixteen rows.

use std::arch::x86_64::{
    __m256, _mm_loadu_si128, _mm256_castsi256_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps,
};

use half::{bf16, f16};

use super::tile::{Job, Load, Vector, run as sweep};

/// Eight lanes.
pub(in crate::kernels) type V = __m256;

impl Vector for V {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, to: Self) -> Self {
        // SAFETY: the caller has FMA.
        unsafe { _mm256_fmadd_ps(self, by, to) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above, and eight numbers are writable.
        unsafe { _mm256_storeu_ps(at, self) };
    }
}

impl Load<V> for f32 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> V {
        // SAFETY: eight are readable, and the caller has AVX2.
        unsafe { _mm256_loadu_ps(at) }
    }
}

impl Load<V> for bf16 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> V {
        // SAFETY: as above.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }
}

impl Load<V> for f16 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> V {
        // SAFETY: as above, and the caller has F16C.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }
}

/// Does the job.
///
/// # Safety
/// The machine has AVX2, FMA and F16C, and nobody else touches the job's part of the output.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<W: Load<V>>(job: &Job<'_, W>) {
    // SAFETY: the caller's promise.
    unsafe { sweep::<V, W, 8, 2, 2>(job) };
}
