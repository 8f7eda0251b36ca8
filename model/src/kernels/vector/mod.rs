//! Registers of f32 lanes, one type per instruction set: kernels are written once over [`Vector`].
//!
//! These functions are inlined into kernels that are compiled for an instruction set. Each function gives every lane
//! the same bits on every instruction set.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod plain;

use half::{bf16, f16};

/// A register of f32 lanes, or of their bits.
///
/// # Safety
/// Every function needs the instruction set of the register; pointers must be valid for [`Self::LANES`] elements, at
/// any alignment.
pub(crate) trait Vector: Copy {
    /// The number of lanes, a divisor of sixteen.
    const LANES: usize;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(at: *const f32) -> Self;
    unsafe fn store(self, at: *mut f32);
    unsafe fn mul(self, by: Self) -> Self;
    /// Returns `self * by + to`, rounded once.
    unsafe fn mul_add(self, by: Self, to: Self) -> Self;
    /// Loads and widens to f32, exactly.
    unsafe fn load_bf16(at: *const bf16) -> Self;
    /// Loads and widens to f32, exactly.
    unsafe fn load_f16(at: *const f16) -> Self;
    /// Adds the lower halves of `noise` to the bits and stores the upper halves.
    unsafe fn store_bf16(self, noise: Self, at: *mut bf16);
    /// Applies Marsaglia's xorshift (13, 17, 5) to the bits of each lane.
    unsafe fn xorshift(self) -> Self;
    /// Moves the upper half of each lane's bits to the lower half.
    unsafe fn upper(self) -> Self;
}
