//! AVX-512 with VNNI: one register holds sixteen rows of weights, four columns of each.

use std::arch::asm;
use std::arch::x86_64::{
    __m512, __m512i, __mmask16, _mm256_loadu_si256, _mm512_add_epi32, _mm512_and_si512, _mm512_cvtepi32_ps,
    _mm512_cvtph_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_fnmadd_ps, _mm512_load_ps, _mm512_loadu_si512,
    _mm512_mask_storeu_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_set4_epi32, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_slli_epi32,
    _mm512_srli_epi16, _mm512_store_ps,
};
use std::mem::MaybeUninit;
use std::ops::Range;

use super::activations::{Activations, BlockSums};
use super::format::{BLOCK, FIRST_BYTES, Form, Kind, Panel, cached_blocks, tiles};
use crate::kernels::panels::{GROUP, Output, PANEL};
use crate::kernels::prefetch::{LINE, Stretch, prefetch, stream_ahead};

/// The most rows of `x` in a tile: with two groups of weights there are 12 sums and 12 products, which leaves registers
/// for the weights.
const ROWS: usize = 6;

/// The most rows that use all weights of a panel before the next rows do: their sums stay in the L1 cache, apart from
/// those of other threads.
const BAND: usize = 6 * ROWS;

/// The sums of a band.
#[repr(align(64))]
struct Sums(#[expect(dead_code, reason = "memory for pointers")] [[f32; PANEL]; BAND]);

/// Groups of a whole panel.
const WHOLE: usize = PANEL / GROUP;

/// The most rows that use a whole panel at once, so that it is read from end to end.
const FEW: usize = 3;

/// Returns `sum`, and keeps the compiler from moving later calls before this one. Otherwise it would finish one row's
/// product after another, each a chain of dependent instructions, with all weights and no sums in registers.
#[inline]
#[target_feature(enable = "avx512f")]
fn in_order(mut sum: __m512i) -> __m512i {
    // SAFETY: emits no instruction.
    unsafe { asm!("/* {0} */", inout(zmm_reg) sum, options(nomem, nostack, preserves_flags)) };
    sum
}

/// Returns the offset of group `g` in one or two panels if a group has `bytes` and the second panel is `jump` bytes
/// behind the first.
#[inline(always)]
const fn place(g: usize, bytes: usize, jump: usize) -> usize {
    g / WHOLE * jump + g % WHOLE * bytes
}

/// Computes the integer products of R rows of `x` with G groups of weights over 32 columns.
///
/// `HIGH`: the weights are in the high halves of bytes. ahead: how many bytes ahead the weights are prefetched, or 0.
///
/// # Safety
/// R blocks of bytes are readable at `x` and their sums at `block_sums`; the words of the weights' block are readable
/// at `w`, `stride` bytes apart, and those of a second panel `jump` bytes behind the first panel's.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn products<F: Form, const R: usize, const G: usize, const HIGH: bool>(
    x: *const i8,
    block_sums: *const BlockSums,
    w: *const u8,
    (stride, jump): (usize, usize),
    ahead: usize,
) -> [[__m512i; G]; R] {
    let low = _mm512_set1_epi8(15);
    let mut sums = [[_mm512_setzero_si512(); G]; R];
    for (r, sums) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's promise: sums of R blocks.
        let negative = _mm512_set1_epi32(unsafe { (*block_sums.add(r)).negative });
        *sums = match F::KIND {
            Kind::Q8_0 => [_mm512_slli_epi32::<7>(negative); G],
            Kind::Q4_0 => [_mm512_slli_epi32::<3>(negative); G],
            Kind::Q4K => [_mm512_setzero_si512(); G],
        };
    }
    for step in 0..8 {
        let (word, column) = match F::KIND {
            Kind::Q8_0 | Kind::Q4K => (step, 4 * step),
            // Both halves of a word's bytes, one after the other.
            Kind::Q4_0 => (step / 2, 4 * (step / 2) + 16 * (step % 2)),
        };
        let high = if F::KIND == Kind::Q4_0 { step % 2 == 1 } else { HIGH };
        let mut weights = [low; G];
        for (g, weights) in weights.iter_mut().enumerate() {
            let at = w.wrapping_add(word * stride + place(g, 64, jump));
            // SAFETY: the caller's promise: word `word` of G groups of 16 rows.
            let bytes = unsafe { _mm512_loadu_si512(at.cast()) };
            // Both halves are in one word, which is prefetched once.
            if ahead > 0 && (F::KIND == Kind::Q8_0 || !high) {
                prefetch(at.wrapping_add(ahead));
            }
            *weights = match (F::KIND, high) {
                (Kind::Q8_0, _) => bytes,
                (_, false) => _mm512_and_si512(bytes, low),
                (_, true) => _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low),
            };
        }
        for r in 0..R {
            // SAFETY: the caller's promise: column + 4 <= 32 bytes of block r.
            let x = _mm512_set1_epi32(unsafe { x.add(BLOCK * r + column).cast::<i32>().read_unaligned() });
            for g in 0..G {
                sums[r][g] = _mm512_dpbusd_epi32(sums[r][g], weights[g], x);
                // For half bytes the compiler's own order is faster.
                if F::KIND == Kind::Q8_0 {
                    sums[r][g] = in_order(sums[r][g]);
                }
            }
        }
    }
    sums
}

/// Adds a block's scaled products to the sums.
///
/// # Safety
/// Sums of R blocks are readable at `block_sums`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add<const R: usize, const G: usize>(
    sums: &mut [[__m512; G]; R],
    products: [[__m512i; G]; R],
    scales: [__m512; G],
    block_sums: *const BlockSums,
) {
    for r in 0..R {
        // SAFETY: the caller's promise.
        let x_scale = _mm512_set1_ps(unsafe { (*block_sums.add(r)).scale });
        for g in 0..G {
            let scale = _mm512_mul_ps(scales[g], x_scale);
            sums[r][g] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[r][g]), scale, sums[r][g]);
        }
    }
}

/// Loads sixteen f16 numbers.
///
/// # Safety
/// 32 bytes are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// Returns the eight scales and eight minima of a q4_k block, a byte each: scales 0..4, 4..8, minima 0..4, 4..8.
///
/// # Safety
/// Three words of 16 rows are readable at `at`, `stride` bytes apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn six_bits(at: *const u8, stride: usize) -> [__m512i; 4] {
    // SAFETY: the caller's promise.
    let load = |i: usize| unsafe { _mm512_loadu_si512(at.add(i * stride).cast()) };
    let (a, b, c) = (load(0), load(1), load(2));
    let (six, four, two) = (_mm512_set1_epi8(63), _mm512_set1_epi8(15), _mm512_set1_epi8(0x30));
    let top = |v| _mm512_and_si512(_mm512_srli_epi16::<2>(v), two);
    [
        _mm512_and_si512(a, six),
        _mm512_or_si512(_mm512_and_si512(c, four), top(a)),
        _mm512_and_si512(b, six),
        _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16::<4>(c), four), top(b)),
    ]
}

/// A tile: where its rows of `x`, its weights, its sums and its outputs are.
#[derive(Clone, Copy)]
struct Tile<'a> {
    x: &'a Activations,
    row: usize,
    w: &'a Panel<'a>,
    group: usize,
    /// The sums of the tile's rows, [`PANEL`] per row, until the last block is done.
    sums: *mut f32,
    out: Output<'a>,
}

/// Multiplies R rows of `x` by G groups of weights over some blocks. The sums start from 0 at block 0 and become the
/// output after the last block.
///
/// # Safety
/// As for `panel`; the tile is in bounds, the blocks are whole stored blocks, and R rows of sums can be written.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile<F: Form, const R: usize, const G: usize>(tile: Tile<'_>, next: &mut Stretch, blocks: Range<usize>) {
    let Tile { x, row, w, group, sums: kept, out } = tile;
    let columns = |g: usize| {
        let start = w.rows.start + (group + g) * GROUP;
        start..w.rows.end.min(start + GROUP)
    };
    let mask = |g: usize| (u32::MAX >> (32 - columns(g).len())) as __mmask16;
    let kept = |r: usize, g: usize| kept.wrapping_add(r * PANEL + (group + g) * GROUP);
    let mut sums = [[_mm512_setzero_ps(); G]; R];
    if blocks.start > 0 {
        for (r, sums) in sums.iter_mut().enumerate() {
            for (g, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                *sum = unsafe { _mm512_load_ps(kept(r, g)) };
            }
        }
    }
    // A tile of whole panels reads them from end to end.
    let ahead = if R <= FEW && G * GROUP == w.count * w.width { stream_ahead(1) } else { 0 };
    let jump = w.bytes.len() / w.count;
    let [a, b, c, d] = FIRST_BYTES;
    let first_bytes = _mm512_set4_epi32(d, c, b, a);
    let stride = 4 * w.width;
    let stored_bytes = F::KIND.block_bytes() * w.width;
    let (mut xs, mut block_sums) = x.from(blocks.start, row);
    let mut at = w.bytes[blocks.start / F::KIND.parts() * stored_bytes..].as_ptr();
    for _ in 0..blocks.len() / F::KIND.parts() {
        // SAFETY: the stored block lies in the panel, its rows of `x` in the activations: the pointers stay inside
        // until the last block is done, and are not read after it.
        unsafe {
            let words = at.add(2 * F::KIND.halves() * w.width + group * 4 * GROUP);
            if ahead > 0 {
                for line in (0..2 * F::KIND.halves() * w.width).step_by(LINE) {
                    for panel in 0..w.count {
                        prefetch(at.wrapping_add(panel * jump + line + ahead));
                    }
                }
            }
            let mut scales = [_mm512_setzero_ps(); G];
            for (g, scales) in scales.iter_mut().enumerate() {
                *scales = halves(at.add(2 * GROUP * group + place(g, 2 * GROUP, jump)));
            }
            if F::KIND == Kind::Q4K {
                let mut minima = [_mm512_setzero_ps(); G];
                let mut bits = [[_mm512_setzero_si512(); 4]; G];
                for g in 0..G {
                    minima[g] = halves(at.add(2 * (w.width + GROUP * group) + place(g, 2 * GROUP, jump)));
                    bits[g] = six_bits(words.add(place(g, 4 * GROUP, jump)), stride);
                }
                for half in 0..2 {
                    for pair in 0..2 {
                        let words = words.add((3 + 16 * half + 8 * pair as usize) * stride);
                        for high in 0..2 {
                            let products = if high == 0 {
                                products::<F, R, G, false>(xs, block_sums, words, (stride, jump), ahead)
                            } else {
                                products::<F, R, G, true>(xs, block_sums, words, (stride, jump), ahead)
                            };
                            let byte = _mm512_add_epi32(first_bytes, _mm512_set1_epi32(2 * pair + high));
                            let of = |bits| _mm512_cvtepi32_ps(_mm512_shuffle_epi8(bits, byte));
                            let (mut part_scales, mut part_minima) = (scales, minima);
                            for g in 0..G {
                                part_scales[g] = _mm512_mul_ps(scales[g], of(bits[g][half]));
                                part_minima[g] = _mm512_mul_ps(minima[g], of(bits[g][2 + half]));
                            }
                            add(&mut sums, products, part_scales, block_sums);
                            for r in 0..R {
                                let total = _mm512_set1_ps((*block_sums.add(r)).total);
                                for g in 0..G {
                                    sums[r][g] = _mm512_fnmadd_ps(total, part_minima[g], sums[r][g]);
                                }
                            }
                            next.advance();
                            xs = xs.wrapping_add(BLOCK * x.stride());
                            block_sums = block_sums.wrapping_add(x.stride());
                        }
                    }
                }
            } else {
                let products = products::<F, R, G, false>(xs, block_sums, words, (stride, jump), ahead);
                add(&mut sums, products, scales, block_sums);
                next.advance();
                xs = xs.wrapping_add(BLOCK * x.stride());
                block_sums = block_sums.wrapping_add(x.stride());
            }
            at = at.wrapping_add(stored_bytes);
        }
    }
    let whole = blocks.end == w.blocks;
    for (r, sums) in sums.iter().enumerate() {
        for (g, sum) in sums.iter().enumerate() {
            // SAFETY: the caller's promise; the mask excludes columns out of bounds.
            unsafe {
                if whole {
                    _mm512_mask_storeu_ps(out.part(row + r, columns(g)).as_mut_ptr(), mask(g), *sum);
                } else {
                    _mm512_store_ps(kept(r, g), *sum);
                }
            }
        }
    }
}

/// Multiplies R rows of `x` by all groups of the panel.
///
/// # Safety
/// As for `panel`; R rows are in bounds.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn groups<F: Form, const R: usize>(mut at: Tile<'_>, next: &mut Stretch, blocks: Range<usize>) {
    let end = at.w.width / GROUP;
    while at.group < end {
        // SAFETY: each arm takes no more groups than there are.
        unsafe {
            match end - at.group {
                4.. if R <= FEW => {
                    tile::<F, R, 4>(at, next, blocks.clone());
                    at.group += 4;
                }
                2.. => {
                    tile::<F, R, 2>(at, next, blocks.clone());
                    at.group += 2;
                }
                _ => {
                    tile::<F, R, 1>(at, next, blocks.clone());
                    at.group += 1;
                }
            }
        }
    }
}

/// Multiplies some rows of `x` by a panel, or by two whole panels.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and VNNI. The rows are in `x`, which has as many columns as the panel; `out`
/// has these rows and the panel's outputs, and no other thread accesses them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn panel<F: Form>(x: &Activations, rows: Range<usize>, w: &Panel<'_>, out: Output<'_>) {
    let line_bytes = F::KIND.block_bytes() * w.width;
    // Few rows stream the weights. With more rows, all tiles use a range of weights that fits the cache, and together
    // they prefetch the next range.
    let few = rows.len() <= FEW;
    let step = if few { w.blocks } else { cached_blocks(F::KIND, w.width) };
    let chunk = step / F::KIND.parts() * line_bytes;
    debug_assert!(w.count == 1 || rows.len() == 1, "two panels are read in one stretch, without sums");
    // Not zeroed, which would slow down few rows: the first blocks of a band write the sums that later blocks of its
    // tiles read.
    let mut sums = MaybeUninit::<Sums>::uninit();
    for band in tiles(rows, BAND) {
        // With few rows, the tile itself prefetches.
        let passes = band.len().div_ceil(ROWS) * (w.width / GROUP).div_ceil(2);
        let lines = if few { 0 } else { chunk.div_ceil(LINE).div_ceil(passes * step) };
        for start in (0..w.blocks).step_by(step.max(1)) {
            let blocks = start..w.blocks.min(start + step);
            let at = w.bytes.as_ptr().wrapping_add(start / F::KIND.parts() * line_bytes);
            let mut next = Stretch { at: at.wrapping_add(chunk), lines };
            for rows in tiles(band.clone(), ROWS) {
                let sums = sums.as_mut_ptr().cast::<f32>().wrapping_add((rows.start - band.start) * PANEL);
                let at = Tile { x, row: rows.start, w, group: 0, sums, out };
                let (next, blocks) = (&mut next, blocks.clone());
                // SAFETY: the caller's promise; a tile has one to six rows, all of them in the band, whose sums have
                // room.
                unsafe {
                    match rows.len() {
                        1 if w.count == 2 => tile::<F, 1, { 2 * WHOLE }>(at, next, blocks),
                        1 => groups::<F, 1>(at, next, blocks),
                        2 => groups::<F, 2>(at, next, blocks),
                        3 => groups::<F, 3>(at, next, blocks),
                        4 => groups::<F, 4>(at, next, blocks),
                        5 => groups::<F, 5>(at, next, blocks),
                        _ => groups::<F, 6>(at, next, blocks),
                    }
                }
            }
        }
    }
}
