//! Reads chunks: of prompts, of sources, of tokens that a grammar has forced, and of texts that were rolled back.
//!
//! The logits of the last token of a prompt, or of the last forced token, choose the next token. The decode step reads
//! that last token, unless the last chunk can include it: then the next token comes one pass of the model earlier.
//! Either way gives the same bits.

use std::time::Instant;

use tidegate_model::LanguageModel;

use super::error::{SequenceError, catch_panic};
use super::generation::Ending;
use super::scheduler::Scheduler;
use super::sequence::{Phase, Sequence};
use super::stats::add;
use super::transfers::Purpose;
use super::worker::Worker;

impl<M: LanguageModel> Worker<M> {
    /// Reads one chunk of one prompt, in pieces where pieces are cheap. Ends early if a waiting request may take a free
    /// slot.
    pub(super) fn read_one_chunk(&mut self) {
        let Some(slot) = self.scheduler.next_prefill() else { return };
        let Some(sequence) = self.scheduler.sequence(slot) else { return };
        let mut left =
            self.shares.chunk_limit(sequence.client.tenant).min(sequence.next_chunk(self.model.longest_chunk()));
        while left > 0 {
            let piece = left.min(self.shares.piece());
            if self.can_choose_after(slot, piece) {
                return self.read_and_choose(slot);
            }
            let Some(length) = self.read_piece(slot, piece) else { return };
            left = left.saturating_sub(length);
            let Scheduler { usage, .. } = &self.scheduler;
            if left > 0 && self.shared.queue.has_next(self.scheduler.room(), usage) {
                break;
            }
        }
        self.scheduler.chunk_was_read(slot);
    }

    /// Reads at most `limit` tokens of a prompt or of the unread tokens, or a whole source, and returns how many it has
    /// read. Returns `None` if it has reached the end, if the request has failed, or if a snapshot is taken here. The
    /// last token of the prompt (after a source, the first token of the text) is left for the decode step, which
    /// samples the next token.
    fn read_piece(&mut self, slot: usize, limit: usize) -> Option<usize> {
        let sequence = self.scheduler.sequence_mut(slot)?;
        let (model, began) = (&mut self.model, Instant::now());
        let (is_source, is_prompt) = (sequence.phase == Phase::ReadSource, !sequence.has_read_prompt());
        if is_source {
            self.shared.heartbeat.pause();
        }
        let outcome = catch_panic(|| sequence.read_chunk(model, slot, limit));
        // The next step has a time limit of its own.
        self.shared.heartbeat.beat();
        let length = match outcome {
            Ok(length) => length,
            Err(error) => {
                self.fail(slot, &error);
                return None;
            }
        };
        let ends = sequence.phase == Phase::ReadBack && sequence.unread.is_empty();
        let last = ends || matches!(sequence.phase, Phase::Decode { .. });
        if !is_source {
            self.costs.read(length, began.elapsed());
        }
        self.count_chunk(slot, length, is_prompt);
        if last {
            self.scheduler.last_chunk_was_read(slot);
        }
        if last && is_prompt {
            self.prompt_was_read(slot);
        }
        if ends {
            self.export(slot, Purpose::End(Ending::StopString, false));
        }
        if self.scheduler.sequence(slot).is_some_and(Sequence::is_at_mark) {
            self.scheduler.chunk_was_read(slot);
            self.export(slot, Purpose::Mark);
            return None;
        }
        (!last).then_some(length)
    }

    fn count_chunk(&mut self, slot: usize, tokens: usize, is_prompt: bool) {
        let Some(sequence) = self.scheduler.sequence(slot) else { return };
        self.shares.use_chunk(sequence.client.tenant, tokens);
        self.scheduler.count(slot, tokens);
        let counters = &self.shared.counters;
        add(&counters.passes, 1);
        add(&counters.prompt_tokens, if is_prompt { tokens } else { 0 });
    }

    /// Whether a chunk of `limit` tokens plus one more covers all known tokens of the text, so that its logits may
    /// choose the next token. Always false for an encoder-decoder: its texts begin with a token that is not in the
    /// prompt and is not counted as a prompt token.
    fn can_choose_after(&self, slot: usize, limit: usize) -> bool {
        let known = self.scheduler.sequence(slot).and_then(Sequence::known_to_the_end);
        known.is_some_and(|known| known <= limit + 1)
            && self.model.scores_chunks()
            && self.model.source_start().is_none()
    }

    /// Reads all known tokens of a text in one pass of the model, and chooses the next token.
    fn read_and_choose(&mut self, slot: usize) {
        let began = Instant::now();
        let Self { model, scheduler, step, rules, .. } = self;
        let Some(sequence) = scheduler.sequence_mut(slot) else { return };
        let is_prompt = !sequence.has_read_prompt();
        let outcome = catch_panic(|| {
            let (read, logits) = step.read_to_the_end(model, sequence, slot)?;
            Ok::<_, SequenceError>((read, sequence.generation.sample(logits, &rules.eos)))
        });
        self.shared.heartbeat.beat();
        let (read, choice) = match outcome {
            Ok(outcome) => outcome,
            Err(error) => return self.fail(slot, &error),
        };
        self.costs.read(read, began.elapsed());
        self.count_chunk(slot, read, is_prompt);
        // Must come before `accept`, after which a grammar may force more tokens.
        self.scheduler.last_chunk_was_read(slot);
        if is_prompt {
            self.prompt_ended(slot);
        }
        self.accept(slot, choice);
    }
}
