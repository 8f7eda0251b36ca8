//! Eight lanes in one AVX2 register (with FMA and F16C).

use std::arch::x86_64::{
    __m256, _mm_loadu_si128, _mm_storeu_si128, _mm256_add_epi32, _mm256_and_si256, _mm256_castps_si256,
    _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_fmadd_ps,
    _mm256_loadu_ps, _mm256_mul_ps, _mm256_packus_epi32, _mm256_permute4x64_epi64, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_slli_epi32, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_xor_si256,
};

use half::{bf16, f16};

use super::Vector;

/// Eight lanes.
pub(crate) type V = __m256;

impl Vector for V {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller has AVX2, FMA and F16C.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: as above, and the pointer is valid.
        unsafe { _mm256_loadu_ps(at) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(at, self) };
    }

    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_mul_ps(self, by) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, to: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_fmadd_ps(self, by, to) }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const bf16) -> Self {
        // SAFETY: as above.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const f16) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, noise: Self, at: *mut bf16) {
        // SAFETY: as above.
        unsafe {
            let noise = _mm256_and_si256(_mm256_castps_si256(noise), _mm256_set1_epi32(0xffff));
            let bits = _mm256_srli_epi32::<16>(_mm256_add_epi32(_mm256_castps_si256(self), noise));
            // Each half of the register packs its own four numbers, which end up in quarters 0 and 2.
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(bits, bits));
            _mm_storeu_si128(at.cast(), _mm256_castsi256_si128(packed));
        }
    }

    #[inline(always)]
    unsafe fn xorshift(self) -> Self {
        // SAFETY: as above.
        unsafe {
            let mut x = _mm256_castps_si256(self);
            x = _mm256_xor_si256(x, _mm256_slli_epi32::<13>(x));
            x = _mm256_xor_si256(x, _mm256_srli_epi32::<17>(x));
            _mm256_castsi256_ps(_mm256_xor_si256(x, _mm256_slli_epi32::<5>(x)))
        }
    }

    #[inline(always)]
    unsafe fn upper(self) -> Self {
        // SAFETY: as above.
        unsafe { _mm256_castsi256_ps(_mm256_srli_epi32::<16>(_mm256_castps_si256(self))) }
    }
}
