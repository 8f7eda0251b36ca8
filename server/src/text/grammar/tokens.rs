//! Gives the compiler a vocabulary, and the tokens of text that a grammar forces.

use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use super::spec::GrammarError;
use crate::text::encoder::Encode;
use crate::text::vocabulary::Vocabulary;

/// A vocabulary for the compiler.
///
/// If the grammar leaves no choice of bytes, it leaves no choice of tokens either: they are those that the tokenizer
/// gives, which the model knows best. Elsewhere, any tokens with matching bytes are accepted.
struct Tokens {
    trie: TokTrie,
    encode: Encode,
    /// Whether every byte of UTF-8 is a token, so that every text can be encoded.
    complete: bool,
}

/// Creates the compiler's view of the vocabulary.
///
/// # Errors
/// The vocabulary has too many tokens.
pub(super) fn environment(vocabulary: &Vocabulary, eos: &[u32], encode: Encode) -> Result<TokEnv, GrammarError> {
    let mut words: Vec<Vec<u8>> = vocabulary.tokens().map(<[u8]>::to_vec).collect();
    for (id, word) in words.iter_mut().enumerate() {
        // llguidance would treat a word that begins with this byte as a special token. UTF-8 never uses the byte.
        let special = word.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
        if special || eos.iter().any(|eos| *eos as usize == id) {
            word.clear();
        }
    }
    let unused = |byte: &u8| matches!(byte, 0xc0 | 0xc1 | 0xf5..);
    let complete = (0..=u8::MAX).filter(|byte| !unused(byte)).all(|byte| words.iter().any(|word| *word == [byte]));
    let size = u32::try_from(words.len()).map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
    let trie = TokTrie::from(&TokRxInfo::new(size, INVALID_TOKEN), &words);
    let trie = if eos.is_empty() { trie } else { trie.with_eos_tokens(eos) };
    Ok(Arc::new(Tokens { trie, encode, complete }))
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// Whether tokens are forced at all.
    fn tokenize_is_canonical(&self) -> bool {
        self.complete
    }

    /// Returns the tokenizer's tokens if they have exactly these bytes, and otherwise the longest match at each place.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        let ids = std::str::from_utf8(bytes).ok().map(|text| (self.encode)(text));
        let exact = |ids: &Vec<u32>| self.trie.decode_raw(ids) == bytes;
        ids.filter(exact).unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}
