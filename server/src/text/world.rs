//! RWKV's World tokenizer, which takes the longest token at each place of a text, from left to right.

use std::collections::{HashMap, HashSet};

use super::encoder::{Encoded, Encoder, Pace};
use super::error::TextError;
use super::trie::Trie;

/// The id with which RWKV's models end texts, and which stands between two texts in training.
const END: u32 = 0;

/// The name of [`END`].
pub(super) const END_TEXT: &str = "<|rwkv_tokenizer_end_of_text|>";

/// A tokenizer that takes the longest token at each place. Tokens are any bytes; many are parts of characters.
pub struct WorldTokenizer {
    trie: Trie,
    tokens: Vec<(u32, Vec<u8>)>,
    /// Tokens that are matched before all others.
    added: Vec<Added>,
    /// The bytes with which the texts of added tokens begin.
    starts: [bool; 256],
    /// The special tokens before every text.
    begin: Vec<u32>,
    /// Length of the longest token in bytes.
    longest: usize,
}

/// A token that is not in the vocabulary's file.
struct Added {
    id: u32,
    text: String,
    special: bool,
}

/// The position of an added token in a text.
struct Found {
    start: usize,
    end: usize,
    id: u32,
}

/// Why a list of tokens is not a valid vocabulary.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorldError {
    /// One of the tokens is wrong.
    #[error("entry {at}: {reason}")]
    Entry {
        /// Its index in the list, from 0.
        at: usize,
        /// What is wrong.
        reason: EntryError,
    },
    /// A byte has no token, so some texts could not be encoded.
    #[error("must have a token for every single byte, and has none for {0:#04x}")]
    Missing(u8),
}

/// Why a token cannot be part of a vocabulary.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// The token has no bytes.
    #[error("a token must have at least one byte")]
    Empty,
    /// Two tokens have the same id.
    #[error("the id {0} is that of an earlier token")]
    Id(u32),
    /// Two tokens have the same bytes.
    #[error("the bytes are those of token {0}")]
    Bytes(u32),
    /// The id is not below the size of the model's vocabulary.
    #[error("token ids must be below the model's vocab_size ({vocab_size}), found {id}")]
    Outside {
        /// The id.
        id: u32,
        /// The size of the model's vocabulary.
        vocab_size: usize,
    },
}

impl WorldTokenizer {
    /// Creates a tokenizer from ids and bytes. If no token has the id 0, it is the special token that ends a text.
    ///
    /// # Errors
    /// A token is empty, two tokens have the same id or the same bytes, or a byte is not a token.
    pub fn new(tokens: Vec<(u32, Vec<u8>)>) -> Result<Self, WorldError> {
        let entry = |at, reason| Err(WorldError::Entry { at, reason });
        let (mut ids, mut by_bytes) = (HashSet::new(), HashMap::new());
        for (at, (id, bytes)) in tokens.iter().enumerate() {
            if bytes.is_empty() {
                return entry(at, EntryError::Empty);
            }
            if !ids.insert(*id) {
                return entry(at, EntryError::Id(*id));
            }
            if let Some(earlier) = by_bytes.insert(bytes.as_slice(), *id) {
                return entry(at, EntryError::Bytes(earlier));
            }
        }
        if let Some(byte) = (0..=u8::MAX).find(|byte| !by_bytes.contains_key([*byte].as_slice())) {
            return Err(WorldError::Missing(byte));
        }
        let end = (!ids.contains(&END)).then(|| Added { id: END, text: END_TEXT.into(), special: true });
        let mut sorted: Vec<(&[u8], u32)> = by_bytes.into_iter().collect();
        sorted.sort_unstable();
        let trie = Trie::new(&sorted);
        let longest = tokens.iter().map(|(_, bytes)| bytes.len()).max().unwrap_or(0);
        let mut world = Self { trie, tokens, added: Vec::new(), starts: [false; 256], begin: Vec::new(), longest };
        world.add(end);
        Ok(world)
    }

    /// Adds a token that is not in the vocabulary's file, replacing any added token with the same id. A special token
    /// has a name but no bytes. A text in the vocabulary keeps its id, because models are trained with that id.
    #[must_use]
    pub fn with_added(mut self, id: u32, text: &str, special: bool) -> Self {
        let known =
            text.is_empty() || self.tokens.iter().any(|(other, bytes)| *other == id || bytes == text.as_bytes());
        if !known {
            self.added.retain(|added| added.id != id);
            self.add(Some(Added { id, text: text.into(), special }));
        }
        self
    }

    /// Makes every text begin with these special tokens.
    #[must_use]
    pub fn with_begin(mut self, begin: Vec<u32>) -> Self {
        self.begin = begin;
        self
    }

    fn add(&mut self, added: Option<Added>) {
        self.added.extend(added);
        // If two tokens begin at the same place, the longer one counts.
        self.added.sort_by_key(|added| std::cmp::Reverse(added.text.len()));
        self.starts = [false; 256];
        for added in &self.added {
            self.starts[usize::from(added.text.as_bytes()[0])] = true;
            self.longest = self.longest.max(added.text.len());
        }
    }

    /// Returns the special tokens before every text.
    pub(super) fn begin(&self) -> &[u32] {
        &self.begin
    }

    /// Returns the id that ends a text, if it is a special token.
    pub(super) fn end(&self) -> Option<u32> {
        self.special(END).map(|_| END)
    }

    /// Returns the bytes of each token, in order of ids.
    pub(super) fn bytes(&self, vocab_size: usize) -> Result<Vec<Box<[u8]>>, WorldError> {
        let mut all: Vec<Box<[u8]>> = vec![Box::default(); vocab_size];
        let added = self.added.iter().map(|added| (added.id, if added.special { &[] } else { added.text.as_bytes() }));
        let tokens = self.tokens.iter().map(|(id, bytes)| (*id, bytes.as_slice()));
        for (at, (id, bytes)) in tokens.chain(added).enumerate() {
            let Some(token) = all.get_mut(id as usize) else {
                return Err(WorldError::Entry { at, reason: EntryError::Outside { id, vocab_size } });
            };
            *token = bytes.into();
        }
        Ok(all)
    }

    /// Returns the next added token at or after `from`.
    fn find(&self, text: &[u8], from: usize, plain: bool) -> Option<Found> {
        (from..text.len()).filter(|start| self.starts[usize::from(text[*start])]).find_map(|start| {
            let mut counting = self.added.iter().filter(|added| !(plain && added.special));
            let added = counting.find(|added| text[start..].starts_with(added.text.as_bytes()))?;
            Some(Found { start, end: start + added.text.len(), id: added.id })
        })
    }

    /// Encodes `text`, without special tokens around it. Calls `piece` with the number of ids every `target` bytes or
    /// so.
    fn ids(
        &self,
        text: &[u8],
        plain: bool,
        target: usize,
        piece: &mut dyn FnMut(usize) -> Result<(), TextError>,
    ) -> Result<Vec<u32>, TextError> {
        let (mut ids, mut at, mut next) = (Vec::new(), 0, target);
        let mut found = self.find(text, 0, plain);
        while at < text.len() {
            if at >= next {
                piece(ids.len())?;
                next = at.saturating_add(target);
            }
            match found {
                Some(Found { start, end, id }) if start == at => {
                    ids.push(id);
                    at = end;
                    found = self.find(text, at, plain);
                }
                _ => {
                    let until = found.as_ref().map_or(text.len(), |found| found.start);
                    let (length, id) = self
                        .trie
                        .longest(&text[at..until])
                        .ok_or_else(|| TextError::Encode(format!("no token begins with the byte {:#04x}", text[at])))?;
                    ids.push(id);
                    at += length;
                }
            }
        }
        Ok(ids)
    }
}

impl Encoder for WorldTokenizer {
    fn encode(&self, text: &str, whole: bool, plain: bool) -> Result<Vec<u32>, TextError> {
        let ids = self.ids(text.as_bytes(), plain, usize::MAX, &mut |_| Ok(()))?;
        Ok(if whole { [self.begin.as_slice(), &ids].concat() } else { ids })
    }

    fn encode_in_pieces(
        &self,
        text: &str,
        plain: bool,
        pace: &mut Pace<'_>,
        target: usize,
    ) -> Result<Option<Encoded<'_>>, TextError> {
        let most = pace.most;
        if text.len() > most.saturating_mul(self.longest) {
            return Err(TextError::Tokens { most, read: 0 });
        }
        let ids = self.ids(text.as_bytes(), plain, target, &mut |read| {
            if read > most {
                return Err(TextError::Tokens { most, read });
            }
            (pace.pause)();
            Ok(())
        })?;
        Ok(Some(Encoded { ids, before: &self.begin, after: &[] }))
    }

    fn more(&self) -> &dyn Encoder {
        self
    }

    fn special(&self, id: u32) -> Option<&str> {
        let added = self.added.iter().find(|added| added.id == id && added.special)?;
        Some(&added.text)
    }

    fn name(&self, _id: u32) -> Option<String> {
        None
    }

    fn id(&self, text: &str) -> Option<u32> {
        let added = self.added.iter().find(|added| added.text == text);
        added.map(|added| added.id).or_else(|| {
            let (length, id) = self.trie.longest(text.as_bytes())?;
            (length == text.len()).then_some(id)
        })
    }

    fn world_separator(&self) -> Option<&str> {
        Some(self.special(END).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All single bytes as 1 to 256, and longer tokens after them.
    fn tokens(longer: &[&[u8]]) -> Vec<(u32, Vec<u8>)> {
        let bytes = (0..=u8::MAX).map(|byte| vec![byte]);
        (1..).zip(bytes.chain(longer.iter().map(|bytes| bytes.to_vec()))).collect()
    }

    const LONGER: [&[u8]; 12] = [
        b"ab",
        b"abc",
        b"abcde",
        b"cd",
        b"\n\n",
        b" the",
        b" th",
        b"User",
        "☃".as_bytes(),
        // Parts of characters.
        &[0xe2, 0x98],
        &[0x98, 0x83, b'a'],
        b"x<|rwkv",
    ];

    fn world() -> WorldTokenizer {
        WorldTokenizer::new(tokens(&LONGER)).unwrap()
    }

    /// Returns the id of one of [`LONGER`].
    fn long(bytes: &[u8]) -> u32 {
        257 + LONGER.iter().position(|longer| *longer == bytes).unwrap() as u32
    }

    fn byte(byte: u8) -> u32 {
        u32::from(byte) + 1
    }

    fn encode(world: &WorldTokenizer, text: &str) -> Vec<u32> {
        world.encode(text, false, false).unwrap()
    }

    #[test]
    fn the_longest_token_counts_even_if_a_shorter_one_would_give_fewer() {
        let world = world();
        assert_eq!(encode(&world, "abcd"), [long(b"abc"), byte(b'd')]);
        assert_eq!(encode(&world, "abcde"), [long(b"abcde")]);
        assert_eq!(encode(&world, "abcdf"), [long(b"abc"), byte(b'd'), byte(b'f')]);
        assert_eq!(encode(&world, " th the"), [long(b" th"), long(b" the")]);
        assert_eq!(encode(&world, "\n\n\n"), [long(b"\n\n"), byte(b'\n')]);
        assert_eq!(encode(&world, "☃a☄"), [long("☃".as_bytes()), byte(b'a'), long(&[0xe2, 0x98]), byte(0x84)]);
        assert_eq!(encode(&world, ""), [0; 0]);
    }

    #[test]
    fn special_tokens_are_found_before_all_others_unless_the_text_is_plain() {
        let world = world().with_added(300, "<|tool|>", true).with_added(301, "<think>", false);
        let text = "x<|rwkv_tokenizer_end_of_text|><|tool|>ab<think>";
        assert_eq!(encode(&world, text), [byte(b'x'), END, 300, long(b"ab"), 301]);
        let plain = world.encode(text, false, true).unwrap();
        assert_eq!(plain[0], long(b"x<|rwkv"));
        assert!(!plain.contains(&END) && !plain.contains(&300) && plain.ends_with(&[long(b"ab"), 301]));
        assert_eq!([0, 300, 301].map(|id| world.special(id)), [Some(END_TEXT), Some("<|tool|>"), None]);
        let bytes = world.bytes(302).unwrap();
        assert_eq!((bytes[0].as_ref(), bytes[300].as_ref(), bytes[301].as_ref()), (&[][..], &[][..], &b"<think>"[..]));
    }

    #[test]
    fn a_text_of_the_vocabulary_keeps_its_id_when_a_special_token_has_the_same() {
        let world = world().with_added(300, "\n\n", true).with_added(byte(b'a'), "<|a|>", true);
        assert_eq!(encode(&world, "\n\n<|a|>")[..2], [long(b"\n\n"), byte(b'<')]);
        assert_eq!((world.id("\n\n"), world.id(END_TEXT), world.id("abcd")), (Some(long(b"\n\n")), Some(0), None));
        // The end-of-text token may have another name.
        let world = self::world().with_added(0, "<s>", true);
        assert_eq!((encode(&world, "<s>"), world.special(0)), (vec![0], Some("<s>")));
        assert!(encode(&world, END_TEXT).len() > 1);
    }

    #[test]
    fn lists_that_are_no_vocabulary_are_refused() {
        let error = |tokens| WorldTokenizer::new(tokens).err().unwrap();
        let entry = |reason| WorldError::Entry { at: 256, reason };
        assert_eq!(error(tokens(&[b""])), entry(EntryError::Empty));
        assert_eq!(error(tokens(&[b"a"])), entry(EntryError::Bytes(byte(b'a'))));
        let mut again = tokens(&[b"ab"]);
        again[256].0 = 7;
        assert_eq!(error(again), entry(EntryError::Id(7)));
        let lacking = error(tokens(&[]).split_off(1));
        assert_eq!(lacking.to_string(), "must have a token for every single byte, and has none for 0x00");
        assert_eq!(error(Vec::new()), WorldError::Missing(0));
        let outside = world().bytes(268).unwrap_err();
        assert_eq!(outside.to_string(), "entry 267: token ids must be below the model's vocab_size (268), found 268");
    }

    #[test]
    fn a_text_in_pieces_gets_the_same_ids_and_pauses_between_them() {
        let world = world();
        let text = "abcdeab ☃ the\n\n".repeat(50) + END_TEXT + &"ab".repeat(50);
        let mut pauses = 0;
        let mut pace = Pace { most: usize::MAX, pause: &mut || pauses += 1 };
        let pieces = world.encode_in_pieces(&text, false, &mut pace, 40).unwrap().unwrap();
        assert_eq!(pieces.ids, encode(&world, &text));
        assert!((10..=text.len() / 40).contains(&pauses), "{pauses}");
        let mut pace = Pace { most: 34, pause: &mut || () };
        let error = world.encode_in_pieces(&text, false, &mut pace, 40).err().unwrap();
        assert!(matches!(error, TextError::Tokens { most: 34, read: 35..60 }), "{error:?}");
        let mut pace = Pace { most: 5, pause: &mut || panic!("nothing is read") };
        let error = world.encode_in_pieces(&text, false, &mut pace, 40).err().unwrap();
        assert!(matches!(error, TextError::Tokens { most: 5, read: 0 }), "{error:?}");
    }

    proptest! {
        #[test]
        fn the_trie_finds_what_a_search_of_all_tokens_finds(
            longer in prop::collection::hash_set(prop::collection::vec(prop::sample::select(b"abc\xe2\x98".to_vec()), 2..6), 0..30),
            text in prop::collection::vec(prop::sample::select(b"abcd\xe2\x98\x83".to_vec()), 0..80),
        ) {
            let longer: Vec<&[u8]> = longer.iter().map(Vec::as_slice).collect();
            let tokens = tokens(&longer);
            let world = WorldTokenizer::new(tokens.clone()).unwrap();
            let (mut want, mut rest) = (Vec::new(), text.as_slice());
            while !rest.is_empty() {
                let fitting = tokens.iter().filter(|(_, bytes)| rest.starts_with(bytes));
                let (id, bytes) = fitting.max_by_key(|(_, bytes)| bytes.len()).unwrap();
                want.push(*id);
                rest = &rest[bytes.len()..];
            }
            prop_assert_eq!(world.ids(&text, false, usize::MAX, &mut |_| Ok(())).unwrap(), want);
        }
    }
}
