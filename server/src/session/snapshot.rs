//! A snapshot: the state of a conversation and everything else needed to continue it exactly. It is immutable and
//! bounded in size.

use sha2::{Digest, Sha256};
use tidegate_model::SamplerState;

/// A digest of a sequence of tokens, extended token by token. Equal digests mean equal texts.
///
/// The empty text has 32 zero bytes. Each further token gives SHA-256 of the previous digest and the token's four
/// bytes, little-endian. So the longest stored prefix of a text can be found without storing any text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct History(pub [u8; 32]);

impl History {
    /// Returns the history after appending `tokens`.
    #[must_use]
    pub fn extended(self, tokens: &[u32]) -> Self {
        tokens.iter().fold(self, |history, token| {
            let digest = Sha256::new().chain_update(history.0).chain_update(token.to_le_bytes()).finalize();
            Self(digest.into())
        })
    }

    /// Returns the history of a state into which a source text has been read, replacing any earlier one: SHA-256 of the
    /// source's own token history followed by the word `source`. It differs from the history of every text, because
    /// there a digest is followed by four bytes, never six.
    pub fn of_source(tokens: &[u32]) -> Self {
        let read = Self::default().extended(tokens);
        Self(Sha256::new().chain_update(read.0).chain_update("source").finalize().into())
    }
}

/// Maximum number of tokens that a snapshot holds outside its state: the last token and the tokens held back for a stop
/// string, each of which (except tokens without text) adds at least a byte to the held-back text.
pub const MAX_PENDING: usize = 4096;

/// The model's answer at the end of a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Whether the answer is unfinished. The next turn continues an unfinished answer unless it brings new text.
    pub open: bool,
    /// Text held back because it may be the beginning of a stop string.
    pub held: String,
    /// The first bytes, at most 3, of a character that is not complete yet.
    pub bytes: Vec<u8>,
}

/// The last tokens of a text, at most 2,048, in which prompt lookup searches for draft tokens. They are a hint: no file
/// contains them, and if reading a prompt was interrupted, they include the unread rest of the prompt.
#[derive(Clone, Debug, Default)]
pub struct Recent(pub Vec<u32>);

/// Always equal: the snapshot continues in the same way with or without these tokens.
impl PartialEq for Recent {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// A conversation at one point in time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The numbers of a slot in the order of [`tidegate_model::StateLayout`]; empty if no token has been read.
    pub state: Vec<f32>,
    /// Number of tokens in the state, including those of a source.
    pub read: u64,
    /// The last tokens of the text, which are not in the state yet: at least the last sampled token, plus all tokens
    /// that a stop string may still remove. If empty, the next turn needs new text. At most [`MAX_PENDING`].
    pub pending: Vec<u32>,
    /// The digest of the tokens in the state, starting with the source if there is one.
    pub history: History,
    /// The sampler's position in its random number stream, and its token counts.
    pub sampler: SamplerState,
    /// The answer at the end of the text; `None` if the text ends with the client's input.
    pub answer: Option<Answer>,
    /// The tokens before the pending ones; empty if the snapshot was read from a file.
    pub recent: Recent,
}

/// Borrows the numbers of the state.
impl AsRef<[f32]> for Snapshot {
    fn as_ref(&self) -> &[f32] {
        &self.state
    }
}

impl Snapshot {
    /// Creates an empty conversation with the given sampler seed.
    pub fn empty(seed: u64) -> Self {
        Self { sampler: SamplerState { seed, ..SamplerState::default() }, ..Self::default() }
    }

    /// Returns whether the snapshot has read the first tokens of `tokens`, but not all of them.
    pub fn is_prefix_of(&self, tokens: &[u32]) -> bool {
        let read = usize::try_from(self.read).ok().filter(|read| (1..tokens.len()).contains(read));
        read.is_some_and(|read| History::default().extended(&tokens[..read]) == self.history)
    }

    /// Returns the number of tokens in the text.
    pub fn tokens(&self) -> u64 {
        self.read + self.pending.len() as u64
    }

    /// Returns the approximate size in memory, in bytes.
    pub fn bytes(&self) -> usize {
        let answer = self.answer.as_ref().map_or(0, |answer| answer.held.len() + answer.bytes.len());
        size_of::<Self>()
            + size_of_val(&*self.state)
            + size_of_val(&*self.sampler.counts)
            + size_of_val(&*self.pending)
            + size_of_val(&*self.recent.0)
            + answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_does_not_depend_on_how_the_text_was_split() {
        let whole = History::default().extended(&[1, 2, 3]);
        assert_eq!(History::default().extended(&[1]).extended(&[2, 3]), whole);
        assert_ne!(History::default().extended(&[1, 3, 2]), whole);
        assert_ne!(History::default().extended(&[1, 2]), whole);
    }

    #[test]
    fn a_prefix_has_read_the_first_tokens_but_not_all() {
        let of = |tokens: &[u32]| Snapshot {
            read: tokens.len() as u64,
            history: History::default().extended(tokens),
            ..Snapshot::default()
        };
        assert!(of(&[1, 2]).is_prefix_of(&[1, 2, 3]) && of(&[1]).is_prefix_of(&[1, 2, 3]));
        for other in [of(&[]), of(&[1, 3]), of(&[1, 2, 3]), of(&[1, 2, 3, 4])] {
            assert!(!other.is_prefix_of(&[1, 2, 3]), "{other:?}");
        }
    }

    #[test]
    fn a_source_has_a_history_of_its_own() {
        let of = |source: &[u32], text: &[u32]| History::of_source(source).extended(text);
        let all = [
            of(&[1, 2], &[3]),
            of(&[1], &[2, 3]),
            of(&[1, 2, 3], &[]),
            of(&[1, 3], &[2]),
            History::default().extended(&[1, 2, 3]),
            // The first four bytes of the word `source`, as a token.
            History::default().extended(&[1, 2, u32::from_le_bytes(*b"sour")]),
        ];
        assert!(all.iter().enumerate().all(|(at, one)| !all[..at].contains(one)), "{all:?}");
    }
}
