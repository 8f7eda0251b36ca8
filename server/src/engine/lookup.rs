//! Prompt lookup: a drafter that proposes what followed the last tokens of a text where they occurred before.

use super::drafter::{Drafter, PROPOSAL_KINDS, Proposal};

/// Longest end of a text that is compared with earlier places, in tokens.
const LONGEST: usize = 6;
/// Places considered, the last ones; earlier places only if they match more tokens. With more of them, a text of a few
/// different tokens would be slow to search.
const MOST_PLACES: usize = 64;
/// How much the places agree: there is only one, all agree, most agree, or fewer.
const AGREEMENTS: usize = 4;
// The length of the match and the agreement are the kind of a proposal.
const _: () = assert!(LONGEST * AGREEMENTS == PROPOSAL_KINDS);

/// Looks up draft tokens in the text itself. At each position, the places that match the longest end of the text vote
/// for the next token; those that voted otherwise drop out.
#[derive(Debug, Default)]
pub(super) struct Lookup {
    /// Where the text so far, with its draft tokens, has occurred: the last place first.
    places: Vec<Place>,
    /// The tokens that follow there, and their number.
    votes: Vec<(u32, usize)>,
}

/// A place in a text where its last tokens have occurred.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The position of the token that follows.
    next: usize,
    /// How many tokens before it are the last tokens of the text, at most [`LONGEST`].
    length: usize,
}

impl Lookup {
    /// Finds the places where the last token of `recent` occurs earlier.
    fn find(&mut self, recent: &[u32]) {
        self.places.clear();
        let Some((last, before)) = recent.split_last() else { return };
        let mut longest = 0;
        for (at, _) in before.iter().enumerate().rev().filter(|(_, token)| *token == last) {
            let both = recent[..=at].iter().rev().zip(recent.iter().rev()).take(LONGEST);
            let length = both.take_while(|(a, b)| a == b).count();
            let is_full = self.places.len() >= MOST_PLACES;
            if !is_full || length > longest {
                self.places.push(Place { next: at + 1, length });
            }
            longest = longest.max(length);
            if is_full && longest == LONGEST {
                break;
            }
        }
    }

    /// Returns the most frequent token at the places with the longest match; of equally frequent ones, the last.
    fn vote(&mut self, token: impl Fn(&Place) -> u32) -> Option<Proposal> {
        let Self { places, votes } = self;
        let longest = places.iter().map(|place| place.length).max()?;
        votes.clear();
        for token in places.iter().filter(|place| place.length == longest).map(token) {
            match votes.iter_mut().find(|(known, _)| *known == token) {
                Some((_, count)) => *count += 1,
                None => votes.push((token, 1)),
            }
        }
        let all: usize = votes.iter().map(|(_, count)| count).sum();
        let (token, count) = votes.iter().rev().copied().max_by_key(|(_, count)| *count)?;
        let agreement = match count {
            1 if all == 1 => 0,
            _ if count == all => 1,
            _ if 2 * count > all => 2,
            _ => 3,
        };
        Some(Proposal { token, kind: (longest - 1) * AGREEMENTS + agreement })
    }
}

impl Drafter for Lookup {
    fn draft(&mut self, recent: &[u32], most: usize, draft: &mut Vec<Proposal>) {
        self.find(recent);
        while draft.len() < most {
            // A place that reaches the end of the text goes on in the draft tokens.
            let token = |place: &Place| match recent.get(place.next) {
                Some(token) => *token,
                None => draft[place.next - recent.len()].token,
            };
            let Some(proposal) = self.vote(token) else { break };
            self.places.retain(|place| token(place) == proposal.token);
            for place in &mut self.places {
                *place = Place { next: place.next + 1, length: LONGEST.min(place.length + 1) };
            }
            draft.push(proposal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn propose(recent: &[u32], most: usize) -> Vec<Proposal> {
        let mut draft = Vec::new();
        Lookup::default().draft(recent, most, &mut draft);
        draft
    }

    fn draft(recent: &[u32], most: usize) -> Vec<u32> {
        propose(recent, most).iter().map(|proposal| proposal.token).collect()
    }

    #[test]
    fn the_longest_end_that_is_known_continues_as_it_did() {
        assert_eq!(draft(&[], 4), [0u32; 0]);
        assert_eq!(draft(&[1, 2, 3], 4), [0u32; 0]);
        assert_eq!(draft(&[1, 2, 3, 4, 9, 1, 2], 2), [3, 4]);
        // Of two matches of the same length, the later one counts,
        assert_eq!(draft(&[1, 2, 3, 1, 2, 4, 5, 1, 2], 1), [4]);
        // unless more places go on in another way.
        assert_eq!(draft(&[1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2], 1), [3]);
        // A longer match before them wins,
        assert_eq!(draft(&[7, 1, 2, 3, 1, 2, 4, 7, 1, 2], 1), [3]);
        // but one longer than `LONGEST` counts no more than one of that length.
        assert_eq!(draft(&[9, 1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6], 1), [7]);
    }

    #[test]
    fn places_that_went_on_in_another_way_have_no_vote_any_more() {
        // 4 follows two of the three places with 1, the last of which goes on with 6. The first goes on with 5, as one
        // of the others does.
        assert_eq!(draft(&[1, 8, 5, 1, 4, 5, 1, 4, 6, 1], 2), [4, 6]);
    }

    #[test]
    fn a_longer_match_is_found_behind_many_shorter_ones() {
        let text: Vec<u32> = [1, 2, 3, 9, 42].into_iter().chain([8, 3].repeat(100)).chain([1, 2, 3]).collect();
        assert_eq!(draft(&text, 1), [9]);
    }

    #[test]
    fn a_period_continues_without_end() {
        assert_eq!(draft(&[1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
        assert_eq!(draft(&[5, 5, 5], 4), [5, 5, 5, 5]);
        assert_eq!(draft(&[1, 2, 3, 4, 1, 2], 7), [3, 4, 1, 2, 3, 4, 1]);
        assert_eq!(draft(&[1, 2, 1, 2], 0), [0u32; 0]);
    }

    #[test]
    fn the_kind_is_the_length_of_the_match_and_how_much_the_places_agree() {
        let kinds = |recent: &[u32]| propose(recent, 3).iter().map(|proposal| proposal.kind).collect::<Vec<_>>();
        // One place, which matches one token, then two, then three.
        assert_eq!(kinds(&[1, 2, 3, 4, 1]), [0, AGREEMENTS, 2 * AGREEMENTS]);
        // Two of two, two of three, and one of two places.
        assert_eq!(kinds(&[1, 2, 1, 2, 9, 1])[0], 1);
        assert_eq!(kinds(&[1, 2, 1, 2, 1, 3, 1])[0], 2);
        assert_eq!(kinds(&[1, 2, 1, 3, 9, 1])[0], 3);
        let long: Vec<u32> = (0..20).chain(0..10).collect();
        assert!(
            kinds(&long).iter().all(|kind| *kind == PROPOSAL_KINDS - AGREEMENTS),
            "no match counts more than the longest"
        );
    }
}
