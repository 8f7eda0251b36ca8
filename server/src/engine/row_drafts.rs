//! The draft tokens of one text: its last tokens, what has been proposed for it, and how often the proposals were
//! right.

use super::accuracy::Accuracy;
use super::drafter::{Drafter, PROPOSAL_KINDS, Proposal};

/// Fewest tokens at the end of a text that a drafter sees, if the text has as many and they are known. Known are the
/// prompt and the answer, and the earlier turns of a conversation while its state stays in memory.
pub(super) const RECENT: usize = 2048;

/// The share of right proposals assumed for lookups before the first one,
const FIRST: f64 = 0.3;
/// and for a draft model, which was chosen for the served model.
const FIRST_OF_MODEL: f64 = 0.5;

/// How far a draft model's share moves back toward its first value with each token for which it was not asked: nothing
/// else would show that it is right again.
const RETURN: f64 = 1.0 / 1024.0;

/// The last positions of the known text at which lookups are tried before the first draft tokens are read: they show
/// how often lookups are right in this text.
const REHEARSED: usize = 64;
/// Tokens looked up at each of these positions,
const REHEARSED_TOKENS: usize = 4;
/// if the answer may have at least this many more tokens.
const WORTHWHILE: usize = 8;

/// Who proposes the draft tokens.
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
    /// The tokens that may follow. A draft model's have no kind: it is 0.
    proposed: Vec<Proposal>,
    /// How many of the proposed tokens the text has followed.
    followed: usize,
    /// The lookup of the next token, if a draft model is asked instead.
    passed_over: Option<Proposal>,
    /// How often lookups were right, by kind. Proposals that the model has not read count too.
    lookups: [Accuracy; PROPOSAL_KINDS],
    rehearsed: bool,
    /// How often a draft model was right.
    model: Accuracy,
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
            passed_over: None,
            lookups: [Accuracy::assumed(FIRST); PROPOSAL_KINDS],
            rehearsed: false,
            model: Accuracy::assumed(FIRST_OF_MODEL),
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
        if let Some(Proposal { token: proposed, kind }) = self.passed_over.take() {
            self.lookups[kind].count(proposed == token);
        }
        if let Some(Proposal { token: proposed, kind }) = self.proposed.get(self.followed) {
            let right = *proposed == token;
            match self.origin {
                Origin::Lookup => self.lookups[*kind].count(right),
                Origin::Model => self.model.count(right),
            }
            self.followed += 1;
            if !right {
                self.proposed.clear();
            }
        }
        if self.origin == Origin::Lookup {
            self.model.rise(FIRST_OF_MODEL, RETURN);
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

    /// Proposes what `lookup` finds, at most `most` tokens. left: how many more tokens the answer may have
    pub(super) fn look_up(&mut self, lookup: Option<&mut (dyn Drafter + 'static)>, most: usize, left: usize) {
        self.forget();
        self.origin = Origin::Lookup;
        self.passed_over = None;
        if let Some(lookup) = lookup.filter(|_| most > 0) {
            if !self.rehearsed && left >= WORTHWHILE {
                self.rehearse(lookup);
            }
            lookup.draft(&self.recent, most, &mut self.proposed);
        }
        self.available = self.proposed.len();
    }

    /// Counts how often lookups would have been right in the last tokens of the known text.
    fn rehearse(&mut self, lookup: &mut dyn Drafter) {
        self.rehearsed = true;
        let Self { recent, proposed, lookups, .. } = self;
        for at in recent.len().saturating_sub(REHEARSED)..recent.len() {
            lookup.draft(&recent[..at], REHEARSED_TOKENS, proposed);
            for (Proposal { token, kind }, true_token) in proposed.drain(..).zip(&recent[at..]) {
                lookups[kind].count(token == *true_token);
                if token != *true_token {
                    break;
                }
            }
        }
    }

    fn forget(&mut self) {
        self.followed = 0;
        self.proposed.clear();
    }

    /// Whether a draft model has been right more often than lookups of the next token's kind, or nothing was found.
    pub(super) fn prefers_model(&self) -> bool {
        self.proposed.first().is_none_or(|proposal| self.model.share() > self.lookups[proposal.kind].share())
    }

    /// Drops what was looked up, and notes that a draft model can propose `available` tokens.
    pub(super) fn await_model(&mut self, available: usize) {
        self.passed_over = self.proposed.first().copied();
        self.forget();
        self.origin = Origin::Model;
        self.available = available;
    }

    /// Adds what a draft model proposes, but no more than can be used.
    pub(super) fn propose(&mut self, tokens: &[u32]) {
        let usable = &tokens[..tokens.len().min(self.available)];
        self.proposed.extend(usable.iter().map(|token| Proposal { token: *token, kind: 0 }));
    }

    /// Draft tokens that a step may use for the text.
    pub(super) fn available(&self) -> usize {
        self.available
    }

    /// The last proposal, until the text has gone on in another way.
    pub(super) fn proposed(&self) -> impl ExactSizeIterator<Item = u32> {
        self.proposed.iter().map(|proposal| proposal.token)
    }

    /// Returns how many tokens a step is expected to give if it reads at most `drafts` of the available draft tokens.
    pub(super) fn expected(&self, drafts: usize) -> f64 {
        let share = |at: usize| match self.origin {
            Origin::Lookup => self.lookups[self.proposed[at].kind].share(),
            Origin::Model => self.model.share(),
        };
        // A draft token counts only if all before it are right too.
        let right = (0..drafts.min(self.available)).scan(1.0, |right, at| {
            *right *= share(at);
            Some(*right)
        });
        1.0 + right.sum::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::super::accuracy::LEAST;
    use super::*;

    /// Proposes the same tokens for every text, all of one kind.
    struct Fixed(Vec<u32>);

    impl Drafter for Fixed {
        fn draft(&mut self, _: &[u32], most: usize, draft: &mut Vec<Proposal>) {
            draft.extend(self.0.iter().take(most).map(|token| Proposal { token: *token, kind: 5 }));
        }
    }

    fn close(found: f64, expected: f64) -> bool {
        (found - expected).abs() < 1e-9
    }

    fn propose(drafts: &mut RowDrafts, proposed: &[u32]) {
        drafts.look_up(Some(&mut Fixed(proposed.to_vec())), proposed.len(), proposed.len());
    }

    fn after(drafts: &mut RowDrafts, proposed: &[u32], tokens: &[u32]) {
        propose(drafts, proposed);
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
            let recent = drafts.recent();
            assert!((RECENT..=2 * RECENT).contains(&recent.len()));
            assert_eq!((recent[0], *recent.last().unwrap()), (token + 1 - recent.len() as u32, token));
            let before = drafts.before(3);
            assert!((RECENT - 3..=RECENT).contains(&before.len()));
            assert!(before.iter().copied().eq(token - 2 - before.len() as u32..token - 2));
        });
    }

    #[test]
    fn the_share_of_right_proposals_decides_what_a_step_is_expected_to_give() {
        let mut drafts = RowDrafts::new(0, &[1]);
        assert_eq!(drafts.expected(7), 1.0, "nothing is proposed");
        for _ in 0..200 {
            after(&mut drafts, &[1, 2, 3], &[1, 2, 3, 4]);
        }
        propose(&mut drafts, &[1, 2, 3]);
        let [none, one, all] = [0, 1, 3].map(|read| drafts.expected(read));
        assert!((none - 1.0).abs() < 1e-9 && (one - 2.0).abs() < 1e-3 && (all - 4.0).abs() < 1e-3, "{all}");
        assert_eq!(drafts.expected(9), all, "no more than there are");
        for _ in 0..200 {
            // After a wrong token, the rest of the proposal counts for nothing.
            after(&mut drafts, &[1, 2, 3], &[9, 2, 3]);
        }
        propose(&mut drafts, &[1, 2, 3]);
        assert!(close(drafts.expected(3), 1.0 + LEAST + LEAST.powi(2) + LEAST.powi(3)));
    }

    /// Proposes a token of some kind.
    struct Kind(usize);

    impl Drafter for Kind {
        fn draft(&mut self, _: &[u32], _: usize, draft: &mut Vec<Proposal>) {
            draft.push(Proposal { token: 7, kind: self.0 });
        }
    }

    #[test]
    fn each_kind_of_proposal_has_its_own_share() {
        let mut drafts = RowDrafts::new(0, &[1]);
        for token in [7, 8].repeat(100) {
            drafts.look_up(Some(&mut Kind(usize::from(token == 8))), 1, 1);
            drafts.push(token);
        }
        let expected = [0, 1, 2].map(|kind| {
            drafts.look_up(Some(&mut Kind(kind)), 1, 1);
            (drafts.expected(1) - 1.0, drafts.prefers_model())
        });
        let [(often, _), (never, _), (unknown, _)] = expected;
        assert!(often > 0.99 && close(never, LEAST) && close(unknown, FIRST), "{expected:?}");
        assert_eq!(expected.map(|(_, prefers_model)| prefers_model), [false, true, true]);
    }

    #[test]
    fn lookups_that_were_passed_over_count_too() {
        let mut drafts = RowDrafts::new(0, &[1]);
        for _ in 0..100 {
            drafts.look_up(Some(&mut Kind(3)), 1, 1);
            drafts.await_model(1);
            drafts.propose(&[7]);
            drafts.push(7);
        }
        drafts.look_up(Some(&mut Kind(3)), 1, 1);
        assert!(drafts.expected(1) > 1.99);
        drafts.look_up(Some(&mut Kind(4)), 1, 1);
        assert!(drafts.prefers_model() && close(drafts.expected(1) - 1.0, FIRST));
    }

    #[test]
    fn the_known_text_shows_how_often_lookups_are_right() {
        let expected = |token, left| {
            let mut drafts = RowDrafts::new(0, &[7; 100]);
            drafts.look_up(Some(&mut Fixed(vec![token])), 1, left);
            drafts.expected(1) - 1.0
        };
        assert!(expected(7, WORTHWHILE) > 0.95);
        assert!(close(expected(8, WORTHWHILE), LEAST));
        assert!(close(expected(7, WORTHWHILE - 1), FIRST), "not worth the time");
    }

    #[test]
    fn what_a_model_proposes_counts_apart_and_is_tried_again_after_a_while() {
        let mut drafts = RowDrafts::new(0, &[1]);
        let one = |drafts: &mut RowDrafts| {
            drafts.look_up(None, 2, 2);
            drafts.await_model(2);
            drafts.expected(1) - 1.0
        };
        assert!(close(one(&mut drafts), FIRST_OF_MODEL));
        assert!(drafts.prefers_model());
        drafts.propose(&[7, 8, 9]);
        assert!(drafts.proposed().eq([7, 8]));
        assert_eq!(drafts.available(), 2);
        drafts.push(7);
        assert!(one(&mut drafts) > FIRST_OF_MODEL);
        for _ in 0..200 {
            one(&mut drafts);
            drafts.propose(&[7]);
            drafts.push(6);
        }
        assert!(close(one(&mut drafts), LEAST));
        propose(&mut drafts, &[1]);
        assert!(!drafts.prefers_model());
        assert!(close(drafts.expected(1) - 1.0, FIRST), "a lookup's share is as before");
        propose(&mut drafts, &[]);
        assert!(drafts.prefers_model(), "nothing was found");
        (0..2048).for_each(|_| drafts.push(6));
        assert!((0.4..FIRST_OF_MODEL).contains(&one(&mut drafts)));
        assert_eq!(drafts.length(), 1 + 1 + 200 + 2048);
    }
}
