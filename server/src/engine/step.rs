//! The rows of a decode step, in buffers that are reused from step to step, and the sampling of their tokens. Tokens
//! are sampled by the model if it can, and otherwise by several threads if there are many logits.

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

/// Fewest logits of a step at which threads share the rows: fewer are sampled before another thread has started.
const MANY_LOGITS: usize = 1 << 17;

/// Rows that the threads share at once.
const GROUP: usize = 64;

/// The rows of one step.
#[derive(Default)]
pub(super) struct Step {
    rows: Vec<Row>,
    /// The rows' slots, in ascending order.
    pub(super) slots: Vec<usize>,
    /// The token that each row reads.
    ids: Vec<u32>,
    /// The model's outcome for each row.
    sampled: Vec<Sampled>,
    /// (rows with logits, vocab)
    logits: Vec<f32>,
    vocab: usize,
    /// Each row's token; `None` for a row that reads prompt tokens or forced tokens.
    pub(super) choices: Vec<Option<Result<Choice, SequenceError>>>,
}

impl Step {
    /// Starts a step with the ready rows for which `shares` has room. Returns whether there are any, and how many rows
    /// have to wait.
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

    /// Makes the model read the rows' tokens, and sample the next tokens if it can.
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

    /// Makes each row read `drafts` draft tokens after its own token: those proposed for it, then arbitrary ones.
    pub(super) fn add_drafts(&mut self, scheduler: &Scheduler, drafts: usize) {
        self.ids.clear();
        for row in &self.rows {
            let proposed = scheduler.sequence(row.slot).and_then(|sequence| sequence.drafts.as_ref());
            let proposed = proposed.into_iter().flat_map(RowDrafts::proposed);
            self.ids.extend(std::iter::once(row.id).chain(proposed.chain(std::iter::repeat(row.id)).take(drafts)));
        }
    }

    /// Makes the model read the rows' tokens and draft tokens.
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

    /// Makes the model read the known tokens of a sequence that its state lacks, in a pass for this sequence alone.
    /// Returns how many tokens these are, and the logits that choose the next token: (vocab).
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
        // The caller's `accept` notes that the last token is in the state.
        match *phase {
            Phase::Prefill { next } => sequence.advance(next, read - 1),
            _ => sequence.unread_were_read(read - 1),
        }
        Ok((read, logits))
    }

    /// Returns each row's slot, tokens, and logits (tokens, vocab), after [`Self::verify`].
    pub(super) fn verified(&mut self) -> impl Iterator<Item = (usize, &[u32], &mut [f32])> {
        let Self { slots, ids, logits, .. } = self;
        let (time, numbers) = (ids.len() / slots.len(), logits.len() / slots.len());
        let of_rows = ids.chunks_exact(time).zip(logits.chunks_exact_mut(numbers));
        slots.iter().zip(of_rows).map(|(slot, (ids, logits))| (*slot, ids, logits))
    }

    /// Returns each row's logits (vocab), if it has any.
    pub(super) fn logits(&self) -> impl Iterator<Item = Option<&[f32]>> {
        let mut logits = self.logits.chunks_exact(self.vocab);
        self.sampled.iter().map(move |sampled| if *sampled == Sampled::Logits { logits.next() } else { None })
    }

    /// Samples a token for each row that has none. The token depends only on the row's own request and logits, and a
    /// panic fails only that row.
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
            // On the stack, because a list that borrows the rows cannot be reused from step to step.
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

/// Plans how the tokens of some rows are sampled. An error becomes the choice of its row.
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

/// What is needed to sample one row's token.
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

/// Runs `step`, and at the same time computes the masks of its rows with a grammar. These masks are for the tokens
/// after those that the step reads, and do not depend on the step's results.
fn compute_masks_during<'a, T>(guides: impl Iterator<Item = &'a mut Guide>, step: impl FnOnce() -> T) -> T {
    let mut guides = guides.peekable();
    if guides.peek().is_none() {
        return step();
    }
    // The step stays on this thread. The pool's threads compute the masks, and help with the step as usual.
    rayon::in_place_scope(|scope| {
        for guide in guides {
            scope.spawn(move |_| guide.compute_mask());
        }
        step()
    })
}
