//! What speculation knows about one text: its last tokens, what has been proposed for it, and how often that was right.

/// Tokens at the end of a text that a drafter sees at least, if the text is as long and known: its prompt and its answer, and
/// those of a conversation's earlier turns while its state stays in memory.
pub(super) const RECENT: usize = 2048;

/// The weight of one token in the share of proposals that were right.
const WEIGHT: f64 = 1.0 / 8.0;
/// The share before the first token: most texts do not repeat themselves at once; and the least: any may begin to.
const FIRST: f64 = 0.1;
const LEAST: f64 = 0.05;

/// The drafts of one text.
#[derive(Debug)]
pub(super) struct RowDrafts {
    recent: Vec<u32>,
    /// What may follow.
    proposed: Vec<u32>,
    /// Tokens of it that the text has followed.
    followed: usize,
    /// The share of proposed tokens that were right, those before them being right, in the last tokens of the text. Also
    /// proposals that the model has not read count.
    share: f64,
    /// Drafts that the model has read, and those of them that the text has kept.
    pub(super) counts: DraftCounts,
}

/// The drafts of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Drafts that the model has read.
    pub drafted: usize,
    /// Those of them that the request's sampler has chosen, and after which the text went on.
    pub accepted: usize,
}

impl RowDrafts {
    /// No drafts yet, for an answer to a prompt with these last tokens.
    pub(super) fn new(prompt: &[u32]) -> Self {
        let mut recent = Vec::with_capacity(2 * RECENT);
        recent.extend_from_slice(&prompt[prompt.len().saturating_sub(RECENT)..]);
        Self { recent, proposed: Vec::new(), followed: 0, share: FIRST, counts: DraftCounts::default() }
    }

    /// Adds a token of the answer.
    pub(super) fn push(&mut self, token: u32) {
        if let Some(proposed) = self.proposed.get(self.followed) {
            let right = *proposed == token;
            self.share += (f64::from(u8::from(right)) - self.share) * WEIGHT;
            self.share = self.share.max(LEAST);
            self.followed += 1;
            if !right {
                self.proposed.clear();
            }
        }
        if self.recent.len() == 2 * RECENT {
            self.recent.drain(..RECENT);
        }
        self.recent.push(token);
    }

    /// Removes the last token.
    pub(super) fn take_back(&mut self) {
        self.recent.pop();
    }

    /// At most [`RECENT`] tokens: the last before the last `pending`.
    pub(super) fn before(&self, pending: usize) -> Vec<u32> {
        let end = self.recent.len().saturating_sub(pending);
        self.recent[end.saturating_sub(RECENT)..end].to_vec()
    }

    /// Lets `draft` propose tokens after the last ones.
    pub(super) fn propose(&mut self, draft: impl FnOnce(&[u32], &mut Vec<u32>)) {
        self.followed = 0;
        self.proposed.clear();
        draft(&self.recent, &mut self.proposed);
    }

    /// What has been proposed last, as far as nothing else has followed.
    pub(super) fn proposed(&self) -> &[u32] {
        &self.proposed
    }

    /// The tokens that a step is expected to give if it reads at most `drafts` of the proposed ones.
    pub(super) fn expected(&self, drafts: usize) -> f64 {
        let read = drafts.min(self.proposed.len()) as i32;
        // The sum of the powers from 0 to the number that is read.
        if self.share < 1.0 { (1.0 - self.share.powi(read + 1)) / (1.0 - self.share) } else { f64::from(read + 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(drafts: &mut RowDrafts, proposed: &[u32], tokens: &[u32]) {
        drafts.propose(|_, to| to.extend_from_slice(proposed));
        for token in tokens {
            drafts.push(*token);
        }
    }

    #[test]
    fn the_last_tokens_of_prompt_and_answer_are_kept() {
        let prompt: Vec<u32> = (0..5000).collect();
        let mut drafts = RowDrafts::new(&prompt);
        (5000..20_000).for_each(|token| {
            drafts.push(token);
            drafts.propose(|recent, _| {
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
        let mut drafts = RowDrafts::new(&[1]);
        assert_eq!(drafts.expected(7), 1.0, "nothing is proposed");
        for _ in 0..100 {
            after(&mut drafts, &[1, 2, 3], &[1, 2, 3, 4]);
        }
        after(&mut drafts, &[1, 2, 3], &[]);
        let [none, one, all] = [0, 1, 3].map(|read| drafts.expected(read));
        assert!((none - 1.0).abs() < 1e-9 && (one - 2.0).abs() < 1e-3 && (all - 4.0).abs() < 1e-3, "{all}");
        assert_eq!(drafts.expected(9), all, "no more than there are");
        for _ in 0..100 {
            // After a wrong token the rest says nothing.
            after(&mut drafts, &[1, 2, 3], &[9, 2, 3]);
        }
        after(&mut drafts, &[1, 2, 3], &[]);
        assert!((drafts.expected(3) - 1.0 / (1.0 - LEAST)).abs() < 1e-3);
    }
}
