//! Compact weights with AVX-512: a step is three loads, two lookups in the table and four interleavings.
//!
//! Every sum is a chain over the columns in their order, whether it stays in a register or is kept from block to block.

use std::arch::x86_64::{
    __m512, __m512i, _mm_loadu_si128, _mm512_and_si512, _mm512_broadcast_i32x4, _mm512_castsi512_ps, _mm512_fmadd_ps,
    _mm512_load_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_blend_ps, _mm512_set1_epi8, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_epi8, _mm512_slli_epi32, _mm512_srli_epi16, _mm512_store_ps,
    _mm512_storeu_ps, _mm512_unpackhi_epi8, _mm512_unpacklo_epi8,
};
use std::ops::Range;

use half::bf16;

use super::format::{COLUMNS, Compact, Escape, STEP, place};
use crate::kernels::float::tile::{tiles, write};
use crate::kernels::panels::{self, Output, PANEL};
use crate::kernels::prefetch::{LINE, prefetch};

/// Bytes by which the stream is asked for ahead. An Intel Xeon reads fastest at 3 to 6 KiB, and at two thirds of that speed if
/// not asked.
const AHEAD: usize = 6 << 10;

/// Registers of a column.
const REGISTERS: usize = 4;

/// The low byte and the high byte of each weight of a step, as numbers of 16 bits in the order of `place`: of each column
/// two registers.
///
/// # Safety
/// The machine has AVX-512 F and BW, and a step is readable at `at`.
#[inline(always)]
unsafe fn pairs(at: *const u8, table: __m512i) -> [[__m512i; 2]; COLUMNS] {
    // SAFETY: the caller's promise.
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

/// A column in f32: register r has the rows from 16 r on.
///
/// # Safety
/// The machine has AVX-512 F.
#[inline(always)]
unsafe fn widened(pairs: [__m512i; 2]) -> [__m512; REGISTERS] {
    // SAFETY: the caller's promise.
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

/// # Safety
/// The machine has AVX-512 F and BW.
#[inline(always)]
unsafe fn table(w: &Compact) -> __m512i {
    // SAFETY: the table has 16 bytes; the rest is the caller's promise.
    unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(w.table.as_ptr().cast())) }
}

/// A column's weights with the true values of those whose codes stand for others, and the number of the next column that has
/// any. It is rare, and a call, so that the compiler keeps the sums in registers elsewhere.
///
/// # Safety
/// The machine has AVX-512 F, and the column's low bytes are readable at `lows`.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn correct(weights: &mut [__m512; REGISTERS], lows: *const u8, escapes: &mut &[Escape]) -> u32 {
    let column = escapes[0].column;
    while let [escape, rest @ ..] = *escapes
        && escape.column == column
    {
        let (register, lane) = (usize::from(escape.row) / 16, escape.row % 16);
        // SAFETY: every row has a low byte.
        unsafe {
            let low = *lows.add(place(usize::from(escape.row)));
            let value = _mm512_set1_ps(bf16::from_le_bytes([low, escape.high]).to_f32());
            weights[register] = _mm512_mask_blend_ps(1 << lane, weights[register], value);
        }
        *escapes = rest;
    }
    next(escapes)
}

/// The column of the first escape; a column that no panel has without one.
fn next(escapes: &[Escape]) -> u32 {
    escapes.first().map_or(u32::MAX, |escape| escape.column)
}

/// `M` rows of `x` against one panel. x: the first row; `ASK`: whether the panel is not in the cache
///
/// # Safety
/// The machine has AVX-512 F and BW, and `M` rows of `w.k` are readable at `x`.
#[inline(always)]
unsafe fn tile<const M: usize, const ASK: bool>(x: *const f32, w: &Compact, p: usize) -> [[__m512; REGISTERS]; M] {
    let (stream, mut escapes) = (w.panel(p), w.escapes(p));
    let mut escape = next(escapes);
    // SAFETY: steps are inside the panel, and columns inside the rows of x.
    unsafe {
        let table = table(w);
        let mut sums = [[_mm512_setzero_ps(); REGISTERS]; M];
        for step in 0..w.k / COLUMNS {
            let at = stream.as_ptr().add(step * STEP);
            if ASK {
                for line in (0..STEP).step_by(LINE) {
                    prefetch(at.wrapping_add(AHEAD + line));
                }
            }
            let pairs = pairs(at, table);
            for c in 0..COLUMNS {
                let column = step * COLUMNS + c;
                let mut weights = widened(pairs[c]);
                if column == escape as usize {
                    escape = correct(&mut weights, at.add(c * PANEL), &mut escapes);
                }
                for m in 0..M {
                    let x = _mm512_set1_ps(*x.add(m * w.k + column));
                    for r in 0..REGISTERS {
                        sums[m][r] = _mm512_fmadd_ps(x, weights[r], sums[m][r]);
                    }
                }
            }
        }
        sums
    }
}

/// Rows from which a panel is unpacked for [`KEPT`] of them at once, some columns at a time.
const MANY: usize = 24;
/// Columns that are unpacked at a time: in f32 they take 16 KiB, a third of the first cache.
const BLOCK: usize = 64;
/// Most rows whose sums are kept from block to block.
const KEPT: usize = 64;

/// Columns in f32, one after another.
#[repr(align(64))]
struct Block([f32; BLOCK * PANEL]);

/// Unpacks some columns, which begin with a step. escapes: those from there on
///
/// # Safety
/// The machine has AVX-512 F and BW.
#[inline(always)]
unsafe fn unpack(w: &Compact, p: usize, columns: Range<usize>, escapes: &mut &[Escape], block: &mut Block) {
    assert!(
        columns.start.is_multiple_of(COLUMNS) && columns.len() <= BLOCK && columns.end <= w.k,
        "unpack: whole steps of the panel, and a block"
    );
    let (steps, mut escape) = (w.panel(p), next(escapes));
    // SAFETY: the steps are the panel's, and the block has room for their columns, as was checked.
    unsafe {
        let table = table(w);
        for column in columns.clone().step_by(COLUMNS) {
            let at = steps.as_ptr().add(column / COLUMNS * STEP);
            for line in (0..STEP).step_by(LINE) {
                prefetch(at.wrapping_add(AHEAD + line));
            }
            let pairs = pairs(at, table);
            for c in 0..COLUMNS {
                let mut weights = widened(pairs[c]);
                if column + c == escape as usize {
                    escape = correct(&mut weights, at.add(c * PANEL), escapes);
                }
                for r in 0..REGISTERS {
                    let to = block.0.as_mut_ptr().add((column + c - columns.start) * PANEL + r * 16);
                    _mm512_store_ps(to, weights[r]);
                }
            }
        }
    }
}

/// Adds some columns to the sums of `M` rows. x: the first row's first of these columns
///
/// # Safety
/// The machine has AVX-512 F; `M` rows of `columns` are readable at `x`, `k` apart.
#[inline(always)]
unsafe fn add<const M: usize>(x: *const f32, k: usize, columns: usize, block: &Block, sums: &mut [[f32; PANEL]]) {
    assert!(sums.len() == M && columns <= BLOCK, "add: a tile");
    // SAFETY: the block has these columns, and the sums as many rows.
    unsafe {
        let mut own = [[_mm512_setzero_ps(); REGISTERS]; M];
        for m in 0..M {
            for r in 0..REGISTERS {
                own[m][r] = _mm512_loadu_ps(sums[m].as_ptr().add(r * 16));
            }
        }
        for c in 0..columns {
            let mut weights = [_mm512_setzero_ps(); REGISTERS];
            for r in 0..REGISTERS {
                weights[r] = _mm512_load_ps(block.0.as_ptr().add(c * PANEL + r * 16));
            }
            for m in 0..M {
                let x = _mm512_set1_ps(*x.add(m * k + c));
                for r in 0..REGISTERS {
                    own[m][r] = _mm512_fmadd_ps(x, weights[r], own[m][r]);
                }
            }
        }
        for m in 0..M {
            for r in 0..REGISTERS {
                _mm512_storeu_ps(sums[m].as_mut_ptr().add(r * 16), own[m][r]);
            }
        }
    }
}

/// Many rows of `x` against some panels: a block of columns is unpacked for [`KEPT`] of them.
///
/// # Safety
/// As for [`run`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn many(x: &[f32], rows: Range<usize>, w: &Compact, panels: Range<usize>, out: Output<'_>) {
    let (mut block, mut kept) = (Block([0.0; BLOCK * PANEL]), [[0.0f32; PANEL]; KEPT]);
    for p in panels {
        for first in rows.clone().step_by(KEPT) {
            let sums = &mut kept[..KEPT.min(rows.end - first)];
            sums.fill([0.0; PANEL]);
            let mut escapes = w.escapes(p);
            for start in (0..w.k).step_by(BLOCK) {
                let part = start..w.k.min(start + BLOCK);
                // SAFETY: the machine has the set; rows and columns are inside `x`.
                unsafe {
                    unpack(w, p, part.clone(), &mut escapes, &mut block);
                    tiles!(0..sums.len(), |row, M| {
                        let x = x[(first + row) * w.k + start..].as_ptr();
                        add::<M>(x, w.k, part.len(), &block, &mut sums[row..][..M]);
                    });
                }
            }
            let (columns, _) = panels::rows(p, w.n);
            for (row, sums) in (first..).zip(&*sums) {
                // SAFETY: the caller's promise.
                unsafe { out.part(row, columns.clone()) }.copy_from_slice(&sums[..columns.len()]);
            }
        }
    }
}

/// Rows of `x` against some panels.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL; rows and panels are in bounds, and no other thread accesses this part of `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn run(x: &[f32], rows: Range<usize>, w: &Compact, panels: Range<usize>, out: Output<'_>) {
    if rows.len() >= MANY {
        // SAFETY: the caller's promise.
        unsafe { many(x, rows, w, panels, out) };
        return;
    }
    for p in panels {
        let (columns, _) = panels::rows(p, w.n);
        tiles!(rows.clone(), |row, M| {
            // SAFETY: there are that many rows, and no other thread accesses their outputs.
            unsafe {
                let x = x[row * w.k..].as_ptr();
                // The first use brings the panel.
                let sums = if row == rows.start { tile::<M, true>(x, w, p) } else { tile::<M, false>(x, w, p) };
                write(&sums, out, row, columns.clone());
            }
        });
    }
}
