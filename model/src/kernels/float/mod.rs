//! Products `x . w^T` with weights in f32, bf16 or f16, packed in panels.
//!
//! Every output is one chain of fused multiply-adds over k, in order, in f32 (see `plain`). Weight rows map to lanes,
//! so no sum crosses lanes, and the result has the same bits on every instruction set, for any number of rows and
//! threads.

mod compact;
mod plain;
mod product;
mod stored;
mod tile;

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;

use super::Isa;
use super::element::Element;
use super::lines::Lines;
use super::panels::{self, Output, PACKED, PANEL};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::vector;
use compact::Compact;
use product::Product;
pub(crate) use stored::{Rows, Type};
use stored::{half, widened};

/// Weights (n, k) in panels.
#[derive(Debug)]
pub(crate) struct Packed {
    n: usize,
    k: usize,
    form: Form,
}

/// How the numbers are stored.
#[derive(Debug)]
enum Form {
    Plain { kind: Type, lines: Lines },
    Compact(Compact),
}

impl Packed {
    /// Packs matrices of `k` columns, stacked vertically; if their types differ, all become f32. Matrices in bf16 are
    /// stored compactly where that pays off.
    pub(crate) fn pack(parts: &[Rows<'_>], k: usize) -> Self {
        assert!(k > 0 && parts.iter().all(|part| part.len().is_multiple_of(k)), "pack: rows of {k} numbers");
        let weights = parts.iter().map(|part| part.len()).sum();
        let fit = compact::pays(Isa::detect(), weights) && parts.iter().all(|part| part.kind == Type::Bf16);
        let compact = if fit { Compact::pack(parts, k) } else { None };
        compact.map_or_else(|| Self::pack_plain(parts, k), Self::of_compact)
    }

    fn of_compact(compact: Compact) -> Self {
        let (n, k) = compact.shape();
        Self { n, k, form: Form::Compact(compact) }
    }

    fn pack_plain(parts: &[Rows<'_>], k: usize) -> Self {
        let n = parts.iter().map(|part| part.len() / k).sum();
        let first = parts.first().map_or(Type::F32, |part| part.kind);
        let kind = if parts.iter().all(|part| part.kind == first) { first } else { Type::F32 };
        let width: usize = (0..panels::count(n)).map(|p| panels::rows(p, n).1).sum();
        let mut lines = Lines::zeroed(width * k * kind.size());
        match kind {
            Type::F32 => interleave(parts, n, k, lines.as_mut_slice::<f32>(), widened),
            Type::Bf16 | Type::F16 => interleave(parts, n, k, lines.as_mut_slice::<u16>(), half),
        }
        Self { n, k, form: Form::Plain { kind, lines } }
    }

    /// Packs a matrix in f32.
    pub(crate) fn of_f32(w: &[f32], k: usize) -> Self {
        let bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::pack(&[Rows { kind: Type::F32, bytes: &bytes }], k)
    }

    /// Returns the number of bytes held.
    pub(crate) fn bytes(&self) -> usize {
        match &self.form {
            Form::Plain { lines, .. } => lines.bytes().len(),
            Form::Compact(compact) => compact.bytes(),
        }
    }

    /// Returns n, the number of outputs.
    pub(crate) fn rows(&self) -> usize {
        self.n
    }

    /// Returns k, the number of inputs.
    pub(crate) fn columns(&self) -> usize {
        self.k
    }

    /// Writes one row, widened to f32. out: (k)
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let (p, lane) = (row / PANEL, row % PANEL);
        let (_, width) = panels::rows(p, self.n);
        let at = |i: usize| p * PANEL * self.k + i * width + lane;
        match &self.form {
            Form::Plain { kind: Type::F32, lines } => read(lines.as_slice::<f32>(), at, out),
            Form::Plain { kind: Type::Bf16, lines } => read(lines.as_slice::<bf16>(), at, out),
            Form::Plain { kind: Type::F16, lines } => read(lines.as_slice::<f16>(), at, out),
            Form::Compact(compact) => compact.row(row, out),
        }
    }
}

/// Reads numbers and widens them to f32. at: the index of each in `numbers`
fn read<W: Element>(numbers: &[W], at: impl Fn(usize) -> usize, out: &mut [f32]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = numbers[at(i)].widen();
    }
}

/// Writes the panels in parallel.
fn interleave<T: Copy + Send + Sync>(
    parts: &[Rows<'_>],
    n: usize,
    k: usize,
    out: &mut [T],
    get: impl Fn(Rows<'_>, usize) -> T + Sync,
) {
    // For each row: its part, and the index of its first element in that part.
    let places: Vec<(Rows<'_>, usize)> =
        parts.iter().flat_map(|&part| (0..part.len() / k).map(move |row| (part, row * k))).collect();
    out.par_chunks_mut(PANEL * k).enumerate().for_each(|(p, out)| {
        let (range, width) = panels::rows(p, n);
        for (first, out) in (0..).step_by(PACKED).zip(out.chunks_mut(PACKED * width)) {
            for (lane, &(part, start)) in places[range.clone()].iter().enumerate() {
                for (i, column) in out.chunks_exact_mut(width).enumerate() {
                    column[lane] = get(part, start + first + i);
                }
            }
        }
    });
}

/// `out (rows, n) = x (rows, k) . w (n, k)^T` on the calling thread.
///
/// # Panics
/// If the lengths do not fit.
pub(crate) fn product(isa: Isa, x: &[f32], w: &Packed, out: &mut [f32]) {
    let rows = x.len() / w.k;
    assert!(x.len() == rows * w.k && out.len() == rows * w.n, "matmul: lengths do not fit");
    // SAFETY: this thread has the whole output, and the lengths were checked above.
    unsafe { panels(isa, x, 0..rows, w, 0..panels::count(w.n), Output::new(out, w.n.max(1))) };
}

/// Multiplies some rows of `x` by some panels of the weights.
///
/// # Safety
/// Rows and panels are in bounds of `x`, `w` and `out`, and no other thread accesses this part of `out`.
pub(crate) unsafe fn panels(
    isa: Isa,
    x: &[f32],
    rows: Range<usize>,
    w: &Packed,
    panels: Range<usize>,
    out: Output<'_>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let Packed { n, k, ref form } = *w;
        match form {
            Form::Plain { kind: Type::F32, lines } => {
                run::<f32>(isa, &Product { x, rows, w: lines.as_slice(), n, k, panels, out });
            }
            Form::Plain { kind: Type::Bf16, lines } => {
                run::<bf16>(isa, &Product { x, rows, w: lines.as_slice(), n, k, panels, out });
            }
            Form::Plain { kind: Type::F16, lines } => {
                run::<f16>(isa, &Product { x, rows, w: lines.as_slice(), n, k, panels, out });
            }
            Form::Compact(compact) => compact::panels(isa, x, rows, compact, panels, out),
        }
    }
}

/// # Safety
/// As for [`panels`].
unsafe fn run<W: Element>(isa: Isa, product: &Product<'_, W>) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields this only where the machine has AVX2, FMA and F16C.
        Isa::Avx2 => unsafe { avx2(product) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::available` yields these only where the machine has AVX-512 F, BW, DQ and VL.
        Isa::Avx512 | Isa::Avx512Vnni => unsafe { avx512(product) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `Isa::available` yields these only where the machine has NEON.
        Isa::Neon | Isa::NeonDot => unsafe { neon(product) },
        // SAFETY: the caller's promise.
        Isa::Plain => unsafe { plain::run(product) },
    }
}

/// One register holds a group of sixteen rows.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL, and no other thread accesses this part of the output.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn avx512<W: Element>(product: &Product<'_, W>) {
    // SAFETY: the caller's promise.
    unsafe { tile::run::<vector::avx512::V, W, 8, 4, 4, 4, 1>(product) };
}

/// Two registers hold a group.
///
/// # Safety
/// The machine has AVX2, FMA and F16C, and no other thread accesses this part of the output.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<W: Element>(product: &Product<'_, W>) {
    // SAFETY: the caller's promise.
    unsafe { tile::run::<vector::avx2::V, W, 0, 8, 4, 2, 2>(product) };
}

/// Four registers hold a group.
///
/// # Safety
/// The machine has NEON, and no other thread accesses this part of the output.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn neon<W: Element>(product: &Product<'_, W>) {
    // SAFETY: the caller's promise.
    unsafe { tile::run::<vector::neon::V, W, 0, 16, 4, 4, 4>(product) };
}

#[cfg(test)]
pub(super) mod tests;
