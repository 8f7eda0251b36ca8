//! The engine's thread: admit, read one chunk of one prompt, take one decode step, again.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_model::sampling::{Permitted, Plans, Sampler, SamplingParams};
use tidegate_model::{LanguageModel, ModelError, Transfer};
use tracing::{Span, debug, error, info};

use super::arrival::{begin_handover, start_import};
use super::ends::Ending;
use super::event::{Event, Failure};
use super::guarded::{Fault, guarded};
use super::handle::{EngineHandle, EngineThread, Heartbeat, Shared};
use super::inbox::{Inbox, Phase, Submission};
use super::moves::Purpose;
use super::scheduler::Scheduler;
use super::sequence::{Choice, Sequence, TextBuffers, TextRules};
use super::stats::{Counters, add};
use super::step::Step;

/// How an engine is set up; its slots are the model's.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// Requests that may wait for a slot.
    pub queue: usize,
    /// How long a request may keep its slot while nobody reads its text.
    pub stall_limit: Duration,
    /// How long a step may take before the engine counts as stuck, and as not ready.
    pub step_limit: Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { queue: 256, stall_limit: Duration::from_mins(1), step_limit: Duration::from_secs(30) }
    }
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The system gave no thread.
    #[error("the engine's thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
    /// The model failed on its first token.
    #[error("the model failed on its first token: {0}")]
    WarmUp(String),
}

/// Starts the engine's thread, and waits until the model has taken its first steps.
///
/// # Errors
/// No thread, or a model that fails.
pub fn spawn<M: LanguageModel + 'static>(
    mut model: M,
    rules: TextRules,
    options: EngineOptions,
) -> Result<(EngineHandle, EngineThread), EngineError> {
    let shared = Arc::new(Shared {
        inbox: Inbox::new(options.queue),
        counters: Counters::new(model.slots(), model.slot_bytes()),
        alive: AtomicBool::new(true),
        heartbeat: Heartbeat::new(options.step_limit),
        stall_limit: options.stall_limit,
        slots: model.slots(),
    });
    let inbox = Arc::clone(&shared);
    model.on_transfer_end(Arc::new(move || inbox.inbox.wake()));
    let scheduler = Scheduler::new(model.slots(), options.stall_limit);
    let (step, buffers) = (Step::default(), TextBuffers::default());
    let mut worker = Worker { model, rules, scheduler, shared: Arc::clone(&shared), step, buffers };
    let (warm, warmed) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
        let _guard = Guard(Arc::clone(&worker.shared));
        let outcome = worker.warm_up();
        let ready = outcome.is_ok();
        // The receiver waits for exactly this message.
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

/// However the thread ends, nobody is left waiting for it.
struct Guard(Arc<Shared>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Release);
        self.0.inbox.shut();
    }
}

pub(super) struct Worker<M> {
    pub(super) model: M,
    pub(super) rules: TextRules,
    pub(super) scheduler: Scheduler,
    pub(super) shared: Arc<Shared>,
    /// Kept from step to step for their memory.
    step: Step,
    buffers: TextBuffers,
}

impl<M: LanguageModel> Worker<M> {
    /// Takes the model through one token of each kind, and a state out of it, so that all is in memory before the first
    /// request.
    fn warm_up(&mut self) -> Result<(), String> {
        let model = &mut self.model;
        guarded(|| {
            model.reset(0)?;
            let start = model.source_start();
            if start.is_some() {
                model.read_source(&[0], 0)?;
            }
            let first = start.unwrap_or(0);
            model.absorb(&[first], 0)?;
            model.decode(&[first], &[0], &mut Vec::new())?;
            if model.samples() {
                let mut sampler =
                    Sampler::new(SamplingParams::default(), model.vocab_size()).map_err(ModelError::other)?;
                let mut plan = |_: Range<usize>, plans: &mut Plans| _ = sampler.plan(Permitted::default(), plans);
                model.decode_and_sample(&[first], &[0], &mut plan, (&mut Vec::new(), &mut Vec::new()))?;
            }
            // What a move wants is made for the first one.
            let mut left = model.start_export(0)?;
            while matches!(left, Transfer::Pending) {
                std::thread::sleep(Duration::from_millis(1));
                left = model.poll_transfer(0)?;
            }
            model.reset(0)
        })
        .map_err(|fault| fault.reason)
    }

    fn run(&mut self) {
        loop {
            let taken = self.shared.inbox.take(self.scheduler.room(), self.scheduler.wait());
            // After the sleep: an engine that has slept for an hour is not stuck. One whose states do not arrive is.
            if !self.scheduler.moves_are_late(self.shared.heartbeat.limit) {
                self.shared.heartbeat.beat();
            }
            for submission in taken.submissions {
                self.admit(submission);
            }
            if taken.phase == Phase::Aborting {
                self.scheduler.abort();
                return;
            }
            self.look_for_arrivals();
            let swept = self.scheduler.sweep();
            self.count_running();
            add(&self.shared.counters.cancelled, swept.cancelled);
            add(&self.shared.counters.failed, swept.stalled);
            if taken.phase == Phase::Draining && !taken.more && self.scheduler.is_idle() {
                return;
            }
            self.read_one_chunk();
            // Between reading and stepping: who is interrupted by then gets no token more.
            for slot in self.scheduler.interrupted() {
                self.finish(slot, Ending::Interrupted);
            }
            self.decode_step();
            // Before the engine may sleep.
            self.count_running();
            if self.model.is_lost() {
                // Not ready any more: what started this process starts another.
                error!("the model's device is lost, and the engine ends");
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
        if submission.sender.is_closed() {
            add(&self.shared.counters.cancelled, 1);
            return;
        }
        if submission.is_over() {
            let mut sequence = Sequence::new(submission, &self.rules);
            let finish = sequence.finish(Ending::Interrupted, None);
            sequence.outlet.end(Event::Finished(finish));
            add(&self.shared.counters.finished, 1);
            // A channel that is new has room, or its reader has left.
            sequence.outlet.flush();
            return;
        }
        // The inbox hands out no more than there is room for.
        let Some((slot, lies_there)) = self.scheduler.admit(Sequence::new(submission, &self.rules)) else { return };
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let model = &mut self.model;
        let begun = guarded(|| {
            sequence.start_grammar(model.vocab_size());
            match sequence.start.as_ref() {
                _ if sequence.prompt_is_there() => return begin_handover(model, slot, sequence),
                Some(_) if lies_there => {}
                Some(start) if start.read > 0 => return Ok((Purpose::Start, start_import(model, slot, start)?)),
                _ => model.reset(slot)?,
            }
            Ok((Purpose::Start, Transfer::Done(Vec::new())))
        });
        self.follow(slot, begun);
    }

    /// Reads one chunk of one prompt. Its last token, or after a source the text's first, is left for the decode step,
    /// which chooses the one after it.
    fn read_one_chunk(&mut self) {
        let Some(slot) = self.scheduler.next_prefill() else { return };
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let model = &mut self.model;
        if sequence.has_source_to_read() {
            self.shared.heartbeat.rest();
        }
        let outcome = guarded(|| sequence.read_chunk(model, slot));
        // The step after it has its own time.
        self.shared.heartbeat.beat();
        match outcome {
            Ok(length) => {
                add(&self.shared.counters.prompt_tokens, length);
                let last = sequence.is_read();
                self.scheduler.chunk_was_read(slot, last);
                if last {
                    self.prompt_was_read(slot);
                }
            }
            Err(fault) => self.fail(slot, &fault),
        }
    }

    /// Takes every running row one token further.
    ///
    /// A panic while choosing or decoding one request's text ends that request alone. A fault inside the step that the
    /// rows share ends the requests of that step, and the engine goes on.
    fn decode_step(&mut self) {
        let Self { model, scheduler, step, rules, .. } = self;
        if !step.begin(scheduler.rows()) {
            return;
        }
        let outcome = guarded(|| step.decode(model, scheduler, rules));
        // Its buffers come back below; what may go wrong in between is guarded.
        let mut step = std::mem::take(step);
        match outcome {
            Ok(()) => {
                self.shared.counters.step(step.slots.len());
                step.choose(&mut self.scheduler, &self.rules);
                let mut chosen = std::mem::take(&mut step.chosen);
                for ((slot, logits), chosen) in step.slots.iter().zip(step.logits()).zip(chosen.drain(..)) {
                    match (chosen, logits) {
                        (Some(chosen), _) => self.accept(*slot, chosen),
                        (None, Some(logits)) => self.score_prompt(*slot, logits),
                        // The row's request has gone.
                        (None, None) => {}
                    }
                }
                step.chosen = chosen;
            }
            // The states may be half a token further: none of these rows can go on.
            Err(fault) => step.slots.iter().for_each(|slot| self.fail(*slot, &fault)),
        }
        self.step = step;
    }

    /// Takes note of a token of a prompt that was read by a step.
    fn score_prompt(&mut self, slot: usize, logits: &[f32]) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        match guarded(|| sequence.score_prompt(logits)) {
            Ok(()) => {
                add(&self.shared.counters.prompt_tokens, 1);
                if sequence.is_read() {
                    self.prompt_was_read(slot);
                }
            }
            Err(fault) => self.fail(slot, &fault),
        }
    }

    /// Takes the token that a row has chosen; a panic here ends that row alone.
    fn accept(&mut self, slot: usize, chosen: Result<Choice, Fault>) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let (rules, buffers) = (&self.rules, &mut self.buffers);
        match guarded(|| sequence.accept(chosen?, rules, buffers)) {
            Ok(ending) => {
                add(&self.shared.counters.generated_tokens, 1);
                if sequence.wants_mark() {
                    return self.take_out(slot, Purpose::Mark(ending));
                }
                self.goes_on(slot, ending);
            }
            Err(fault) => self.fail(slot, &fault),
        }
    }

    pub(super) fn fail(&mut self, slot: usize, fault: &Fault) {
        let reason = fault.reason.as_str();
        let span = self.scheduler.sequence(slot).map_or_else(Span::none, |sequence| sequence.span.clone());
        // A client must not be able to raise an alarm with a grammar of its own.
        span.in_scope(|| {
            if fault.failure == Failure::Grammar {
                info!(slot, reason, "generation ended: {}", fault.failure);
            } else {
                error!(slot, reason, "generation failed");
            }
        });
        add(&self.shared.counters.failed, 1);
        self.scheduler.end(slot, Event::Failed(fault.failure));
        debug!(running = self.scheduler.running(), "the engine goes on");
    }
}
