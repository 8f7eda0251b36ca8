//! The draft tokens of one text: its last tokens, what has been proposed for it, and how often the proposals were
//! right.

/// Fewest tokens at the end of a text that a drafter sees, if the text has as many and they are known. Known are the
/// prompt and the answer, and the earlier turns of a conversation while its state stays in memory.
pub(super) const RECENT: usize = 2048;

/// The weight of one token in the running share of right proposals.
const WEIGHT: f64 = 1.0 / 8.0;
/// The share assumed for lookups before the first token: most texts do not repeat themselves at once;
const FIRST: f64 = 0.1;
/// the share assumed for a draft model, which was chosen for the served model;
const FIRST_OF_MODEL: f64 = 0.5;
/// and the smallest share, because texts change.
const LEAST: f64 = 0.05;

/// How far a draft model's share moves back toward its first value with each token that had no proposal: without
/// proposals, nothing else would show that they are right again.
const RETURN: f64 = 1.0 / 1024.0;

/// The kind of drafter that proposes the draft tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Origin {
    /// Lookup in the text itself.
    #[default]
    Lookup,
    /// A draft model.
    Model,
}

/// The drafts of one text.
#[derive(Debug)]
pub(super) struct RowDrafts {
    /// The number that identifies the text.
    text: u64,
    recent: Vec<u32>,
    /// The known end of the prompt and all tokens since, counted in tokens.
    length: u64,
    origin: Origin,
    /// Draft tokens that a step may use for the text: those proposed, or as many as a draft model would propose.
    available: usize,
    /// The tokens that may follow.
    proposed: Vec<u32>,
    /// How many of the proposed tokens the text has followed.
    followed: usize,
    /// For each origin, the running share of proposed tokens that were right, given that those before them were right.
    /// Proposals that the model has not read count too.
    shares: [f64; 2],
    /// Draft tokens that the model has read, and how many of them the text has kept.
    pub(super) counts: DraftCounts,
}

/// How many draft tokens a text had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Draft tokens that the model has read.
    pub drafted: usize,
    /// Draft tokens that the request's sampler has chosen too, and after which the text went on.
    pub accepted: usize,
}

impl RowDrafts {
    /// Creates an empty record for an answer to a prompt with these last tokens.
    pub(super) fn new(text: u64, prompt: &[u32]) -> Self {
        let mut recent = Vec::with_capacity(2 * RECENT);
        recent.extend_from_slice(&prompt[prompt.len().saturating_sub(RECENT)..]);
        Self {
            text,
            length: recent.len() as u64,
            recent,
            origin: Origin::default(),
            available: 0,
            proposed: Vec::new(),
            followed: 0,
            shares: [FIRST, FIRST_OF_MODEL],
            counts: DraftCounts::default(),
        }
    }

    /// The number that identifies the text.
    pub(super) fn text(&self) -> u64 {
        self.text
    }

    /// At least the last [`RECENT`] tokens of the text, if it has as many and they are known.
    pub(super) fn recent(&self) -> &[u32] {
        &self.recent
    }

    /// Number of tokens of the text that have ever been known, without those that were taken back.
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// The drafter that proposes the next draft tokens.
    pub(super) fn origin(&self) -> Origin {
        self.origin
    }

    /// Adds a token of the answer.
    pub(super) fn push(&mut self, token: u32) {
        if let Some(proposed) = self.proposed.get(self.followed) {
            let (right, share) = (*proposed == token, &mut self.shares[self.origin as usize]);
            *share += (f64::from(u8::from(right)) - *share) * WEIGHT;
            *share = share.max(LEAST);
            self.followed += 1;
            if !right {
                self.proposed.clear();
            }
        } else {
            let share = &mut self.shares[Origin::Model as usize];
            *share += (FIRST_OF_MODEL - *share).max(0.0) * RETURN;
        }
        self.length += 1;
        if self.recent.len() == 2 * RECENT {
            self.recent.drain(..RECENT);
        }
        self.recent.push(token);
    }

    /// Removes the last token of the answer.
    pub(super) fn take_back(&mut self) {
        self.recent.pop();
        self.length -= 1;
    }

    /// Returns at most [`RECENT`] tokens: the last ones before the last `pending`.
    pub(super) fn before(&self, pending: usize) -> Vec<u32> {
        let end = self.recent.len().saturating_sub(pending);
        self.recent[end.saturating_sub(RECENT)..end].to_vec()
    }

    /// Whether a draft model has been right more often than lookups.
    pub(super) fn trusts_model(&self) -> bool {
        self.shares[Origin::Model as usize] > self.shares[Origin::Lookup as usize]
    }

    /// Makes `draft` look up tokens that may follow the last ones.
    pub(super) fn look_up(&mut self, draft: impl FnOnce(&[u32], &mut Vec<u32>)) {
        self.followed = 0;
        self.proposed.clear();
        self.origin = Origin::Lookup;
        draft(&self.recent, &mut self.proposed);
        self.available = self.proposed.len();
    }

    /// Notes that a draft model can propose `available` tokens.
    pub(super) fn await_model(&mut self, available: usize) {
        self.origin = Origin::Model;
        self.available = available;
    }

    /// Adds what a draft model proposes, but no more than can be used.
    pub(super) fn propose(&mut self, tokens: &[u32]) {
        self.proposed.extend_from_slice(&tokens[..tokens.len().min(self.available)]);
    }

    /// Draft tokens that a step may use for the text.
    pub(super) fn available(&self) -> usize {
        self.available
    }

    /// The last proposal, until the text has gone on in another way.
    pub(super) fn proposed(&self) -> &[u32] {
        &self.proposed
    }

    /// Returns how many tokens a step is expected to give if it reads at most `drafts` of the available draft tokens.
    pub(super) fn expected(&self, drafts: usize) -> f64 {
        let (read, share) = (drafts.min(self.available) as i32, self.shares[self.origin as usize]);
        // The sum of `share` to the powers 0 to `read`.
        if share < 1.0 { (1.0 - share.powi(read + 1)) / (1.0 - share) } else { f64::from(read + 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(drafts: &mut RowDrafts, proposed: &[u32], tokens: &[u32]) {
        drafts.look_up(|_, to| to.extend_from_slice(proposed));
        for token in tokens {
            drafts.push(*token);
        }
    }

    #[test]
    fn the_last_tokens_of_prompt_and_answer_are_kept() {
        let prompt: Vec<u32> = (0..5000).collect();
        let mut drafts = RowDrafts::new(0, &prompt);
        (5000..20_000).for_each(|token| {
            drafts.push(token);
            drafts.look_up(|recent, _| {
                assert!((RECENT..=2 * RECENT).contains(&recent.len()));
                assert_eq!((recent[0], *recent.last().unwrap()), (token + 1 - recent.len() as u32, token));
            });
            let before = drafts.before(3);
            assert!((RECENT - 3..=RECENT).contains(&before.len()));
            assert!(before.iter().copied().eq(token - 2 - before.len() as u32..token - 2));
        });
    }

    #[test]
    fn the_share_of_right_proposals_decides_what_a_step_is_expected_to_give() {
        let mut drafts = RowDrafts::new(0, &[1]);
        assert_eq!(drafts.expected(7), 1.0, "nothing is proposed");
        for _ in 0..100 {
            after(&mut drafts, &[1, 2, 3], &[1, 2, 3, 4]);
        }
        after(&mut drafts, &[1, 2, 3], &[]);
        let [none, one, all] = [0, 1, 3].map(|read| drafts.expected(read));
        assert!((none - 1.0).abs() < 1e-9 && (one - 2.0).abs() < 1e-3 && (all - 4.0).abs() < 1e-3, "{all}");
        assert_eq!(drafts.expected(9), all, "no more than there are");
        for _ in 0..100 {
            // After a wrong token, the rest of the proposal counts for nothing.
            after(&mut drafts, &[1, 2, 3], &[9, 2, 3]);
        }
        after(&mut drafts, &[1, 2, 3], &[]);
        assert!((drafts.expected(3) - 1.0 / (1.0 - LEAST)).abs() < 1e-3);
    }

    #[test]
    fn what_a_model_proposes_counts_apart_and_is_tried_again_after_a_while() {
        let mut drafts = RowDrafts::new(0, &[1]);
        let one = |drafts: &mut RowDrafts| {
            drafts.look_up(|_, _| {});
            drafts.await_model(2);
            drafts.expected(1) - 1.0
        };
        assert!((one(&mut drafts) - FIRST_OF_MODEL).abs() < 1e-9);
        assert!(drafts.trusts_model());
        drafts.propose(&[7, 8, 9]);
        assert_eq!((drafts.proposed(), drafts.available()), (&[7, 8][..], 2));
        drafts.push(7);
        assert!(one(&mut drafts) > FIRST_OF_MODEL);
        for _ in 0..100 {
            one(&mut drafts);
            drafts.propose(&[7]);
            drafts.push(6);
        }
        assert!((one(&mut drafts) - LEAST).abs() < 1e-9);
        assert!(!drafts.trusts_model());
        after(&mut drafts, &[1], &[]);
        assert!((drafts.expected(1) - 1.0 - FIRST).abs() < 1e-9, "a lookup's share is as before");
        (0..2048).for_each(|_| drafts.push(6));
        assert!((0.4..FIRST_OF_MODEL).contains(&one(&mut drafts)));
        assert_eq!(drafts.length(), 1 + 1 + 100 + 2048);
    }
}
