//! Limits the memory of texts that follow grammars: each text has a small allowance, and all texts share a bounded pool
//! beyond that.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that every text may hold in any case. Common grammars need less, so they work whatever others do.
const OWN_BYTES: usize = 4 << 20;

/// Most bytes of one text.
const TEXT_BYTES: usize = 32 << 20;

/// Bytes that all texts together may hold beyond [`OWN_BYTES`] each.
const SHARED_BYTES: usize = 256 << 20;

/// The unit in which shared bytes are taken.
const UNIT: usize = 1 << 20;

/// The shared bytes that are still free.
#[derive(Debug)]
pub(super) struct Memory(AtomicUsize);

impl Default for Memory {
    fn default() -> Self {
        Self(AtomicUsize::new(SHARED_BYTES))
    }
}

/// The memory of one text. Dropping it returns the shared part.
#[derive(Debug)]
pub(super) struct Share {
    memory: Arc<Memory>,
    /// Bytes of the shared pool that it holds.
    taken: usize,
}

impl Share {
    pub(super) fn new(memory: &Arc<Memory>) -> Self {
        Self { memory: Arc::clone(memory), taken: 0 }
    }

    /// Notes that the text holds `bytes`.
    ///
    /// # Errors
    /// That is more than one text may hold, or more than is left in the pool.
    pub(super) fn hold(&mut self, bytes: usize) -> Result<(), String> {
        if bytes > TEXT_BYTES {
            return Err(format!("its parser needs more than {TEXT_BYTES} bytes"));
        }
        let needed = bytes.saturating_sub(OWN_BYTES).next_multiple_of(UNIT);
        let more = needed.saturating_sub(self.taken);
        if more > 0 {
            let take = |left: usize| left.checked_sub(more);
            let taken = self.memory.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, take);
            taken.map_err(|_| format!("the parsers of all texts hold {SHARED_BYTES} bytes already"))?;
            self.taken += more;
        }
        Ok(())
    }

    /// Returns the shared bytes that the text holds.
    pub(super) fn release(&mut self) {
        self.memory.0.fetch_add(std::mem::take(&mut self.taken), Ordering::AcqRel);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_has_its_own_part_and_the_rest_is_bounded_and_returned() {
        let memory = Arc::<Memory>::default();
        let full = |_| {
            let mut share = Share::new(&memory);
            share.hold(TEXT_BYTES).map(|()| share)
        };
        let shares: Vec<Share> = (0..1000).map(full).take_while(Result::is_ok).flatten().collect();
        assert_eq!(shares.len(), SHARED_BYTES / (TEXT_BYTES - OWN_BYTES));
        let mut small = Share::new(&memory);
        assert!(small.hold(OWN_BYTES).is_ok());
        assert!(small.hold(TEXT_BYTES).unwrap_err().contains("all texts"));
        drop(shares);
        assert!(small.hold(TEXT_BYTES).is_ok());
        assert!(small.hold(TEXT_BYTES + 1).unwrap_err().contains("its parser"));
        drop(small);
        assert_eq!(memory.0.load(Ordering::Acquire), SHARED_BYTES);
    }
}
