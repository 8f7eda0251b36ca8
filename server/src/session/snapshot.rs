//! What is kept of a conversation: its state, and all that an exact continuation needs. Immutable, of bounded size.

use sha2::{Digest, Sha256};
use tidegate_model::SamplerState;

/// A digest of a sequence of tokens that grows token by token: two texts with one history are the same text.
///
/// The empty text has 32 zeros; after a token it is SHA-256 of the history before and the token's four bytes, little
/// end first. So the longest kept beginning of a text is found without keeping any text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct History(pub [u8; 32]);

impl History {
    /// The history after `tokens` more.
    #[must_use]
    pub fn extended(self, tokens: &[u32]) -> Self {
        tokens.iter().fold(self, |history, token| {
            let digest = Sha256::new().chain_update(history.0).chain_update(token.to_le_bytes()).finalize();
            Self(digest.into())
        })
    }

    /// The history of a state that a source has been read into, whatever was there before: SHA-256 of the history that
    /// its tokens have as a text, and the word `source`. No text has it, and no other source: after a token what is
    /// hashed is four bytes longer than a history, never six.
    pub fn of_source(tokens: &[u32]) -> Self {
        let read = Self::default().extended(tokens);
        Self(Sha256::new().chain_update(read.0).chain_update("source").finalize().into())
    }
}

/// Most tokens that a snapshot holds beside its state: each adds at least a byte to the text that is held back for a
/// stop string, but for the last and for tokens without text.
pub const MAX_PENDING: usize = 4096;

/// The answer that a text ends with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Whether it has not ended: the next turn goes on with it where it brings no new text.
    pub open: bool,
    /// Text held back since it may be the beginning of a stop string.
    pub held: String,
    /// The first bytes of a character whose last are still to come; at most 3.
    pub bytes: Vec<u8>,
}

/// A conversation at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The numbers of a slot in the order of [`tidegate_model::StateLayout`]; empty where no token has been read.
    pub state: Vec<f32>,
    /// Tokens that are in the state, those of a source included.
    pub read: u64,
    /// The last tokens of the text, which the state does not have yet: at least the last that was chosen, and all that
    /// a stop string may still take back. Without any the next turn needs new text. At most [`MAX_PENDING`].
    pub pending: Vec<u32>,
    /// The digest of the tokens that are in the state, a source and its text where there is one.
    pub history: History,
    /// The sampler's place in its random numbers, and its counts.
    pub sampler: SamplerState,
    /// The answer that the text ends with; none where it ends with text that came from outside.
    pub answer: Option<Answer>,
}

/// The numbers of its state.
impl AsRef<[f32]> for Snapshot {
    fn as_ref(&self) -> &[f32] {
        &self.state
    }
}

impl Snapshot {
    /// The empty conversation, whose random numbers come from `seed`.
    pub fn empty(seed: u64) -> Self {
        Self { sampler: SamplerState { seed, ..SamplerState::default() }, ..Self::default() }
    }

    /// Tokens of the text.
    pub fn tokens(&self) -> u64 {
        self.read + self.pending.len() as u64
    }

    /// Bytes that it takes in memory, nearly.
    pub fn bytes(&self) -> usize {
        let answer = self.answer.as_ref().map_or(0, |answer| answer.held.len() + answer.bytes.len());
        size_of::<Self>()
            + size_of_val(&*self.state)
            + size_of_val(&*self.sampler.counts)
            + 4 * self.pending.len()
            + answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_does_not_depend_on_where_it_was_cut() {
        let whole = History::default().extended(&[1, 2, 3]);
        assert_eq!(History::default().extended(&[1]).extended(&[2, 3]), whole);
        assert_ne!(History::default().extended(&[1, 3, 2]), whole);
        assert_ne!(History::default().extended(&[1, 2]), whole);
    }

    #[test]
    fn a_source_is_no_text_and_no_other_source() {
        let of = |source: &[u32], text: &[u32]| History::of_source(source).extended(text);
        let all = [
            of(&[1, 2], &[3]),
            of(&[1], &[2, 3]),
            of(&[1, 2, 3], &[]),
            of(&[1, 3], &[2]),
            History::default().extended(&[1, 2, 3]),
            // The bytes of the word as a token's.
            History::default().extended(&[1, 2, u32::from_le_bytes(*b"sour")]),
        ];
        assert!(all.iter().enumerate().all(|(at, one)| !all[..at].contains(one)), "{all:?}");
    }
}
