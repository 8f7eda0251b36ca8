//! Splits a text into the pieces of a vocabulary, by their scores. It begins with single characters and joins neighbors
//! that form a piece together. The pair whose piece has the highest score is joined first, and among equal scores the
//! leftmost.
//!
//! This is the algorithm of SentencePiece and llama.cpp. A list of merges, as `tokenizers` uses it, gives other tokens
//! if scores are equal, or if a piece contains characters that are not pieces themselves.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Index that stands for no part.
const NONE: usize = usize::MAX;

/// The pieces of a vocabulary.
pub(super) struct ScoreMerges {
    pieces: HashMap<Box<str>, Piece>,
    /// The token of each byte, for characters that are not pieces.
    bytes: Box<[Option<u32>; 256]>,
    /// Length of the longest piece in bytes.
    longest: usize,
}

#[derive(Clone, Copy)]
struct Piece {
    id: u32,
    /// The position of the score among all scores; equal scores have the same rank.
    rank: usize,
}

/// A part of a text: a character, or several characters that were joined.
struct Part {
    start: usize,
    end: usize,
    /// The neighbors. A part that was joined to another has no `after`.
    before: usize,
    after: usize,
}

/// Two neighbors that form a piece together. The greatest pair is joined first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    rank: usize,
    left: Reverse<usize>,
    right: usize,
    /// Length of both together in bytes.
    length: usize,
}

impl ScoreMerges {
    /// Creates the vocabulary of the pieces with these texts, ids and scores, and of the tokens of bytes. No two pieces
    /// may have the same text.
    pub(super) fn new<'a>(pieces: impl Iterator<Item = (&'a str, u32, f32)>, bytes: Box<[Option<u32>; 256]>) -> Self {
        // The first piece of a vocabulary often has the score -0, which equals 0.
        let pieces: Vec<_> = pieces.map(|(text, id, score)| (text, id, score + 0.0)).collect();
        let mut scores: Vec<f32> = pieces.iter().map(|(_, _, score)| *score).collect();
        scores.sort_unstable_by(f32::total_cmp);
        let rank = |score: f32| scores.partition_point(|other| other.total_cmp(&score).is_lt());
        let longest = pieces.iter().map(|(text, ..)| text.len()).max().unwrap_or(0);
        let pieces = pieces.iter().map(|&(text, id, score)| (text.into(), Piece { id, rank: rank(score) })).collect();
        Self { pieces, bytes, longest }
    }

    /// Returns the id of the piece with this text.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.pieces.get(text).map(|piece| piece.id)
    }

    /// Length of the longest piece in bytes.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// The texts of all pieces, in any order.
    pub(super) fn texts(&self) -> impl Iterator<Item = &str> {
        self.pieces.keys().map(AsRef::as_ref)
    }

    /// Appends the tokens of `text` to `ids`.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let mut parts: Vec<Part> = Vec::with_capacity(text.len());
        for (start, character) in text.char_indices() {
            let at = parts.len();
            let before = at.checked_sub(1).unwrap_or(NONE);
            parts.push(Part { start, end: start + character.len_utf8(), before, after: at + 1 });
        }
        let Some(last) = parts.last_mut() else { return };
        last.after = NONE;
        let mut queue: BinaryHeap<Pair> =
            (1..parts.len()).filter_map(|right| self.pair(text, &parts, right - 1, right)).collect();
        while let Some(Pair { left: Reverse(left), right, length, .. }) = queue.pop() {
            // One of the two may have been joined to another part in the meantime.
            if parts[left].after != right || parts[right].end - parts[left].start != length {
                continue;
            }
            let (end, after) = (parts[right].end, std::mem::replace(&mut parts[right].after, NONE));
            (parts[left].end, parts[left].after) = (end, after);
            if let Some(next) = parts.get_mut(after) {
                next.before = left;
            }
            let before = parts[left].before;
            queue.extend(self.pair(text, &parts, before, left));
            queue.extend(self.pair(text, &parts, left, after));
        }
        let mut at = 0;
        while let Some(part) = parts.get(at) {
            let text = &text[part.start..part.end];
            match self.id(text) {
                Some(id) => ids.push(id),
                None => ids.extend(text.bytes().filter_map(|byte| self.bytes[usize::from(byte)])),
            }
            at = part.after;
        }
    }

    /// Returns a pair of neighbors, if both exist and form a piece together.
    fn pair(&self, text: &str, parts: &[Part], left: usize, right: usize) -> Option<Pair> {
        let (start, end) = (parts.get(left)?.start, parts.get(right)?.end);
        let length = end - start;
        let piece = (length <= self.longest).then(|| self.pieces.get(&text[start..end]))??;
        Some(Pair { rank: piece.rank, left: Reverse(left), right, length })
    }
}
