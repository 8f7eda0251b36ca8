//! Splits a slice into equal parts, each of which one thread claims.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

/// Records which parts are claimed. Reused from job to job to avoid allocations.
#[derive(Debug, Default)]
pub(crate) struct Marks(Vec<AtomicBool>);

/// The parts of one slice.
pub(crate) struct Parts<'a, T> {
    base: *mut T,
    all: usize,
    len: usize,
    taken: &'a [AtomicBool],
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: a part is handed out once, so two threads never have the same elements, which are `Send`.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    /// Splits a slice into parts of `len` elements; the last may be shorter, and there are none if `len` is 0.
    pub(crate) fn new(slice: &'a mut [T], len: usize, marks: &'a mut Marks) -> Self {
        let count = if len == 0 { 0 } else { slice.len().div_ceil(len) };
        marks.0.truncate(count);
        marks.0.iter_mut().for_each(|mark| *mark.get_mut() = false);
        marks.0.resize_with(count, AtomicBool::default);
        Self { base: slice.as_mut_ptr(), all: slice.len(), len, taken: &marks.0, slice: PhantomData }
    }

    /// Returns part `i` to the first caller, and `None` to all others or if there is no such part.
    #[allow(clippy::mut_from_ref, reason = "each part is returned once")]
    pub(crate) fn take(&self, i: usize) -> Option<&'a mut [T]> {
        if self.taken.get(i)?.swap(true, Ordering::Relaxed) {
            return None;
        }
        let start = i * self.len;
        // SAFETY: part i is in the slice, which is borrowed for 'a, and its mark was not set: no other thread has it.
        Some(unsafe { std::slice::from_raw_parts_mut(self.base.add(start), self.len.min(self.all - start)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_claimed_once() {
        let (mut numbers, mut marks) = ([0u32; 11], Marks::default());
        for round in 1..3 {
            let parts = Parts::new(&mut numbers, 3, &mut marks);
            let (a, b) = (parts.take(2).unwrap(), parts.take(0).unwrap());
            a.fill(round);
            b.fill(round + 10);
            assert!(parts.take(2).is_none() && parts.take(4).is_none());
            assert_eq!(parts.take(3).unwrap().len(), 2);
            assert_eq!(numbers, [round + 10, round + 10, round + 10, 0, 0, 0, round, round, round, 0, 0]);
        }
        assert!(Parts::new(&mut numbers, 0, &mut marks).take(0).is_none());
    }
}
