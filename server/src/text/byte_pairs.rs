//! A byte-level BPE tokenizer in the style of GPT-2, for files that store it in another form than `tokenizer.json`.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use super::tokenizer::{GenerationDefaults, Tokenizer};
use super::tokenizer_json::TokenizerJson;
use super::vocabulary::byte_of;

/// A byte-level tokenizer that splits words like GPT-2's and merges pairs of tokens within them.
#[derive(Clone, Debug, Default)]
pub struct BytePairs {
    /// Tokens with their ids, spelled in the alphabet of byte-level tokenizers.
    pub tokens: Vec<(u32, String)>,
    /// Special tokens with their literal texts.
    pub special: Vec<(u32, String)>,
    /// Tokens that are matched before the text is split into words, with their literal texts.
    pub added: Vec<(u32, String)>,
    /// Pairs of tokens to merge, in order of priority.
    pub merges: Vec<(String, String)>,
    /// Whether texts are normalized to Unicode's form C first.
    pub normal_form_c: bool,
    /// The special token before every text, if any.
    pub begin: Option<u32>,
    /// The special token after every text, if any.
    pub end: Option<u32>,
}

impl BytePairs {
    /// Returns the contents of a `tokenizer.json`.
    ///
    /// # Errors
    /// Two tokens have the same text, a byte has no token, or a token to put around texts is not a special token.
    pub(super) fn json(&self) -> Result<Value, String> {
        let Self { tokens, special, added, merges, normal_form_c, begin, end } = self;
        let mut vocab: HashMap<&str, u32> = HashMap::new();
        for (id, text) in tokens.iter().chain(special).chain(added) {
            if let Some(other) = vocab.insert(text, *id) {
                return Err(format!("tokens {} and {} have the same text", other.min(*id), other.max(*id)));
            }
        }
        let single: HashSet<u8> = tokens.iter().filter_map(|(_, text)| single_byte(text)).collect();
        if let Some(byte) = (0..=u8::MAX).find(|byte| is_in_texts(*byte) && !single.contains(byte)) {
            return Err(format!("must have a token for every byte of a text, and has none for 0x{byte:02x}"));
        }
        let text_of = |id: &u32| {
            let known = special.iter().find(|(known, _)| known == id);
            known.map(|(_, text)| text.as_str()).ok_or_else(|| format!("token {id} must be a special token"))
        };
        let around = [begin.as_ref().map(text_of).transpose()?, end.as_ref().map(text_of).transpose()?];
        let describe = |(id, text): &(u32, String), special: bool| {
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": !special, "special": special})
        };
        let mut described: Vec<Value> = special.iter().map(|token| describe(token, true)).collect();
        described.extend(added.iter().map(|token| describe(token, false)));
        described.sort_by_key(|token| token["id"].as_u64());
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": described,
            "normalizer": normal_form_c.then(|| json!({"type": "NFC"})),
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": processor(around, &vocab),
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
        }))
    }
}

impl Tokenizer {
    /// Creates a byte-level tokenizer for a model of `vocab_size` tokens with these recommended parameters.
    ///
    /// # Errors
    /// Says what is wrong with the tokens or merges.
    pub fn from_byte_pairs(pairs: &BytePairs, vocab_size: usize, defaults: GenerationDefaults) -> Result<Self, String> {
        let (encoder, vocabulary) = TokenizerJson::parse(pairs.json()?.to_string().as_bytes(), vocab_size)?;
        let begin = encoder.begin().map_err(|error| error.to_string())?;
        Ok(Self::new(Box::new(encoder), vocabulary, begin, defaults))
    }
}

/// Whether a byte occurs in UTF-8. Published vocabularies lack tokens for the others.
fn is_in_texts(byte: u8) -> bool {
    !matches!(byte, 0xc0 | 0xc1 | 0xf5..)
}

/// Returns the byte that a token of one character stands for.
fn single_byte(text: &str) -> Option<u8> {
    let mut characters = text.chars();
    characters.next().filter(|_| characters.next().is_none()).and_then(byte_of)
}

/// Returns the `post_processor` that puts special tokens before and after a text; null if there are none.
fn processor([begin, end]: [Option<&str>; 2], vocab: &HashMap<&str, u32>) -> Value {
    if begin.or(end).is_none() {
        return Value::Null;
    }
    let token = |text: &str| json!({"SpecialToken": {"id": text, "type_id": 0}});
    let form = |texts: &[&str]| {
        let texts = texts.iter().map(|text| json!({"Sequence": {"id": text, "type_id": 0}}));
        begin.map(token).into_iter().chain(texts).chain(end.map(token)).collect::<Vec<_>>()
    };
    let known = |text: &str| (text.to_owned(), json!({"id": text, "ids": [vocab.get(text)], "tokens": [text]}));
    let special: Map<String, Value> = begin.into_iter().chain(end).map(known).collect();
    json!({"type": "TemplateProcessing", "single": form(&["A"]), "pair": form(&["A", "B"]), "special_tokens": special})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from_byte_pairs(pairs: &BytePairs, vocab_size: usize) -> Result<Tokenizer, String> {
        Tokenizer::from_byte_pairs(pairs, vocab_size, GenerationDefaults::default())
    }

    /// Two special tokens, all single bytes from id 2 on, then "th" and "the".
    fn parts() -> BytePairs {
        let bytes = (0..0x200).filter_map(char::from_u32).filter(|character| byte_of(*character).is_some());
        let words = ["th", "the"].map(str::to_owned);
        let merges = [("t", "h"), ("th", "e")].map(|(one, other)| (one.to_owned(), other.to_owned()));
        BytePairs {
            tokens: (2..).zip(bytes.map(String::from).chain(words)).collect(),
            special: vec![(0, "<|end|>".into()), (1, "<|begin|>".into())],
            added: vec![(260, "  ".into())],
            merges: merges.into(),
            ..BytePairs::default()
        }
    }

    fn error(parts: &BytePairs) -> String {
        from_byte_pairs(parts, 300).err().unwrap()
    }

    #[test]
    fn texts_are_merged_and_special_tokens_found() {
        let tokenizer = from_byte_pairs(&parts(), 300).unwrap();
        let ids = tokenizer.encode("the  th<|end|>e").unwrap();
        let e = parts().tokens.iter().find(|(_, text)| text == "e").unwrap().0;
        assert_eq!(ids, [259, 260, 258, 0, e]);
        assert_eq!(tokenizer.vocabulary().bytes_of(&ids), b"the  the");
        assert_eq!(tokenizer.vocabulary().bytes(0), b"");
    }

    #[test]
    fn special_tokens_are_put_around_a_text() {
        let parts = BytePairs { begin: Some(1), end: Some(0), ..parts() };
        let tokenizer = from_byte_pairs(&parts, 300).unwrap();
        assert_eq!(tokenizer.encode("the").unwrap(), [1, 259, 0]);
        assert_eq!((tokenizer.encode_chat("the").unwrap(), tokenizer.begin()), (vec![1, 259], &[1][..]));
    }

    #[test]
    fn normal_form_c_is_a_choice() {
        for normal_form_c in [false, true] {
            let tokenizer = from_byte_pairs(&BytePairs { normal_form_c, ..parts() }, 300).unwrap();
            let ids = tokenizer.encode("e\u{301}").unwrap();
            let text = if normal_form_c { "\u{e9}" } else { "e\u{301}" };
            assert_eq!(tokenizer.vocabulary().bytes_of(&ids), text.as_bytes());
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_named() {
        let twice = BytePairs { added: vec![(261, "the".into())], ..parts() };
        assert_eq!(error(&twice), "tokens 259 and 261 have the same text");
        let mut missing = parts();
        missing.tokens.retain(|(_, text)| text != "a");
        assert_eq!(error(&missing), "must have a token for every byte of a text, and has none for 0x61");
        // Published vocabularies have no tokens for bytes that never occur in UTF-8.
        let mut published = parts();
        published.tokens.retain(|(_, text)| single_byte(text).is_none_or(is_in_texts));
        assert_eq!(parts().tokens.len() - published.tokens.len(), 13);
        assert_eq!(from_byte_pairs(&published, 300).unwrap().encode("the").unwrap(), [259]);
        let begin = BytePairs { begin: Some(5), ..parts() };
        assert_eq!(error(&begin), "token 5 must be a special token");
        let merges = BytePairs { merges: vec![("a".into(), "zz".into())], ..parts() };
        assert!(error(&merges).contains("`zz` out of vocabulary"), "{}", error(&merges));
        let far = BytePairs { added: vec![(300, "  ".into())], ..parts() };
        assert!(error(&far).contains("vocab_size (300), found 300"), "{}", error(&far));
    }
}
