//! The layout of weights in memory: panels of interleaved rows, so that one load reads a column of many rows.
//!
//! A weight matrix (n, k) is split into panels of [`PANEL`] rows. The last panel may be narrower, a multiple of
//! [`GROUP`] rows; its missing rows are zero. A panel stores column after column, and each column holds the panel's
//! rows side by side: kernels stream a panel from its first byte to its last, and every row is a lane, so that no sum
//! crosses lanes.

use std::marker::PhantomData;
use std::ops::Range;

use super::threads::Threads;

/// Rows of a whole panel.
pub(crate) const PANEL: usize = 64;
/// Columns of a float panel that are packed at a time, so that they stay in the cache: 16 KiB in 16 bits, 32 KiB in
/// f32.
pub(crate) const PACKED: usize = 128;
/// The rows of a panel are padded to a multiple of this: the lanes of the widest register.
pub(crate) const GROUP: usize = 16;

/// Returns the number of panels of `n` rows.
#[inline]
pub(crate) fn count(n: usize) -> usize {
    n.div_ceil(PANEL)
}

/// Returns the rows in panel `p` of `n` rows, and its width: the number of rows padded to whole groups.
#[inline]
pub(crate) fn rows(p: usize, n: usize) -> (Range<usize>, usize) {
    let range = p * PANEL..n.min((p + 1) * PANEL);
    let width = range.len().next_multiple_of(GROUP);
    (range, width)
}

/// Multiply-adds below which one thread is faster than several.
const SERIAL: usize = 1 << 15;
/// Weight bytes that a thread claims at a time for one row of `x`: some microseconds of streaming.
const PIECE: usize = 96 << 10;
/// The fewest rows of `x` that a thread claims: a multiple of every kernel's tile.
const FEWEST: usize = 24;

/// How a product of some rows with a matrix is split among threads. The split changes no result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Split {
    rows: usize,
    panels: usize,
    /// Rows per piece.
    block: usize,
    /// Panels per piece.
    group: usize,
}

impl Split {
    /// Splits the product of `rows` rows with a matrix (n, k) of `bytes` bytes if there is work enough for several
    /// threads.
    pub(crate) fn new(threads: &Threads, rows: usize, (n, k): (usize, usize), bytes: usize) -> Self {
        let all = count(n);
        if threads.count() == 1 || rows * n * k < SERIAL {
            return Self { rows, panels: all, block: rows.max(1), group: all.max(1) };
        }
        // A piece has enough panels for some microseconds; if there are few panels, the rows are split too.
        let panel = bytes.div_ceil(all).max(1);
        let group = PIECE.div_ceil(panel * rows);
        // For one row, kernels read two panels at once.
        let group = if rows == 1 && all >= 4 * threads.count() { group.next_multiple_of(2) } else { group };
        // Many rows form at least two blocks, one for each end of the job: a core's caches hold what half of the
        // threads read. With fewer rows, the second block might have a single one.
        let fewest = if rows >= 3 * FEWEST { 2 } else { 1 };
        let wanted = (4 * threads.count()).div_ceil(all.div_ceil(group)).max(fewest).min(rows / FEWEST).max(1);
        Self { rows, panels: all, block: rows.div_ceil(wanted).next_multiple_of(FEWEST), group }
    }

    fn blocks(self) -> usize {
        self.rows.div_ceil(self.block)
    }

    fn groups(self) -> usize {
        self.panels.div_ceil(self.group)
    }

    /// Returns the number of pieces; 0 if the product is empty.
    pub(crate) fn pieces(self) -> usize {
        self.groups() * self.blocks()
    }

    /// Returns the number of pieces in the first half of the rows; 0 if there is only one block of rows.
    pub(crate) fn first_half(self) -> usize {
        self.groups() * (self.blocks() / 2)
    }

    /// Returns the rows and panels of piece `i`, ordered by block of rows. Pieces do not overlap.
    pub(crate) fn piece(self, i: usize) -> (Range<usize>, Range<usize>) {
        let (row, panel) = (i / self.groups() * self.block, i % self.groups() * self.group);
        (row..self.rows.min(row + self.block), panel..self.panels.min(panel + self.group))
    }
}

/// A matrix that several threads write at the same time, each to different elements.
#[derive(Clone, Copy)]
pub(crate) struct Output<'a> {
    base: *mut f32,
    rows: usize,
    stride: usize,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: `part` requires that no two threads have the same elements; no thread reads until all are done.
unsafe impl Send for Output<'_> {}
// SAFETY: as above.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    /// Wraps a matrix with rows of `stride` numbers.
    pub(crate) fn new(out: &'a mut [f32], stride: usize) -> Self {
        assert!(stride > 0 && out.len().is_multiple_of(stride), "output: rows of {stride} do not fill {}", out.len());
        Self { base: out.as_mut_ptr(), rows: out.len() / stride, stride, matrix: PhantomData }
    }

    /// Returns whether the matrix has at least that many rows and columns.
    pub(crate) fn holds(self, rows: usize, columns: usize) -> bool {
        rows <= self.rows && columns <= self.stride
    }

    /// Returns neighboring elements of one row.
    ///
    /// # Safety
    /// `row` and the columns are in bounds; no other thread accesses these elements while the slice lives.
    #[inline(always)]
    pub(crate) unsafe fn part(self, row: usize, columns: Range<usize>) -> &'a mut [f32] {
        debug_assert!(row < self.rows && columns.start <= columns.end && columns.end <= self.stride);
        // SAFETY: the caller keeps row and columns inside and disjoint from all others.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.stride + columns.start), columns.len()) }
    }
}
