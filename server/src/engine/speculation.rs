//! Speculation: a step in which rows read drafts besides their pending tokens. The request's own sampler then chooses at
//! each position, as it would have done step by step, and a draft is kept if it is what the sampler has chosen. So drafts
//! change the time that a text takes, and nothing else.
//!
//! A step reads as many drafts as give the most tokens in the time that it takes: by how often the drafts of each text were
//! right lately, and by what steps of as many tokens have cost. For many rows, whose step costs what its tokens cost, that is
//! none.

use std::time::Instant;

use tidegate_model::LanguageModel;

use super::drafter::Speculation;
use super::error::{SequenceError, catch_panic};
use super::pass_costs::PassCost;
use super::row_drafts::DraftCounts;
use super::sequence::{Accepted, Sequence};
use super::stats::add;
use super::worker::Worker;

/// Most rows of a step with drafts. For more of them, even looking for drafts takes longer than it saves.
const MOST_ROWS: usize = 8;

/// Drafts are read only where they promise so many times the tokens: the estimates are not exact.
const GAIN: f64 = 1.05;

/// The number of drafts, at most `longest`, that gives the most tokens for the cost of a step of `rows` rows. `expected`
/// are the tokens of all rows for a number of drafts.
fn best(rows: usize, longest: usize, cost: PassCost, expected: impl Fn(usize) -> f64) -> usize {
    let rate = |drafts: usize| expected(drafts) / cost.of(rows * (1 + drafts));
    let best = (1..=longest).max_by(|a, b| rate(*a).total_cmp(&rate(*b)));
    best.filter(|drafts| rate(*drafts) > rate(0) * GAIN).unwrap_or(0)
}

impl<M: LanguageModel> Worker<M> {
    /// How many drafts each row of the step that has begun reads. The rows of other tenants would wait for them, and rows
    /// that read known tokens have no use for them.
    pub(super) fn propose_drafts(&mut self) -> usize {
        let Self { scheduler, step, costs, speculation, .. } = self;
        let Some(Speculation { drafter, most }) = speculation else { return 0 };
        let rows = step.slots.len();
        if rows > MOST_ROWS || !step.is_of_one_tenant() {
            return 0;
        }
        let generating = |slot: &usize| scheduler.sequence(*slot).is_some_and(Sequence::is_generating);
        if !step.slots.iter().all(generating) {
            return 0;
        }
        let mut longest = 0;
        for sequence in scheduler.sequences(&step.slots).flatten() {
            let left = sequence.generation.max_tokens.saturating_sub(sequence.generation.generated + 1);
            if let Some(drafts) = &mut sequence.drafts {
                drafts.propose(|recent, draft| drafter.draft(recent, left.min(*most), draft));
                longest = longest.max(drafts.proposed().len());
            }
        }
        let drafts = |slot: &usize| scheduler.sequence(*slot)?.drafts.as_ref();
        best(rows, longest, costs.with_drafts(), |count| {
            step.slots.iter().map(|slot| drafts(slot).map_or(1.0, |drafts| drafts.expected(count))).sum()
        })
    }

    /// Makes the step that has begun with so many drafts for each row.
    pub(super) fn draft_step(&mut self, drafts: usize, waiting: usize) {
        let began = Instant::now();
        let Self { model, scheduler, step, .. } = self;
        step.add_drafts(scheduler, drafts);
        let outcome = catch_panic(|| step.verify(model, scheduler));
        // Its buffers are put back below; panics in between are caught.
        let mut step = std::mem::take(step);
        match outcome {
            Ok(()) => {
                let passes = self.count_step(step.slots.len(), waiting);
                for (slot, tokens, logits) in step.verified() {
                    self.scheduler.stepped(slot, passes, tokens.len());
                    self.accept_drafts(slot, tokens, logits);
                }
                self.costs.drafted(step.slots.len() * (1 + drafts), began.elapsed());
            }
            // Some states may be incomplete.
            Err(error) => step.slots.iter().for_each(|slot| self.fail(*slot, &error)),
        }
        self.step = step;
    }

    /// Chooses the tokens of a row that has read `tokens`, its pending one and drafts, as long as they are the drafts; then
    /// the state keeps what it has read of the text. logits: (tokens, vocab)
    fn accept_drafts(&mut self, slot: usize, tokens: &[u32], logits: &mut [f32]) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let (rules, buffers, counters) = (&self.rules, &mut self.buffers, &self.shared.counters);
        let drafted = sequence.drafts.as_ref().map_or(0, |drafts| drafts.proposed().len()).min(tokens.len() - 1);
        let mut read = 0;
        let mut last = Err(SequenceError::internal("a row has no logits"));
        for logits in logits.chunks_exact_mut(logits.len() / tokens.len()) {
            read += 1;
            last = catch_panic(|| {
                let choice = sequence.generation.choose(logits, &rules.eos)?;
                sequence.accept(choice, rules, buffers).map(Some)
            });
            let draft = tokens.get(read).filter(|_| read <= drafted).copied();
            let goes_on = matches!(last, Ok(Some(Accepted { ending: None, rollback: None })));
            if !goes_on || draft.is_none() || draft != sequence.pending() || sequence.client.events.is_full() {
                break;
            }
            add(&counters.generated_tokens, 1);
        }
        let counts = DraftCounts { drafted, accepted: read.saturating_sub(1) };
        add(&counters.drafted_tokens, counts.drafted);
        add(&counters.accepted_drafts, counts.accepted);
        if let Some(drafts) = &mut sequence.drafts {
            drafts.counts.drafted += counts.drafted;
            drafts.counts.accepted += counts.accepted;
        }
        let model = &mut self.model;
        match catch_panic(|| model.keep(slot, read)) {
            Ok(()) => self.accepted(slot, last),
            Err(error) => self.fail(slot, &error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens of `rows` rows whose drafts are right with this share.
    fn expected(rows: usize, share: f64) -> impl Fn(usize) -> f64 {
        move |drafts| rows as f64 * (0..=drafts).map(|power| share.powi(power as i32)).sum::<f64>()
    }

    #[test]
    fn drafts_are_read_where_they_pay() {
        let memory_bound = PassCost { base: 10.0, each: 1.0 };
        assert_eq!(best(1, 16, memory_bound, expected(1, 1.0)), 16);
        assert_eq!(best(1, 3, memory_bound, expected(1, 1.0)), 3);
        let some = best(1, 16, memory_bound, expected(1, 0.6));
        assert!((2..8).contains(&some), "{some}");
        assert_eq!(best(1, 16, memory_bound, expected(1, 0.1)), 0);
        // A wide step costs what its tokens cost.
        assert_eq!(best(64, 16, memory_bound, expected(64, 0.6)), 0);
        assert_eq!(best(1, 16, PassCost { base: 0.0, each: 1.0 }, expected(1, 0.9)), 0);
        // Where tokens cost nothing, any hope is enough.
        assert_eq!(best(2, 5, PassCost { base: 1.0, each: 0.0 }, expected(2, 0.06)), 5);
    }
}
