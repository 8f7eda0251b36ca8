//! Sixteen lanes in one AVX-512 register (F, BW, DQ and VL).

use std::arch::x86_64::{
    __m512, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cvtepi32_epi16, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_storeu_ps, _mm512_xor_si512,
};

use half::{bf16, f16};

use super::Vector;

/// Sixteen lanes.
pub(crate) type V = __m512;

impl Vector for V {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller has AVX-512.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: as above, and the pointer is valid.
        unsafe { _mm512_loadu_ps(at) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(at, self) };
    }

    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(self, by) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, to: Self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(self, by, to) }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const bf16) -> Self {
        // SAFETY: as above.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const f16) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, noise: Self, at: *mut bf16) {
        // SAFETY: as above.
        unsafe {
            let noise = _mm512_and_si512(_mm512_castps_si512(noise), _mm512_set1_epi32(0xffff));
            let bits = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(self), noise));
            _mm256_storeu_si256(at.cast(), _mm512_cvtepi32_epi16(bits));
        }
    }

    #[inline(always)]
    unsafe fn xorshift(self) -> Self {
        // SAFETY: as above.
        unsafe {
            let mut x = _mm512_castps_si512(self);
            x = _mm512_xor_si512(x, _mm512_slli_epi32::<13>(x));
            x = _mm512_xor_si512(x, _mm512_srli_epi32::<17>(x));
            _mm512_castsi512_ps(_mm512_xor_si512(x, _mm512_slli_epi32::<5>(x)))
        }
    }

    #[inline(always)]
    unsafe fn upper(self) -> Self {
        // SAFETY: as above.
        unsafe { _mm512_castsi512_ps(_mm512_srli_epi32::<16>(_mm512_castps_si512(self))) }
    }
}
