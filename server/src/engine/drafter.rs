//! Drafters: they propose tokens that may follow a text. The model then reads all of these draft tokens in one step.

use super::draft_model::DraftModel;
use super::row_drafts::RowDrafts;

/// Proposes draft tokens. They change how many steps a text takes, but never the text.
pub trait Drafter: Send {
    /// Appends at most `most` tokens that may follow `recent`, the last tokens of a text, to `draft`, which is empty.
    /// `sure` asks for proposals only where the drafter is confident, because a draft model would do better than a
    /// guess.
    fn draft(&mut self, recent: &[u32], most: usize, sure: bool, draft: &mut Vec<u32>);
}

/// The drafters of an engine; by default, none.
#[derive(Default)]
pub struct Drafters {
    /// Looks up draft tokens in the text itself.
    pub lookup: Option<Box<dyn Drafter>>,
    /// Proposes tokens where the lookup finds none.
    pub model: Option<DraftModel>,
}

impl Drafters {
    /// Prompt lookup, and a draft model if there is one. Prompt lookup proposes what followed the last tokens of a text
    /// when they last occurred in it.
    pub fn by_lookup(model: Option<DraftModel>) -> Self {
        Self { lookup: Some(Box::new(NgramDrafter)), model }
    }
}

/// The drafters, and how many draft tokens they may propose for each row of a step.
pub(super) struct Speculation {
    pub(super) drafters: Drafters,
    pub(super) most: usize,
    /// Texts so far, used to number them.
    texts: u64,
}

impl Speculation {
    pub(super) fn new(drafters: Drafters, most: usize) -> Self {
        Self { drafters, most, texts: 0 }
    }

    /// Starts the draft state of a new text whose prompt ends with these tokens.
    pub(super) fn row(&mut self, prompt: &[u32]) -> RowDrafts {
        self.texts += 1;
        RowDrafts::new(self.texts, prompt)
    }
}

/// Longest suffix of a text that is searched for, in tokens.
const LONGEST: usize = 4;
/// Shortest suffix that counts as a match, unless the proposal has to be `sure`.
const SHORTEST: usize = 2;

/// Prompt lookup: proposes what followed the last tokens of the text when they last occurred in it.
#[derive(Clone, Copy, Debug)]
struct NgramDrafter;

impl Drafter for NgramDrafter {
    fn draft(&mut self, recent: &[u32], most: usize, sure: bool, draft: &mut Vec<u32>) {
        let Some(after) = continuation(recent, if sure { LONGEST } else { SHORTEST }) else { return };
        // A continuation that runs into the end of the text repeats itself.
        for at in 0..most {
            let token = recent.get(after + at).or_else(|| draft.get(after + at - recent.len())).copied();
            draft.extend(token);
        }
    }
}

/// Finds the last occurrence of the longest suffix of `recent` that occurs earlier, if it has at least `shortest`
/// tokens. Returns where the text after that occurrence begins.
fn continuation(recent: &[u32], shortest: usize) -> Option<usize> {
    let (last, before) = recent.split_last()?;
    let mut found = None;
    let mut longest = shortest - 1;
    for (at, token) in before.iter().enumerate().rev() {
        if token == last {
            let ends = recent[..=at].iter().rev().zip(recent.iter().rev());
            let length = ends.take(LONGEST).take_while(|(a, b)| a == b).count();
            if length > longest {
                (found, longest) = (Some(at + 1), length);
                if length == LONGEST {
                    break;
                }
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(recent: &[u32], most: usize) -> Vec<u32> {
        let mut draft = Vec::new();
        NgramDrafter.draft(recent, most, false, &mut draft);
        draft
    }

    #[test]
    fn the_longest_end_that_is_known_continues_as_it_last_did() {
        assert_eq!(draft(&[], 4), [0u32; 0]);
        assert_eq!(draft(&[1, 2, 3], 4), [0u32; 0]);
        assert_eq!(draft(&[1, 2, 3, 2], 4), [0u32; 0], "one token is not enough");
        assert_eq!(draft(&[1, 2, 3, 4, 9, 1, 2], 2), [3, 4]);
        // Of two matches of the same length, the later one counts,
        assert_eq!(draft(&[1, 2, 3, 1, 2, 4, 5, 1, 2], 1), [4]);
        // but a longer match before it wins.
        assert_eq!(draft(&[7, 1, 2, 3, 1, 2, 4, 7, 1, 2], 1), [3]);
        // A match longer than `LONGEST` counts no more than one of that length.
        assert_eq!(draft(&[9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 6, 9, 1, 2, 3, 4], 1), [6]);
    }

    #[test]
    fn only_the_longest_end_is_sure() {
        let mut draft = Vec::new();
        NgramDrafter.draft(&[1, 2, 3, 4, 0, 2, 3, 4], 1, true, &mut draft);
        assert_eq!(draft, [0u32; 0]);
        NgramDrafter.draft(&[1, 2, 3, 4, 5, 0, 1, 2, 3, 4], 1, true, &mut draft);
        assert_eq!(draft, [5]);
    }

    #[test]
    fn a_period_continues_without_end() {
        assert_eq!(draft(&[1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
        assert_eq!(draft(&[5, 5, 5], 4), [5, 5, 5, 5]);
        assert_eq!(draft(&[1, 2, 3, 4, 1, 2], 7), [3, 4, 1, 2, 3, 4, 1]);
        assert_eq!(draft(&[1, 2, 1, 2], 0), [0u32; 0]);
    }
}
