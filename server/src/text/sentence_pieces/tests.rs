//! Tests SentencePiece tokenizers: against the library's own encoding of whole texts, and with texts in pieces.

#[path = "../../../tests/common/pieces.rs"]
mod pieces;

use std::cell::Cell;

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::text::encoder::Pace;
use crate::text::{Detokenizer, Tokenizer};
use pieces::{SPACES, SPECIAL, Space, VOCABULARY, tokenizer as described};

/// Returns our tokenizer and the library's.
fn both(space: Space) -> (Tokenizer, tokenizers::Tokenizer) {
    let json = described(space);
    (loaded(&json).unwrap(), json.to_string().parse().unwrap())
}

fn loaded(json: &Value) -> Result<Tokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::load(folder.path(), VOCABULARY, &[2]).map_err(|error| error.to_string())
}

fn tokens(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    ids.iter().map(|id| tokenizer.name(*id)).collect()
}

/// Texts of parts that often meet where something is merged or a space is added.
fn texts() -> impl Strategy<Value = String> {
    let parts = [
        " ",
        "  ",
        "    ",
        "\n",
        "\t",
        "the",
        " the",
        "river",
        " river",
        "Hello",
        "[",
        "1",
        "23",
        "\u{e9}t\u{e9}",
        "\u{1f980}",
        "\u{65e5}",
        "<0x41>",
        "e\u{301}",
        "\u{a0}",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "\":",
        "\0",
    ];
    proptest::collection::vec(prop::sample::select(parts.to_vec()), 0..30).prop_map(|parts| parts.concat())
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn a_whole_text_has_the_tokens_and_the_text_of_the_library() {
    for space in SPACES {
        let (tokenizer, library) = both(space);
        proptest!(config(500), |(text in texts())| {
            let ids = |special| library.encode_fast(text.as_str(), special).unwrap().get_ids().to_vec();
            prop_assert_eq!(tokenizer.encode(&text).unwrap(), ids(true));
            let bare = ids(false);
            let chat = if bare.first() == Some(&1) { bare.clone() } else { [&[1][..], &bare].concat() };
            prop_assert_eq!(tokenizer.encode_chat(&text).unwrap(), chat);
            let shown = String::from_utf8(tokenizer.vocabulary().text_of(&bare, true)).unwrap();
            prop_assert_eq!(shown, library.decode(&bare, true).unwrap());
        });
    }
}

#[test]
fn a_text_survives_unless_it_begins_with_the_very_space_that_is_added() {
    for space in SPACES {
        let (tokenizer, _) = both(space);
        proptest!(config(500), |(text in "\\PC{0,40}")| {
            prop_assume!(!text.contains('\u{2581}') && !SPECIAL.iter().any(|special| text.contains(special)));
            let shown = tokenizer.vocabulary().text_of(&tokenizer.encode(&text).unwrap(), true);
            // The pre-tokenizer adds no space to a text that begins with one.
            let kept = if matches!(space, Space::First | Space::Always) { text.strip_prefix(' ').unwrap_or(&text) } else { &text };
            prop_assert_eq!(String::from_utf8(shown).unwrap(), kept);
        });
    }
}

#[test]
fn a_text_that_continues_another_has_exactly_its_own_bytes() {
    for space in SPACES {
        let (tokenizer, _) = both(space);
        proptest!(config(500), |(text in "\\PC{0,40}")| {
            prop_assume!(!text.contains('\u{2581}') && !SPECIAL.iter().any(|special| text.contains(special)));
            let ids = tokenizer.encode_more(&text).unwrap();
            prop_assert_eq!(tokenizer.vocabulary().bytes_of(&ids), text.as_bytes());
        });
    }
}

#[test]
fn a_text_in_two_turns_has_the_tokens_of_the_whole() {
    for space in SPACES {
        let (tokenizer, _) = both(space);
        for parts in
            [["the river", " and the fox"], ["Hello [INST] the[/INST]", "</s>[INST] a fox[/INST]"], ["123\n\n", "the"]]
        {
            let two = parts.map(str::to_owned);
            let [first, second] = [tokenizer.encode(&two[0]).unwrap(), tokenizer.encode_more(&two[1]).unwrap()];
            assert_eq!([first, second].concat(), tokenizer.encode(&two.concat()).unwrap(), "{space:?} {parts:?}");
        }
    }
}

#[test]
fn where_a_space_is_added_is_the_tokenizers_choice() {
    for (space, whole, more) in [
        (Space::First, "<s> ▁the [INST] the", "the [INST] the"),
        (Space::Always, "<s> ▁the [INST] ▁the", "the [INST] ▁the"),
        (Space::Prepend, "<s> ▁the [INST] ▁the", "the [INST] ▁the"),
        (Space::Never, "<s> the [INST] the", "the [INST] the"),
    ] {
        let (tokenizer, _) = both(space);
        let text = "the[INST]the";
        assert_eq!(tokens(&tokenizer, &tokenizer.encode(text).unwrap()).join(" "), whole, "{space:?}");
        assert_eq!(tokens(&tokenizer, &tokenizer.encode_more(text).unwrap()).join(" "), more, "{space:?}");
        assert_eq!(
            tokens(&tokenizer, &tokenizer.encode_more("[INST]the").unwrap()),
            tokens(&tokenizer, &tokenizer.encode("[INST]the").unwrap())[1..]
        );
        let plain = tokenizer.encode_plain("</s>the", false).unwrap();
        assert_eq!(tokenizer.vocabulary().text_of(&plain, true), b"</s>the", "{space:?}");
        // The name of a byte is ordinary text.
        assert_eq!(tokenizer.vocabulary().bytes_of(&tokenizer.encode_more("<0x41>").unwrap()), b"<0x41>");
    }
}

#[test]
fn a_text_in_pieces_has_the_tokens_of_the_whole() {
    for space in SPACES {
        let (tokenizer, _) = both(space);
        let cuts = Cell::new(0);
        for plain in [false, true] {
            for encoder in [&*tokenizer.encoder, tokenizer.encoder.more()] {
                proptest!(config(500), |(text in texts(), target in 1..12_usize)| {
                    let mut pace = Pace { most: usize::MAX, pause: &mut || cuts.set(cuts.get() + 1) };
                    let whole = encoder.encode(&text, false, plain).unwrap();
                    if let Some(encoded) = encoder.encode_in_pieces(&text, plain, &mut pace, target).unwrap() {
                        prop_assert_eq!((encoded.ids, encoded.before, encoded.after), (whole, &[1][..], &[][..]), "{:?}", text);
                    }
                });
            }
        }
        assert!(cuts.get() > 1000, "{space:?}: {} cuts", cuts.get());
    }
}

#[test]
fn a_character_of_several_bytes_is_shown_when_it_is_complete() {
    let (tokenizer, _) = both(Space::First);
    let ids = tokenizer.encode("a\u{1f980}b").unwrap();
    assert_eq!(tokens(&tokenizer, &ids).join(" "), "<s> ▁a <0xF0> <0x9F> <0xA6> <0x80> b");
    let mut detokenizer: Detokenizer = tokenizer.vocabulary().detokenizer();
    let shown = ids.iter().map(|id| {
        let mut out = String::new();
        detokenizer.push(tokenizer.vocabulary().bytes(*id), &mut out);
        out
    });
    assert_eq!(shown.collect::<Vec<_>>(), ["", "a", "", "", "", "\u{1f980}", "b"]);
}

#[test]
fn tokens_are_shown_so_that_they_are_read_again() {
    let (tokenizer, _) = both(Space::First);
    for (text, shown) in [("the fox", "<s> the fox"), ("[INST]the", "<s>[INST]the"), ("<s>the", "<s>the"), ("", "<s>")]
    {
        let ids = tokenizer.encode_chat(text).unwrap();
        assert_eq!(tokenizer.pieces(&ids), shown.as_bytes());
        assert_eq!(tokenizer.encode_chat(shown).unwrap(), ids);
        assert_eq!(tokenizer.pieces(&tokenizer.encode_plain(text, false).unwrap()), text.as_bytes());
    }
}

#[test]
fn parts_that_are_not_known_are_named() {
    for (part, value, words) in [
        (
            "decoder",
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            "decoder must be ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip, found WordPiece",
        ),
        ("decoder", Value::Null, "Fuse and Strip, found none"),
        (
            "decoder",
            json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}),
            "found Sequence of ByteFallback",
        ),
        (
            "normalizer",
            json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}]}),
            "before a text, found Sequence of NFKC",
        ),
        ("normalizer", Value::Null, "must put ▁ in the place of spaces, and none does"),
        (
            "pre_tokenizer",
            json!({"type": "Whitespace"}),
            "pre_tokenizer must be absent or Metaspace where the decoder is not ByteLevel, found Whitespace",
        ),
    ] {
        let mut json = described(Space::Never);
        json[part] = value;
        let error = loaded(&json).err().unwrap();
        assert!(error.contains("tokenizer.json: ") && error.contains(words), "{error}");
    }
    let mut json = described(Space::First);
    json["decoder"] =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": false});
    assert!(loaded(&json).is_ok());
    json["model"]["byte_fallback"] = false.into();
    assert!(loaded(&json).err().unwrap().contains("model must have byte_fallback"));
    let mut json = described(Space::First);
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    let id = vocab.remove("<0x0A>").unwrap();
    vocab.insert("<0x0a?".into(), id);
    assert!(loaded(&json).err().unwrap().ends_with("must have a token for every byte of a text, and has no <0x0A>"));
    // With a space within a token, texts cannot be cut, but they are encoded.
    let mut json = described(Space::First);
    json["model"]["vocab"]["a\u{2581}b"] = json!(VOCABULARY - 1);
    let tokenizer = loaded(&json).unwrap();
    let text = "the fox ".repeat(20_000);
    let mut pace = Pace { most: usize::MAX, pause: &mut || panic!("the text is cut") };
    assert!(tokenizer.encode_within(&text, crate::text::Around::Nothing, &mut pace).is_ok());
}
