//! The engine's worker: what a request does after each transfer, each chunk and each token. `run` has its loop.
//!
//! A request takes these steps; the transfers in brackets happen only if they are needed: (import of its starting
//! state, or of the prompt that another request has read) -> the prompt is read, (export of a state within it) and
//! (export of the state after it) -> tokens, sometimes with (export of a rollback point) -> sometimes the text without
//! its stop string is read -> (export of the state at the end) -> done. A transfer ends at once, or in the loop's iteration that finds it done. Until then only its own
//! request waits.

use std::sync::Arc;

use tidegate_model::{LanguageModel, Transfer};
use tracing::{Span, debug, error, info};

use super::drafters::Speculation;
use super::error::{SequenceError, catch_panic};
use super::event::{Event, Failure};
use super::generation::{Choice, Ending};
use super::handle::Shared;
use super::output::TextBuffers;
use super::pass_costs::CostSource;
use super::scheduler::Scheduler;
use super::sequence::Accepted;
use super::shares::Shares;
use super::snapshots::{self, End, EndSnapshot};
use super::stats::add;
use super::step::Step;
use super::text_rules::TextRules;
use super::transfers::Purpose;
use crate::session::Snapshot;

pub(super) struct Worker<M> {
    pub(super) model: M,
    pub(super) rules: TextRules,
    pub(super) scheduler: Scheduler,
    pub(super) shared: Arc<Shared>,
    pub(super) costs: CostSource,
    /// Reused from step to step.
    pub(super) shares: Shares,
    pub(super) step: Step,
    /// `None` if every row reads one token per step.
    pub(super) speculation: Option<Speculation>,
    pub(super) buffers: TextBuffers,
}

impl<M: LanguageModel> Worker<M> {
    /// Continues every request whose transfer has ended.
    pub(super) fn poll_transfers(&mut self) {
        for slot in self.scheduler.pending_transfers() {
            let transfer = catch_panic(|| self.model.poll_transfer(slot));
            if matches!(transfer, Ok(Transfer::Pending)) {
                continue;
            }
            match (self.scheduler.end_transfer(slot), transfer) {
                (Some(purpose), transfer) => self.continue_after(slot, purpose, transfer),
                (None, Err(error)) => error!(slot, reason = error.reason, "a transfer failed after its request ended"),
                (None, Ok(_)) => {}
            }
        }
    }

    /// Continues a request if its transfer has ended; otherwise notes that the transfer is pending.
    pub(super) fn continue_after(&mut self, slot: usize, purpose: Purpose, transfer: Result<Transfer, SequenceError>) {
        match transfer {
            Ok(Transfer::Done(state)) => self.transferred(slot, &purpose, state),
            Ok(Transfer::Pending) => {
                self.scheduler.start_transfer(slot, purpose);
                if let Some(sequence) = self.scheduler.sequence_mut(slot) {
                    // The text so far does not wait for the transfer.
                    sequence.client.events.flush();
                }
            }
            Err(error) => self.fail(slot, &error),
        }
    }

    /// Starts the import of a snapshot.
    pub(super) fn import(&mut self, slot: usize, purpose: Purpose, snapshot: Arc<Snapshot>) {
        let (model, tokens) = (&mut self.model, snapshot.read);
        let transfer = catch_panic(|| model.start_import(slot, snapshot, tokens));
        self.continue_after(slot, purpose, transfer);
    }

    pub(super) fn export(&mut self, slot: usize, purpose: Purpose) {
        let model = &mut self.model;
        let transfer = catch_panic(|| model.start_export(slot));
        self.continue_after(slot, purpose, transfer);
    }

    /// Continues a request whose transfer has ended; `state` is the result of an export.
    fn transferred(&mut self, slot: usize, purpose: &Purpose, state: Vec<f32>) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let outcome = catch_panic(|| {
            match purpose {
                Purpose::Start => {}
                Purpose::SharedPrompt => sequence.take_over_prompt(),
                Purpose::Mark => sequence.pass_on(&Arc::new(snapshots::of_prompt(state, sequence))),
                Purpose::PromptEnd => sequence.hand_over_prompt(snapshots::of_prompt(state, sequence)),
                Purpose::Rollback(shown, _) => sequence.set_rollback(state, shown.clone()),
                Purpose::End(_, open) => return Ok(Some(snapshots::of_slot(state, sequence, *open))),
            }
            Ok::<_, SequenceError>(None)
        });
        let snapshot = match outcome {
            Ok(snapshot) => snapshot,
            Err(error) => return self.fail(slot, &error),
        };
        match purpose {
            // Another request has read the prompt while this request's start was in transfer.
            Purpose::Start if sequence.prompt.read_by_other().is_some() => self.import_prompt(slot),
            Purpose::Start if !sequence.has_read_prompt() => {}
            // The rest of the prompt follows.
            Purpose::Mark => {}
            Purpose::Start | Purpose::SharedPrompt => self.prompt_was_read(slot),
            Purpose::PromptEnd => self.prompt_ended(slot),
            Purpose::Rollback(_, ending) => self.continue_text(slot, *ending),
            Purpose::End(ending, _) => self.end(slot, *ending, snapshot),
        }
    }

    /// Takes the snapshot after the prompt if one is needed, and then ends the prompt.
    pub(super) fn prompt_was_read(&mut self, slot: usize) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        if sequence.generation.wants_tokens() && self.model.source_start().is_none() {
            // Counts the last token, which the next step reads. After a source that token is not part of the prompt:
            // every text begins with it.
            add(&self.shared.counters.prompt_tokens, 1);
        }
        if sequence.wants_prompt_end() {
            return self.export(slot, Purpose::PromptEnd);
        }
        self.prompt_ended(slot);
    }

    /// Sends the prompt's log probabilities, ends a request that generates nothing, and resumes the requests that wait
    /// for the same prompt.
    pub(super) fn prompt_ended(&mut self, slot: usize) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        sequence.send_prompt_logprobs();
        let shared = sequence.prompt.shared.take();
        if !sequence.generation.wants_tokens() {
            self.finish(slot, Ending::Length);
        }
        for slot in shared.map(|prompt| self.scheduler.waiting_for(&prompt)).unwrap_or_default() {
            self.import_prompt(slot);
        }
    }

    /// Lets a request continue after the prompt that another request has read, unless its own start is still in
    /// transfer.
    pub(super) fn import_prompt(&mut self, slot: usize) {
        if self.scheduler.is_in_transfer(slot) {
            return;
        }
        let Some(sequence) = self.scheduler.sequence(slot) else { return };
        match sequence.prompt.read_by_other().map(|prompt| Arc::clone(&prompt.end)) {
            Some(end) => self.import(slot, Purpose::SharedPrompt, end),
            None => self.fail(slot, &SequenceError::internal("no prompt was handed over")),
        }
    }

    /// Accepts a row's token and the tokens that a grammar forces after it. A panic here ends only this row's request.
    pub(super) fn accept(&mut self, slot: usize, choice: Result<Choice, SequenceError>) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let (rules, buffers) = (&self.rules, &mut self.buffers);
        let accepted = catch_panic(|| sequence.accept(choice?, rules, buffers).map(Some));
        self.accepted(slot, accepted);
    }

    /// Continues after a token whose predecessors the state has read: accepts the tokens that a grammar forces after
    /// it.
    pub(super) fn accepted(&mut self, slot: usize, mut accepted: Result<Option<Accepted>, SequenceError>) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let (rules, buffers, counters) = (&self.rules, &mut self.buffers, &self.shared.counters);
        loop {
            match accepted {
                Ok(None) => break,
                Ok(Some(Accepted { ending: None, rollback: None })) => add(&counters.generated_tokens, 1),
                Ok(Some(Accepted { ending, rollback })) => {
                    add(&counters.generated_tokens, 1);
                    return match rollback {
                        Some(shown) => self.export_before_pending(slot, Purpose::Rollback(shown, ending)),
                        None => self.continue_text(slot, ending),
                    };
                }
                Err(error) => return self.fail(slot, &error),
            }
            accepted = catch_panic(|| sequence.take_forced(rules, buffers));
            add(&counters.forced_tokens, usize::from(matches!(accepted, Ok(Some(_)))));
        }
        self.scheduler.read_forced(slot);
        self.continue_text(slot, None);
    }

    /// Exports the state before the pending token.
    fn export_before_pending(&mut self, slot: usize, purpose: Purpose) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let model = &mut self.model;
        match catch_panic(|| sequence.read_unread(model, slot, usize::MAX)) {
            Ok(count) => {
                self.scheduler.count(slot, count);
                self.export(slot, purpose);
            }
            Err(error) => self.fail(slot, &error),
        }
    }

    /// Continues after a token, which may have ended the text.
    fn continue_text(&mut self, slot: usize, ending: Option<Ending>) {
        match ending {
            Some(ending) => self.finish(slot, ending),
            // The reader gets this token before the next step.
            None => _ = self.scheduler.sequence_mut(slot).map(|sequence| sequence.client.events.flush()),
        }
    }

    /// Ends a text. If it needs a snapshot, takes that first.
    pub(super) fn finish(&mut self, slot: usize, ending: Ending) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let (rules, model, unread) = (&self.rules, &mut self.model, sequence.unread.len());
        let snapshot = || {
            let wanted = sequence.wants_end();
            wanted.then(|| snapshots::at_end(model, slot, sequence, ending, rules)).transpose()
        };
        let snapshot = catch_panic(snapshot);
        self.scheduler.count(slot, unread);
        match snapshot {
            Ok(None) => self.end(slot, ending, None),
            Ok(Some(End::Complete(snapshot))) => self.end(slot, ending, Some(snapshot)),
            Ok(Some(End::NeedsState { open })) => {
                let read_again = self.scheduler.sequence(slot).map_or(0, |sequence| sequence.retokenized.len());
                self.scheduler.count(slot, read_again);
                self.export(slot, Purpose::End(ending, open));
            }
            Ok(Some(End::ReadsBack)) => {
                self.scheduler.read_back(slot);
                self.continue_text(slot, None);
            }
            Err(error) => self.fail(slot, &error),
        }
    }

    fn end(&mut self, slot: usize, ending: Ending, snapshot: Option<EndSnapshot>) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let (mut finish, wanted) = (sequence.finish(ending), sequence.snapshot);
        let taker = sequence.keeper.take().filter(|keeper| keeper.end).map(|keeper| keeper.taker);
        if let Some(EndSnapshot { snapshot, is_in_slot }) = snapshot {
            let snapshot = Arc::new(snapshot);
            if is_in_slot {
                self.scheduler.set_resident(slot, &snapshot);
            }
            if let Some(taker) = taker {
                taker.take(&snapshot);
            }
            finish.snapshot = wanted.then_some(snapshot);
        }
        // Count first, so that a client that has received the last event finds it counted.
        add(&self.shared.counters.finished, 1);
        self.scheduler.end(slot, Event::Finished(finish));
    }

    /// Ends a request that cannot continue.
    pub(super) fn fail(&mut self, slot: usize, error: &SequenceError) {
        let reason = error.reason.as_str();
        let span = self.scheduler.sequence(slot).map_or_else(Span::none, |sequence| sequence.client.span.clone());
        // A grammar error is not logged as an error: a client must not be able to raise an alarm with its own grammar.
        span.in_scope(|| {
            if error.failure == Failure::Grammar {
                info!(slot, reason, "generation ended: {}", error.failure);
            } else {
                error!(slot, reason, "generation failed");
            }
        });
        add(&self.shared.counters.failed, 1);
        self.scheduler.end(slot, Event::Failed(error.failure));
        debug!(running = self.scheduler.running(), "the engine continues");
    }
}
