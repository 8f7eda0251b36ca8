//! Arithmetic on slices: matrix products, sine and cosine, the fused recurrence of one token; and the threads that
//! share the work.
//!
//! Every kernel has one plain definition. Its versions for the instruction sets perform the same operations in the same
//! order, so results have the same bits on every machine, and a row's result does not depend on the rows computed with
//! it. Kernels know slices and lengths, but no tensors, heads or layers.

#![allow(clippy::inline_always, reason = "the bodies must be compiled inside each instruction set's function")]
#![allow(
    clippy::needless_range_loop,
    reason = "registers are indexed: `Iterator::zip` and `array::map` may be calls, which would keep them in memory"
)]
#![allow(clippy::excessive_precision, reason = "constants as their sources print them")]

use half::bf16;

pub(crate) mod activation;
pub(crate) mod decay;
pub(crate) mod delta;
pub(crate) mod element;
pub(crate) mod elementwise;
pub(crate) mod exponentials;
pub(crate) mod float;
pub(crate) mod lines;
pub(crate) mod norm;
pub(crate) mod panels;
pub(crate) mod parts;
pub(crate) mod plain;
pub(crate) mod positive;
pub(crate) mod prefetch;
pub(crate) mod products;
pub(crate) mod quantized;
pub(crate) mod readout;
pub(crate) mod recurrence;
pub mod roofline;
pub(crate) mod softmax;
pub(crate) mod state_space;
pub(crate) mod threads;
pub(crate) mod trigonometry;
pub(crate) mod vector;

/// The number of lanes into which every reduction (norms, denominators) is split, on every machine.
pub(crate) const LANES: usize = 16;

/// The instruction sets that a kernel may be compiled for.
///
/// A value other than `Plain` proves that the machine supports the set: only [`Isa::available`] creates one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// The instruction set that the build targets.
    Plain,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// `Avx512` and VNNI: dot products of bytes.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// NEON, which every aarch64 machine has.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON and dot products of bytes.
    #[cfg(target_arch = "aarch64")]
    NeonDot,
}

impl Isa {
    /// Returns the best set that this machine supports, detected once.
    pub(crate) fn detect() -> Self {
        static BEST: std::sync::OnceLock<Isa> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| *Self::available().last().unwrap_or(&Self::Plain))
    }

    /// Returns all sets that this machine supports, from the plainest to the best.
    pub(crate) fn available() -> Vec<Self> {
        #[allow(unused_mut, reason = "other architectures add nothing")]
        let mut sets = vec![Self::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 {
                sets.push(Self::Avx2);
            }
            if avx512 {
                sets.push(Self::Avx512);
            }
            if avx512 && is_x86_feature_detected!("avx512vnni") {
                sets.push(Self::Avx512Vnni);
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            sets.push(Self::Neon);
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                sets.push(Self::NeonDot);
            }
        }
        sets
    }
}

/// Rounds to the nearest bfloat16. Finite numbers stay finite: plain rounding would turn those just above the largest
/// bfloat16 into infinity.
pub(crate) fn nearest(value: f32) -> bf16 {
    let most = bf16::MAX.to_f32();
    bf16::from_f32(if value.is_finite() { value.clamp(-most, most) } else { value })
}

/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Advises the system to back `memory` with huge pages: weights are streamed from end to end, and small pages cost a
/// walk of the page tables every 4 KiB.
pub(crate) fn advise_huge<T>(memory: &mut [T]) {
    #[cfg(target_os = "linux")]
    advise(memory, HUGE_PAGE, libc::MADV_HUGEPAGE);
    let _ = memory;
}

/// Like [`advise_huge`], but for the states of many conversations, of which a server often uses the first few only. The
/// beginning gets small pages, so a conversation takes only the memory of its own state.
pub(crate) fn advise_huge_later<T>(memory: &mut [T]) {
    let Some((first, later)) = memory.split_at_mut_checked(HUGE_PAGE / size_of::<T>()) else { return };
    #[cfg(target_os = "linux")]
    advise(first, 4096, libc::MADV_NOHUGEPAGE);
    let _ = first;
    advise_huge(later);
}

/// Gives the system advice on the whole pages in `memory`.
#[cfg(target_os = "linux")]
fn advise<T>(memory: &mut [T], page: usize, advice: libc::c_int) {
    let first: *mut u8 = memory.as_mut_ptr().cast();
    let start = first.addr().next_multiple_of(page) - first.addr();
    let len = size_of_val(memory).saturating_sub(start) / page * page;
    if len > 0 {
        // SAFETY: the range lies in `memory`, on whole pages, and these kinds of advice change no contents. A refusal
        // does not matter.
        unsafe { libc::madvise(first.add(start).cast(), len, advice) };
    }
}

/// Compiles an `#[inline(always)]` function of plain Rust for every instruction set, and runs the version for `isa`.
///
/// Write multiplications that feed additions as `mul_add`, so that all sets round alike.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident : $ty:ty),* $(,)?) = $body:path;) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "slices and lengths of one kernel")]
        $vis fn $name(isa: $crate::kernels::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) {
                    $body($($arg),*);
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) {
                    $body($($arg),*);
                }
                match isa {
                    // SAFETY: `Isa::available` yields these only where the machine has the features.
                    $crate::kernels::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    // SAFETY: as above.
                    $crate::kernels::Isa::Avx512 | $crate::kernels::Isa::Avx512Vnni => return unsafe { avx512($($arg),*) },
                    $crate::kernels::Isa::Plain => {}
                }
            }
            let _ = isa;
            $body($($arg),*);
        }
    };
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_of_a_finite_number_is_finite() {
        for value in [f32::MAX, 3.398e38, f32::MIN] {
            assert!(bf16::from_f32(value).is_infinite(), "{value}: the test shows nothing");
            assert_eq!(nearest(value).to_f32(), bf16::MAX.to_f32().copysign(value));
        }
        for value in [0.0, 1.003, -7e-41, 3.38e38] {
            assert_eq!(nearest(value), bf16::from_f32(value));
        }
        assert!(nearest(f32::NAN).is_nan() && nearest(f32::NEG_INFINITY) == bf16::NEG_INFINITY);
    }
}
