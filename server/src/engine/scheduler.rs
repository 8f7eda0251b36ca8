//! Keeps track of which request is in which slot, and decides what to do next.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::event::{Event, Failure};
use super::event_sender::{EventSender, Flush};
use super::guide::Guide;
use super::pass_costs::PassCosts;
use super::prefill_order::PrefillOrder;
use super::prompt::{SharedPrompt, TextKind};
use super::queue::Wait;
use super::sequence::{Client, Phase, Sequence};
use super::shares::{Row, Shares};
use super::tenants::Usage;
use super::transfers::{Purpose, Transfers};
use crate::session::Snapshot;

/// The slots, and the order in which prompts are read.
pub(super) struct Scheduler {
    slots: Vec<Option<Sequence>>,
    /// The slots with a request, in ascending order. An iteration of the loop looks only at these.
    used: Vec<usize>,
    /// Free slots; the one that has been free longest comes first.
    free: VecDeque<usize>,
    /// The snapshots that free slots still hold from their last requests. A conversation that continues from one of
    /// them needs no copy.
    resident: Vec<Weak<Snapshot>>,
    /// Slots whose prompts or unread tokens are read in chunks.
    prefilling: PrefillOrder,
    /// Each tenant's slots, and the tokens that it has read and generated.
    pub(super) usage: Usage,
    /// Slots in transfer, which take part in nothing else. Every slot is either in `used` or in `free`, with one
    /// exception: if its request ends during the transfer, it is in neither until the transfer ends.
    transfers: Transfers,
    /// Events of requests that have left their slots, but whose readers are behind.
    lingering: Vec<EventSender>,
    stall_limit: Duration,
}

/// How many requests [`Scheduler::sweep`] removed.
#[derive(Default)]
pub(super) struct Swept {
    pub(super) cancelled: usize,
    pub(super) stalled: usize,
}

impl Scheduler {
    pub(super) fn new(slots: usize, stall_limit: Duration) -> Self {
        Self {
            slots: (0..slots).map(|_| None).collect(),
            used: Vec::new(),
            free: (0..slots).collect(),
            resident: (0..slots).map(|_| Weak::new()).collect(),
            prefilling: PrefillOrder::default(),
            usage: Usage::default(),
            transfers: Transfers::new(slots),
            lingering: Vec::new(),
            stall_limit,
        }
    }

    /// Whether there is nothing to do at all. This is the only place that decides it.
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
            Wait::No
        }
    }

    /// Number of free slots.
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Number of slots that are not free.
    pub(super) fn running(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Assigns a slot to `sequence`. Also returns whether the slot already holds the sequence's starting state.
    /// Requires [`Self::room`].
    pub(super) fn admit(&mut self, sequence: Sequence) -> Option<(usize, bool)> {
        let holding = |start: &Arc<Snapshot>| {
            self.free.iter().position(|slot| std::ptr::eq(self.resident[*slot].as_ptr(), Arc::as_ptr(start)))
        };
        let found = sequence.prompt.start.as_ref().and_then(holding);
        let slot = self.free.remove(found.unwrap_or(0))?;
        self.resident[slot] = Weak::new();
        self.slots[slot] = Some(sequence);
        self.used.insert(self.used.partition_point(|other| *other < slot), slot);
        self.begin_reading(slot);
        Some((slot, found.is_some()))
    }

    /// Starts reading the prompt of the sequence in `slot`, or waits for the request that reads the same prompt or has
    /// read it.
    fn begin_reading(&mut self, slot: usize) {
        let Some(sequence) = &self.slots[slot] else { return };
        let is_read = |shared| self.sharing(shared).any(|other| other != slot && !self.awaits_prompt(other));
        let awaits = sequence.prompt.shared.as_ref().is_some_and(is_read) || sequence.prompt.read_by_other().is_some();
        let Some(sequence) = &mut self.slots[slot] else { return };
        sequence.start_reading();
        match sequence.phase {
            Phase::Decode { .. } => {}
            _ if awaits => sequence.phase = Phase::AwaitPrompt,
            Phase::ReadSource | Phase::Prefill { .. } => self.prefilling.add(sequence.client.tenant, slot),
            Phase::AwaitPrompt | Phase::ScorePrompt { .. } | Phase::ReadForced { .. } | Phase::ReadBack => {}
        }
    }

    /// Switches to reading forced tokens in a chunk, if that takes no more passes of the model than reading one of them
    /// per step together with all other rows.
    pub(super) fn read_forced(&mut self, slot: usize) {
        let rows = self.used.len();
        if let Some(sequence) = &mut self.slots[slot]
            && sequence.unread.len() >= rows.max(1)
        {
            sequence.start_reading_forced();
            self.prefilling.add(sequence.client.tenant, slot);
        }
    }

    /// Starts reading what is left of a text that was rolled back, in chunks.
    pub(super) fn read_back(&mut self, slot: usize) {
        if let Some(sequence) = &self.slots[slot] {
            self.prefilling.add(sequence.client.tenant, slot);
        }
    }

    /// The slots whose requests share this prompt and have not read it to the end.
    fn sharing(&self, prompt: &Arc<SharedPrompt>) -> impl Iterator<Item = usize> {
        let has = move |held: &Sequence| held.prompt.shared.as_ref().is_some_and(|shared| Arc::ptr_eq(shared, prompt));
        self.held().filter(move |(_, held)| has(held)).map(|(slot, _)| slot)
    }

    /// The requests with their slots.
    fn held(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        self.used.iter().filter_map(|slot| Some((*slot, self.slots[*slot].as_ref()?)))
    }

    fn awaits_prompt(&self, slot: usize) -> bool {
        self.slots[slot].as_ref().is_some_and(|sequence| sequence.phase == Phase::AwaitPrompt)
    }

    /// The slots that wait for another request to read this prompt.
    pub(super) fn waiting_for(&self, prompt: &Arc<SharedPrompt>) -> Vec<usize> {
        self.sharing(prompt).filter(|slot| self.awaits_prompt(*slot)).collect()
    }

    /// Notes that `slot`, which is about to be freed, holds `snapshot`.
    pub(super) fn set_resident(&mut self, slot: usize, snapshot: &Arc<Snapshot>) {
        self.resident[slot] = Arc::downgrade(snapshot);
    }

    /// Returns the slot whose chunk is read next.
    pub(super) fn next_prefill(&self) -> Option<usize> {
        self.prefilling.next(|slot| !self.is_in_transfer(slot))
    }

    /// Passes the turn from `slot` to the next slot.
    pub(super) fn chunk_was_read(&mut self, slot: usize) {
        self.prefilling.chunk_was_read(slot);
    }

    /// Notes that `slot` needs no more turns, and passes the turn to the next slot.
    pub(super) fn last_chunk_was_read(&mut self, slot: usize) {
        self.prefilling.chunk_was_read(slot);
        self.prefilling.remove(slot);
    }

    /// Divides an iteration of the loop among the tenants that have slots. A chunk has at most `longest` tokens.
    pub(super) fn divide(&self, shares: &mut Shares, costs: Option<PassCosts>, longest: usize) {
        shares.begin(costs);
        for row in self.rows() {
            shares.want_row(row.tenant, self.usage.weight(row.tenant));
        }
        for slot in self.prefilling.firsts(|slot| !self.is_in_transfer(slot)) {
            if let Some(held) = &self.slots[slot] {
                let weight = self.usage.weight(held.client.tenant);
                shares.want_chunk(held.client.tenant, weight, held.next_chunk(longest));
            }
        }
        shares.divide();
    }

    /// Notes that a row has read `tokens` tokens in a decode step, which brings the engine's passes to `passes`.
    pub(super) fn stepped(&mut self, slot: usize, passes: u64, tokens: usize) {
        if let Some(sequence) = &mut self.slots[slot] {
            sequence.client.since = passes;
        }
        self.count(slot, tokens);
    }

    /// Counts tokens that the request in `slot` has read or generated, unless they were counted in advance.
    pub(super) fn count(&mut self, slot: usize, tokens: usize) {
        let Some(sequence) = &mut self.slots[slot] else { return };
        let counted = tokens.min(sequence.client.advance);
        sequence.client.advance -= counted;
        self.usage.count(sequence.client.tenant, tokens - counted);
    }

    /// The rows that are ready for a decode step, in order of their slots.
    pub(super) fn rows(&self) -> impl Iterator<Item = Row> {
        let held = self.held().filter(|(slot, _)| !self.is_in_transfer(*slot));
        held.filter_map(|(slot, held)| {
            let Client { tenant, since, .. } = held.client;
            Some(Row { slot, id: held.next_token()?, tenant, since })
        })
    }

    /// The guides of those rows in `slots` (ascending) that have a grammar.
    pub(super) fn guides(&mut self, slots: &[usize]) -> impl Iterator<Item = &mut Guide> {
        self.sequences(slots).flatten().filter_map(|sequence| sequence.generation.guide.as_mut())
    }

    /// Notes that a transfer of `slot` is pending.
    pub(super) fn start_transfer(&mut self, slot: usize, purpose: Purpose) {
        self.transfers.start(slot, purpose);
    }

    pub(super) fn is_in_transfer(&self, slot: usize) -> bool {
        self.transfers.contains(slot)
    }

    /// Whether transfers have been pending for longer than `limit` without one of them ending.
    pub(super) fn transfers_are_late(&self, limit: Duration) -> bool {
        self.transfers.are_late(limit)
    }

    /// The slots in transfer.
    pub(super) fn pending_transfers(&self) -> Vec<usize> {
        self.transfers.pending()
    }

    /// Ends the transfer of `slot`, and returns its purpose. If the request has ended meanwhile, the slot becomes free.
    pub(super) fn end_transfer(&mut self, slot: usize) -> Option<Purpose> {
        let purpose = self.transfers.end(slot);
        if purpose.is_none() {
            self.free.push_back(slot);
        }
        purpose
    }

    /// The sequences in `slots` (ascending); `None` for a free slot.
    pub(super) fn sequences(&mut self, slots: &[usize]) -> impl Iterator<Item = Option<&mut Sequence>> {
        select(&mut self.slots, slots.iter().copied())
    }

    /// The slots whose requests have been interrupted and can end now. A request reads its prompt first if it is a
    /// turn, because the conversation continues there, or if other requests need the prompt. A pending transfer ends
    /// first.
    pub(super) fn interrupted(&self) -> Vec<usize> {
        let requested = |sequence: &Sequence| sequence.client.interrupt.is_requested();
        let by_slot = |slot: usize| self.slots[slot].as_ref().is_some_and(requested);
        let alone =
            |held: &Sequence| held.prompt.shared.as_ref().is_none_or(|prompt| self.sharing(prompt).all(by_slot));
        let can_end = |held: &Sequence| held.has_read_prompt() || (held.kind == TextKind::Completion && alone(held));
        // A text that was rolled back has ended.
        let ends = |held: &Sequence| requested(held) && can_end(held) && held.phase != Phase::ReadBack;
        let held = self.held().filter(|(slot, _)| !self.is_in_transfer(*slot));
        held.filter(|(_, held)| ends(held)).map(|(slot, _)| slot).collect()
    }

    pub(super) fn sequence(&self, slot: usize) -> Option<&Sequence> {
        self.slots[slot].as_ref()
    }

    pub(super) fn sequence_mut(&mut self, slot: usize) -> Option<&mut Sequence> {
        self.slots[slot].as_mut()
    }

    /// Ends a request with the event `last`, and frees its slot, or leaves that to the end of a pending transfer.
    pub(super) fn end(&mut self, slot: usize, last: Event) {
        if let Some(mut sequence) = self.release(slot) {
            let events = &mut sequence.client.events;
            events.end(last);
            if events.flush() == Flush::Full {
                self.lingering.push(sequence.client.events);
            }
        }
    }

    /// Sends all text for which there is room, and ends the requests whose readers have left or stalled. A reader does
    /// not count as stalled during a transfer.
    pub(super) fn sweep(&mut self) -> Swept {
        let mut swept = Swept::default();
        // Backwards, so that removing a slot does not move those still to come.
        for index in (0..self.used.len()).rev() {
            let slot = self.used[index];
            let Some(sequence) = &mut self.slots[slot] else { continue };
            if sequence.client.events.flush() == Flush::Closed {
                self.release(slot);
                swept.cancelled += 1;
            } else if sequence.client.events.is_stalled(self.stall_limit) && !self.transfers.contains(slot) {
                self.end(slot, Event::Failed(Failure::Stalled));
                swept.stalled += 1;
            }
        }
        let limit = self.stall_limit;
        self.lingering.retain_mut(|events| events.flush() == Flush::Full && !events.is_stalled(limit));
        swept
    }

    /// Ends all requests.
    pub(super) fn abort(&mut self) {
        for slot in self.used.clone() {
            self.end(slot, Event::Failed(Failure::ShuttingDown));
        }
        self.lingering.clear();
    }

    fn release(&mut self, slot: usize) -> Option<Sequence> {
        let sequence = self.slots[slot].take()?;
        if let Ok(index) = self.used.binary_search(&slot) {
            self.used.remove(index);
        }
        if !self.transfers.abandon(slot) {
            self.free.push_back(slot);
        }
        self.prefilling.remove(slot);
        self.usage.free_slot(sequence.client.tenant, sequence.client.advance);
        if sequence.phase != Phase::AwaitPrompt
            && let Some(prompt) = &sequence.prompt.shared
            && let Some(next) = self.waiting_for(prompt).first()
        {
            // The request that read the prompt for others has ended, so the next one reads it.
            self.begin_reading(*next);
        }
        Some(sequence)
    }
}

/// The sequences at the indices `wanted` (ascending).
fn select(
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
