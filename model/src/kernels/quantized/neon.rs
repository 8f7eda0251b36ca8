//! NEON: four registers hold sixteen rows of weights, four columns of each.

use std::arch::aarch64::{
    float32x4_t, int8x16_t, int32x4_t, uint8x16_t, vaddq_s32, vandq_u8, vandq_u32, vcvtq_f32_s32, vcvtq_f32_u32,
    vdupq_n_f32, vdupq_n_s32, vdupq_n_u8, vdupq_n_u32, veorq_u8, vfmaq_f32, vfmsq_f32, vget_low_s8, vld1q_f32,
    vld1q_u8, vmull_high_s8, vmull_s8, vmulq_f32, vorrq_u8, vpaddlq_s16, vpaddq_s32, vreinterpretq_s8_s32,
    vreinterpretq_s8_u8, vreinterpretq_u32_u8, vshlq_n_s32, vshlq_n_u8, vshlq_u32, vshrq_n_u8, vst1q_f32,
};
use std::arch::asm;
use std::ops::Range;

use super::activations::{Activations, BlockSums};
use super::format::{BLOCK, Form, Kind, Panel, cached_blocks, tiles};
use crate::kernels::panels::{GROUP, Output};

/// The most rows of `x` in a tile: twelve sums and twelve products, of thirty-two registers.
const ROWS: usize = 3;
/// Rows of weights per register.
const LANES: usize = 4;
/// Registers for sixteen rows.
const PARTS: usize = GROUP / LANES;

/// Adds the products of each four bytes to a sum. `DOT`: whether the machine has one instruction for that.
#[inline(always)]
fn dot<const DOT: bool>(sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    if DOT {
        let mut sum = sum;
        // SAFETY: `DOT` says that the machine has the instruction.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b",
                sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        return sum;
    }
    // SAFETY: every machine of this architecture has NEON.
    unsafe {
        let low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
        vaddq_s32(sum, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(w, x))))
    }
}

/// Performs step `STEP` of eight: adds the products of R rows with sixteen rows of weights over four columns.
///
/// # Safety
/// As for `products`.
#[inline(always)]
unsafe fn step<F: Form, const R: usize, const HIGH: bool, const DOT: bool, const STEP: usize>(
    sums: &mut [[int32x4_t; PARTS]; R],
    x: *const i8,
    w: *const u8,
    stride: usize,
) {
    let (word, column, high) = match F::KIND {
        Kind::Q8_0 | Kind::Q4K => (STEP, 4 * STEP, HIGH),
        // Both halves of a word's bytes, one after the other.
        Kind::Q4_0 => (STEP / 2, 4 * (STEP / 2) + 16 * (STEP % 2), STEP % 2 == 1),
    };
    // SAFETY: every machine of this architecture has NEON; the words and columns are readable by the caller's promise:
    // column + 4 <= 32.
    unsafe {
        let mut weights = [vreinterpretq_s8_u8(vdupq_n_u8(0)); PARTS];
        for i in 0..PARTS {
            let bytes = vld1q_u8(w.add(word * stride + 16 * i));
            weights[i] = vreinterpretq_s8_u8(match (F::KIND, high) {
                (Kind::Q8_0, _) => veorq_u8(bytes, vdupq_n_u8(0x80)),
                (_, false) => vandq_u8(bytes, vdupq_n_u8(15)),
                (_, true) => vshrq_n_u8::<4>(bytes),
            });
        }
        for r in 0..R {
            let four = x.add(BLOCK * r + column).cast::<i32>().read_unaligned();
            let x = vreinterpretq_s8_s32(vdupq_n_s32(four));
            for i in 0..PARTS {
                sums[r][i] = dot::<DOT>(sums[r][i], weights[i], x);
            }
        }
    }
}

/// Computes the integer products of R rows of `x` with sixteen rows of weights over 32 columns.
///
/// `HIGH`: the weights are in the high halves of bytes.
///
/// # Safety
/// R blocks of bytes are readable at `x` and their sums at `block_sums`; the words of the weights' block are readable
/// at `w`, `stride` bytes apart.
#[inline(always)]
unsafe fn products<F: Form, const R: usize, const HIGH: bool, const DOT: bool>(
    x: *const i8,
    block_sums: *const BlockSums,
    w: *const u8,
    stride: usize,
) -> [[int32x4_t; PARTS]; R] {
    // SAFETY: every machine of this architecture has NEON; the rest is the caller's promise.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); PARTS]; R];
        if F::KIND == Kind::Q4_0 {
            for (r, sums) in sums.iter_mut().enumerate() {
                *sums = [vshlq_n_s32::<3>(vdupq_n_s32((*block_sums.add(r)).negative)); PARTS];
            }
        }
        // Unrolled by hand: otherwise the compiler keeps a loop, with the sums in memory.
        step::<F, R, HIGH, DOT, 0>(&mut sums, x, w, stride);
        step::<F, R, HIGH, DOT, 1>(&mut sums, x, w, stride);
        step::<F, R, HIGH, DOT, 2>(&mut sums, x, w, stride);
        step::<F, R, HIGH, DOT, 3>(&mut sums, x, w, stride);
        step::<F, R, HIGH, DOT, 4>(&mut sums, x, w, stride);
        step::<F, R, HIGH, DOT, 5>(&mut sums, x, w, stride);
        step::<F, R, HIGH, DOT, 6>(&mut sums, x, w, stride);
        step::<F, R, HIGH, DOT, 7>(&mut sums, x, w, stride);
        sums
    }
}

/// Adds a block's scaled products to the sums, and subtracts the scaled minima of q4_k.
///
/// # Safety
/// Sums of R blocks are readable at `block_sums`.
#[inline(always)]
unsafe fn add<F: Form, const R: usize>(
    sums: &mut [[float32x4_t; PARTS]; R],
    products: [[int32x4_t; PARTS]; R],
    (scales, minima): ([float32x4_t; PARTS], [float32x4_t; PARTS]),
    block_sums: *const BlockSums,
) {
    for r in 0..R {
        // SAFETY: the caller's promise.
        let block_sums = unsafe { *block_sums.add(r) };
        for i in 0..PARTS {
            // SAFETY: every machine of this architecture has NEON.
            unsafe {
                let scale = vmulq_f32(scales[i], vdupq_n_f32(block_sums.scale));
                sums[r][i] = vfmaq_f32(sums[r][i], vcvtq_f32_s32(products[r][i]), scale);
                if F::KIND == Kind::Q4K {
                    sums[r][i] = vfmsq_f32(sums[r][i], vdupq_n_f32(block_sums.total), minima[i]);
                }
            }
        }
    }
}

/// Loads sixteen f16 numbers.
///
/// # Safety
/// 32 bytes are readable.
#[inline(always)]
unsafe fn halves(at: *const u8) -> [float32x4_t; PARTS] {
    let load = |i: usize| {
        // SAFETY: the caller's promise; every machine of this architecture has the instruction.
        unsafe {
            let bits = at.add(2 * LANES * i).cast::<u64>().read_unaligned();
            let wide: float32x4_t;
            asm!(
                "fmov {wide:d}, {bits}",
                "fcvtl {wide:v}.4s, {wide:v}.4h",
                wide = out(vreg) wide, bits = in(reg) bits,
                options(pure, nomem, nostack, preserves_flags)
            );
            wide
        }
    };
    [load(0), load(1), load(2), load(3)]
}

/// Returns the eight scales and eight minima of a q4_k block, a byte each: scales 0..4, 4..8, minima 0..4, 4..8.
///
/// # Safety
/// Three words of 4 rows are readable at `at`, `stride` bytes apart.
#[inline(always)]
unsafe fn six_bits(at: *const u8, stride: usize) -> [uint8x16_t; 4] {
    // SAFETY: the caller's promise; every machine of this architecture has NEON.
    unsafe {
        let (a, b, c) = (vld1q_u8(at), vld1q_u8(at.add(stride)), vld1q_u8(at.add(2 * stride)));
        let (six, four) = (vdupq_n_u8(63), vdupq_n_u8(15));
        [
            vandq_u8(a, six),
            vorrq_u8(vandq_u8(c, four), vshlq_n_u8::<4>(vshrq_n_u8::<6>(a))),
            vandq_u8(b, six),
            vorrq_u8(vshrq_n_u8::<4>(c), vshlq_n_u8::<4>(vshrq_n_u8::<6>(b))),
        ]
    }
}

/// Multiplies R rows of `x`, from `row` on, by sixteen rows of weights over some blocks. The sums start from `out`, or
/// from 0 at block 0.
///
/// # Safety
/// As for `panel`; the rows and the group are in bounds, and the blocks are whole stored blocks.
#[inline(always)]
unsafe fn tile<F: Form, const R: usize, const DOT: bool>(
    (x, row): (&Activations, usize),
    (w, group): (&Panel<'_>, usize),
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
    // SAFETY: every machine of this architecture has NEON.
    let mut sums = [[unsafe { vdupq_n_f32(0.0) }; PARTS]; R];
    for r in 0..R {
        for i in 0..PARTS {
            // SAFETY: four numbers are readable in the i-th four of sixteen.
            sums[r][i] = unsafe { vld1q_f32(lanes[r].as_ptr().add(LANES * i)) };
        }
    }
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
                let mut bits = [[vdupq_n_u8(0); 4]; PARTS];
                for i in 0..PARTS {
                    bits[i] = six_bits(words.add(4 * LANES * i), stride);
                }
                for part in 0..F::KIND.parts() {
                    let words = words.add((3 + part / 2 * 8) * stride);
                    let products = if part % 2 == 0 {
                        products::<F, R, false, DOT>(xs, block_sums, words, stride)
                    } else {
                        products::<F, R, true, DOT>(xs, block_sums, words, stride)
                    };
                    // Shifts this part's byte of every four to the lowest place.
                    let right = vdupq_n_s32(-8 * (part as i32 % 4));
                    let of = |bits| {
                        let byte = vandq_u32(vshlq_u32(vreinterpretq_u32_u8(bits), right), vdupq_n_u32(255));
                        vcvtq_f32_u32(byte)
                    };
                    let (mut part_scales, mut part_minima) = (scales, minima);
                    for i in 0..PARTS {
                        part_scales[i] = vmulq_f32(scales[i], of(bits[i][part / 4]));
                        part_minima[i] = vmulq_f32(minima[i], of(bits[i][2 + part / 4]));
                    }
                    add::<F, R>(&mut sums, products, (part_scales, part_minima), block_sums);
                    xs = xs.wrapping_add(BLOCK * x.stride());
                    block_sums = block_sums.wrapping_add(x.stride());
                }
            } else {
                let products = products::<F, R, false, DOT>(xs, block_sums, words, stride);
                add::<F, R>(&mut sums, products, (scales, scales), block_sums);
                xs = xs.wrapping_add(BLOCK * x.stride());
                block_sums = block_sums.wrapping_add(x.stride());
            }
            at = at.wrapping_add(stored_bytes);
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        let mut lanes = [0.0f32; GROUP];
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: four numbers are written to the i-th four of sixteen.
            unsafe { vst1q_f32(lanes.as_mut_ptr().add(LANES * i), *sum) };
        }
        // SAFETY: the caller's promise.
        unsafe { out.part(row + r, columns.clone()) }.copy_from_slice(&lanes[..columns.len()]);
    }
}

/// Multiplies some rows of `x` by a panel. `DOT`: whether to use the instruction for dot products of bytes.
///
/// # Safety
/// The machine has the instruction if `DOT`. The rows are in `x`, which has as many columns as the panel; `out` has
/// these rows and the panel's outputs, and no other thread accesses them.
pub(super) unsafe fn panel<F: Form, const DOT: bool>(
    x: &Activations,
    rows: Range<usize>,
    w: &Panel<'_>,
    out: Output<'_>,
) {
    let step = cached_blocks(F::KIND, w.width);
    for start in (0..w.blocks).step_by(step) {
        let blocks = start..w.blocks.min(start + step);
        for rows in tiles(rows.clone(), ROWS) {
            for group in 0..w.width / GROUP {
                // SAFETY: the caller's promise; a tile has one to three rows.
                unsafe {
                    match rows.len() {
                        1 => tile::<F, 1, DOT>((x, rows.start), (w, group), blocks.clone(), out),
                        2 => tile::<F, 2, DOT>((x, rows.start), (w, group), blocks.clone(), out),
                        _ => tile::<F, 3, DOT>((x, rows.start), (w, group), blocks.clone(), out),
                    }
                }
            }
        }
    }
}
