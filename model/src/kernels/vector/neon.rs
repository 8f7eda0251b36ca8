//! Four lanes in one NEON register.

use std::arch::aarch64::{
    float32x4_t, vaddq_u32, vandq_u32, vdupq_n_f32, vdupq_n_u32, veorq_u32, vfmaq_f32, vld1_u16, vld1q_f32, vmulq_f32,
    vreinterpretq_f32_u32, vreinterpretq_u32_f32, vshll_n_u16, vshlq_n_u32, vshrn_n_u32, vshrq_n_u32, vst1_u16,
    vst1q_f32,
};

use half::{bf16, f16};

use super::Vector;

/// Four lanes.
pub(crate) type V = float32x4_t;

impl Vector for V {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller has NEON.
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: as above, and the pointer is valid.
        unsafe { vld1q_f32(at) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above.
        unsafe { vst1q_f32(at, self) };
    }

    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        // SAFETY: as above.
        unsafe { vmulq_f32(self, by) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, to: Self) -> Self {
        // SAFETY: as above.
        unsafe { vfmaq_f32(to, self, by) }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const bf16) -> Self {
        // SAFETY: as above.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(at.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const f16) -> Self {
        // No stable intrinsic widens f16 here; the compiler turns these conversions into fcvt.
        // SAFETY: as above.
        unsafe {
            let [a, b, c, d] = at.cast::<[f16; 4]>().read_unaligned();
            vld1q_f32([a.to_f32(), b.to_f32(), c.to_f32(), d.to_f32()].as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, noise: Self, at: *mut bf16) {
        // SAFETY: as above.
        unsafe {
            let noise = vandq_u32(vreinterpretq_u32_f32(noise), vdupq_n_u32(0xffff));
            vst1_u16(at.cast(), vshrn_n_u32::<16>(vaddq_u32(vreinterpretq_u32_f32(self), noise)));
        }
    }

    #[inline(always)]
    unsafe fn xorshift(self) -> Self {
        // SAFETY: as above.
        unsafe {
            let mut x = vreinterpretq_u32_f32(self);
            x = veorq_u32(x, vshlq_n_u32::<13>(x));
            x = veorq_u32(x, vshrq_n_u32::<17>(x));
            vreinterpretq_f32_u32(veorq_u32(x, vshlq_n_u32::<5>(x)))
        }
    }

    #[inline(always)]
    unsafe fn upper(self) -> Self {
        // SAFETY: as above.
        unsafe { vreinterpretq_f32_u32(vshrq_n_u32::<16>(vreinterpretq_u32_f32(self))) }
    }
}
