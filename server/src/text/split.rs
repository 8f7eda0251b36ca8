//! Finds the places where a long text can be cut so that its pieces have the same tokens as the whole.
//!
//! A byte-level tokenizer finds the words of a text with a regular expression, and merges bytes only within words. With
//! the expressions below, no word spans two kinds of places: between a character that is not whitespace and a space,
//! and between a letter or digit and a line break or punctuation. The expressions do not look at the text before a
//! word, so the rest of the text has the same words on its own.
//!
//! A SentencePiece tokenizer merges characters over the whole text. If none of its tokens has a space after another
//! character, nothing is merged across such a place. Nothing is known about other tokenizers.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::{Value, json};
use tokenizers::Encoding;
use tokenizers::models::ModelWrapper;

use super::encoder::{Encoded, Pace};
use super::error::TextError;
use super::sentence_pieces;

/// The expressions of Qwen 2 and Llama 3, as the first of two pre-tokenizers. GPT-2's expression is part of
/// `ByteLevel`.
const EXPRESSIONS: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// A text may be cut before these characters if a letter or digit precedes them. None of them combines with the
/// character before it, and added tokens rarely contain them.
const SEPARATORS: &str = "\n\r.,;:!?\u{3001}\u{3002}\u{ff0c}\u{ff01}\u{ff1f}\u{ff1b}\u{ff1a}\u{300c}\u{300d}";

/// Where texts can be cut.
#[derive(Clone, Debug)]
pub(super) enum Cuts {
    /// Between words.
    Words,
    /// Before a space that follows another character, except after `not_after`: added tokens end with those characters,
    /// and text after an added token may be encoded in a special way.
    Spaces {
        /// Characters after which texts are not cut.
        not_after: String,
    },
}

impl Cuts {
    fn is_cut(&self, previous: char, next: char) -> bool {
        match self {
            Self::Words => is_cut(previous, next),
            Self::Spaces { not_after } => {
                next == ' ' && !matches!(previous, ' ' | sentence_pieces::SPACE) && !not_after.contains(previous)
            }
        }
    }

    /// The places where `text` can be cut, in ascending order.
    fn places(&self, text: &str) -> impl Iterator<Item = usize> {
        let mut before = text.chars().next();
        text.char_indices().skip(1).filter_map(move |(at, next)| {
            let previous = before.replace(next)?;
            self.is_cut(previous, next).then_some(at)
        })
    }
}

/// Longest piece without a place to cut it, in bytes.
const MAX_PIECE_BYTES: usize = 256 << 10;

/// Longest text in bytes, for tokenizers whose texts cannot be cut.
const MAX_WHOLE_BYTES: usize = 1 << 20;

/// What is known about a tokenizer whose texts can be cut.
#[derive(Clone, Debug)]
pub(super) struct Splitter {
    pub(super) cuts: Cuts,
    /// The special tokens before and after every text.
    pub(super) before: Vec<u32>,
    pub(super) after: Vec<u32>,
    /// Most bytes of a text that become one token; `None` if the tokenizer changes texts before encoding them.
    pub(super) longest: Option<usize>,
}

impl Splitter {
    /// Returns what is known about a byte-level tokenizer; `None` if it is not known where texts can be cut. `longest`
    /// is the length of its longest token in bytes.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer, longest: usize) -> Option<Self> {
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
        let known = (normalizer.is_null() || normalizer == json!({"type": "NFC"})) && is_known(&pre_tokenizer);
        let longest = normalizer.is_null().then_some(longest);
        if known { Self::with(tokenizer, Cuts::Words, longest) } else { None }
    }

    /// Does the same as [`Self::of`] for a tokenizer that [`sentence_pieces::check`] accepts.
    pub(super) fn of_sentence_pieces(tokenizer: &tokenizers::Tokenizer, longest: usize) -> Option<Self> {
        let added = tokenizer.get_added_tokens_decoder();
        let not_after = added.values().filter_map(|token| token.content.chars().last()).collect();
        // The character that stands for a space may be in the text itself, where it has three bytes.
        let longest = Some(longest * sentence_pieces::SPACE.len_utf8());
        // If an added token is matched in the normalized text, a space before it is read differently at the beginning
        // of a piece.
        let apart = sentence_pieces::is_apart(tokenizer) && !added.values().any(|token| token.normalized);
        apart.then(|| Self::with(tokenizer, Cuts::Spaces { not_after }, longest))?
    }

    /// Does the same as [`Self::of_sentence_pieces`] for these pieces and added tokens, with the special tokens around
    /// every text.
    pub(super) fn of_pieces<'a>(
        mut pieces: impl Iterator<Item = &'a str>,
        added: &[&str],
        longest: usize,
        [before, after]: [Vec<u32>; 2],
    ) -> Option<Self> {
        let cuts = Cuts::Spaces { not_after: added.iter().filter_map(|text| text.chars().last()).collect() };
        let apart = pieces.all(sentence_pieces::begins_with_spaces)
            && added.iter().all(|text| cuts.places(text).next().is_none());
        let longest = added.iter().map(|text| text.len()).fold(longest, usize::max);
        apart.then_some(Self { cuts, before, after, longest: Some(longest) })
    }

    fn with(tokenizer: &tokenizers::Tokenizer, cuts: Cuts, longest: Option<usize>) -> Option<Self> {
        let by_words = matches!(tokenizer.get_model(), ModelWrapper::BPE(model) if model.dropout.is_none());
        // Added tokens are matched before all words, and must not span a cut.
        let added = tokenizer.get_added_tokens_decoder();
        let is_apart = |content: &str| cuts.places(content).next().is_none();
        let apart = added
            .values()
            .all(|token| !(token.rstrip || token.lstrip || token.single_word) && is_apart(&token.content));
        if !by_words || !apart {
            return None;
        }
        let longest_added = added.values().map(|token| token.content.len()).max().unwrap_or(0);
        let (before, after) = around(tokenizer)?;
        Some(Self { before, after, longest: longest.map(|longest| longest.max(longest_added)), cuts })
    }
}

/// Encodes `text` in pieces of about `target` bytes. Returns `None` if it is short enough to be encoded at once.
/// Without a splitter, a text can only be encoded as a whole. `encode` gets a piece, and whether it is the first.
pub(super) fn encode_in_pieces<'a>(
    splitter: Option<&'a Splitter>,
    text: &str,
    pace: &mut Pace<'_>,
    target: usize,
    encode: impl Fn(&str, bool) -> Result<Vec<u32>, TextError>,
) -> Result<Option<Encoded<'a>>, TextError> {
    let splitter = match splitter {
        Some(splitter) if text.len() > target => splitter,
        None if text.len() > MAX_WHOLE_BYTES => {
            return Err(TextError::Bytes { most: MAX_WHOLE_BYTES, found: text.len() });
        }
        _ => return Ok(None),
    };
    let most = pace.most;
    let too_many = |read| TextError::Tokens { most, read };
    if splitter.longest.is_some_and(|longest| text.len() > most.saturating_mul(longest)) {
        return Err(too_many(0));
    }
    let pieces = pieces(text, target, &splitter.cuts);
    if pieces.iter().any(|piece| piece.len() > MAX_PIECE_BYTES) {
        return Err(TextError::Uncut { most: MAX_PIECE_BYTES });
    }
    let mut all = Vec::new();
    for (at, piece) in pieces.iter().enumerate() {
        if at > 0 {
            if all.len() > most {
                return Err(too_many(all.len()));
            }
            (pace.pause)();
        }
        all.extend(encode(piece, at == 0)?);
    }
    Ok(Some(Encoded { ids: all, before: &splitter.before, after: &splitter.after }))
}

fn is_known(pre_tokenizer: &Value) -> bool {
    let byte_level = |it: &Value, words: bool| {
        it["type"] == "ByteLevel" && it["add_prefix_space"] == false && it["use_regex"] == words
    };
    let split = |it: &Value| {
        let expression = it["pattern"]["Regex"].as_str();
        let known = expression.is_some_and(|expression| EXPRESSIONS.contains(&expression));
        it["type"] == "Split" && known && it["behavior"] == "Isolated" && it["invert"] == false
    };
    match pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice) {
        Some([first, second]) => pre_tokenizer["type"] == "Sequence" && split(first) && byte_level(second, false),
        Some(_) => false,
        None => byte_level(pre_tokenizer, true),
    }
}

/// Returns the special tokens before and after every text; `None` if they depend on the text.
fn around(tokenizer: &tokenizers::Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let wrapped = |text: &str| {
        let (bare, all) = (ids(tokenizer, text, false).ok()?, ids(tokenizer, text, true).ok()?);
        let at = all.windows(bare.len().max(1)).position(|window| window == bare)?;
        Some((all[..at].to_vec(), all[at + bare.len()..].to_vec()))
    };
    wrapped("a").filter(|found| wrapped("b c, d").as_ref() == Some(found))
}

fn is_cut(previous: char, next: char) -> bool {
    if next == ' ' {
        return !previous.is_whitespace();
    }
    // Only characters that the expressions certainly treat as letters: marks, for example, go with punctuation.
    let letter = previous.is_ascii_alphanumeric()
        || matches!(previous, '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}');
    letter && SEPARATORS.contains(next)
}

/// Splits `text` into pieces of at most `target` bytes if it can be cut that way, and otherwise into pieces as short as
/// possible.
pub(super) fn pieces<'a>(text: &'a str, target: usize, cuts: &Cuts) -> Vec<&'a str> {
    let (mut pieces, mut start, mut last) = (Vec::new(), 0, 0);
    for cut in cuts.places(text).chain([text.len()]) {
        if cut - start > target && last > start {
            pieces.push(&text[start..last]);
            start = last;
        }
        last = cut;
    }
    pieces.push(&text[start..]);
    pieces
}

/// Encodes `text`; with `special`, including the special tokens around it.
pub(super) fn ids(tokenizer: &tokenizers::Tokenizer, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
    Ok(caught(|| tokenizer.encode_fast(text, special))?.get_ids().to_vec())
}

/// Runs `encode`, and turns a panic of the library into an error: a tokenizer file may be invalid in ways that only
/// show when a text is encoded.
pub(super) fn caught(encode: impl FnOnce() -> tokenizers::Result<Encoding>) -> Result<Encoding, TextError> {
    let encoded = catch_unwind(AssertUnwindSafe(encode));
    let encoded = encoded.map_err(|_| TextError::Encode("the library tokenizers panicked".into()))?;
    encoded.map_err(|error| TextError::Encode(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;
    use std::str::FromStr;

    use proptest::prelude::*;

    use super::*;

    /// The shipped tokenizer with another pre-tokenizer and normalizer.
    fn tokenizer(pre_tokenizer: &Value, normalizer: &Value) -> tokenizers::Tokenizer {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/checkpoints/tidegate-tiny/tokenizer.json");
        let mut all: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        all["pre_tokenizer"] = pre_tokenizer.clone();
        all["normalizer"] = normalizer.clone();
        let added = json!({"id": 1, "content": "<|tool|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": true, "special": false});
        all["added_tokens"].as_array_mut().unwrap().push(added);
        tokenizers::Tokenizer::from_str(&all.to_string()).unwrap()
    }

    fn byte_level(words: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": words})
    }

    fn split(expression: &str) -> Value {
        let first = json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false});
        json!({"type": "Sequence", "pretokenizers": [first, byte_level(false)]})
    }

    fn known() -> Vec<tokenizers::Tokenizer> {
        let ways = EXPRESSIONS.iter().map(|expression| split(expression)).chain([byte_level(true)]);
        let normalizers = [Value::Null, json!({"type": "NFC"})];
        ways.flat_map(|way| normalizers.iter().map(move |normalizer| tokenizer(&way, normalizer))).collect()
    }

    /// Texts of characters that often meet at word boundaries.
    fn texts() -> impl Strategy<Value = String> {
        let parts = [
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t",
            "\u{a0}",
            "\u{3000}",
            "a",
            "Once",
            "s",
            "'s",
            "'",
            "'LL",
            "1",
            "12",
            "1234",
            ".",
            "...",
            ",",
            "<",
            "<|endoftext|>",
            "<|tool|>",
            "|>",
            "\u{e9}",
            "e\u{301}",
            "\u{301}",
            "\u{338}",
            "=",
            "\u{930}\u{93e}",
            "\u{65e5}",
            "\u{672c}",
            "\u{3002}",
            "\u{304b}",
            "\u{3099}",
            "\u{1f980}",
            "\u{200d}",
            "\u{b2}",
            "\u{2160}",
            "_",
            "\u{130}",
            "\u{d55c}",
            "\u{1100}",
            "\u{1161}",
        ];
        proptest::collection::vec(prop::sample::select(parts.to_vec()), 0..60).prop_map(|parts| parts.concat())
    }

    #[test]
    fn the_tokens_of_the_pieces_are_those_of_the_whole() {
        let tokenizers = known();
        assert!(tokenizers.iter().all(|tokenizer| Splitter::of(tokenizer, 14).is_some()));
        let config = ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() };
        let cut = Cell::new(0);
        proptest!(config, |(text in texts(), target in 1..12_usize)| {
            let pieces = pieces(&text, target, &Cuts::Words);
            prop_assert_eq!(pieces.concat(), text.as_str());
            cut.set(cut.get() + pieces.len() - 1);
            for tokenizer in &tokenizers {
                let whole = ids(tokenizer, &text, false).unwrap();
                let parts: Vec<u32> = pieces.iter().flat_map(|piece| ids(tokenizer, piece, false).unwrap()).collect();
                prop_assert_eq!(whole, parts, "{:?}", &pieces);
            }
        });
        assert!(cut.get() > 2000, "{} cuts", cut.get());
    }

    #[test]
    fn nothing_is_known_of_other_tokenizers() {
        let prefixed = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        for (way, normalizer) in [
            (prefixed, Value::Null),
            (byte_level(false), Value::Null),
            (split("."), Value::Null),
            (byte_level(true), json!({"type": "Lowercase"})),
        ] {
            assert!(Splitter::of(&tokenizer(&way, &normalizer), 14).is_none(), "{way} {normalizer}");
        }
        let mut stripping = tokenizer(&byte_level(true), &Value::Null);
        stripping.add_tokens([tokenizers::AddedToken::from("<|strip|>", false).rstrip(true)]).unwrap();
        assert!(Splitter::of(&stripping, 14).is_none());
    }

    #[test]
    fn pieces_are_short_where_the_text_can_be_cut() {
        let text = "word ".repeat(1000) + &"1".repeat(500) + " end";
        let pieces = pieces(&text, 64, &Cuts::Words);
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().filter(|piece| piece.len() > 64).count() == 1);
        assert!(pieces.iter().any(|piece| piece.len() == 501));
    }
}
