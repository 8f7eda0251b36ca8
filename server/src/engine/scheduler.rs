//! Who is in which slot, and what there is to do.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::event::{Event, Failure};
use super::guide::Guide;
use super::inbox::Wait;
use super::moves::{Moves, Purpose};
use super::outlet::{Outlet, Reader};
use super::sequence::{ReadBy, Sequence};
use super::shared::SharedPrompt;
use crate::session::Snapshot;

/// The slots, and the order in which prompts are read.
pub(super) struct Scheduler {
    slots: Vec<Option<Sequence>>,
    /// Those that have a request, ascending: a loop's turn looks at these alone, of however many there are.
    taken: Vec<usize>,
    /// Those that have been free for longest come first.
    free: VecDeque<usize>,
    /// What lies in the free slots from the request before: the conversation that goes on from it need not be copied.
    resident: Vec<Weak<Snapshot>>,
    /// Slots whose prompts are being read: each gets one chunk in turn, so that a long prompt delays no short one.
    prefilling: VecDeque<usize>,
    /// Slots whose states are on their way, which take part in nothing. Every slot is in one of `taken` and `free`, or
    /// its request has left while its state was moving: then it is in neither until that has ended.
    moves: Moves,
    /// Ends of requests that have left their slots but whose readers are behind.
    lingering: Vec<Outlet>,
    stall_limit: Duration,
}

/// What [`Scheduler::sweep`] removed.
#[derive(Default)]
pub(super) struct Swept {
    pub(super) cancelled: usize,
    pub(super) stalled: usize,
}

impl Scheduler {
    pub(super) fn new(slots: usize, stall_limit: Duration) -> Self {
        Self {
            slots: (0..slots).map(|_| None).collect(),
            taken: Vec::new(),
            free: (0..slots).collect(),
            resident: (0..slots).map(|_| Weak::new()).collect(),
            prefilling: VecDeque::new(),
            moves: Moves::new(slots),
            lingering: Vec::new(),
            stall_limit,
        }
    }

    /// Whether there is nothing to do at all. The one answer to that question.
    pub(super) fn is_idle(&self) -> bool {
        self.running() == 0 && self.lingering.is_empty()
    }

    /// How long the engine may sleep.
    pub(super) fn wait(&self) -> Wait {
        if self.is_idle() {
            Wait::ForWork
        } else if self.next_prefill().is_none() && self.rows().next().is_none() {
            Wait::Briefly
        } else {
            Wait::Not
        }
    }

    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    pub(super) fn running(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Gives `sequence` a slot, and says whether its start is in it already; there must be [`Self::room`].
    pub(super) fn admit(&mut self, sequence: Sequence) -> Option<(usize, bool)> {
        let lies_in = |start: &Arc<Snapshot>| {
            self.free.iter().position(|slot| std::ptr::eq(self.resident[*slot].as_ptr(), Arc::as_ptr(start)))
        };
        let found = sequence.start.as_ref().and_then(lies_in);
        let slot = self.free.remove(found.unwrap_or(0))?;
        self.resident[slot] = Weak::new();
        self.slots[slot] = Some(sequence);
        self.taken.insert(self.taken.partition_point(|other| *other < slot), slot);
        self.begin_reading(slot);
        Some((slot, found.is_some()))
    }

    /// Has the prompt in `slot` read, unless there is nothing to read or it comes from elsewhere.
    fn begin_reading(&mut self, slot: usize) {
        let Some(sequence) = &self.slots[slot] else { return };
        let of = |shared| self.sharing(shared).any(|other| other != slot && !self.waits(other));
        let waits = sequence.shared.as_ref().is_some_and(of);
        let comes = sequence.prompt_is_there();
        let queues = !waits && !comes && !sequence.is_read() && !sequence.reads_by_steps();
        if let Some(sequence) = &mut self.slots[slot] {
            let other = waits && !comes && !sequence.is_read();
            sequence.read_by = if other { ReadBy::Other } else { ReadBy::Itself };
        }
        if queues {
            self.prefilling.push_back(slot);
        }
    }

    /// The slots whose requests have this prompt and have not come to its end.
    fn sharing(&self, prompt: &Arc<SharedPrompt>) -> impl Iterator<Item = usize> {
        let has = move |held: &Sequence| held.shared.as_ref().is_some_and(|shared| Arc::ptr_eq(shared, prompt));
        self.held().filter(move |(_, held)| has(held)).map(|(slot, _)| slot)
    }

    /// The requests, by slot.
    fn held(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.taken.iter().filter_map(|slot| Some((*slot, self.slots[*slot].as_ref()?)))
    }

    fn waits(&self, slot: usize) -> bool {
        self.slots[slot].as_ref().is_some_and(|sequence| sequence.read_by == ReadBy::Other)
    }

    /// The slots that wait for this prompt.
    pub(super) fn waiting_for(&self, prompt: &Arc<SharedPrompt>) -> Vec<usize> {
        self.sharing(prompt).filter(|slot| self.waits(*slot)).collect()
    }

    /// Notes that `snapshot` is what lies in `slot`, which is about to be freed.
    pub(super) fn leave(&mut self, slot: usize, snapshot: &Arc<Snapshot>) {
        self.resident[slot] = Arc::downgrade(snapshot);
    }

    /// The slot whose prompt is to be read next.
    pub(super) fn next_prefill(&self) -> Option<usize> {
        self.prefilling.iter().copied().find(|slot| !self.is_moving(*slot))
    }

    /// Puts `slot` behind the other prompts, or takes it out where its prompt has been read to the end.
    pub(super) fn chunk_was_read(&mut self, slot: usize, last: bool) {
        self.prefilling.retain(|other| *other != slot);
        if !last {
            self.prefilling.push_back(slot);
        }
    }

    /// The slots that take part in the next decode step, and the token that each reads.
    pub(super) fn rows(&self) -> impl Iterator<Item = (usize, u32)> {
        let held = self.held().filter(|(slot, _)| !self.is_moving(*slot));
        held.filter_map(|(slot, held)| Some((slot, held.decodable()?)))
    }

    /// What holds the rows of the next decode step to their grammars, where anything does.
    pub(super) fn guides(&mut self) -> impl Iterator<Item = &mut Guide> {
        let Self { slots, taken, moves, .. } = self;
        let still = taken.iter().copied().filter(|slot| !moves.is_moving(*slot));
        let rows = each(slots, still).flatten().filter(|sequence| sequence.decodable().is_some());
        rows.filter_map(Sequence::guide)
    }

    /// Notes that the state of `slot` is on its way.
    pub(super) fn begin_move(&mut self, slot: usize, purpose: Purpose) {
        self.moves.begin(slot, purpose);
    }

    pub(super) fn is_moving(&self, slot: usize) -> bool {
        self.moves.is_moving(slot)
    }

    /// Whether states have been on their way for `limit` and none of them has arrived.
    pub(super) fn moves_are_late(&self, limit: Duration) -> bool {
        self.moves.are_late(limit)
    }

    /// The slots whose states are on their way.
    pub(super) fn moving(&self) -> Vec<usize> {
        self.moves.under_way()
    }

    /// Notes that the move of `slot` has ended, and says what it was for. Where its request has left, the slot is free
    /// from here on.
    pub(super) fn end_move(&mut self, slot: usize) -> Option<Purpose> {
        let purpose = self.moves.end(slot);
        if purpose.is_none() {
            self.free.push_back(slot);
        }
        purpose
    }

    /// The requests in `slots`, which ascend: one for each, none where a slot is free.
    pub(super) fn sequences(&mut self, slots: &[usize]) -> impl Iterator<Item = Option<&mut Sequence>> {
        each(&mut self.slots, slots.iter().copied())
    }

    /// The slots whose requests are to end with what they have. A turn has its prompt read first, since the
    /// conversation goes on from there, and so has a prompt that others need; a state on its way arrives first.
    pub(super) fn interrupted(&self) -> Vec<usize> {
        let asked = |sequence: &Sequence| sequence.interrupt.is_asked();
        let by_slot = |slot: usize| self.slots[slot].as_ref().is_some_and(asked);
        let alone = |held: &Sequence| held.shared.as_ref().is_none_or(|prompt| self.sharing(prompt).all(by_slot));
        let ends = |held: &Sequence| asked(held) && (held.is_read() || (!held.is_turn && alone(held)));
        let held = self.held().filter(|(slot, _)| !self.is_moving(*slot));
        held.filter(|(_, held)| ends(held)).map(|(slot, _)| slot).collect()
    }

    pub(super) fn sequence(&self, slot: usize) -> Option<&Sequence> {
        self.slots[slot].as_ref()
    }

    pub(super) fn sequence_mut(&mut self, slot: usize) -> Option<&mut Sequence> {
        self.slots[slot].as_mut()
    }

    /// Frees a slot, one that is moving once its state has arrived; its request's last event is `last`.
    pub(super) fn end(&mut self, slot: usize, last: Event) {
        if let Some(mut sequence) = self.release(slot) {
            sequence.outlet.end(last);
            if sequence.outlet.flush() == Reader::Behind {
                self.lingering.push(sequence.outlet);
            }
        }
    }

    /// Hands over all text for which there is room, and ends the requests that nobody waits for. While the state of a
    /// request is on its way, no reader is late.
    pub(super) fn sweep(&mut self) -> Swept {
        let mut swept = Swept::default();
        // From the last on: those that leave on the way change no place of those that come.
        for place in (0..self.taken.len()).rev() {
            let slot = self.taken[place];
            let Some(sequence) = &mut self.slots[slot] else { continue };
            if sequence.outlet.flush() == Reader::Gone {
                self.release(slot);
                swept.cancelled += 1;
            } else if sequence.outlet.is_stalled(self.stall_limit) && !self.moves.is_moving(slot) {
                self.end(slot, Event::Failed(Failure::Stalled));
                swept.stalled += 1;
            }
        }
        let limit = self.stall_limit;
        self.lingering.retain_mut(|outlet| outlet.flush() == Reader::Behind && !outlet.is_stalled(limit));
        swept
    }

    /// Ends everything.
    pub(super) fn abort(&mut self) {
        for slot in self.taken.clone() {
            self.end(slot, Event::Failed(Failure::ShuttingDown));
        }
        self.lingering.clear();
    }

    fn release(&mut self, slot: usize) -> Option<Sequence> {
        let sequence = self.slots[slot].take()?;
        if let Ok(place) = self.taken.binary_search(&slot) {
            self.taken.remove(place);
        }
        if !self.moves.forsake(slot) {
            self.free.push_back(slot);
        }
        self.prefilling.retain(|other| *other != slot);
        if sequence.read_by != ReadBy::Other
            && let Some(prompt) = &sequence.shared
            && let Some(next) = self.waiting_for(prompt).first()
        {
            // Who was to read the prompt for others is gone: the next reads it.
            self.begin_reading(*next);
        }
        Some(sequence)
    }
}

/// Those of `slots` that are wanted, which ascend.
fn each(
    slots: &mut [Option<Sequence>],
    wanted: impl Iterator<Item = usize>,
) -> impl Iterator<Item = Option<&mut Sequence>> {
    let (mut rest, mut next) = (slots.iter_mut(), 0);
    wanted.filter_map(move |slot| {
        let passed = slot - next;
        next = slot + 1;
        rest.nth(passed).map(Option::as_mut)
    })
}
