//! The slots whose states are being copied between device and host: why, and whether a request still waits for the
//! copy.

use std::time::{Duration, Instant};

use super::generation::Ending;

/// Why a state is copied, which also determines what comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Import of the state that the request starts from.
    Start,
    /// Import of the state after a prompt that another request has read.
    SharedPrompt,
    /// Export of the state within the prompt.
    Mark,
    /// Export of the state after the prompt.
    PromptEnd,
    /// Export of the state that a stop string may roll the text back to, before the token that shows this text. If the
    /// token has ended the text, the ending is set.
    Rollback(String, Option<Ending>),
    /// Export of the state at the end of the text, and whether the answer stays open.
    End(Ending, bool),
}

/// The transfer state of one slot.
#[derive(Clone)]
enum SlotTransfer {
    /// No transfer.
    Idle,
    /// A request waits for the transfer.
    Awaited(Purpose),
    /// The request has ended: the slot becomes free when the transfer ends.
    Abandoned,
}

/// The pending transfers, at most one for each slot.
pub(super) struct Transfers {
    slots: Vec<SlotTransfer>,
    /// The slots in transfer, in the order in which their transfers started.
    pending: Vec<usize>,
    /// When the pending transfers began, or when a transfer last ended.
    since: Instant,
}

impl Transfers {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: vec![SlotTransfer::Idle; slots], pending: Vec::new(), since: Instant::now() }
    }

    pub(super) fn contains(&self, slot: usize) -> bool {
        !matches!(self.slots[slot], SlotTransfer::Idle)
    }

    /// The slots in transfer.
    pub(super) fn pending(&self) -> Vec<usize> {
        self.pending.clone()
    }

    /// Whether transfers have been pending for `limit` and none has ended.
    pub(super) fn are_late(&self, limit: Duration) -> bool {
        !self.pending.is_empty() && self.since.elapsed() > limit
    }

    pub(super) fn start(&mut self, slot: usize, purpose: Purpose) {
        if !self.contains(slot) {
            if self.pending.is_empty() {
                self.since = Instant::now();
            }
            self.pending.push(slot);
        }
        self.slots[slot] = SlotTransfer::Awaited(purpose);
    }

    /// Notes that no request waits for `slot` any more. Returns whether the slot is in transfer.
    pub(super) fn abandon(&mut self, slot: usize) -> bool {
        let pending = self.contains(slot);
        if pending {
            self.slots[slot] = SlotTransfer::Abandoned;
        }
        pending
    }

    /// Ends the transfer of `slot`. Returns its purpose, if a request still waits for it.
    pub(super) fn end(&mut self, slot: usize) -> Option<Purpose> {
        let purpose = match std::mem::replace(&mut self.slots[slot], SlotTransfer::Idle) {
            SlotTransfer::Idle => return None,
            SlotTransfer::Awaited(purpose) => Some(purpose),
            SlotTransfer::Abandoned => None,
        };
        self.pending.retain(|other| *other != slot);
        self.since = Instant::now();
        purpose
    }
}
