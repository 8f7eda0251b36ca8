//! The tile in NEON: four registers are a group of sixteen rows.

use std::arch::aarch64::{
    float32x4_t, vdupq_n_f32, vfmaq_f32, vld1_u16, vld1q_f32, vreinterpretq_f32_u32, vshll_n_u16, vst1q_f32,
};

use half::{bf16, f16};

use super::tile::{Job, Load, Vector, run as sweep};

/// Four lanes.
pub(in crate::kernels) type V = float32x4_t;

impl Vector for V {
    const LANES: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller has NEON.
        unsafe { vdupq_n_f32(0.0) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: as above.
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, to: Self) -> Self {
        // SAFETY: as above.
        unsafe { vfmaq_f32(to, self, by) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above, and four numbers are writable.
        unsafe { vst1q_f32(at, self) };
    }
}

impl Load<V> for f32 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> V {
        // SAFETY: four are readable, and the caller has NEON.
        unsafe { vld1q_f32(at) }
    }
}

impl Load<V> for bf16 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> V {
        // SAFETY: as above.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(at.cast()))) }
    }
}

impl Load<V> for f16 {
    #[inline(always)]
    unsafe fn load(at: *const Self) -> V {
        // Rust has no stable intrinsic that widens f16 here: one by one, which the compiler turns into fcvt.
        // SAFETY: as above.
        unsafe {
            let lanes = [(*at).to_f32(), (*at.add(1)).to_f32(), (*at.add(2)).to_f32(), (*at.add(3)).to_f32()];
            vld1q_f32(lanes.as_ptr())
        }
    }
}

/// Does the job.
///
/// # Safety
/// The machine has NEON, and nobody else touches the job's part of the output.
#[target_feature(enable = "neon")]
pub(super) unsafe fn run<W: Load<V>>(job: &Job<'_, W>) {
    // SAFETY: the caller's promise.
    unsafe { sweep::<V, W, 16, 4, 4>(job) };
}
