//! Tokenizers whose pieces have scores instead of a list of merges: the SentencePiece tokenizers of GGUF files, with
//! the same ids as llama.cpp.
//!
//! Added tokens first divide the text. What is between them is encoded by scores, after a space that the tokenizer may
//! add.

use std::collections::HashMap;
use std::sync::Arc;

use super::encoder::{Encoded, Encoder, Pace};
use super::error::TextError;
use super::score_merges::ScoreMerges;
use super::sentence_pieces::SPACE;
use super::split::{self, Splitter};
use super::tokenizer::{GenerationDefaults, Tokenizer};
use super::trie::Trie;
use super::vocabulary::Vocabulary;

/// [`SPACE`] as a string.
const SPACE_TEXT: &str = "\u{2581}";

/// The tokens of a tokenizer. In their texts, `▁` stands for a space.
#[derive(Clone, Debug, Default)]
pub struct ScoredPieces {
    /// The tokens that ordinary text becomes.
    pub pieces: Vec<ScoredPiece>,
    /// The token of each byte, for characters that are not pieces.
    pub bytes: Vec<(u32, u8)>,
    /// Special tokens with their literal texts.
    pub special: Vec<(u32, String)>,
    /// Tokens that are matched first, with their literal texts. They may also result from joining pieces.
    pub added: Vec<ScoredPiece>,
    /// Whether a space is added before a text and after special and added tokens.
    pub adds_space: bool,
    /// The special token before every text, if any.
    pub begin: Option<u32>,
    /// The special token after every text, if any.
    pub end: Option<u32>,
}

/// A piece with its score.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredPiece {
    /// The token's id.
    pub id: u32,
    /// Its text.
    pub text: String,
    /// The piece with the highest score is joined first.
    pub score: f32,
}

/// The tokenizer for the beginnings of texts, or for texts that continue others.
struct ScoredTokenizer {
    parts: Arc<Parts>,
    /// Whether its texts continue others, so that no space is added before them.
    continues: bool,
    /// The tokenizer for texts that continue others, if it differs.
    more: Option<Box<Self>>,
}

struct Parts {
    merges: ScoreMerges,
    /// The special and added tokens, which divide a text; and the added tokens alone, for plain text.
    dividing: Trie,
    dividing_plain: Trie,
    special: HashMap<u32, String>,
    names: HashMap<u32, String>,
    adds_space: bool,
    /// The special tokens before and after every text.
    around: [Vec<u32>; 2],
    splitter: Option<Splitter>,
}

impl ScoredPieces {
    /// Checks the tokens for a model of `vocab_size` tokens, and returns what is wrong.
    fn check(&self, vocab_size: usize) -> Result<(), String> {
        let mut known: HashMap<&str, u32> = HashMap::new();
        let scored = self.pieces.iter().chain(&self.added);
        if let Some(ScoredPiece { id, score, .. }) = scored.clone().find(|piece| !piece.score.is_finite()) {
            return Err(format!("the score of token {id} must be a finite number, found {score}"));
        }
        let special = self.special.iter().map(|(id, text)| (*id, text));
        for (id, text) in scored.map(|piece| (piece.id, &piece.text)).chain(special) {
            if text.is_empty() {
                return Err(format!("token {id} must have a text"));
            }
            if let Some(other) = known.insert(text, id) {
                return Err(format!("tokens {} and {} have the same text", other.min(id), other.max(id)));
            }
        }
        if !self.pieces.iter().any(|piece| piece.text == SPACE_TEXT) {
            return Err(format!("must have a token for a space, and has no {SPACE}"));
        }
        let ids = known.into_values().chain(self.bytes.iter().map(|(id, _)| *id));
        if let Some(id) = ids.max().filter(|id| *id as usize >= vocab_size) {
            return Err(format!("token ids must be below the model's vocab_size ({vocab_size}), found {id}"));
        }
        let is_special = |id: &u32| self.special.iter().any(|(special, _)| special == id);
        if let Some(id) = self.begin.iter().chain(&self.end).find(|id| !is_special(id)) {
            return Err(format!("token {id} must be a special token"));
        }
        let has = |byte: &u8| self.bytes.iter().any(|(_, known)| known == byte);
        // The other bytes do not occur in UTF-8.
        let missing = (0..=u8::MAX).filter(|byte| !matches!(byte, 0xc0 | 0xc1 | 0xf5..)).find(|byte| !has(byte));
        missing.map_or(Ok(()), |byte| {
            Err(format!("must have a token for every byte of a text, and has no <0x{byte:02X}>"))
        })
    }

    /// Returns the bytes that each token adds to a text.
    fn vocabulary(&self, vocab_size: usize) -> Vocabulary {
        let mut tokens: Vec<Box<[u8]>> = vec![Box::default(); vocab_size];
        for ScoredPiece { id, text, .. } in self.pieces.iter().chain(&self.added) {
            tokens[*id as usize] = text.replace(SPACE, " ").into_bytes().into();
        }
        for (id, byte) in &self.bytes {
            tokens[*id as usize] = [*byte].into();
        }
        let vocabulary = Vocabulary::new(tokens);
        if self.adds_space { vocabulary.with_added_space() } else { vocabulary }
    }

    fn into_parts(self) -> Parts {
        let mut bytes = Box::new([None; 256]);
        for (id, byte) in &self.bytes {
            bytes[usize::from(*byte)] = Some(*id);
        }
        let scored = self.pieces.iter().chain(&self.added);
        let merges = ScoreMerges::new(scored.clone().map(|piece| (piece.text.as_str(), piece.id, piece.score)), bytes);
        let added = self.added.iter().map(|piece| (piece.text.as_str(), piece.id));
        let special = self.special.iter().map(|(id, text)| (text.as_str(), *id));
        let dividing: Vec<(&str, u32)> = special.chain(added.clone()).collect();
        let texts: Vec<&str> = dividing.iter().map(|(text, _)| *text).collect();
        let around = [self.begin, self.end].map(Vec::from_iter);
        let splitter = Splitter::of_pieces(merges.texts(), &texts, merges.longest(), around.clone());
        let names = scored.map(|piece| (piece.id, piece.text.clone()));
        let names = names.chain(self.bytes.iter().map(|(id, byte)| (*id, format!("<0x{byte:02X}>")))).collect();
        Parts {
            dividing: trie(dividing),
            dividing_plain: trie(added.collect()),
            special: self.special.into_iter().collect(),
            names,
            adds_space: self.adds_space,
            merges,
            around,
            splitter,
        }
    }
}

fn trie(mut tokens: Vec<(&str, u32)>) -> Trie {
    tokens.sort_unstable();
    Trie::new(&tokens.into_iter().map(|(text, id)| (text.as_bytes(), id)).collect::<Vec<_>>())
}

impl Parts {
    /// Encodes `text`, without special tokens around it.
    fn ids(&self, text: &str, plain: bool, continues: bool) -> Vec<u32> {
        let dividing = if plain { &self.dividing_plain } else { &self.dividing };
        let (mut ids, mut from, mut at, mut with_space) = (Vec::new(), 0, 0, !continues);
        let encode = |text: &str, with_space: bool, ids: &mut Vec<u32>| {
            if !text.is_empty() {
                let before = if self.adds_space && with_space { " " } else { "" };
                self.merges.encode(&[before, text].concat().replace(' ', SPACE_TEXT), ids);
            }
        };
        while at < text.len() {
            let Some((length, id)) = dividing.longest(&text.as_bytes()[at..]) else {
                at += 1;
                continue;
            };
            encode(&text[from..at], with_space, &mut ids);
            ids.push(id);
            at += length;
            (from, with_space) = (at, true);
        }
        encode(&text[from..], with_space, &mut ids);
        ids
    }
}

impl ScoredTokenizer {
    fn new(parts: Parts) -> Self {
        let parts = Arc::new(parts);
        let more = parts.adds_space.then(|| Box::new(Self { parts: Arc::clone(&parts), continues: true, more: None }));
        Self { parts, continues: false, more }
    }
}

impl Encoder for ScoredTokenizer {
    fn encode(&self, text: &str, whole: bool, plain: bool) -> Result<Vec<u32>, TextError> {
        let ids = self.parts.ids(text, plain, self.continues);
        let [before, after] = &self.parts.around;
        Ok(if whole { [before, &ids, after].map(Vec::as_slice).concat() } else { ids })
    }

    fn encode_in_pieces(
        &self,
        text: &str,
        plain: bool,
        pace: &mut Pace<'_>,
        target: usize,
    ) -> Result<Option<Encoded<'_>>, TextError> {
        split::encode_in_pieces(self.parts.splitter.as_ref(), text, pace, target, |piece, first| {
            Ok(self.parts.ids(piece, plain, self.continues || !first))
        })
    }

    fn more(&self) -> &dyn Encoder {
        self.more.as_deref().unwrap_or(self)
    }

    fn special(&self, id: u32) -> Option<&str> {
        self.parts.special.get(&id).map(String::as_str)
    }

    fn name(&self, id: u32) -> Option<String> {
        let name = self.special(id).or_else(|| self.parts.names.get(&id).map(String::as_str));
        Some(name.unwrap_or_default().to_owned())
    }

    fn id(&self, text: &str) -> Option<u32> {
        let special = self.parts.special.iter().find(|(_, special)| *special == text).map(|(id, _)| *id);
        special.or_else(|| self.parts.merges.id(text))
    }
}

impl Tokenizer {
    /// Creates a SentencePiece tokenizer for a model of `vocab_size` tokens with these recommended parameters.
    ///
    /// # Errors
    /// Says what is wrong with the tokens.
    pub fn from_scored_pieces(
        pieces: ScoredPieces,
        vocab_size: usize,
        defaults: GenerationDefaults,
    ) -> Result<Self, String> {
        pieces.check(vocab_size)?;
        let (vocabulary, begin) = (pieces.vocabulary(vocab_size), Vec::from_iter(pieces.begin));
        let encoder = ScoredTokenizer::new(pieces.into_parts());
        Ok(Self::new(Box::new(encoder), vocabulary, begin, defaults))
    }
}

#[cfg(test)]
mod tests;
