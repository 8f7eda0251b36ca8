//! q4_0 and q4_k with AVX2: two registers hold sixteen rows of weights, four columns of each. Sums stay in registers
//! while a range of blocks is in the L1 cache.

use std::arch::x86_64::{
    __m256, __m256i, _mm_loadu_si128, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256, _mm256_cvtepi32_ps,
    _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_fnmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_mul_ps, _mm256_or_si256, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setr_epi32, _mm256_setzero_ps, _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_slli_epi32,
    _mm256_srli_epi16, _mm256_storeu_ps,
};
use std::ops::Range;

use crate::kernels::panels::{GROUP, Output};
use crate::kernels::prefetch::{LINE, Stretch};
use crate::kernels::quantized::activations::{Activations, BlockSums};
use crate::kernels::quantized::format::{BLOCK, FIRST_BYTES, Form, Kind, Panel, cached_blocks, tiles};

/// The most rows of `x` in a tile: four sums and four products, of sixteen registers.
const ROWS: usize = 2;
/// Rows of weights per register.
const LANES: usize = 8;

/// Computes the integer products of R rows of `x` with sixteen rows of weights over 32 columns.
///
/// `HIGH`: the weights are in the high halves of bytes.
///
/// # Safety
/// R blocks of bytes are readable at `x` and their sums at `block_sums`; the words of the weights' block are readable
/// at `w`, `stride` bytes apart.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn products<F: Form, const R: usize, const HIGH: bool>(
    x: *const i8,
    block_sums: *const BlockSums,
    w: *const u8,
    stride: usize,
) -> [[__m256i; 2]; R] {
    let (low, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
    let mut sums = [[_mm256_setzero_si256(); 2]; R];
    for step in 0..8 {
        let (word, column, high) = match F::KIND {
            // Both halves of a word's bytes, one after the other.
            Kind::Q4_0 => (step / 2, 4 * (step / 2) + 16 * (step % 2), step % 2 == 1),
            _ => (step, 4 * step, HIGH),
        };
        for half in 0..2 {
            // SAFETY: the caller's promise: word `word` of 16 rows.
            let bytes = unsafe { _mm256_loadu_si256(w.add(word * stride + 32 * half).cast()) };
            let weights = _mm256_and_si256(if high { _mm256_srli_epi16::<4>(bytes) } else { bytes }, low);
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's promise: column + 4 <= 32 bytes of block r.
                let x = _mm256_set1_epi32(unsafe { x.add(BLOCK * r + column).cast::<i32>().read_unaligned() });
                // Sixteen products add up to 16 * 15 * 127 at most, which fits into 16 bits.
                sums[half] = _mm256_add_epi16(sums[half], _mm256_maddubs_epi16(weights, x));
            }
        }
    }
    for (r, sums) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise: sums of R blocks.
        let negative = _mm256_set1_epi32(unsafe { (*block_sums.add(r)).negative });
        let zero = match F::KIND {
            Kind::Q4_0 => _mm256_slli_epi32::<3>(negative),
            _ => _mm256_setzero_si256(),
        };
        for half in 0..2 {
            sums[half] = _mm256_add_epi32(_mm256_madd_epi16(sums[half], ones), zero);
        }
    }
    sums
}

/// Adds a block's scaled products to the sums, and subtracts the scaled minima of q4_k.
///
/// # Safety
/// Sums of R blocks are readable at `block_sums`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add<F: Form, const R: usize>(
    sums: &mut [[__m256; 2]; R],
    products: [[__m256i; 2]; R],
    (scales, minima): ([__m256; 2], [__m256; 2]),
    block_sums: *const BlockSums,
) {
    for r in 0..R {
        // SAFETY: the caller's promise.
        let block_sums = unsafe { *block_sums.add(r) };
        for half in 0..2 {
            let scale = _mm256_mul_ps(scales[half], _mm256_set1_ps(block_sums.scale));
            sums[r][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[r][half]), scale, sums[r][half]);
            if F::KIND == Kind::Q4K {
                sums[r][half] = _mm256_fnmadd_ps(_mm256_set1_ps(block_sums.total), minima[half], sums[r][half]);
            }
        }
    }
}

/// Loads sixteen f16 numbers.
///
/// # Safety
/// 32 bytes are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn halves(at: *const u8) -> [__m256; 2] {
    // SAFETY: the caller's promise.
    let load = |i: usize| unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.add(i).cast())) };
    [load(0), load(2 * LANES)]
}

/// Returns the eight scales and eight minima of a q4_k block, a byte each: scales 0..4, 4..8, minima 0..4, 4..8.
///
/// # Safety
/// Three words of 8 rows are readable at `at`, `stride` bytes apart.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn six_bits(at: *const u8, stride: usize) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let load = |i: usize| unsafe { _mm256_loadu_si256(at.add(i * stride).cast()) };
    let (a, b, c) = (load(0), load(1), load(2));
    let (six, four, two) = (_mm256_set1_epi8(63), _mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
    let top = |v| _mm256_and_si256(_mm256_srli_epi16::<2>(v), two);
    [
        _mm256_and_si256(a, six),
        _mm256_or_si256(_mm256_and_si256(c, four), top(a)),
        _mm256_and_si256(b, six),
        _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16::<4>(c), four), top(b)),
    ]
}

/// Multiplies R rows of `x`, from `row` on, by sixteen rows of weights over some blocks. The sums start from `out`, or
/// from 0 at block 0.
///
/// # Safety
/// As for `panel`; the rows and the group are in bounds, and the blocks are whole stored blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<F: Form, const R: usize>(
    (x, row): (&Activations, usize),
    (w, group): (&Panel<'_>, usize),
    next: &mut Stretch,
    blocks: Range<usize>,
    out: Output<'_>,
) {
    let start = w.rows.start + group * GROUP;
    let columns = start..w.rows.end.min(start + GROUP);
    let mut lanes = [[0.0f32; GROUP]; R];
    if blocks.start > 0 {
        for (r, lanes) in lanes.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            lanes[..columns.len()].copy_from_slice(unsafe { out.part(row + r, columns.clone()) });
        }
    }
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for r in 0..R {
        // SAFETY: sixteen numbers are readable in each row of lanes.
        sums[r] = unsafe { [_mm256_loadu_ps(lanes[r].as_ptr()), _mm256_loadu_ps(lanes[r].as_ptr().add(LANES))] };
    }
    let [a, b, c, d] = FIRST_BYTES;
    let first_bytes = _mm256_setr_epi32(a, b, c, d, a, b, c, d);
    let stride = 4 * w.width;
    let stored_bytes = F::KIND.block_bytes() * w.width;
    let (mut xs, mut block_sums) = x.from(blocks.start, row);
    let mut at = w.bytes[blocks.start / F::KIND.parts() * stored_bytes..].as_ptr();
    for _ in 0..blocks.len() / F::KIND.parts() {
        // SAFETY: the stored block lies in the panel, its rows of `x` in the activations: the pointers stay inside
        // until the last block is done, and are not read after it.
        unsafe {
            let scales = halves(at.add(2 * GROUP * group));
            let words = at.add(2 * F::KIND.halves() * w.width + 4 * GROUP * group);
            if F::KIND == Kind::Q4K {
                let minima = halves(at.add(2 * (w.width + GROUP * group)));
                let bits = [six_bits(words, stride), six_bits(words.add(4 * LANES), stride)];
                for part in 0..F::KIND.parts() {
                    let words = words.add((3 + part / 2 * 8) * stride);
                    let products = if part % 2 == 0 {
                        products::<F, R, false>(xs, block_sums, words, stride)
                    } else {
                        products::<F, R, true>(xs, block_sums, words, stride)
                    };
                    let byte = _mm256_add_epi32(first_bytes, _mm256_set1_epi32(part as i32 % 4));
                    let (mut part_scales, mut part_minima) = (scales, minima);
                    for i in 0..2 {
                        let of = |bits| _mm256_cvtepi32_ps(_mm256_shuffle_epi8(bits, byte));
                        part_scales[i] = _mm256_mul_ps(scales[i], of(bits[i][part / 4]));
                        part_minima[i] = _mm256_mul_ps(minima[i], of(bits[i][2 + part / 4]));
                    }
                    add::<F, R>(&mut sums, products, (part_scales, part_minima), block_sums);
                    next.advance();
                    xs = xs.wrapping_add(BLOCK * x.stride());
                    block_sums = block_sums.wrapping_add(x.stride());
                }
            } else {
                let products = products::<F, R, false>(xs, block_sums, words, stride);
                add::<F, R>(&mut sums, products, (scales, scales), block_sums);
                next.advance();
                xs = xs.wrapping_add(BLOCK * x.stride());
                block_sums = block_sums.wrapping_add(x.stride());
            }
            at = at.wrapping_add(stored_bytes);
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        let mut lanes = [0.0f32; GROUP];
        // SAFETY: sixteen numbers are written to sixteen lanes.
        unsafe {
            _mm256_storeu_ps(lanes.as_mut_ptr(), sums[0]);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(LANES), sums[1]);
        }
        // SAFETY: the caller's promise.
        unsafe { out.part(row + r, columns.clone()) }.copy_from_slice(&lanes[..columns.len()]);
    }
}

/// Multiplies some rows of `x` by a panel.
///
/// # Safety
/// The machine has AVX2, FMA and F16C. The rows are in `x`, which has as many columns as the panel; `out` has these
/// rows and the panel's outputs, and no other thread accesses them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn panel<F: Form>(x: &Activations, rows: Range<usize>, w: &Panel<'_>, out: Output<'_>) {
    let step = cached_blocks(F::KIND, w.width);
    for start in (0..w.blocks).step_by(step) {
        let blocks = start..w.blocks.min(start + step);
        // Together, all tiles prefetch the blocks that follow.
        let chunk = step / F::KIND.parts() * F::KIND.block_bytes() * w.width;
        let asks = rows.len().div_ceil(ROWS) * (w.width / GROUP) * step;
        let at = w.bytes.as_ptr().wrapping_add((start / step + 1) * chunk);
        let mut next = Stretch { at, lines: chunk.div_ceil(LINE).div_ceil(asks) };
        for rows in tiles(rows.clone(), ROWS) {
            for group in 0..w.width / GROUP {
                // SAFETY: the caller's promise; a tile has one or two rows.
                unsafe {
                    match rows.len() {
                        1 => tile::<F, 1>((x, rows.start), (w, group), &mut next, blocks.clone(), out),
                        _ => tile::<F, 2>((x, rows.start), (w, group), &mut next, blocks.clone(), out),
                    }
                }
            }
        }
    }
}
