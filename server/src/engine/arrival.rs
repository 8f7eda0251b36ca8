//! What comes after a slot's state has moved: at once where it moves at once, else in the turn of the loop that finds it
//! there. Until then its request waits, alone.
//!
//! A request's way: (start comes, or what another has read) -> its prompt is read -> (the prompt's end leaves) -> tokens,
//! now and then (a mark leaves) -> (the end leaves) -> over. What stands in brackets moves, where it is wanted at all.

use std::sync::Arc;

use tidegate_model::{LanguageModel, ModelError, SharedState, Transfer};
use tracing::error;

use super::ends::Ending;
use super::event::Event;
use super::guarded::{Fault, guarded};
use super::keep::{self, End, Kept};
use super::moves::Purpose;
use super::sequence::Sequence;
use super::stats::add;
use super::worker::Worker;
use crate::session::Snapshot;

impl<M: LanguageModel> Worker<M> {
    /// Goes on with every request whose state has arrived.
    pub(super) fn look_for_arrivals(&mut self) {
        for slot in self.scheduler.moving() {
            let moved = guarded(|| self.model.poll_transfer(slot));
            if matches!(moved, Ok(Transfer::Pending)) {
                continue;
            }
            match (self.scheduler.end_move(slot), moved) {
                (Some(purpose), moved) => self.follow(slot, moved.map(|moved| (purpose, moved))),
                (None, Err(fault)) => error!(slot, reason = fault.reason, "a state that nobody waits for did not move"),
                (None, Ok(_)) => {}
            }
        }
    }

    /// Goes on with what a move was begun for where it has ended, and notes where it has not.
    pub(super) fn follow(&mut self, slot: usize, begun: Result<(Purpose, Transfer), Fault>) {
        match begun {
            Ok((purpose, Transfer::Done(state))) => self.arrived(slot, purpose, state),
            Ok((purpose, Transfer::Pending)) => {
                self.scheduler.begin_move(slot, purpose);
                if let Some(sequence) = self.scheduler.sequence_mut(slot) {
                    // What there is of the text does not wait for the state.
                    sequence.outlet.flush();
                }
            }
            Err(fault) => self.fail(slot, &fault),
        }
    }

    /// Takes the state out of `slot`.
    pub(super) fn take_out(&mut self, slot: usize, purpose: Purpose) {
        let model = &mut self.model;
        let begun = guarded(|| model.start_export(slot));
        self.follow(slot, begun.map(|begun| (purpose, begun)));
    }

    /// Goes on where a state has come to `slot`, or has left it and is `state`.
    fn arrived(&mut self, slot: usize, purpose: Purpose, state: Vec<f32>) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let taken = guarded(|| {
            match purpose {
                Purpose::Start => {}
                Purpose::Handover => sequence.take_over(),
                Purpose::PromptEnd => sequence.prompt_ended(keep::prompt_end(state, sequence)),
                Purpose::Mark(_) => sequence.set_mark(state),
                Purpose::End(_, open) => return Ok(Some(keep::whole(state, sequence, open))),
            }
            Ok::<_, Fault>(None)
        });
        let kept = match taken {
            Ok(kept) => kept,
            Err(fault) => return self.fail(slot, &fault),
        };
        match purpose {
            // Another has come to the prompt's end while this one's start was on its way.
            Purpose::Start if sequence.prompt_is_there() => self.hand_over(slot),
            Purpose::Start if !sequence.is_read() => {}
            Purpose::Start | Purpose::Handover => self.prompt_was_read(slot),
            Purpose::PromptEnd => self.prompt_has_ended(slot),
            Purpose::Mark(ending) => self.goes_on(slot, ending),
            Purpose::End(ending, _) => self.end(slot, ending, kept),
        }
    }

    /// Tells of the prompt's end where that was asked for, and ends a request that asks for nothing more.
    pub(super) fn prompt_was_read(&mut self, slot: usize) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        if sequence.wants_tokens() && self.model.source_start().is_none() {
            // The last token, which the next step reads; after a source that is the one that every text begins with.
            add(&self.shared.counters.prompt_tokens, 1);
        }
        if sequence.wants_prompt_end() {
            return self.take_out(slot, Purpose::PromptEnd);
        }
        self.prompt_has_ended(slot);
    }

    fn prompt_has_ended(&mut self, slot: usize) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        sequence.tell_prompt_scores();
        let shared = sequence.shared.take();
        if !sequence.wants_tokens() {
            self.finish(slot, Ending::Length);
        }
        for slot in shared.map(|prompt| self.scheduler.waiting_for(&prompt)).unwrap_or_default() {
            self.hand_over(slot);
        }
    }

    /// Lets a request that has waited for its prompt begin: one whose start is still on its way, once that is there.
    fn hand_over(&mut self, slot: usize) {
        if self.scheduler.is_moving(slot) {
            return;
        }
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let model = &mut self.model;
        let begun = guarded(|| begin_handover(model, slot, sequence));
        self.follow(slot, begun);
    }

    /// Goes on after a token that has ended the text, or has not.
    pub(super) fn goes_on(&mut self, slot: usize, ending: Option<Ending>) {
        match ending {
            Some(ending) => self.finish(slot, ending),
            // Nobody waits for the next step to see this token.
            None => _ = self.scheduler.sequence_mut(slot).map(|sequence| sequence.outlet.flush()),
        }
    }

    /// Ends a text, once what is to be kept of it is there.
    pub(super) fn finish(&mut self, slot: usize, ending: Ending) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let (rules, model) = (&self.rules, &mut self.model);
        match guarded(|| sequence.keep.end.then(|| keep::end(model, slot, sequence, ending, rules)).transpose()) {
            Ok(None) => self.end(slot, ending, None),
            Ok(Some(End::There(kept))) => self.end(slot, ending, Some(kept)),
            Ok(Some(End::InSlot(open))) => self.take_out(slot, Purpose::End(ending, open)),
            Err(fault) => self.fail(slot, &fault),
        }
    }

    fn end(&mut self, slot: usize, ending: Ending, kept: Option<Kept>) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let (snapshot, lies_there) = kept.map(|kept| (Arc::new(kept.snapshot), kept.lies_in_slot)).unzip();
        let finish = sequence.finish(ending, snapshot.clone());
        if let (Some(snapshot), Some(true)) = (&snapshot, lies_there) {
            self.scheduler.leave(slot, snapshot);
        }
        // Counted first: who has seen the last event finds it in the counts.
        add(&self.shared.counters.finished, 1);
        self.scheduler.end(slot, Event::Finished(finish));
    }
}

/// Begins where another request has read the prompt to.
///
/// # Errors
/// It has not, or the model failed.
pub(super) fn begin_handover<M: LanguageModel>(
    model: &mut M,
    slot: usize,
    sequence: &Sequence,
) -> Result<(Purpose, Transfer), ModelError> {
    let prompt = sequence.shared.as_ref().and_then(|shared| shared.read());
    let prompt = prompt.ok_or_else(|| ModelError::other("no prompt was handed over"))?;
    Ok((Purpose::Handover, start_import(model, slot, &prompt.end)?))
}

/// Starts to put the state of `snapshot` into `slot`.
pub(super) fn start_import<M: LanguageModel>(
    model: &mut M,
    slot: usize,
    snapshot: &Arc<Snapshot>,
) -> Result<Transfer, ModelError> {
    model.start_import(slot, Arc::clone(snapshot) as SharedState, snapshot.read)
}
