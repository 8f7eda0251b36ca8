//! The engine's thread and its loop: admit requests, read one chunk of one prompt, make one decode step, repeat.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidegate_model::sampling::{Permitted, Plans, Sampler, SamplingParams};
use tidegate_model::{LanguageModel, ModelError, Transfer};
use tracing::error;

use super::draft_model::DraftModel;
use super::drafters::{Drafters, Speculation};
use super::error::catch_panic;
use super::event::Event;
use super::generation::Ending;
use super::handle::{EngineHandle, EngineThread, Heartbeat, Shared};
use super::output::TextBuffers;
use super::pass_costs::{CostSource, PassCosts};
use super::queue::{Lifecycle, RequestQueue};
use super::scheduler::Scheduler;
use super::sequence::Sequence;
use super::shares::Shares;
use super::stats::{Counters, add};
use super::step::Step;
use super::submission::Submission;
use super::text_rules::TextRules;
use super::transfers::Purpose;
use super::worker::Worker;

/// The settings of an engine; the model sets its number of slots.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Most requests that can wait for a slot.
    pub queue: usize,
    /// How long a request may keep its slot while nobody reads its text.
    pub stall_limit: Duration,
    /// How long a step may take before the engine counts as stuck, and so as not ready.
    pub step_limit: Duration,
    /// What steps and chunks cost. This decides how many rows of a tenant take part in a step, and how many draft
    /// tokens a row reads. Measured if `None`.
    pub pass_costs: Option<PassCosts>,
    /// Most draft tokens that a row reads in a step, if the model can verify draft tokens; 0 turns speculation off.
    pub draft_max: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        let (stall_limit, step_limit) = (Duration::from_mins(1), Duration::from_secs(30));
        Self { queue: 256, stall_limit, step_limit, pass_costs: None, draft_max: DRAFT_MAX }
    }
}

/// Default for the most draft tokens that a row reads in a step.
pub const DRAFT_MAX: usize = 16;

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The system could not create the thread.
    #[error("the engine's thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
    /// The model failed on its first token.
    #[error("the model failed on its first token: {0}")]
    WarmUp(String),
}

/// Starts the engine's thread, and waits until the model has made its first steps. Draft tokens come from prompt
/// lookup.
///
/// # Errors
/// The thread cannot be created, or the model fails.
pub fn spawn<M: LanguageModel + 'static>(
    model: M,
    rules: TextRules,
    options: EngineOptions,
) -> Result<(EngineHandle, EngineThread), EngineError> {
    spawn_with(model, rules, options, Drafters::by_lookup(None))
}

/// Does what [`spawn`] does, with other drafters.
///
/// # Errors
/// As for [`spawn`].
pub fn spawn_with<M: LanguageModel + 'static>(
    mut model: M,
    rules: TextRules,
    options: EngineOptions,
    drafters: Drafters,
) -> Result<(EngineHandle, EngineThread), EngineError> {
    let shared = Arc::new(Shared {
        queue: RequestQueue::new(options.queue, model.slots()),
        counters: Counters::new(model.slots(), model.slot_bytes()),
        alive: AtomicBool::new(true),
        heartbeat: Heartbeat::new(options.step_limit),
        stall_limit: options.stall_limit,
        slots: model.slots(),
    });
    let woken = Arc::clone(&shared);
    model.on_transfer_end(Arc::new(move || woken.queue.wake()));
    let scheduler = Scheduler::new(model.slots(), options.stall_limit);
    let (costs, shares) = (CostSource::new(options.pass_costs), Shares::default());
    let (step, buffers) = (Step::default(), TextBuffers::default());
    let any = drafters.lookup.is_some() || drafters.model.is_some();
    let speculates = any && options.draft_max > 0 && model.speculates();
    let speculation = speculates.then(|| Speculation::new(drafters, options.draft_max));
    let mut worker =
        Worker { model, rules, scheduler, shared: Arc::clone(&shared), costs, shares, step, speculation, buffers };
    let (warm, warmed) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
        let _guard = Guard(Arc::clone(&worker.shared));
        let outcome = worker.warm_up();
        let ready = outcome.is_ok();
        // The receiver waits for this message.
        let _ = warm.send(outcome);
        if ready {
            worker.run();
        }
    })?;
    match warmed.recv() {
        Ok(Ok(())) => Ok((EngineHandle { shared }, EngineThread { thread })),
        Ok(Err(reason)) => Err(EngineError::WarmUp(reason)),
        Err(_) => Err(EngineError::WarmUp("its thread ended".into())),
    }
}

/// Closes the queue however the thread ends, so that no request waits forever.
struct Guard(Arc<Shared>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Release);
        self.0.queue.close();
    }
}

impl<M: LanguageModel> Worker<M> {
    /// Makes each kind of call once, so that everything is in memory before the first request.
    fn warm_up(&mut self) -> Result<(), String> {
        let model = &mut self.model;
        let draft_model = self.speculation.as_mut().and_then(|speculation| speculation.drafters.model.as_mut());
        catch_panic(|| {
            draft_model.map_or(Ok(()), DraftModel::warm_up)?;
            model.reset(0)?;
            let start = model.source_start();
            if start.is_some() {
                model.read_source(&[0], 0)?;
            }
            let first = start.unwrap_or(0);
            model.prefill(&[first], 0)?;
            model.decode(&[first], &[0], &mut Vec::new())?;
            if model.scores_chunks() {
                model.prefill_logits(&[first; 2], 0, &mut Vec::new())?;
            }
            if model.speculates() {
                model.verify(&[first; 2], &[0], &mut Vec::new())?;
                model.keep(0, 1)?;
            }
            if model.samples() {
                let mut sampler =
                    Sampler::new(SamplingParams::default(), model.vocab_size()).map_err(ModelError::other)?;
                let mut plan = |_: Range<usize>, plans: &mut Plans| _ = sampler.plan(Permitted::default(), plans);
                model.decode_and_sample(&[first], &[0], &mut plan, (&mut Vec::new(), &mut Vec::new()))?;
            }
            let mut transfer = model.start_export(0)?;
            while matches!(transfer, Transfer::Pending) {
                std::thread::sleep(Duration::from_millis(1));
                transfer = model.poll_transfer(0)?;
            }
            model.reset(0)
        })
        .map_err(|error| error.reason)
    }

    fn run(&mut self) {
        loop {
            let (room, wait) = (self.scheduler.room(), self.scheduler.wait());
            let batch = self.shared.queue.take(room, &mut self.scheduler.usage, wait);
            // Only after the sleep: an engine that has slept for an hour is not stuck, but one whose transfers do not
            // end is.
            if !self.scheduler.transfers_are_late(self.shared.heartbeat.limit) {
                self.shared.heartbeat.beat();
            }
            for submission in batch.submissions {
                self.admit(submission);
            }
            if batch.lifecycle == Lifecycle::Aborting {
                self.scheduler.abort();
                return;
            }
            self.poll_transfers();
            let swept = self.scheduler.sweep();
            self.count_running();
            add(&self.shared.counters.cancelled, swept.cancelled);
            add(&self.shared.counters.failed, swept.stalled);
            if batch.lifecycle == Lifecycle::Draining && !batch.more && self.scheduler.is_idle() {
                return;
            }
            let costs = self.costs.costs().filter(|_| batch.shared);
            self.scheduler.divide(&mut self.shares, costs, self.model.longest_chunk());
            self.read_one_chunk();
            // Between reading and stepping: a request that is interrupted by now gets no more tokens.
            for slot in self.scheduler.interrupted() {
                self.finish(slot, Ending::Interrupted);
            }
            self.decode_step();
            // Before the engine may sleep.
            self.count_running();
            if self.model.is_lost() {
                // The server is no longer ready: its supervisor has to restart it.
                error!("the model's device is lost: the engine ends");
                self.scheduler.abort();
                return;
            }
        }
    }

    fn count_running(&self) {
        self.shared.counters.running.store(self.scheduler.running() as u64, Ordering::Relaxed);
        self.shared.counters.denominators(self.model.denominators());
    }

    fn admit(&mut self, submission: Submission) {
        let counters = &self.shared.counters;
        let passes = counters.passes.load(Ordering::Relaxed);
        // Read once: another thread may change either at any time, and then the count of slots would not be given back.
        let (is_abandoned, is_interrupted) = (submission.is_abandoned(), submission.is_interrupted());
        if submission.advance > 0 && (is_abandoned || is_interrupted) {
            // The count was taken when the submission left the queue.
            self.scheduler.usage.free_slot(submission.tenant, submission.advance);
        }
        if is_abandoned {
            add(&counters.cancelled, 1);
            return;
        }
        if is_interrupted {
            let mut sequence = Sequence::new(submission, passes, &self.rules);
            let finish = sequence.finish(Ending::Interrupted);
            sequence.client.events.end(Event::Finished(finish));
            add(&counters.finished, 1);
            // A new channel has room, unless the reader has left.
            sequence.client.events.flush();
            return;
        }
        // The queue returns no more submissions than there are free slots.
        add(&counters.admitted, 1);
        add(&counters.waited_passes, passes.saturating_sub(submission.submitted_at) as usize);
        let mut sequence = Sequence::new(submission, passes, &self.rules);
        sequence.drafts = self.speculation.as_mut().map(|speculation| speculation.row(&sequence.prompt.recent));
        let repeated = catch_panic(|| sequence.repeat_begun(&self.rules, &mut self.buffers));
        let Some((slot, is_in_slot)) = self.scheduler.admit(sequence) else { return };
        if let Err(error) = repeated {
            return self.fail(slot, &error);
        }
        let Some(sequence) = self.scheduler.sequence(slot) else { return };
        match sequence.prompt.start.clone() {
            _ if sequence.prompt.read_by_other().is_some() => self.import_prompt(slot),
            Some(start) if !is_in_slot && start.read > 0 => self.import(slot, Purpose::Start, start),
            _ => {
                let model = &mut self.model;
                let reset = catch_panic(|| if is_in_slot { Ok(()) } else { model.reset(slot) });
                self.continue_after(slot, Purpose::Start, reset.map(|()| Transfer::Done(Vec::new())));
            }
        }
    }

    /// Makes one decode step with the running rows whose turn it is.
    ///
    /// A panic while sampling or accepting one row's token ends only that request. An error in the step that the rows
    /// share ends all requests of the step, and the engine continues.
    fn decode_step(&mut self) {
        let (any, waiting) = self.step.begin(self.scheduler.rows(), &mut self.shares);
        if !any {
            return;
        }
        let drafts = self.propose_drafts();
        if drafts > 0 {
            return self.draft_step(drafts, waiting);
        }
        let Self { model, scheduler, step, rules, .. } = self;
        let began = Instant::now();
        let outcome = catch_panic(|| step.decode(model, scheduler, rules));
        // The buffers are put back below; panics in between are caught.
        let mut step = std::mem::take(step);
        match outcome {
            Ok(()) => {
                let passes = self.count_step(step.slots.len(), waiting);
                step.slots.iter().for_each(|slot| self.scheduler.stepped(*slot, passes, 1));
                step.sample(&mut self.scheduler, &self.rules);
                let mut choices = std::mem::take(&mut step.choices);
                for ((slot, logits), choice) in step.slots.iter().zip(step.logits()).zip(choices.drain(..)) {
                    match (choice, logits) {
                        (Some(choice), _) => self.accept(*slot, choice),
                        (None, Some(logits)) => self.read_known(*slot, logits),
                        // The row's request has ended.
                        (None, None) => {}
                    }
                }
                step.choices = choices;
                self.costs.stepped(step.slots.len(), began.elapsed());
            }
            // Some states may have read their token and others not, so none of these rows can continue.
            Err(error) => step.slots.iter().for_each(|slot| self.fail(*slot, &error)),
        }
        self.step = step;
    }

    /// Counts a step, and returns the number of passes so far.
    pub(super) fn count_step(&self, rows: usize, waiting: usize) -> u64 {
        self.shared.counters.step(rows, waiting);
        self.shared.counters.passes.load(Ordering::Relaxed)
    }

    /// Continues after a step that has read a token whose successor is known: a forced token, or a prompt token, which
    /// the logits score.
    fn read_known(&mut self, slot: usize, logits: &[f32]) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        if sequence.has_read_prompt() {
            return sequence.unread_were_read(1);
        }
        match catch_panic(|| sequence.score_prompt(logits)) {
            Ok(()) => {
                add(&self.shared.counters.prompt_tokens, 1);
                if sequence.has_read_prompt() {
                    self.prompt_was_read(slot);
                }
            }
            Err(error) => self.fail(slot, &error),
        }
    }
}
