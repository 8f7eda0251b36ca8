//! A small tokenizer in the style of SentencePiece: byte fallback, and `▁` for a space.

use serde_json::{Value, json};

/// Where the tokenizer adds a space that is not in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// Before a text, by the pre-tokenizer.
    First,
    /// Before a text and after special tokens, by the pre-tokenizer.
    Always,
    /// Nowhere.
    Never,
    /// Nowhere, in the form of Gemma's tokenizers: the pre-tokenizer would split at spaces, but the normalizer has
    /// replaced them all, and a tab is a token of its own instead of a byte.
    Gemma,
    /// Before a text and after special tokens, by the normalizer.
    Prepend,
}

pub(crate) const SPACES: [Space; 5] = [Space::First, Space::Always, Space::Never, Space::Gemma, Space::Prepend];

/// Special tokens, from id 0 on.
pub(crate) const SPECIAL: [&str; 5] = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"];

/// Words that are merged into one token each.
const WORDS: [&str; 14] = [
    "\u{2581}the",
    "\u{2581}river",
    "\u{2581}fox",
    "\u{2581}said",
    "\u{2581}and",
    "\u{2581}a",
    "\u{2581}\u{2581}\u{2581}\u{2581}",
    "\u{2581}[",
    "Hello",
    "the",
    "er",
    "\":",
    "123",
    "\u{e9}t\u{e9}",
];

/// An upper bound for the token ids.
pub(crate) const VOCABULARY: usize = 420;

/// Returns the contents of the tokenizer's `tokenizer.json`.
pub(crate) fn tokenizer(space: Space) -> Value {
    let bytes = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>"));
    let characters = ('!'..='~').chain(['\u{2581}', '\u{e9}', '\u{e0}']).map(String::from);
    let mut tokens: Vec<String> = SPECIAL.map(str::to_owned).into_iter().chain(bytes).chain(characters).collect();
    if space == Space::Gemma {
        *tokens.iter_mut().find(|token| *token == "<0x09>").unwrap() = "\t".into();
    }
    let mut merges = Vec::new();
    for word in WORDS {
        let mut parts = word.chars().map(String::from);
        let first = parts.next().unwrap();
        parts.fold(first, |before, next| {
            let merged = format!("{before}{next}");
            if !tokens.contains(&merged) {
                tokens.push(merged.clone());
                merges.push([before, next]);
            }
            merged
        });
    }
    assert!(tokens.len() <= VOCABULARY, "{}", tokens.len());
    let vocab: serde_json::Map<String, Value> =
        tokens.into_iter().zip(0..).map(|(token, id)| (token, json!(id))).collect();
    let added = SPECIAL.iter().zip(0..).map(|(content, id)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false});
    let (normalizer, pre_tokenizer) = match space {
        Space::First => (Value::Null, metaspace("first")),
        Space::Always => (Value::Null, metaspace("always")),
        Space::Never => (replace, Value::Null),
        Space::Gemma => (
            replace,
            json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}),
        ),
        Space::Prepend => {
            let steps = [json!({"type": "Prepend", "prepend": "\u{2581}"}), replace];
            (json!({"type": "Sequence", "normalizers": steps}), Value::Null)
        }
    };
    let begin = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": usize::from(!matches!(space, Space::Never | Space::Gemma)), "stop": 0}]});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder,
        "post_processor": {"type": "TemplateProcessing", "single": [begin, text("A")],
            "pair": [begin, text("A"), text("B")], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": merges}
    })
}
