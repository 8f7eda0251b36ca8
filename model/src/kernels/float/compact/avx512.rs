//! Products with compact weights for AVX-512: a step takes three loads, two table lookups and four interleavings.

use std::arch::x86_64::{
    __m512, __m512i, _mm_loadu_si128, _mm512_and_si512, _mm512_broadcast_i32x4, _mm512_castsi512_ps,
    _mm512_loadu_si512, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_shuffle_epi8, _mm512_slli_epi32, _mm512_srli_epi16,
    _mm512_unpackhi_epi8, _mm512_unpacklo_epi8,
};
use std::ops::Range;

use super::format::{COLUMNS, Compact};
use super::many;
use super::product::{REGISTERS, Unpack, few};
use crate::kernels::float::tile::{MOST, tiles};
use crate::kernels::panels::{Output, PANEL};

/// The most rows for which a panel is used as it is unpacked: one tile. For more, it is unpacked in blocks, each for many
/// rows at once.
const FEW: usize = MOST;

impl Unpack for __m512 {
    type Bytes = __m512i;

    #[inline(always)]
    unsafe fn table(bytes: &[u8; 16]) -> __m512i {
        // SAFETY: the machine has AVX-512 F.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(bytes.as_ptr().cast())) }
    }

    #[inline(always)]
    unsafe fn pairs(at: *const u8, table: __m512i, _: usize) -> [[__m512i; 2]; COLUMNS] {
        // SAFETY: the machine has AVX-512 F and BW, and a step is readable.
        unsafe {
            let low = [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(PANEL).cast())];
            let (codes, nibble) = (_mm512_loadu_si512(at.add(COLUMNS * PANEL).cast()), _mm512_set1_epi8(15));
            let high = [
                _mm512_shuffle_epi8(table, _mm512_and_si512(codes, nibble)),
                _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble)),
            ];
            [
                [_mm512_unpacklo_epi8(low[0], high[0]), _mm512_unpackhi_epi8(low[0], high[0])],
                [_mm512_unpacklo_epi8(low[1], high[1]), _mm512_unpackhi_epi8(low[1], high[1])],
            ]
        }
    }

    #[inline(always)]
    unsafe fn widened(pairs: [__m512i; 2]) -> [Self; REGISTERS] {
        // SAFETY: the machine has AVX-512 F.
        unsafe {
            let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
            [
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs[0])),
                _mm512_castsi512_ps(_mm512_and_si512(pairs[0], upper)),
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs[1])),
                _mm512_castsi512_ps(_mm512_and_si512(pairs[1], upper)),
            ]
        }
    }
}

/// Multiplies rows of `x` by some panels.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL; rows and panels are in bounds, and no other thread accesses this part of
/// `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn run(x: &[f32], rows: Range<usize>, w: &Compact, panels: Range<usize>, out: Output<'_>) {
    if rows.len() > FEW {
        // SAFETY: the caller's promise.
        return unsafe { many::run::<__m512, 1, REGISTERS>(x, rows, w, panels, out) };
    }
    for p in panels {
        tiles!(rows.clone(), |row, M| {
            // SAFETY: the caller's promise.
            unsafe { few::<__m512, M, 1>((x, row), (w, p), out) };
        });
    }
}
