//! A set of tokens of the vocabulary, with one bit per token.

/// A set of tokens, such as those that are allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSet {
    words: Vec<u32>,
    vocab_size: usize,
}

impl TokenSet {
    /// The empty set over a vocabulary of `vocab_size` tokens.
    pub fn new(vocab_size: usize) -> Self {
        Self { words: vec![0; vocab_size.div_ceil(32)], vocab_size }
    }

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Adds a token; ignores one outside the vocabulary.
    pub fn insert(&mut self, token: u32) {
        if (token as usize) < self.vocab_size {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// Removes a token.
    pub fn remove(&mut self, token: u32) {
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }

    /// Sets the bits to `words`, with token 0 in the lowest bit of the first word. Missing words count as 0; bits
    /// outside the vocabulary are ignored.
    pub fn copy_from(&mut self, words: &[u32]) {
        let count = self.words.len().min(words.len());
        self.words[..count].copy_from_slice(&words[..count]);
        self.words[count..].fill(0);
        if let Some(last) = self.words.last_mut()
            && !self.vocab_size.is_multiple_of(32)
        {
            *last &= (1 << (self.vocab_size % 32)) - 1;
        }
    }

    /// Whether a token is in the set.
    pub fn contains(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// The bits of all tokens, with token 0 in the lowest bit of the first word.
    pub(super) fn words(&self) -> &[u32] {
        &self.words
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// Sets every logit outside the set to minus infinity. logits: (vocab)
    pub fn apply(&self, logits: &mut [f32]) {
        let (chunks, rest) = logits.as_chunks_mut::<32>();
        for (chunk, word) in chunks.iter_mut().zip(&self.words) {
            match *word {
                u32::MAX => {}
                0 => *chunk = [f32::NEG_INFINITY; 32],
                word => mask(chunk, word),
            }
        }
        if let Some(word) = self.words.get(chunks.len()) {
            mask(rest, *word);
        }
    }
}

/// Sets logits to minus infinity where the bit in `word` is 0.
#[inline]
fn mask(logits: &mut [f32], word: u32) {
    for (bit, logit) in logits.iter_mut().enumerate() {
        *logit = if word >> bit & 1 == 1 { *logit } else { f32::NEG_INFINITY };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_the_added_tokens_and_none_outside_the_vocabulary() {
        let mut set = TokenSet::new(40);
        assert!(set.is_empty());
        for token in [0, 31, 32, 39, 40, u32::MAX] {
            set.insert(token);
        }
        let tokens: Vec<u32> = (0..64).filter(|token| set.contains(*token)).collect();
        assert_eq!(tokens, [0, 31, 32, 39]);
        set.remove(31);
        set.remove(1000);
        let left = |set: &TokenSet, logits: usize| -> Vec<usize> {
            let mut logits = vec![1.0; logits];
            set.apply(&mut logits);
            (0..logits.len()).filter(|token| logits[*token] == 1.0).collect()
        };
        assert_eq!(left(&set, 40), [0, 32, 39]);
        assert_eq!(left(&set, 33), [0, 32]);
        set.copy_from(&[u32::MAX, u32::MAX]);
        assert!(set.contains(39) && !set.contains(40));
        assert_eq!(left(&set, 40), (0..40).collect::<Vec<_>>());
        set.copy_from(&[2]);
        assert!(set.contains(1) && !set.contains(32));
        set.copy_from(&[0, 128]);
        assert_eq!(left(&set, 40), [39]);
    }
}
