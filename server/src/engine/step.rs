//! The rows of a decode step, in buffers that are reused from step to step, and the sampling of their tokens: by the model
//! if it samples, else by several threads if there are many.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use tidegate_model::Threads;
use tidegate_model::sampling::{Plans, Sampled};
use tidegate_model::{LanguageModel, ModelError};

use super::error::{SequenceError, catch_panic};
use super::generation::Choice;
use super::guide::Guide;
use super::row_drafts::RowDrafts;
use super::scheduler::Scheduler;
use super::sequence::{Phase, Sequence};
use super::shares::{Row, Shares};
use super::text_rules::TextRules;

/// Fewest logits of a step whose rows are shared among threads: fewer are sampled before another thread has started.
const MANY_LOGITS: usize = 1 << 17;

/// Rows that the threads share at a time.
const GROUP: usize = 64;

/// The rows of one step.
#[derive(Default)]
pub(super) struct Step {
    rows: Vec<Row>,
    /// In ascending order.
    pub(super) slots: Vec<usize>,
    /// The token that each row reads.
    ids: Vec<u32>,
    /// The model's outcome for each row.
    sampled: Vec<Sampled>,
    /// (rows with logits, vocab)
    logits: Vec<f32>,
    vocab: usize,
    /// Each row's token; `None` for a row that reads its prompt or tokens that its grammar has forced.
    pub(super) choices: Vec<Option<Result<Choice, SequenceError>>>,
}

impl Step {
    /// Starts a step of the rows that are ready, as far as `shares` has room for them; whether there are any. Returns also
    /// how many have to wait.
    pub(super) fn begin(&mut self, ready: impl Iterator<Item = Row>, shares: &mut Shares) -> (bool, usize) {
        self.rows.clear();
        self.rows.extend(ready);
        let ready = self.rows.len();
        shares.choose(&mut self.rows);
        self.slots.clear();
        self.slots.extend(self.rows.iter().map(|row| row.slot));
        self.ids.clear();
        self.ids.extend(self.rows.iter().map(|row| row.id));
        self.choices.clear();
        self.choices.resize_with(self.slots.len(), || None);
        (!self.slots.is_empty(), ready - self.rows.len())
    }

    /// Lets the model read the rows' tokens, and sample the next ones if it does.
    ///
    /// # Errors
    /// The model failed, or returned a wrong number of logits.
    pub(super) fn decode<M: LanguageModel>(
        &mut self,
        model: &mut M,
        scheduler: &mut Scheduler,
        rules: &TextRules,
    ) -> Result<(), ModelError> {
        let Self { slots, ids, sampled, logits, choices, .. } = self;
        if model.samples() {
            let mut plan = |rows: Range<usize>, plans: &mut Plans| {
                if rows.start == 0 {
                    compute_masks_during(scheduler.guides(slots), || ());
                }
                plan_rows(scheduler, &slots[rows.clone()], (plans, &mut choices[rows]), rules);
            };
            model.decode_and_sample(ids, slots, &mut plan, (sampled, logits))?;
        } else {
            sampled.clear();
            sampled.resize(slots.len(), Sampled::Logits);
            compute_masks_during(scheduler.guides(slots), || model.decode(ids, slots, logits))?;
        }
        self.vocab = model.vocab_size();
        let rows = self.sampled.iter().filter(|sampled| **sampled == Sampled::Logits).count();
        let (expected, found) = ((self.slots.len(), rows * self.vocab), (self.sampled.len(), self.logits.len()));
        if found == expected {
            return Ok(());
        }
        let message = format!("the model must return {expected:?} outcomes and logits, it returned {found:?}");
        Err(ModelError::other(message))
    }

    /// Lets each row read so many drafts after its token: those proposed for it, then any.
    pub(super) fn add_drafts(&mut self, scheduler: &Scheduler, drafts: usize) {
        self.ids.clear();
        for row in &self.rows {
            let proposed = scheduler.sequence(row.slot).and_then(|sequence| sequence.drafts.as_ref());
            let proposed = proposed.map_or(&[][..], RowDrafts::proposed).iter().copied();
            self.ids.extend(std::iter::once(row.id).chain(proposed.chain(std::iter::repeat(row.id)).take(drafts)));
        }
    }

    /// Lets the model read the rows' tokens and drafts.
    ///
    /// # Errors
    /// The model failed, or returned a wrong number of logits.
    pub(super) fn verify<M: LanguageModel>(
        &mut self,
        model: &mut M,
        scheduler: &mut Scheduler,
    ) -> Result<(), ModelError> {
        let Self { slots, ids, logits, .. } = self;
        compute_masks_during(scheduler.guides(slots), || model.verify(ids, slots, logits))?;
        let (expected, found) = (ids.len() * model.vocab_size(), logits.len());
        if found == expected {
            return Ok(());
        }
        Err(ModelError::other(format!("the model must return {expected} logits, it returned {found}")))
    }

    /// Lets the model read what is known of a sequence and not in the state, in a pass for that sequence alone. Returns how
    /// many tokens these are, and the logits that choose the next one: (vocab).
    ///
    /// # Errors
    /// The model failed, or returned a wrong number of logits.
    pub(super) fn read_to_the_end<M: LanguageModel>(
        &mut self,
        model: &mut M,
        sequence: &mut Sequence,
        slot: usize,
    ) -> Result<(usize, &mut [f32]), ModelError> {
        let Self { logits, .. } = self;
        let Sequence { phase, prompt, unread, generation, .. } = sequence;
        let ids = match *phase {
            Phase::Prefill { next } => &prompt.input[next..],
            Phase::ReadForced { pending } => {
                unread.push(pending);
                &unread[..]
            }
            _ => return Err(ModelError::other("a sequence has nothing to read in a chunk")),
        };
        let read = ids.len();
        let outcome = compute_masks_during(generation.guide.iter_mut(), || model.prefill_logits(ids, slot, logits));
        if matches!(phase, Phase::ReadForced { .. }) {
            unread.pop();
        }
        outcome?;
        let (expected, found) = (model.vocab_size(), logits.len());
        if found != expected {
            return Err(ModelError::other(format!("the model must return {expected} logits, it returned {found}")));
        }
        // The caller's `accept` notes that the last one is in the state.
        match *phase {
            Phase::Prefill { next } => sequence.advance(next, read - 1),
            _ => sequence.forced_were_read(read - 1),
        }
        Ok((read, logits))
    }

    /// After [`Self::verify`]: each row's slot, tokens, and logits (tokens, vocab).
    pub(super) fn verified(&mut self) -> impl Iterator<Item = (usize, &[u32], &mut [f32])> {
        let Self { slots, ids, logits, .. } = self;
        let (time, numbers) = (ids.len() / slots.len(), logits.len() / slots.len());
        let of_rows = ids.chunks_exact(time).zip(logits.chunks_exact_mut(numbers));
        slots.iter().zip(of_rows).map(|(slot, (ids, logits))| (*slot, ids, logits))
    }

    /// Each row's logits (vocab), if it has any.
    pub(super) fn logits(&self) -> impl Iterator<Item = Option<&[f32]>> {
        let mut logits = self.logits.chunks_exact(self.vocab);
        self.sampled.iter().map(move |sampled| if *sampled == Sampled::Logits { logits.next() } else { None })
    }

    /// Samples a token for each row that has none. The token depends on the row's own request and logits alone; a panic
    /// fails that row alone.
    pub(super) fn sample(&mut self, scheduler: &mut Scheduler, rules: &TextRules) {
        let Self { slots, sampled, logits, vocab, choices, .. } = self;
        let many = slots.len() > 1 && logits.len() >= MANY_LOGITS;
        let mut logits = logits.chunks_exact_mut(*vocab);
        let rows = scheduler.sequences(slots).zip(sampled).zip(choices);
        let rows = rows.filter_map(|((sequence, sampled), choice)| {
            let logits = if *sampled == Sampled::Logits { logits.next() } else { None };
            Some(Sampling { sequence: sequence?, sampled: *sampled, logits, choice })
        });
        let mut rows = rows.filter(|row| row.choice.is_none() && row.sequence.is_generating());
        if !many {
            return rows.for_each(|row| row.sample(rules));
        }
        loop {
            // On the stack: a list that borrows the rows cannot be reused from step to step.
            let mut group: [Mutex<Option<Sampling>>; GROUP] = std::array::from_fn(|_| Mutex::new(None));
            let mut count = 0;
            for (place, row) in group.iter_mut().zip(rows.by_ref()) {
                *place = Mutex::new(Some(row));
                count += 1;
            }
            if count == 0 {
                return;
            }
            Threads::global().run(count, &|i| {
                let row = group[i].lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(row) = row {
                    row.sample(rules);
                }
            });
        }
    }
}

/// Plans how the tokens of some rows are sampled; an error becomes that row's choice.
fn plan_rows(
    scheduler: &mut Scheduler,
    slots: &[usize],
    (plans, choices): (&mut Plans, &mut [Option<Result<Choice, SequenceError>>]),
    rules: &TextRules,
) {
    for (i, (sequence, choice)) in scheduler.sequences(slots).zip(choices).enumerate() {
        if let Some(sequence) = sequence.filter(|sequence| sequence.is_generating())
            && let Err(error) = catch_panic(|| sequence.generation.plan(plans, &rules.eos))
        {
            *choice = Some(Err(error));
        }
        plans.skip_to(i + 1);
    }
}

/// What the sampling of one row needs.
struct Sampling<'a> {
    sequence: &'a mut Sequence,
    sampled: Sampled,
    logits: Option<&'a mut [f32]>,
    choice: &'a mut Option<Result<Choice, SequenceError>>,
}

impl Sampling<'_> {
    fn sample(self, rules: &TextRules) {
        let generation = &mut self.sequence.generation;
        *self.choice = Some(catch_panic(|| match (self.sampled, self.logits) {
            (Sampled::Token(token), _) => Ok(generation.accept_known(token)),
            (Sampled::Nothing { possible }, _) => {
                generation.end_by_grammar(possible, &rules.eos).map(Choice::without_logprobs)
            }
            (Sampled::Logits, Some(logits)) => generation.sample(logits, &rules.eos),
            (Sampled::Logits, None) => Err(SequenceError::internal("a row has neither a token nor logits")),
        }));
    }
}

/// Runs `step`, and computes the masks of its constrained rows at the same time: they are for the tokens after those that
/// the step reads, and do not depend on its results.
fn compute_masks_during<'a, T>(guides: impl Iterator<Item = &'a mut Guide>, step: impl FnOnce() -> T) -> T {
    let mut guides = guides.peekable();
    if guides.peek().is_none() {
        return step();
    }
    // The step stays on this thread; the pool's threads compute the masks, and help with the step as always.
    rayon::in_place_scope(|scope| {
        for guide in guides {
            scope.spawn(move |_| guide.compute_mask());
        }
        step()
    })
}
