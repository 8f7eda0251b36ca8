//! The memory layout of compact weights.
//!
//! All panels are full; the rows that pad the last one hold arbitrary values. A panel is a sequence of steps. A step
//! holds two columns in 192 bytes: 64 low bytes for each column, then 64 bytes with the codes of both, the first
//! column's in the lower four bits. Within each 64 bytes the rows are in the order of [`place`], so that interleaving
//! low and high bytes yields whole registers of neighboring rows.

use half::bf16;
use rayon::prelude::*;

use crate::kernels::float::stored::Rows;
use crate::kernels::lines::Lines;
use crate::kernels::panels::{self, GROUP, PACKED, PANEL};
use crate::kernels::{Isa, multiversion};

/// Columns of a step.
pub(super) const COLUMNS: usize = 2;
/// Bytes of a step.
pub(super) const STEP: usize = COLUMNS * PANEL + PANEL;
/// Marks a high byte that has no code.
const ESCAPE: u8 = 16;
/// At most one weight in this many may be an escape: each escape costs about as much as one or two steps.
const RARE: usize = 512;
/// The approximate number of weights sampled to find the frequent high bytes.
const SAMPLE: usize = 1 << 18;

/// A weight whose high byte has no code.
#[derive(Clone, Copy, Debug)]
pub(super) struct Escape {
    pub(super) column: u32,
    /// The row within its panel.
    pub(super) row: u8,
    pub(super) high: u8,
}

/// Weights (n, k) in bf16.
#[derive(Debug)]
pub(in super::super) struct Compact {
    pub(super) n: usize,
    /// A whole number of steps.
    pub(super) k: usize,
    /// The high byte of each code.
    pub(super) table: [u8; 16],
    stream: Lines,
    /// The escapes of each panel, ordered by column, then row.
    escapes: Vec<Box<[Escape]>>,
}

/// Returns the position of a row among the 64 bytes of a column: groups 2h and 2h + 1 alternate in bytes 8h to 8h + 7
/// of each sixteen.
pub(super) const fn place(row: usize) -> usize {
    let (group, lane) = (row / 16, row % 16);
    lane / 4 * 16 + group / 2 * 8 + lane % 4 * 2 + group % 2
}

impl Compact {
    /// Packs matrices of `k` columns, stacked vertically; returns `None` if this format does not suit them.
    pub(in super::super) fn pack(parts: &[Rows<'_>], k: usize) -> Option<Self> {
        let n: usize = parts.iter().map(|part| part.len() / k).sum();
        let plain = n.next_multiple_of(GROUP) * k * size_of::<bf16>();
        // Padding a last panel of few rows may cost more than packing saves.
        if !k.is_multiple_of(COLUMNS) || panels::count(n) * (k / COLUMNS) * STEP >= plain {
            return None;
        }
        let rows = rows(parts, k);
        let packed = Self::coded(&rows, k, frequent(&rows, k)?);
        // The sample may have missed rare high bytes.
        let escapes: usize = packed.escapes.iter().map(|panel| panel.len()).sum();
        (escapes * RARE <= n * k).then_some(packed)
    }

    /// Packs rows with the given table of codes.
    pub(super) fn coded(rows: &[&[u8]], k: usize, table: [u8; 16]) -> Self {
        assert!(k.is_multiple_of(COLUMNS), "{k} columns are not whole steps");
        let (n, isa) = (rows.len(), Isa::detect());
        let mut stream = Lines::zeroed(panels::count(n) * (k / COLUMNS) * STEP);
        let panels = stream.bytes_mut().par_chunks_mut(k / COLUMNS * STEP).enumerate();
        let pack = |(p, out)| {
            let mut escapes = Vec::new();
            pack_panel(isa, &rows[panels::rows(p, n).0], &table, out, &mut escapes);
            escapes.sort_unstable_by_key(|escape: &Escape| (escape.column, escape.row));
            escapes.into_boxed_slice()
        };
        let escapes = panels.map(pack).collect();
        Self { n, k, table, stream, escapes }
    }

    /// Returns n and k.
    pub(in super::super) fn shape(&self) -> (usize, usize) {
        (self.n, self.k)
    }

    /// Returns the number of bytes held.
    pub(in super::super) fn bytes(&self) -> usize {
        self.stream.bytes().len() + self.escapes.iter().map(|panel| size_of_val(&panel[..])).sum::<usize>()
    }

    /// Returns the steps of a panel.
    pub(super) fn panel(&self, p: usize) -> &[u8] {
        let len = self.k / COLUMNS * STEP;
        &self.stream.bytes()[p * len..(p + 1) * len]
    }

    /// Returns the escapes of a panel, ordered by column, then row.
    pub(super) fn escapes(&self, p: usize) -> &[Escape] {
        &self.escapes[p]
    }

    /// Writes one row, widened to f32. out: (k)
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

/// Returns the bytes of each row of matrices of `k` columns, stacked vertically.
pub(super) fn rows<'a>(parts: &[Rows<'a>], k: usize) -> Vec<&'a [u8]> {
    parts.iter().flat_map(|part| part.bytes.chunks_exact(k * size_of::<bf16>())).collect()
}

/// Returns the sixteen most frequent high bytes in a sample of the rows, or `None` if too many sampled weights have
/// others.
fn frequent(rows: &[&[u8]], k: usize) -> Option<[u8; 16]> {
    let mut counts = [0usize; 256];
    // An odd stride: heads have a power of two rows, and rows may differ by their position in the head.
    let apart = (rows.len() * k / SAMPLE) | 1;
    for row in rows.iter().step_by(apart) {
        for number in row.as_chunks::<2>().0 {
            counts[usize::from(number[1])] += 1;
        }
    }
    let mut order: [u8; 256] = std::array::from_fn(|high| high as u8);
    order.sort_by_key(|high| std::cmp::Reverse(counts[usize::from(*high)]));
    let total = |highs: &[u8]| highs.iter().map(|high| counts[usize::from(*high)]).sum::<usize>();
    (total(&order[16..]) * RARE <= total(&order)).then(|| std::array::from_fn(|code| order[code]))
}

/// The inverse of [`place`].
const ROWS: [u8; PANEL] = {
    let (mut rows, mut row) = ([0; PANEL], 0);
    while row < PANEL {
        rows[place(row)] = row as u8;
        row += 1;
    }
    rows
};

multiversion! {
    /// Writes a panel's steps and appends its escapes in any order. rows: at most a panel; table: the high byte of each
    /// code
    fn pack_panel(rows: &[&[u8]], table: &[u8; 16], out: &mut [u8], escapes: &mut Vec<Escape>) = pack_panel_of;
}

#[inline(always)]
fn pack_panel_of(rows: &[&[u8]], table: &[u8; 16], out: &mut [u8], escapes: &mut Vec<Escape>) {
    // Rows that pad the panel get a high byte that has a code, so they are no escapes.
    let mut block = [[u16::from(table[0]) << 8; PANEL]; PACKED];
    for (first, out) in (0..).step_by(PACKED).zip(out.chunks_mut(PACKED / COLUMNS * STEP)) {
        let steps = out.as_chunks_mut::<STEP>().0;
        for (row, bytes) in rows.iter().enumerate() {
            let numbers = bytes.as_chunks::<2>().0[first..].iter();
            for (column, number) in block.iter_mut().zip(numbers) {
                column[place(row)] = u16::from_le_bytes(*number);
            }
        }
        for (i, (columns, step)) in block.as_chunks::<COLUMNS>().0.iter().zip(steps).enumerate() {
            let both = [codes(&columns[0], table), codes(&columns[1], table)];
            for at in 0..PANEL {
                step[at] = columns[0][at] as u8;
                step[PANEL + at] = columns[1][at] as u8;
                step[COLUMNS * PANEL + at] = both[0][at] & 15 | both[1][at] << 4;
            }
            for (column, (found, numbers)) in (first + i * COLUMNS..).zip(both.iter().zip(columns)) {
                let mut any = 0;
                for code in found {
                    any |= code;
                }
                if any & ESCAPE != 0 {
                    add_escapes(column, found, numbers, escapes);
                }
            }
        }
    }
}

/// Appends the escapes of a column.
#[cold]
fn add_escapes(column: usize, codes: &[u8; PANEL], numbers: &[u16; PANEL], escapes: &mut Vec<Escape>) {
    let without = (0..PANEL).filter(|&at| codes[at] == ESCAPE);
    let escape = |at: usize| Escape { column: column as u32, row: ROWS[at], high: (numbers[at] >> 8) as u8 };
    escapes.extend(without.map(escape));
}

/// Returns the code of each number's high byte, or [`ESCAPE`]. Comparing with every table entry takes a few
/// instructions per register of numbers, whereas a lookup takes a few per number.
#[inline(always)]
fn codes(numbers: &[u16; PANEL], table: &[u8; 16]) -> [u8; PANEL] {
    let (mut high, mut codes) = ([0; PANEL], [ESCAPE; PANEL]);
    for at in 0..PANEL {
        high[at] = (numbers[at] >> 8) as u8;
    }
    for code in 0..table.len() {
        for at in 0..PANEL {
            codes[at] = if high[at] == table[code] { code as u8 } else { codes[at] };
        }
    }
    codes
}
