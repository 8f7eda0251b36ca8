//! A decode step's rows: the buffers that they are kept in from step to step, and the choice of their tokens, by
//! several threads where there are many.

use std::sync::{Mutex, PoisonError};

use tidegate_model::Threads;

use super::guarded::{Fault, guarded};
use super::guide::Guide;
use super::model::{LanguageModel, ModelError};
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
    /// (rows, vocab)
    pub(super) logits: Vec<f32>,
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
        !self.slots.is_empty()
    }

    /// Has the model read the rows' tokens.
    ///
    /// # Errors
    /// The model failed, or gave another number of logits than the rows and its vocabulary make.
    pub(super) fn decode<M: LanguageModel>(&mut self, model: &mut M) -> Result<(), ModelError> {
        model.decode(&self.ids, &self.slots, &mut self.logits)?;
        let (rows, vocab, found) = (self.slots.len(), model.vocab_size(), self.logits.len());
        if found == rows * vocab {
            return Ok(());
        }
        Err(ModelError::new(format_args!("the model must give {rows} x {vocab} logits, it gave {found}")))
    }

    /// Lets each row choose its token. A row's choice depends on its own request and logits alone; a panic there is
    /// that row's fault.
    pub(super) fn choose(&mut self, scheduler: &mut Scheduler, rules: &TextRules) {
        let vocab = self.logits.len() / self.slots.len();
        self.chosen.clear();
        self.chosen.resize_with(self.slots.len(), || None);
        let rows = scheduler.sequences(&self.slots).zip(self.logits.chunks_exact_mut(vocab)).zip(&mut self.chosen);
        let rows = rows.filter_map(|((sequence, logits), chosen)| Some(Row { sequence: sequence?, logits, chosen }));
        let mut rows = rows.filter(|row| !row.sequence.reads_by_steps());
        if self.slots.len() == 1 || self.slots.len() * vocab < MANY_LOGITS {
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

/// What one row's choice takes.
struct Row<'a> {
    sequence: &'a mut Sequence,
    logits: &'a mut [f32],
    chosen: &'a mut Option<Result<Choice, Fault>>,
}

impl Row<'_> {
    fn choose(self, rules: &TextRules) {
        *self.chosen = Some(guarded(|| self.sequence.choose(self.logits, rules)));
    }
}

/// Takes a step of the model, and makes the masks of its constrained rows beside it: they are of the tokens that come
/// after those that the step reads, and need nothing of what it computes.
pub(super) fn while_masks_are_made<'a, T>(guides: impl Iterator<Item = &'a mut Guide>, step: impl FnOnce() -> T) -> T {
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
