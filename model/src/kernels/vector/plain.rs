//! Sixteen lanes in plain Rust: the reference implementation.

use half::{bf16, f16};

use super::Vector;

/// Sixteen lanes.
#[derive(Clone, Copy)]
pub(crate) struct V([f32; 16]);

impl Vector for V {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; 16])
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: sixteen are readable.
        Self(unsafe { at.cast::<[f32; 16]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: sixteen are writable.
        unsafe { at.cast::<[f32; 16]>().write_unaligned(self.0) };
    }

    #[inline(always)]
    unsafe fn mul(self, by: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l] * by.0[l]))
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, to: Self) -> Self {
        Self(std::array::from_fn(|l| self.0[l].mul_add(by.0[l], to.0[l])))
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const bf16) -> Self {
        // SAFETY: sixteen are readable.
        let numbers = unsafe { at.cast::<[bf16; 16]>().read_unaligned() };
        Self(numbers.map(|number| f32::from_bits(u32::from(number.to_bits()) << 16)))
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const f16) -> Self {
        // SAFETY: sixteen are readable.
        Self(unsafe { at.cast::<[f16; 16]>().read_unaligned() }.map(f16::to_f32))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, noise: Self, at: *mut bf16) {
        let numbers: [bf16; 16] = std::array::from_fn(|l| {
            let bits = self.0[l].to_bits().wrapping_add(noise.0[l].to_bits() & 0xffff);
            bf16::from_bits((bits >> 16) as u16)
        });
        // SAFETY: sixteen are writable.
        unsafe { at.cast::<[bf16; 16]>().write_unaligned(numbers) };
    }

    #[inline(always)]
    unsafe fn xorshift(self) -> Self {
        Self(self.0.map(|lane| {
            let mut x = lane.to_bits();
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            f32::from_bits(x)
        }))
    }

    #[inline(always)]
    unsafe fn upper(self) -> Self {
        Self(self.0.map(|lane| f32::from_bits(lane.to_bits() >> 16)))
    }
}
