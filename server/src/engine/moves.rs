//! Slots whose states are on their way: what each moves for, and who still waits for it.

use std::time::{Duration, Instant};

use super::ends::Ending;

/// What a state moves for, and so what comes after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// It comes: what its request begins with.
    Start,
    /// It comes: where another request has read the prompt to.
    Handover,
    /// It leaves: where the prompt ends.
    PromptEnd,
    /// It leaves: where a stop string may take the text back to. The token after it has ended the text, or not.
    Mark(Option<Ending>),
    /// It leaves: where the text ends, with an answer that is open or not.
    End(Ending, bool),
}

/// A slot that is moving.
#[derive(Clone, Copy)]
enum Moving {
    For(Purpose),
    /// Its request has left: when the move has ended, the slot is free.
    ForNobody,
}

/// The moves that are under way, at most one of each slot.
pub(super) struct Moves {
    slots: Vec<Option<Moving>>,
    /// Those that are moving, in the order in which they began.
    under_way: Vec<usize>,
    /// When the first of them began, or the last that has ended did so.
    since: Instant,
}

impl Moves {
    pub(super) fn new(slots: usize) -> Self {
        Self { slots: vec![None; slots], under_way: Vec::new(), since: Instant::now() }
    }

    pub(super) fn is_moving(&self, slot: usize) -> bool {
        self.slots[slot].is_some()
    }

    /// The slots that are moving.
    pub(super) fn under_way(&self) -> Vec<usize> {
        self.under_way.clone()
    }

    /// Whether some have been on their way for `limit` and none has ended.
    pub(super) fn are_late(&self, limit: Duration) -> bool {
        !self.under_way.is_empty() && self.since.elapsed() > limit
    }

    pub(super) fn begin(&mut self, slot: usize, purpose: Purpose) {
        if self.slots[slot].replace(Moving::For(purpose)).is_none() {
            if self.under_way.is_empty() {
                self.since = Instant::now();
            }
            self.under_way.push(slot);
        }
    }

    /// Notes that nobody waits for `slot` any more; whether it is moving.
    pub(super) fn forsake(&mut self, slot: usize) -> bool {
        self.slots[slot].as_mut().map(|moving| *moving = Moving::ForNobody).is_some()
    }

    /// Notes that the move of `slot` has ended; what it was for, where anybody waits.
    pub(super) fn end(&mut self, slot: usize) -> Option<Purpose> {
        let moving = self.slots[slot].take()?;
        self.under_way.retain(|other| *other != slot);
        self.since = Instant::now();
        match moving {
            Moving::For(purpose) => Some(purpose),
            Moving::ForNobody => None,
        }
    }
}
