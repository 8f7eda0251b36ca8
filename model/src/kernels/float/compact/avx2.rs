//! Products with compact weights for AVX2: half of a step's rows at a time, eight of each group.

use std::arch::x86_64::{
    __m256, __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_castsi256_ps,
    _mm256_loadu_si256, _mm256_set1_epi8, _mm256_set1_epi32, _mm256_shuffle_epi8, _mm256_slli_epi32, _mm256_srli_epi16,
    _mm256_unpackhi_epi8, _mm256_unpacklo_epi8,
};
use std::ops::Range;

use super::format::{COLUMNS, Compact};
use super::many;
use super::product::{REGISTERS, Unpack, few};
use crate::kernels::panels::{Output, PANEL};

impl Unpack for __m256 {
    type Bytes = __m256i;

    #[inline(always)]
    unsafe fn table(bytes: &[u8; 16]) -> __m256i {
        // SAFETY: the machine has AVX2.
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast())) }
    }

    #[inline(always)]
    unsafe fn pairs(at: *const u8, table: __m256i, part: usize) -> [[__m256i; 2]; COLUMNS] {
        // SAFETY: the machine has AVX2, and a step is readable.
        unsafe {
            let at = at.add(part * PANEL / 2);
            let low = [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(PANEL).cast())];
            let (codes, nibble) = (_mm256_loadu_si256(at.add(COLUMNS * PANEL).cast()), _mm256_set1_epi8(15));
            let high = [
                _mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble)),
                _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble)),
            ];
            [
                [_mm256_unpacklo_epi8(low[0], high[0]), _mm256_unpackhi_epi8(low[0], high[0])],
                [_mm256_unpacklo_epi8(low[1], high[1]), _mm256_unpackhi_epi8(low[1], high[1])],
            ]
        }
    }

    #[inline(always)]
    unsafe fn widened(pairs: [__m256i; 2]) -> [Self; REGISTERS] {
        // SAFETY: the machine has AVX2.
        unsafe {
            let upper = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs[0])),
                _mm256_castsi256_ps(_mm256_and_si256(pairs[0], upper)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs[1])),
                _mm256_castsi256_ps(_mm256_and_si256(pairs[1], upper)),
            ]
        }
    }
}

/// Multiplies rows of `x` by some panels.
///
/// # Safety
/// The machine has AVX2, FMA and F16C; rows and panels are in bounds, and no other thread accesses this part of `out`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run(x: &[f32], rows: Range<usize>, w: &Compact, panels: Range<usize>, out: Output<'_>) {
    // Eight sums: both parts for one row, one part at a time for two rows. With the twelve sums of three rows, the
    // compiler spills sums to memory, and unpacking blocks first is faster.
    // SAFETY: the caller's promise.
    unsafe {
        match rows.len() {
            1 => panels.for_each(|p| few::<__m256, 1, 2>((x, rows.start), (w, p), out)),
            2 => panels.for_each(|p| few::<__m256, 2, 1>((x, rows.start), (w, p), out)),
            _ => many::run::<__m256, 2, 2>(x, rows, w, panels, out),
        }
    }
}
