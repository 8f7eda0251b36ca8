//! Tests tokenizers with scores: against a plain implementation on random vocabularies, and with texts in pieces.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;

const VOCABULARY: usize = 400;

/// The first id of a piece. The ids before it are special tokens and bytes.
const FIRST: u32 = 260;

fn piece(id: u32, text: &str, score: f32) -> ScoredPiece {
    ScoredPiece { id, text: text.into(), score }
}

/// Creates a tokenizer with these pieces and a space, special tokens `<s>` and `</s>`, and added tokens `[b]` and `ab`.
fn parts(pieces: &[(&str, f32)], adds_space: bool) -> ScoredPieces {
    let space = pieces.iter().all(|(text, _)| *text != SPACE_TEXT).then_some((SPACE_TEXT, -10.0));
    let pieces = pieces.iter().copied().chain(space);
    let pieces: Vec<ScoredPiece> = (FIRST..).zip(pieces).map(|(id, (text, score))| piece(id, text, score)).collect();
    ScoredPieces {
        bytes: (4..).zip(0..=u8::MAX).collect(),
        special: vec![(0, "<s>".into()), (1, "</s>".into())],
        added: vec![piece(2, "[b]", -1.0), piece(3, "ab", -1000.0)],
        pieces,
        adds_space,
        begin: Some(0),
        end: None,
    }
}

fn tokenizer(parts: ScoredPieces) -> Tokenizer {
    Tokenizer::from_scored_pieces(parts, VOCABULARY, GenerationDefaults::default()).unwrap()
}

/// Encodes a text as the definition says: searches for the best pair of neighbors again and again.
fn plainly(parts: &ScoredPieces, text: &str, plain: bool, continues: bool) -> Vec<u32> {
    let scored = || parts.pieces.iter().chain(&parts.added);
    let pieces: BTreeMap<&str, &ScoredPiece> = scored().map(|piece| (piece.text.as_str(), piece)).collect();
    let special = parts.special.iter().filter(|_| !plain).map(|(id, text)| (*id, text.as_str()));
    let added = parts.added.iter().map(|piece| (piece.id, piece.text.as_str()));
    let mut dividing: Vec<(u32, &str)> = special.chain(added).collect();
    dividing.sort_by_key(|(_, text)| text.len());
    let (mut ids, mut rest, mut with_space) = (Vec::new(), text, !continues);
    while !rest.is_empty() {
        let found = |text: &str| dividing.iter().rev().find(|(_, token)| text.starts_with(token)).copied();
        if let Some((id, token)) = found(rest) {
            ids.push(id);
            (rest, with_space) = (&rest[token.len()..], true);
            continue;
        }
        let end = rest.char_indices().map(|(at, _)| at).find(|at| found(&rest[*at..]).is_some()).unwrap_or(rest.len());
        let space = if parts.adds_space && with_space { "\u{2581}" } else { "" };
        let spaces = space.to_owned() + &rest[..end].replace(' ', "\u{2581}");
        (rest, with_space) = (&rest[end..], false);
        let mut symbols: Vec<String> = spaces.chars().map(String::from).collect();
        loop {
            let mut best: Option<(f32, usize)> = None;
            for (at, pair) in symbols.windows(2).enumerate() {
                if let Some(piece) = pieces.get(pair.concat().as_str())
                    && best.is_none_or(|(score, _)| piece.score > score)
                {
                    best = Some((piece.score, at));
                }
            }
            let Some((_, at)) = best else { break };
            let second = symbols.remove(at + 1);
            symbols[at] += &second;
        }
        for symbol in symbols {
            match pieces.get(symbol.as_str()) {
                Some(piece) => ids.push(piece.id),
                None => ids.extend(symbol.bytes().map(|byte| u32::from(byte) + 4)),
            }
        }
    }
    ids
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Pieces of few characters and few scores, so that pieces overlap and scores are often equal.
fn vocabularies(characters: &'static str) -> impl Strategy<Value = Vec<(String, f32)>> {
    let score = prop::sample::select(vec![-3.0_f32, -2.5, -1.0, -0.0, 0.0, 7.0, f32::MIN_POSITIVE]);
    let pieces = prop::collection::btree_map(characters, score, 0..120);
    pieces.prop_map(|mut pieces| {
        pieces.retain(|text, _| !["ab", "<s>", ""].contains(&text.as_str()));
        pieces.into_iter().collect()
    })
}

/// Texts of parts that often meet where something is joined or a space is added.
fn texts() -> impl Strategy<Value = String> {
    let parts = [
        " ",
        "  ",
        "a",
        "aa",
        "b",
        "ab",
        "ba",
        "\u{e9}",
        "\u{e9}a",
        "\u{65e5}",
        "\u{1f980}",
        "\n",
        "\u{2581}",
        "<s>",
        "</s>",
        "[b]",
        "[",
        "<0x41>",
        "\0",
        "a b",
        "e\u{301}",
    ];
    prop::collection::vec(prop::sample::select(parts.to_vec()), 0..40).prop_map(|parts| parts.concat())
}

fn random(pieces: &[(String, f32)], adds_space: bool) -> ScoredPieces {
    let pieces: Vec<(&str, f32)> = pieces.iter().map(|(text, score)| (text.as_str(), *score)).collect();
    parts(&pieces, adds_space)
}

#[test]
fn texts_have_the_tokens_of_the_plain_algorithm() {
    let (joined, bytes) = (Cell::new(0), Cell::new(0));
    let any = "[ab\u{e9}\u{2581}\u{65e5}<s>\n]{1,5}";
    proptest!(config(3000), |(pieces in vocabularies(any), text in texts(), adds_space: bool)| {
        let parts = random(&pieces, adds_space);
        let tokenizer = tokenizer(parts.clone());
        for plain in [false, true] {
            let whole = plainly(&parts, &text, plain, false);
            prop_assert_eq!(&tokenizer.encoder.encode(&text, false, plain).unwrap(), &whole);
            prop_assert_eq!(tokenizer.encoder.encode(&text, true, plain).unwrap(), [&[0][..], &whole].concat());
            let more = plainly(&parts, &text, plain, true);
            prop_assert_eq!(tokenizer.encoder.more().encode(&text, false, plain).unwrap(), more);
            let is_joined = |id: &&u32| **id >= FIRST && tokenizer.name(**id).chars().count() > 1;
            joined.set(joined.get() + whole.iter().filter(is_joined).count());
            bytes.set(bytes.get() + whole.iter().filter(|id| (4..FIRST).contains(*id)).count());
        }
    });
    assert!(joined.get() > 4000 && bytes.get() > 5000, "{} joined, {} bytes", joined.get(), bytes.get());
}

#[test]
fn a_text_in_pieces_has_the_tokens_of_the_whole() {
    let cuts = Cell::new(0);
    let apart = "\u{2581}{0,2}[ab\u{e9}\u{65e5}<s>\n]{0,3}";
    proptest!(config(1000), |(pieces in vocabularies(apart), text in texts(), adds_space: bool, target in 1..12_usize)| {
        let tokenizer = tokenizer(random(&pieces, adds_space));
        for encoder in [&*tokenizer.encoder, tokenizer.encoder.more()] {
            for plain in [false, true] {
                let mut pace = Pace { most: usize::MAX, pause: &mut || cuts.set(cuts.get() + 1) };
                let whole = encoder.encode(&text, false, plain).unwrap();
                if let Some(encoded) = encoder.encode_in_pieces(&text, plain, &mut pace, target).unwrap() {
                    prop_assert_eq!((encoded.ids, encoded.before, encoded.after), (whole, &[0][..], &[][..]));
                }
            }
        }
    });
    assert!(cuts.get() > 1000, "{} cuts", cuts.get());
}

#[test]
fn a_text_that_continues_another_has_exactly_its_own_bytes() {
    let any = "[ab\u{e9}\u{2581}\u{65e5}<s>\n]{1,5}";
    proptest!(config(500), |(pieces in vocabularies(any), text in "[ab \u{e9}\n\\PC]{0,40}", adds_space: bool)| {
        prop_assume!(!text.contains(['\u{2581}', '[']) && !text.contains("ab"));
        let tokenizer = tokenizer(random(&pieces, adds_space));
        let vocabulary = tokenizer.vocabulary();
        prop_assert_eq!(vocabulary.bytes_of(&tokenizer.encoder.more().encode(&text, false, true).unwrap()), text.as_bytes());
        let whole = tokenizer.encode_plain(&text, true).unwrap();
        prop_assert_eq!(vocabulary.text_of(&whole, true), text.as_bytes());
        prop_assert_eq!(tokenizer.pieces(&whole[1..]), text.as_bytes());
    });
}

fn names(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    ids.iter().map(|id| tokenizer.name(*id)).collect::<Vec<_>>().join(" ")
}

#[test]
fn what_a_list_of_merges_cannot_say() {
    // With equal scores, the leftmost pair is joined, whichever two parts form it.
    let tokenizer = tokenizer(parts(&[("x", -9.0), ("xx", -1.0), ("xxx", -1.0)], false));
    assert_eq!(names(&tokenizer, &tokenizer.encode_more("xxxxx").unwrap()), "xxx xx");
    // A character that is not a piece may be part of a piece.
    let tokenizer = self::tokenizer(parts(&[("\u{e9}t", -1.0), ("t", -2.0)], false));
    assert_eq!(names(&tokenizer, &tokenizer.encode_more("\u{e9}t\u{e9}").unwrap()), "\u{e9}t <0xC3> <0xA9>");
}

#[test]
fn special_and_added_tokens_divide_a_text() {
    let pieces =
        [("\u{2581}", -5.0), ("a", -6.0), ("\u{2581}a", -1.0), ("<", -8.0), ("s", -9.0), (">", -9.5), ("<s", -2.0)];
    for (adds_space, whole, more) in [
        (true, "<s> \u{2581}a </s> \u{2581}a [b] \u{2581} \u{2581}a", "a </s> \u{2581}a [b] \u{2581} \u{2581}a"),
        (false, "<s> a </s> a [b] \u{2581}a", "a </s> a [b] \u{2581}a"),
    ] {
        let tokenizer = tokenizer(parts(&pieces, adds_space));
        let text = "a</s>a[b] a";
        assert_eq!(names(&tokenizer, &tokenizer.encode(text).unwrap()), whole);
        assert_eq!(names(&tokenizer, &tokenizer.encode_more(text).unwrap()), more);
        // Plain text never gives a special token, not even by joining pieces.
        let plain = tokenizer.encode_plain("<s>a", false).unwrap();
        assert_eq!(names(&tokenizer, &plain), if adds_space { "\u{2581} <s > a" } else { "<s > a" });
        assert_eq!(tokenizer.vocabulary().text_of(&plain, true), b"<s>a");
        assert_eq!((tokenizer.special(0), tokenizer.special(2), tokenizer.special(9)), (Some("<s>"), None, None));
        assert_eq!(
            ["</s>", "[b]", "<s", "none"].map(|text| tokenizer.encoder.id(text)),
            [Some(1), Some(2), Some(266), None]
        );
    }
    let tokenizer = tokenizer(ScoredPieces { begin: None, end: Some(1), ..parts(&pieces, true) });
    assert_eq!(
        (names(&tokenizer, &tokenizer.encode("a").unwrap()), tokenizer.begin()),
        ("\u{2581}a </s>".into(), &[][..])
    );
    assert_eq!(names(&tokenizer, &tokenizer.encode_chat("").unwrap()), "");
}

#[test]
fn a_long_run_of_one_character_is_encoded_in_little_time() {
    let tokenizer = tokenizer(parts(&[("x", -1.0), ("xx", -2.0), ("xxxx", -3.0), ("\u{2581}\u{2581}", -4.0)], true));
    for text in ["x".repeat(1 << 20), " ".repeat(1 << 20)] {
        let clock = Instant::now();
        let ids = tokenizer.encode_more(&text).unwrap();
        assert_eq!(tokenizer.vocabulary().bytes_of(&ids).len(), text.len());
        assert!(clock.elapsed() < Duration::from_secs(20), "{:?}", clock.elapsed());
    }
}

#[test]
fn tokens_that_do_not_fit_are_named() {
    let error = |change: &dyn Fn(&mut ScoredPieces)| {
        let mut parts = parts(&[("x", -1.0)], true);
        change(&mut parts);
        Tokenizer::from_scored_pieces(parts, VOCABULARY, GenerationDefaults::default()).err().unwrap()
    };
    for score in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let reason = error(&|parts| parts.pieces[0].score = score);
        assert_eq!(reason, format!("the score of token 260 must be a finite number, found {score}"));
    }
    assert_eq!(error(&|parts| parts.added[0].text = "x".into()), "tokens 2 and 260 have the same text");
    assert_eq!(error(&|parts| parts.special[1].1 = "x".into()), "tokens 1 and 260 have the same text");
    assert_eq!(error(&|parts| parts.special[1].1 = String::new()), "token 1 must have a text");
    assert_eq!(error(&|parts| parts.begin = Some(260)), "token 260 must be a special token");
    assert_eq!(error(&|parts| parts.end = Some(5000)), "token 5000 must be a special token");
    let far = "token ids must be below the model's vocab_size (400), found 400";
    assert_eq!(error(&|parts| parts.pieces[0].id = 400), far);
    assert_eq!(error(&|parts| parts.bytes[0].0 = 400), far);
    assert_eq!(error(&|parts| drop(parts.pieces.pop())), "must have a token for a space, and has no \u{2581}");
    let missing = error(&|parts| parts.bytes.retain(|(_, byte)| *byte != b'\n'));
    assert_eq!(missing, "must have a token for every byte of a text, and has no <0x0A>");
}
