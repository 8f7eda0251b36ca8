//! Memory for weights: aligned to cache lines, on huge pages.
//!
//! With small pages a processor walks the page tables every 4 KiB, and under a hypervisor each walk becomes several:
//! weights are then read at half the speed. A huge page has 2 MiB, more than many matrices, so matrices lie side by
//! side in blocks.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use memmap2::{MmapMut, MmapRaw};

use super::element::Plain;
use super::prefetch::LINE;

/// Bytes of a huge page.
const PAGE: usize = 2 << 20;
/// Bytes of a block that several matrices share. A matrix of at least half this size has a block of its own.
const SHARED: usize = 64 << 20;

/// Pages that hold some matrices and are freed when the last of these is dropped. The system provides each page,
/// zeroed, at its first write, so the thread that fills a page also clears it.
struct Block {
    map: MmapRaw,
    /// The offset of the first huge page in the map.
    first: usize,
}

impl Block {
    /// Maps room for `len` bytes.
    fn new(len: usize) -> Arc<Self> {
        let whole = len.checked_add(PAGE).and_then(|len| len.checked_next_multiple_of(PAGE));
        let map = MmapMut::map_anon(whole.unwrap_or(usize::MAX));
        let mut map = map.unwrap_or_else(|error| panic!("no memory for {len} bytes of weights: {error}"));
        let first = map.as_ptr().addr().next_multiple_of(PAGE) - map.as_ptr().addr();
        super::advise_huge(&mut map[first..]);
        Arc::new(Self { map: map.into(), first })
    }

    /// Returns the address of the `len` bytes that begin at `start`.
    fn piece(&self, start: usize, len: usize) -> NonNull<u8> {
        let room = self.map.len() - self.first;
        assert!(start <= room && len <= room - start, "{len} bytes at {start} of a block of {room}");
        // SAFETY: the bytes are in the map, which does not lie at address 0.
        unsafe { NonNull::new_unchecked(self.map.as_mut_ptr().add(self.first + start)) }
    }
}

/// The block that the next matrices share, and how many of its bytes are taken.
static OPEN: Mutex<(Weak<Block>, usize)> = Mutex::new((Weak::new(), 0));

/// Takes `len` bytes, a multiple of [`LINE`], from a block. No earlier matrix had them, so they are zeros.
fn take(len: usize) -> (Arc<Block>, NonNull<u8>) {
    if len >= SHARED / 2 {
        let block = Block::new(len);
        let start = block.piece(0, len);
        return (block, start);
    }
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let (block, taken) = match open.0.upgrade() {
        Some(block) if open.1 + len <= SHARED => (block, open.1),
        _ => (Block::new(SHARED), 0),
    };
    *open = (Arc::downgrade(&block), taken + len);
    let start = block.piece(taken, len);
    (block, start)
}

/// A buffer of bytes, aligned to cache lines.
pub(crate) struct Lines {
    /// Keeps the memory alive; `None` if there are no bytes.
    _block: Option<Arc<Block>>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a value owns its bytes: `take` hands out no byte twice while their block lives.
unsafe impl Send for Lines {}
// SAFETY: as above.
unsafe impl Sync for Lines {}

impl Lines {
    /// Returns `len` zero bytes.
    pub(crate) fn zeroed(len: usize) -> Self {
        if len == 0 {
            return Self { _block: None, start: NonNull::<Line>::dangling().cast(), len };
        }
        let whole = len.next_multiple_of(LINE);
        let (block, start) = take(whole);
        Self { _block: Some(block), start, len }
    }

    /// Returns the bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.as_slice()
    }

    /// Returns the bytes, mutable.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }

    /// Returns the bytes as numbers, without an incomplete one at the end.
    pub(crate) fn as_slice<T: Plain>(&self) -> &[T] {
        // SAFETY: the bytes are initialized and aligned to cache lines, which is enough for every `Plain`, and any bits
        // are a `T`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.len / size_of::<T>()) }
    }

    /// Returns the bytes as numbers, mutable.
    pub(crate) fn as_mut_slice<T: Plain>(&mut self) -> &mut [T] {
        // SAFETY: as for `as_slice`, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len / size_of::<T>()) }
    }
}

/// A type with the alignment of a cache line.
#[repr(align(64))]
struct Line;

impl Clone for Lines {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len);
        copy.bytes_mut().copy_from_slice(self.bytes());
        copy
    }
}

impl Default for Lines {
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl fmt::Debug for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lines").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zero_aligned_and_apart() {
        let lens = [0, 1, 63, 64, 65, 5000, SHARED / 2 - 1, SHARED / 2 + 1, 7, SHARED / 2 - 64, 9];
        let mut all: Vec<Lines> = lens.map(Lines::zeroed).into();
        for (i, lines) in all.iter_mut().enumerate() {
            assert_eq!(lines.bytes().as_ptr().addr() % LINE, 0);
            assert!(lines.bytes().len() == lens[i] && lines.bytes().iter().all(|byte| *byte == 0));
            lines.bytes_mut().fill(i as u8);
        }
        let copy = all[5].clone();
        all.remove(6);
        all.push(Lines::zeroed(100));
        assert!(copy.bytes().iter().all(|byte| *byte == 5));
        assert!(all[4].bytes().iter().all(|byte| *byte == 4) && all[7].bytes().iter().all(|byte| *byte == 8));
        assert!(all.last().is_some_and(|new| new.bytes().iter().all(|byte| *byte == 0)));
    }

    #[test]
    fn numbers_leave_out_an_incomplete_one() {
        let mut lines = Lines::zeroed(11);
        lines.as_mut_slice::<f32>().copy_from_slice(&[1.0, 2.0]);
        assert_eq!(lines.as_slice::<f32>(), [1.0, 2.0]);
        assert_eq!(lines.bytes()[8..], [0; 3]);
        assert!(Lines::default().as_slice::<f32>().is_empty());
    }
}
