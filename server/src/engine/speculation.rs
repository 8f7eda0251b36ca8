//! Speculative decoding: a step in which each row reads draft tokens after its pending token. The request's own sampler
//! then chooses at each position, as it would have done step by step. A draft token is kept if the sampler has chosen
//! it too. So draft tokens change only how long a text takes.
//!
//! A step reads as many draft tokens as yield the most tokens per unit of time. The estimate uses how often each text's
//! recent draft tokens were right, and what steps with as many tokens have cost. With many rows, where the cost of a
//! step grows with its tokens, the best number is zero.

use std::time::Instant;

use tidegate_model::LanguageModel;
use tracing::error;

use super::draft_model::{DRAFT_SLOTS, DraftRow};
use super::drafters::{Drafters, Speculation};
use super::error::{SequenceError, catch_panic};
use super::row_drafts::{DraftCounts, Origin};
use super::sequence::{Accepted, Sequence};
use super::stats::add;
use super::worker::Worker;

/// Most rows of a step with draft tokens. With more rows, even looking for draft tokens takes longer than it saves.
const MOST_ROWS: usize = DRAFT_SLOTS;

/// Most tokens of a step with draft tokens, over all rows: all their logits are in memory, and other requests wait
/// meanwhile.
pub const MOST_TOKENS: usize = 64;

/// Draft tokens are read only if they raise the expected tokens per unit of time by at least this factor, because the
/// estimates are not exact.
const GAIN: f64 = 1.05;

/// The fraction of its speed without draft tokens that a text may lose to the draft tokens of others in a step.
const LOSS: f64 = 0.03;

/// Returns the number of draft tokens, at most `longest`, that yields the most tokens for the cost of a step with these
/// rows, without slowing any of them down much. `cost` is the cost of a step with that many draft tokens per row, and
/// `expected` the number of tokens that a row yields.
fn best<R: Copy>(rows: &[R], longest: usize, cost: impl Fn(usize) -> f64, expected: impl Fn(R, usize) -> f64) -> usize {
    let rate = |drafts: usize| rows.iter().map(|row| expected(*row, drafts)).sum::<f64>() / cost(drafts);
    let is_fair = |drafts: &usize| {
        let least = (1.0 - LOSS) * cost(*drafts) / cost(0);
        rows.iter().all(|row| expected(*row, *drafts) >= least * expected(*row, 0))
    };
    let longest = longest.min((MOST_TOKENS / rows.len().max(1)).saturating_sub(1));
    let best = (1..=longest).filter(is_fair).max_by(|a, b| rate(*a).total_cmp(&rate(*b)));
    best.filter(|drafts| rate(*drafts) > rate(0) * GAIN).unwrap_or(0)
}

impl<M: LanguageModel> Worker<M> {
    /// Proposes draft tokens for the step that has begun, and returns how many each row reads. Returns 0 if other
    /// tenants would wait for them, or if rows read known tokens and cannot use them.
    pub(super) fn propose_drafts(&mut self) -> usize {
        let Self { scheduler, step, costs, shares, speculation, .. } = self;
        let Some(Speculation { drafters: Drafters { lookup, model }, most, .. }) = speculation else { return 0 };
        let rows = step.slots.len();
        if rows > MOST_ROWS || !shares.is_of_one() {
            return 0;
        }
        let generating = |slot: &usize| scheduler.sequence(*slot).is_some_and(Sequence::is_generating);
        if !step.slots.iter().all(generating) {
            return 0;
        }
        let (steps, proposals) = (costs.with_drafts(), costs.of_proposals());
        // If the draft model takes longer than it saves, the rows use only lookups.
        for with_model in [model.is_some(), false] {
            let (mut longest, mut by_model) = (0, 0);
            for Sequence { generation, drafts, .. } in scheduler.sequences(&step.slots).flatten() {
                let left = generation.max_tokens.saturating_sub(generation.generated + 1);
                let most = left.min(*most);
                let of_model = if with_model { costs.worth_asking(most) } else { 0 };
                let Some(drafts) = drafts else { continue };
                drafts.look_up(lookup.as_deref_mut(), most, left);
                if of_model > 0 && drafts.prefers_model() {
                    drafts.await_model(of_model);
                    by_model += 1;
                }
                longest = longest.max(drafts.available());
            }
            let cost = |drafts: usize| match by_model * drafts {
                0 => steps.of(rows * (1 + drafts)),
                proposed => steps.of(rows * (1 + drafts)) + proposals.of(proposed),
            };
            let drafts = |slot: &usize| scheduler.sequence(*slot)?.drafts.as_ref();
            let expected = |slot, count| drafts(&slot).map_or(1.0, |drafts| drafts.expected(count));
            let best = best(&step.slots, longest, cost, expected);
            if by_model == 0 {
                return best;
            }
            if best > 0 {
                return self.ask_draft_model(best);
            }
        }
        0
    }

    /// Makes the draft model propose `count` tokens for each row that waits for it. A draft model that fails is not
    /// asked again. Returns the largest number of draft tokens of any row.
    fn ask_draft_model(&mut self, count: usize) -> usize {
        let Self { scheduler, step, costs, speculation: Some(Speculation { drafters, .. }), .. } = self else {
            return 0;
        };
        let Some(model) = &mut drafters.model else { return 0 };
        let began = Instant::now();
        let rows = scheduler.sequences(&step.slots).flatten().filter_map(|sequence| {
            let drafts = sequence.drafts.as_mut().filter(|drafts| drafts.origin() == Origin::Model)?;
            Some(DraftRow { drafts, sampler: sequence.generation.sampler.clone() })
        });
        let rows: Vec<DraftRow<'_>> = rows.collect();
        let asked = rows.len();
        match catch_panic(|| model.draft(rows, count)) {
            Ok(()) => costs.proposed(asked * count, began.elapsed()),
            Err(error) => {
                error!(reason = error.reason, "the draft model failed and proposes nothing any more");
                drafters.model = None;
            }
        }
        let drafts = scheduler.sequences(&step.slots).flatten().filter_map(|sequence| sequence.drafts.as_ref());
        drafts.map(|drafts| drafts.proposed().len()).max().unwrap_or(0).min(count)
    }

    /// Completes the step that has begun, with `drafts` draft tokens per row.
    pub(super) fn draft_step(&mut self, drafts: usize, waiting: usize) {
        let began = Instant::now();
        let Self { model, scheduler, step, .. } = self;
        step.add_drafts(scheduler, drafts);
        let outcome = catch_panic(|| step.verify(model, scheduler));
        // The buffers are put back below; panics in between are caught.
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

    /// Chooses tokens for a row that has read `tokens`, its pending token and draft tokens, as long as the choices
    /// match the draft tokens. The state then keeps what it has read of the resulting text. logits: (tokens, vocab)
    fn accept_drafts(&mut self, slot: usize, tokens: &[u32], logits: &mut [f32]) {
        let Some(sequence) = self.scheduler.sequence_mut(slot) else { return };
        let (rules, buffers, counters) = (&self.rules, &mut self.buffers, &self.shared.counters);
        let drafted = sequence.drafts.as_ref().map_or(0, |drafts| drafts.proposed().len()).min(tokens.len() - 1);
        let mut read = 0;
        let mut last = Err(SequenceError::internal("a row has no logits"));
        for logits in logits.chunks_exact_mut(logits.len() / tokens.len()) {
            read += 1;
            last = catch_panic(|| {
                let generation = &mut sequence.generation;
                // The first mask was computed during the step.
                let first = read == 1;
                let choice = if first {
                    generation.sample(logits, &rules.eos)?
                } else {
                    generation.choose(logits, &rules.eos)?
                };
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
    use super::super::pass_costs::PassCost;
    use super::*;

    /// The expected tokens of a row whose draft tokens are right with probability `share`.
    fn expected(share: f64, drafts: usize) -> f64 {
        (0..=drafts).map(|power| share.powi(power as i32)).sum()
    }

    /// The cost of a step with `rows` rows.
    fn step(rows: usize, cost: PassCost) -> impl Fn(usize) -> f64 {
        move |drafts| cost.of(rows * (1 + drafts))
    }

    #[test]
    fn drafts_are_read_where_they_pay() {
        let memory_bound = PassCost { base: 10.0, each: 1.0 };
        let best = |shares: &[f64], longest, cost| best(shares, longest, step(shares.len(), cost), expected);
        assert_eq!(best(&[1.0], 16, memory_bound), 16);
        assert_eq!(best(&[1.0], 3, memory_bound), 3);
        let some = best(&[0.6], 16, memory_bound);
        assert!((2..8).contains(&some), "{some}");
        assert_eq!(best(&[0.1], 16, memory_bound), 0);
        // The cost of a wide step grows with its tokens.
        assert_eq!(best(&[0.6; 64], 16, memory_bound), 0);
        assert_eq!(best(&[0.9], 16, PassCost { base: 0.0, each: 1.0 }), 0);
        // If tokens cost nothing, even a small chance is enough.
        assert_eq!(best(&[0.06; 2], 5, PassCost { base: 1.0, each: 0.0 }), 5);
    }

    #[test]
    fn what_a_draft_model_takes_counts() {
        let cost = PassCost { base: 10.0, each: 1.0 };
        let best = |each| best(&[0.8], 16, |drafts| step(1, cost)(drafts) + each * drafts as f64, expected);
        let (free, cheap) = (best(0.0), best(2.0));
        assert!(free > cheap && cheap > 0, "{free}, {cheap}");
        assert_eq!(best(10.0), 0, "as slow as the served model");
    }

    #[test]
    fn no_row_waits_long_for_the_drafts_of_others() {
        let best = |shares: &[f64], each| best(shares, 60, step(shares.len(), PassCost { base: 10.0, each }), expected);
        assert!(best(&[1.0, 1.0], 1.0) > 20);
        assert_eq!(best(&[1.0, 0.0], 1.0), 0);
        let few = best(&[1.0, 0.0], 0.01);
        assert!((1..=15).contains(&few), "{few} drafts of 0.02 cost less than 3 % of 10");
    }

    #[test]
    fn a_step_has_a_bounded_number_of_tokens() {
        let free = PassCost { base: 1.0, each: 0.0 };
        for rows in [1, 2, 3, 8, 64, 100] {
            let drafts = best(&vec![1.0; rows], 1000, step(rows, free), expected);
            assert!(drafts == 0 || rows * (1 + drafts) <= MOST_TOKENS, "{rows} rows, {drafts} drafts");
            assert!(drafts > 0 || rows > MOST_TOKENS / 2);
        }
    }
}
