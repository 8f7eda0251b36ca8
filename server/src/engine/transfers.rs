//! Slots whose states are being copied between device and host: what for, and whether a request still waits for it.

use std::time::{Duration, Instant};

use super::generation::Ending;

/// What a state is copied for, and so what comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Import of the state that the request starts from.
    Start,
    /// Import of the prompt that another request has read.
    SharedPrompt,
    /// Export of the state after the prompt.
    PromptEnd,
    /// Export of the state that a stop string may roll the text back to, before the token that shows this text. The token
    /// may have ended the text.
    Rollback(String, Option<Ending>),
    /// Export of the state at the end of the text, and whether the answer stays open.
    End(Ending, bool),
}

/// The pending transfers, at most one for each slot.
pub(super) struct Transfers {
    /// By slot; the purpose is `None` once its request has ended: the slot is free when the transfer ends.
    slots: Vec<Option<Option<Purpose>>>,
    /// The slots in transfer, in the order in which they started.
    pending: Vec<usize>,
    /// When the first of them started, or the last to end did so.
    since: Instant,
}

impl Transfers {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: vec![None; slots], pending: Vec::new(), since: Instant::now() }
    }

    pub(super) fn contains(&self, slot: usize) -> bool {
        self.slots[slot].is_some()
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
        if self.slots[slot].replace(Some(purpose)).is_none() {
            if self.pending.is_empty() {
                self.since = Instant::now();
            }
            self.pending.push(slot);
        }
    }

    /// Notes that no request waits for `slot` any more; whether it is in transfer.
    pub(super) fn abandon(&mut self, slot: usize) -> bool {
        self.slots[slot].as_mut().map(|purpose| *purpose = None).is_some()
    }

    /// Ends the transfer of `slot`; its purpose, if a request still waits for it.
    pub(super) fn end(&mut self, slot: usize) -> Option<Purpose> {
        let purpose = self.slots[slot].take()?;
        self.pending.retain(|other| *other != slot);
        self.since = Instant::now();
        purpose
    }
}
