//! A decode step's rows: the buffers that they are kept in from step to step, and the choice of their tokens: by the
//! model, where it chooses, else by several threads where there are many.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use tidegate_model::Threads;
use tidegate_model::sampling::{Plans, Sampled};
use tidegate_model::{LanguageModel, ModelError};

use super::guarded::{Fault, guarded};
use super::guide::Guide;
use super::scheduler::Scheduler;
use super::sequence::{Choice, Sequence, TextRules};

/// Logits of a step from which on threads share its rows: fewer are chosen from before a thread has begun.
const MANY_LOGITS: usize = 1 << 17;

/// Rows that are handed to the threads at a time.
const GROUP: usize = 64;

/// The rows of one step.
#[derive(Default)]
pub(super) struct Step {
    /// Ascending.
    pub(super) slots: Vec<usize>,
    /// The token that each reads.
    ids: Vec<u32>,
    /// What the model has brought for each.
    sampled: Vec<Sampled>,
    /// (rows that have logits, vocab)
    logits: Vec<f32>,
    vocab: usize,
    /// What each row has chosen; none where it reads its prompt.
    pub(super) chosen: Vec<Option<Result<Choice, Fault>>>,
}

impl Step {
    /// Takes up the rows of a new step; whether there are any.
    pub(super) fn begin(&mut self, rows: impl Iterator<Item = (usize, u32)>) -> bool {
        self.slots.clear();
        self.ids.clear();
        for (slot, id) in rows {
            self.slots.push(slot);
            self.ids.push(id);
        }
        self.chosen.clear();
        self.chosen.resize_with(self.slots.len(), || None);
        !self.slots.is_empty()
    }

    /// Has the model read the rows' tokens, and choose the next ones where it does.
    ///
    /// # Errors
    /// The model failed, or gave another number of logits than the rows and its vocabulary make.
    pub(super) fn decode<M: LanguageModel>(
        &mut self,
        model: &mut M,
        scheduler: &mut Scheduler,
        rules: &TextRules,
    ) -> Result<(), ModelError> {
        let Self { slots, ids, sampled, logits, chosen, .. } = self;
        if model.samples() {
            let mut plan = |rows: Range<usize>, plans: &mut Plans| {
                if rows.start == 0 {
                    while_masks_are_made(scheduler.guides(), || ());
                }
                plan_rows(scheduler, &slots[rows.clone()], (plans, &mut chosen[rows]), rules);
            };
            model.decode_and_sample(ids, slots, &mut plan, (sampled, logits))?;
        } else {
            sampled.clear();
            sampled.resize(slots.len(), Sampled::Logits);
            while_masks_are_made(scheduler.guides(), || model.decode(ids, slots, logits))?;
        }
        self.vocab = model.vocab_size();
        let rows = self.sampled.iter().filter(|sampled| **sampled == Sampled::Logits).count();
        let (vocab, found) = (self.vocab, self.logits.len());
        if self.sampled.len() != self.slots.len() {
            let (sampled, rows) = (self.sampled.len(), self.slots.len());
            return Err(ModelError::other(format_args!(
                "the model must give something for {rows} rows, it did for {sampled}"
            )));
        }
        if found == rows * vocab {
            return Ok(());
        }
        Err(ModelError::other(format_args!("the model must give {rows} x {vocab} logits, it gave {found}")))
    }

    /// Each row's logits (vocab), where it has any.
    pub(super) fn logits(&self) -> impl Iterator<Item = Option<&[f32]>> {
        let mut logits = self.logits.chunks_exact(self.vocab);
        self.sampled.iter().map(move |sampled| if *sampled == Sampled::Logits { logits.next() } else { None })
    }

    /// Lets each row choose its token that has not. A row's choice depends on its own request and logits alone; a panic
    /// there is that row's fault.
    pub(super) fn choose(&mut self, scheduler: &mut Scheduler, rules: &TextRules) {
        let Self { slots, sampled, logits, vocab, chosen, .. } = self;
        let many = slots.len() > 1 && logits.len() >= MANY_LOGITS;
        let mut logits = logits.chunks_exact_mut(*vocab);
        let rows = scheduler.sequences(slots).zip(sampled).zip(chosen);
        let rows = rows.filter_map(|((sequence, sampled), chosen)| {
            let logits = if *sampled == Sampled::Logits { logits.next() } else { None };
            Some(Row { sequence: sequence?, sampled: *sampled, logits, chosen })
        });
        let mut rows = rows.filter(|row| row.chosen.is_none() && !row.sequence.reads_by_steps());
        if !many {
            return rows.for_each(|row| row.choose(rules));
        }
        loop {
            // On the stack: a list of rows could not be kept from step to step, for it borrows them.
            let mut group: [Mutex<Option<Row>>; GROUP] = std::array::from_fn(|_| Mutex::new(None));
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
                    row.choose(rules);
                }
            });
        }
    }
}

/// Plans how the tokens of some rows are chosen; what goes wrong in one is that row's fault, and chosen for it.
fn plan_rows(
    scheduler: &mut Scheduler,
    slots: &[usize],
    (plans, chosen): (&mut Plans, &mut [Option<Result<Choice, Fault>>]),
    rules: &TextRules,
) {
    for (i, (sequence, chosen)) in scheduler.sequences(slots).zip(chosen).enumerate() {
        if let Some(sequence) = sequence.filter(|sequence| !sequence.reads_by_steps())
            && let Err(fault) = guarded(|| sequence.plan(plans, rules))
        {
            *chosen = Some(Err(fault));
        }
        plans.skip_to(i + 1);
    }
}

/// What one row's choice takes.
struct Row<'a> {
    sequence: &'a mut Sequence,
    sampled: Sampled,
    logits: Option<&'a mut [f32]>,
    chosen: &'a mut Option<Result<Choice, Fault>>,
}

impl Row<'_> {
    fn choose(self, rules: &TextRules) {
        let sequence = self.sequence;
        *self.chosen = Some(guarded(|| match (self.sampled, self.logits) {
            (Sampled::Token(token), _) => Ok(sequence.take(token)),
            (Sampled::Nothing { possible }, _) => sequence.end_of_grammar(possible, rules).map(Choice::unscored),
            (Sampled::Logits, Some(logits)) => sequence.choose(logits, rules),
            (Sampled::Logits, None) => Err(Fault::internal("a row has neither a token nor logits")),
        }));
    }
}

/// Takes a step of the model, and makes the masks of its constrained rows beside it: they are of the tokens that come
/// after those that the step reads, and need nothing of what it computes.
fn while_masks_are_made<'a, T>(guides: impl Iterator<Item = &'a mut Guide>, step: impl FnOnce() -> T) -> T {
    let mut guides = guides.peekable();
    if guides.peek().is_none() {
        return step();
    }
    // The step stays on this thread; the pool's threads make the masks, and help with the step as they always do.
    rayon::in_place_scope(|scope| {
        for guide in guides {
            scope.spawn(move |_| guide.look_ahead());
        }
        step()
    })
}
