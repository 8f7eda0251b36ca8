//! How compact weights lie in memory.
//!
//! All panels are whole; the rows that pad the last one have any values. A panel is a sequence of steps of two columns, 192
//! bytes each: 64 low bytes of either column, and 64 bytes with the codes of both, the first column's in the lower four bits.
//! Within each 64 bytes the rows are in the order of [`place`], in which interleaving low and high bytes gives whole registers
//! of neighbouring rows.

use half::bf16;
use rayon::prelude::*;

use crate::kernels::float::stored::Rows;
use crate::kernels::lines::Lines;
use crate::kernels::panels::{self, GROUP, PANEL};

/// Columns of a step.
pub(super) const COLUMNS: usize = 2;
/// Bytes of a step.
pub(super) const STEP: usize = COLUMNS * PANEL + PANEL;
/// Columns that are packed at a time, so that their steps stay in the first cache.
const BLOCK: usize = 64;
/// Instead of a code, for a high byte that has none.
const ESCAPE: u8 = 16;
/// Of so many weights, one may be an escape: each costs about as much as a step.
const RARE: usize = 512;

/// A weight whose high byte has no code.
#[derive(Clone, Copy, Debug)]
pub(super) struct Escape {
    pub(super) column: u32,
    /// The row in its panel.
    pub(super) row: u8,
    pub(super) high: u8,
}

/// Weights (n, k) in bf16.
#[derive(Debug)]
pub(in super::super) struct Compact {
    pub(super) n: usize,
    pub(super) k: usize,
    /// The high byte of each code.
    pub(super) table: [u8; 16],
    stream: Lines,
    /// Of each panel, by columns and rows.
    escapes: Vec<Box<[Escape]>>,
}

/// The place of a row among the 64 bytes of a column: registers 2h and 2h + 1 take turns in bytes 8h to 8h + 7 of each
/// sixteen.
pub(super) const fn place(row: usize) -> usize {
    let (register, lane) = (row / 16, row % 16);
    lane / 4 * 16 + register / 2 * 8 + lane % 4 * 2 + register % 2
}

impl Compact {
    /// Packs matrices of `k` columns, stacked one below the other; `None` if they are not fit for it.
    pub(in super::super) fn pack(parts: &[Rows<'_>], k: usize) -> Option<Self> {
        let n: usize = parts.iter().map(|part| part.len() / k).sum();
        let plain = n.next_multiple_of(GROUP) * k * size_of::<bf16>();
        // A last panel of few rows may be padded with more than is saved.
        if !k.is_multiple_of(COLUMNS) || panels::count(n) * (k / COLUMNS) * STEP >= plain {
            return None;
        }
        let counts = high_bytes(parts);
        let mut order: Vec<u8> = (0..=u8::MAX).collect();
        order.sort_by_key(|high| std::cmp::Reverse(counts[usize::from(*high)]));
        let total = |highs: &[u8]| highs.iter().map(|high| counts[usize::from(*high)]).sum::<usize>();
        if total(&order[16..]) * RARE > total(&order) {
            return None;
        }
        Some(Self::coded(parts, k, std::array::from_fn(|code| order[code])))
    }

    /// Packs matrices with given codes.
    pub(super) fn coded(parts: &[Rows<'_>], k: usize, table: [u8; 16]) -> Self {
        let rows: Vec<(Rows<'_>, usize)> =
            parts.iter().flat_map(|&part| (0..part.len() / k).map(move |row| (part, row * k))).collect();
        let n = rows.len();
        let mut codes = [ESCAPE; 256];
        for (code, high) in (0u8..).zip(table) {
            codes[usize::from(high)] = code;
        }
        let mut stream = Lines::zeroed(panels::count(n) * (k / COLUMNS) * STEP);
        let panels = stream.bytes_mut().par_chunks_mut(k / COLUMNS * STEP).enumerate();
        let escapes = panels.map(|(p, out)| pack_panel(&rows[panels::rows(p, n).0], &codes, out)).collect();
        Self { n, k, table, stream, escapes }
    }

    /// n and k.
    pub(in super::super) fn shape(&self) -> (usize, usize) {
        (self.n, self.k)
    }

    /// Bytes held.
    pub(in super::super) fn bytes(&self) -> usize {
        self.stream.bytes().len() + self.escapes.iter().map(|panel| size_of_val(&panel[..])).sum::<usize>()
    }

    /// The steps of a panel.
    pub(super) fn panel(&self, p: usize) -> &[u8] {
        let len = self.k / COLUMNS * STEP;
        &self.stream.bytes()[p * len..(p + 1) * len]
    }

    /// The escapes of a panel, by columns and rows.
    pub(super) fn escapes(&self, p: usize) -> &[Escape] {
        &self.escapes[p]
    }

    /// One row, widened. out: (k)
    pub(in super::super) fn row(&self, row: usize, out: &mut [f32]) {
        let (p, row) = (row / PANEL, row % PANEL);
        let at = place(row);
        let widen = |low, high| bf16::from_le_bytes([low, high]).to_f32();
        let steps = self.panel(p).chunks_exact(STEP);
        for (bytes, out) in steps.zip(out.chunks_exact_mut(COLUMNS)) {
            let codes = bytes[COLUMNS * PANEL + at];
            out[0] = widen(bytes[at], self.table[usize::from(codes & 15)]);
            out[1] = widen(bytes[PANEL + at], self.table[usize::from(codes >> 4)]);
        }
        for escape in self.escapes(p).iter().filter(|escape| usize::from(escape.row) == row) {
            let column = escape.column as usize;
            let low = self.panel(p)[column / COLUMNS * STEP + column % COLUMNS * PANEL + at];
            out[column] = widen(low, escape.high);
        }
    }
}

/// How often each high byte occurs.
fn high_bytes(parts: &[Rows<'_>]) -> [usize; 256] {
    let chunks: Vec<&[u8]> = parts.iter().flat_map(|part| part.bytes.chunks(1 << 20)).collect();
    let count = |bytes: &&[u8]| {
        let mut counts = [0; 256];
        for number in bytes.as_chunks::<2>().0 {
            counts[usize::from(number[1])] += 1;
        }
        counts
    };
    let counted: Vec<[usize; 256]> = chunks.par_iter().map(count).collect();
    std::array::from_fn(|high| counted.iter().map(|counts| counts[high]).sum())
}

/// Writes a panel's steps, and returns its escapes. rows: a part and the row's first number there; codes: of each high byte,
/// [`ESCAPE`] for those without one
fn pack_panel(rows: &[(Rows<'_>, usize)], codes: &[u8; 256], out: &mut [u8]) -> Box<[Escape]> {
    let mut escapes = Vec::new();
    for (first, out) in (0..).step_by(BLOCK).zip(out.chunks_mut(BLOCK / COLUMNS * STEP)) {
        let (steps, _) = out.as_chunks_mut::<STEP>();
        for (row, &(part, start)) in (0u8..).zip(rows) {
            let place = place(usize::from(row));
            let (pairs, _) = part.bytes[2 * (start + first)..].as_chunks::<{ 2 * COLUMNS }>();
            for (i, (&[low0, high0, low1, high1], step)) in pairs.iter().zip(&mut *steps).enumerate() {
                let [code0, code1] = [high0, high1].map(|high| codes[usize::from(high)]);
                step[place] = low0;
                step[PANEL + place] = low1;
                step[COLUMNS * PANEL + place] = code0 & 15 | code1 << 4;
                if (code0 | code1) & ESCAPE != 0 {
                    let column = (first + i * COLUMNS) as u32;
                    let both = [(column, code0, high0), (column + 1, code1, high1)];
                    let without = both.into_iter().filter(|(_, code, _)| *code == ESCAPE);
                    escapes.extend(without.map(|(column, _, high)| Escape { column, row, high }));
                }
            }
        }
    }
    escapes.sort_unstable_by_key(|escape| (escape.column, escape.row));
    escapes.into_boxed_slice()
}
