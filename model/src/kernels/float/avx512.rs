//! The tile in AVX-512: a register is a group of sixteen rows.

use std::arch::x86_64::{
    __m512, _mm256_loadu_si256, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};

use half::{bf16, f16};

use super::tile::{Job, Load, Vector, run as sweep};

/// Sixteen lanes.
pub(in crate::kernels) type V = __m512;

impl Vector for V {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has AVX-512.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, to: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(self, by, to) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above, and sixteen numbers are writable.
        unsafe { _mm512_storeu_ps(at, self) };
    }
}

impl Load<V> for f32 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> V {
        // SAFETY: sixteen are readable, and the caller has AVX-512.
        unsafe { _mm512_loadu_ps(at) }
    }
}

impl Load<V> for bf16 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> V {
        // SAFETY: as above.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
}

impl Load<V> for f16 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> V {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }
}

/// Does the job.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL, and nobody else touches the job's part of the output.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn run<W: Load<V>>(job: &Job<'_, W>) {
    // SAFETY: the caller's promise.
    unsafe { sweep::<V, W, 4, 4, 1>(job) };
}
