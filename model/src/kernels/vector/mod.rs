//! Registers of f32 lanes, one type for each instruction set: kernels are written once over [`Vector`].
//!
//! Functions here are inlined into the kernels' own, which are compiled for the set; each does the same to every lane,
//! bit for bit, whatever the set.

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
/// Every function needs the instruction set that the register belongs to; pointers must be good for [`Self::LANES`]
/// elements, at any alignment.
pub(crate) trait Vector: Copy {
    /// Its lanes; they divide sixteen.
    const LANES: usize;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(at: *const f32) -> Self;
    unsafe fn store(self, at: *mut f32);
    unsafe fn mul(self, by: Self) -> Self;
    /// `self * by + to`, rounded once.
    unsafe fn mul_add(self, by: Self, to: Self) -> Self;
    /// Widened: exact.
    unsafe fn load_bf16(at: *const bf16) -> Self;
    /// Widened: exact.
    unsafe fn load_f16(at: *const f16) -> Self;
    /// The upper halves of the bits, after the lower halves of `noise` were added to them.
    unsafe fn store_bf16(self, noise: Self, at: *mut bf16);
    /// The next numbers of Marsaglia's xorshift (13, 17, 5), lane by lane, on bits.
    unsafe fn xorshift(self) -> Self;
    /// The bits' upper halves as lower ones.
    unsafe fn upper(self) -> Self;
}
