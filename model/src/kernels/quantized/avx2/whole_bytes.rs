//! q8_0 with AVX2: a register holds eight rows of weights, four columns of each.
//!
//! A panel is read from its first byte to its last, block by block, and all rows of `x` use a block before the next is
//! read. Several rows keep their sums in the L1 cache; a single row with a whole panel keeps them in registers.

use std::arch::x86_64::{
    __m256, __m256i, _mm_loadu_si128, _mm256_add_epi32, _mm256_and_si256, _mm256_cvtepi32_ps, _mm256_cvtph_ps,
    _mm256_fmadd_ps, _mm256_load_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_mul_ps, _mm256_set1_epi16,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256, _mm256_slli_epi16, _mm256_srai_epi16,
    _mm256_srli_epi16, _mm256_store_ps, _mm256_store_si256,
};
use std::ops::Range;

use crate::kernels::panels::{GROUP, Output, PANEL};
use crate::kernels::prefetch::{LINE, prefetch, stream_ahead};
use crate::kernels::quantized::activations::{Activations, BlockSums};
use crate::kernels::quantized::format::{BLOCK, Kind, Panel};

/// Rows of weights per register.
const LANES: usize = 8;
/// Registers per half panel.
const HALF: usize = PANEL / LANES / 2;
/// The most rows of `x` in a tile: with two registers of weights, eight products, which leaves room for the weights.
const ROWS: usize = 4;
/// The most rows of `x` whose sums are kept from block to block: 16 KiB, half of the L1 cache.
const KEPT: usize = 64;

/// One number for each row of a panel.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes([f32; PANEL]);

/// A block of `x` as 16-bit numbers: the even columns, then the odd ones.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Pairs([i16; BLOCK]);

impl Pairs {
    /// Widens a block of bytes into `self`.
    ///
    /// # Safety
    /// The machine has AVX2; 32 bytes are readable.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn set(&mut self, quants: *const i8) {
        let to = self.0.as_mut_ptr();
        // SAFETY: the caller's promise, and room for two registers.
        unsafe {
            let bytes = _mm256_loadu_si256(quants.cast());
            let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes));
            _mm256_store_si256(to.cast(), even);
            _mm256_store_si256(to.add(BLOCK / 2).cast(), _mm256_srai_epi16::<8>(bytes));
        }
    }
}

/// A block of one row of `x`.
#[derive(Clone, Copy)]
struct Row {
    pairs: *const i16,
    sums: *const BlockSums,
}

impl Row {
    fn new(pairs: &Pairs, sums: *const BlockSums) -> Self {
        Self { pairs: pairs.0.as_ptr(), sums }
    }
}

/// A block of a panel.
struct Block {
    /// The scales of all rows, in f16.
    scales: *const u8,
    /// The words of four columns of all rows.
    words: *const u8,
    /// Bytes from a word to the next one of the same row.
    stride: usize,
    /// How many bytes ahead the words are prefetched, or 0.
    ahead: usize,
}

impl Block {
    /// Returns block `index` of the panel and prefetches later scales.
    fn new(w: &Panel<'_>, index: usize) -> Self {
        let (len, ahead) = (Kind::Q8_0.block_bytes() * w.width, stream_ahead(1));
        let (scales, words) = w.bytes[index * len..][..len].split_at(2 * w.width);
        for line in (0..scales.len()).step_by(LINE) {
            prefetch(scales.as_ptr().wrapping_add(ahead + line));
        }
        Self { scales: scales.as_ptr(), words: words.as_ptr(), stride: 4 * w.width, ahead }
    }
}

/// Computes the integer products of R rows of `x` with G registers of weights, an even number.
///
/// # Safety
/// The rows are readable, and so are G registers of the block from `lane` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn products<const R: usize, const G: usize>(x: &[Row; R], block: &Block, lane: usize) -> [[__m256i; G]; R] {
    let low = _mm256_set1_epi16(255);
    let mut sums = [[_mm256_setzero_si256(); G]; R];
    for r in 0..R {
        // SAFETY: the caller's promise. The weights are stored with an offset of 128.
        sums[r] = [_mm256_set1_epi32(unsafe { (*x[r].sums).negative } << 7); G];
    }
    // A single row needs the words soon and prefetches them in order; several rows prefetch what they use.
    let asked = match (block.ahead > 0, R) {
        (false, _) => 0..0,
        (true, 1) => 0..if lane == 0 { block.stride } else { 0 },
        (true, _) => 4 * lane..4 * (lane + G * LANES),
    };
    for word in 0..8 {
        for line in asked.clone().step_by(LINE) {
            prefetch(block.words.wrapping_add(block.ahead + word * block.stride + line));
        }
        // The even columns as 16-bit numbers, then the odd ones: a sum of two products of bytes may not fit into 16
        // bits.
        for odd in [false, true] {
            // Two at a time: otherwise the compiler loads all of them first and has no registers left for the products.
            for g in (0..G).step_by(2) {
                let at = block.words.wrapping_add(word * block.stride + 4 * (lane + g * LANES));
                let mut weights = [low; 2];
                for i in 0..2 {
                    // SAFETY: registers of the block, by the caller's promise.
                    let bytes = unsafe { _mm256_loadu_si256(at.add(4 * LANES * i).cast()) };
                    weights[i] = if odd { _mm256_srli_epi16::<8>(bytes) } else { _mm256_and_si256(bytes, low) };
                }
                for r in 0..R {
                    let at = 2 * word + if odd { BLOCK / 2 } else { 0 };
                    // SAFETY: two of the row's 32 numbers, by the caller's promise.
                    let x = _mm256_set1_epi32(unsafe { x[r].pairs.add(at).cast::<i32>().read_unaligned() });
                    for i in 0..2 {
                        sums[r][g + i] = _mm256_add_epi32(sums[r][g + i], _mm256_madd_epi16(weights[i], x));
                    }
                }
            }
        }
    }
    sums
}

/// Adds the block's scaled products to the sums of R rows.
///
/// # Safety
/// As for [`products`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add<const R: usize, const G: usize>(x: &[Row; R], block: &Block, lane: usize, sums: &mut [[__m256; G]; R]) {
    // SAFETY: the caller's promise.
    unsafe {
        let products = products::<R, G>(x, block, lane);
        for r in 0..R {
            let x_scale = _mm256_set1_ps((*x[r].sums).scale);
            for g in 0..G {
                let scale = _mm256_cvtph_ps(_mm_loadu_si128(block.scales.add(2 * (lane + g * LANES)).cast()));
                let products = _mm256_cvtepi32_ps(products[r][g]);
                sums[r][g] = _mm256_fmadd_ps(products, _mm256_mul_ps(scale, x_scale), sums[r][g]);
            }
        }
    }
}

/// Multiplies R rows of `x` by a block, `WIDE` registers at a time, or two where fewer are left.
///
/// # Safety
/// The block and the rows are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn strips<const R: usize, const WIDE: usize>(x: &[Row; R], (block, width): (&Block, usize), sums: &mut [Lanes]) {
    let mut lane = 0;
    while lane < width {
        // SAFETY: the registers are in the block.
        unsafe {
            if width - lane >= WIDE * LANES {
                tile::<R, WIDE>(x, block, lane, sums);
                lane += WIDE * LANES;
            } else {
                tile::<R, 2>(x, block, lane, sums);
                lane += GROUP;
            }
        }
    }
}

/// Multiplies R rows of `x` by G registers of weights, with sums in memory.
///
/// # Safety
/// As for [`products`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const R: usize, const G: usize>(x: &[Row; R], block: &Block, lane: usize, sums: &mut [Lanes]) {
    assert!(sums.len() == R && lane + G * LANES <= PANEL, "tile: rows and lanes");
    // SAFETY: the caller's promise, and the lanes are in the panel, as checked above.
    unsafe {
        let mut own = [[_mm256_setzero_ps(); G]; R];
        for r in 0..R {
            for g in 0..G {
                own[r][g] = _mm256_load_ps(sums[r].0.as_ptr().add(lane + g * LANES));
            }
        }
        add::<R, G>(x, block, lane, &mut own);
        for r in 0..R {
            for g in 0..G {
                _mm256_store_ps(sums[r].0.as_mut_ptr().add(lane + g * LANES), own[r][g]);
            }
        }
    }
}

/// Multiplies some rows of `x` by a panel, with sums in memory.
///
/// # Safety
/// As for [`panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn many(x: &Activations, rows: Range<usize>, w: &Panel<'_>, out: Output<'_>) {
    let (mut kept, mut pairs) = ([Lanes([0.0; PANEL]); KEPT], [Pairs([0; BLOCK]); KEPT]);
    for first in rows.clone().step_by(KEPT) {
        let sums = &mut kept[..KEPT.min(rows.end - first)];
        sums.fill(Lanes([0.0; PANEL]));
        for index in 0..w.blocks {
            let (mut block, (quants, block_sums)) = (Block::new(w, index), x.from(index, first));
            for (r, pairs) in pairs[..sums.len()].iter_mut().enumerate() {
                // SAFETY: the row's block is readable.
                unsafe { pairs.set(quants.add(BLOCK * r)) };
            }
            let row = |r: usize| Row::new(&pairs[r], block_sums.wrapping_add(r));
            for (tile, sums) in sums.chunks_mut(ROWS).enumerate() {
                let (r, of) = (ROWS * tile, (&block, w.width));
                // SAFETY: the rows of `x` are readable, and each arm takes as many of them as it has sums.
                unsafe {
                    match sums.len() {
                        1 => strips::<1, 4>(&[row(r)], of, sums),
                        2 => strips::<2, 4>(&[row(r), row(r + 1)], of, sums),
                        3 => strips::<3, 2>(&[row(r), row(r + 1), row(r + 2)], of, sums),
                        _ => strips::<4, 2>(&[row(r), row(r + 1), row(r + 2), row(r + 3)], of, sums),
                    }
                }
                // The first rows have brought the weights into the cache.
                block.ahead = 0;
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { out.part(first + r, w.rows.clone()) }.copy_from_slice(&sums.0[..w.rows.len()]);
        }
    }
}

/// Multiplies one row of `x` by a whole panel, with sums in registers.
///
/// # Safety
/// As for [`panel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn one(x: &Activations, row: usize, w: &Panel<'_>, out: Output<'_>) {
    let mut pairs = Pairs([0; BLOCK]);
    let (mut left, mut right) = ([[_mm256_setzero_ps(); HALF]], [[_mm256_setzero_ps(); HALF]]);
    for index in 0..w.blocks {
        let (block, (quants, block_sums)) = (Block::new(w, index), x.from(index, row));
        // SAFETY: the row of `x` is readable, and the panel is whole.
        unsafe {
            pairs.set(quants);
            let x = [Row::new(&pairs, block_sums)];
            add::<1, HALF>(&x, &block, 0, &mut left);
            add::<1, HALF>(&x, &block, PANEL / 2, &mut right);
        }
    }
    let mut sums = Lanes([0.0; PANEL]);
    for g in 0..HALF {
        // SAFETY: eight lanes of either half.
        unsafe {
            _mm256_store_ps(sums.0[g * LANES..][..LANES].as_mut_ptr(), left[0][g]);
            _mm256_store_ps(sums.0[PANEL / 2 + g * LANES..][..LANES].as_mut_ptr(), right[0][g]);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { out.part(row, w.rows.clone()) }.copy_from_slice(&sums.0[..w.rows.len()]);
}

/// Multiplies some rows of `x` by a panel.
///
/// # Safety
/// The machine has AVX2, FMA and F16C. The rows are in `x`, which has as many columns as the panel; `out` has these
/// rows and the panel's outputs, and no other thread accesses them.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn panel(x: &Activations, rows: Range<usize>, w: &Panel<'_>, out: Output<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        if rows.len() == 1 && w.width == PANEL {
            one(x, rows.start, w, out);
        } else {
            many(x, rows, w, out);
        }
    }
}
