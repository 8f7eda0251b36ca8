//! The number types in which weights, states and caches are stored, and how kernels read them.

use half::{bf16, f16};

use super::vector::Vector;

/// Plain old data: every bit pattern is a valid value, and there is no padding.
///
/// # Safety
/// The type must fit this description.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: integers and floats.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: a transparent wrapper around a u16.
unsafe impl Plain for bf16 {}
// SAFETY: as above.
unsafe impl Plain for f16 {}

/// A stored number that kernels widen to f32.
pub(crate) trait Element: Plain + Send + Sync + 'static {
    /// Converts the number to f32, exactly.
    fn widen(self) -> f32;
    /// Loads as many numbers as `V` has lanes and widens them.
    ///
    /// # Safety
    /// That many numbers are readable, and the machine has the instruction set of `V`.
    unsafe fn load<V: Vector>(at: *const Self) -> V;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(at) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(at) }
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(at) }
    }
}
