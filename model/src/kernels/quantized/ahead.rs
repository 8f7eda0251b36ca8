//! Asking for weights before they are needed.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

/// Bytes that one request brings.
pub(super) const LINE: usize = 64;

/// Weights that will be needed: asked for while others are worked on, where the machine's own guesses come late.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub(super) at: *const u8,
    /// Lines to ask for with every block of 32 columns.
    pub(super) lines: usize,
}

impl Ahead {
    /// Asks for the next lines.
    #[inline(always)]
    pub(super) fn ask(&mut self) {
        for _ in 0..self.lines {
            // SAFETY: nothing is read, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.at.cast()) };
            self.at = self.at.wrapping_add(LINE);
        }
    }
}
