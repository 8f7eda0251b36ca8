//! Boundaries of stop strings, characters and tokens in every arrangement, compared with a simple reference.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use serde_json::{Value, json};
use tidegate_server::AppState;
use tidegate_server::text::{Detokenizer, StopMatcher, StopStrings};
use tokio::runtime::Runtime;

use super::kit::{ROUTES, chunks};
use super::script::{byte_tokens, recited, tokenizer};
use crate::common::{post, with};

/// Characters of one to four bytes with common first bytes, parts of joined emoji, and line ends.
const TEXT: &str = "[abéê☃☄🦀🦁\u{200D}👩\n]{0,24}";

/// Stop strings of the same characters, so that some occur in the text by chance.
const STOP: &str = "[abéê☃☄🦀🦁\u{200D}👩\n]{1,4}";

/// Returns the text up to its first stop string (the first to end, and the longest of those), and whether it has one.
fn cut<'a>(text: &'a str, stops: &[String]) -> (&'a str, bool) {
    let ends = |stop: &String| text.match_indices(stop.as_str()).map(|(at, _)| (at + stop.len(), at)).min();
    let first = stops.iter().filter_map(ends).min();
    first.map_or((text, false), |(_, at)| (&text[..at], true))
}

/// Returns the number of bytes at the end of `text` that may begin a stop string.
fn doubtful(text: &str, stops: &[String]) -> usize {
    let beginning =
        |at: &usize| stops.iter().any(|stop| stop.len() > text.len() - at && stop.starts_with(&text[*at..]));
    (0..text.len()).filter(|at| text.is_char_boundary(*at)).find(beginning).map_or(0, |at| text.len() - at)
}

/// Splits `bytes` into pieces whose lengths are those of `cuts`, repeated.
fn pieces(bytes: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
    let (mut rest, mut out) = (bytes, Vec::new());
    for cut in cuts.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (piece, more) = rest.split_at((*cut).min(rest.len()));
        out.push(piece.to_vec());
        rest = more;
    }
    out
}

/// Returns the output for `bytes` in pieces, and whether a stop string ended it; checks the output after each piece.
fn shown(bytes: &[u8], cuts: &[usize], stops: &[String]) -> Result<(String, bool), TestCaseError> {
    let whole = String::from_utf8_lossy(bytes).into_owned();
    let (expected, _) = cut(&whole, stops);
    let (mut detokenizer, mut matcher) = (Detokenizer::new(), StopMatcher::new(StopStrings::new(stops).unwrap()));
    let (mut decoded, mut out) = (String::new(), String::new());
    for piece in pieces(bytes, cuts) {
        let mut characters = String::new();
        detokenizer.push(&piece, &mut characters);
        decoded.push_str(&characters);
        if matcher.push(&characters, &mut out) {
            return Ok((out, true));
        }
        prop_assert!(expected.starts_with(&out));
        // Exactly the text that may begin a stop string is held back.
        prop_assert_eq!(&out, &decoded[..decoded.len() - doubtful(&decoded, stops)]);
    }
    let mut rest = String::new();
    detokenizer.finish(&mut rest);
    if matcher.push(&rest, &mut out) {
        return Ok((out, true));
    }
    matcher.finish(&mut out);
    Ok((out, false))
}

fn stop_strings() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(STOP, 0..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_text_in_any_pieces_ends_before_its_first_stop_string(
        text in TEXT,
        cuts in prop::collection::vec(1usize..7, 1..8),
        stops in stop_strings(),
    ) {
        let (expected, stopped) = cut(&text, &stops);
        prop_assert_eq!(shown(text.as_bytes(), &cuts, &stops)?, (expected.to_owned(), stopped));
    }

    #[test]
    fn any_bytes_in_any_pieces_end_before_their_first_stop_string(
        bytes in prop::collection::vec(prop_oneof![Just(0xE2u8), Just(0x98), Just(0x83), Just(b'a'), any::<u8>()], 0..24),
        cuts in prop::collection::vec(1usize..5, 1..8),
        stops in prop::collection::vec("[a☃☄\u{FFFD}]{1,3}", 0..4),
    ) {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let (expected, stopped) = cut(&text, &stops);
        prop_assert_eq!(shown(&bytes, &cuts, &stops)?, (expected.to_owned(), stopped));
    }
}

/// Returns the choice of a whole answer, and the pieces of its text as a stream.
async fn both(state: &AppState, body: Value) -> (Value, Vec<String>) {
    let (_, whole) = post(state, body.clone()).await;
    let pieces = chunks(state, ROUTES[0], body).await;
    let pieces = pieces.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned()).collect();
    (whole["choices"][0].clone(), pieces)
}

fn asking(more: Value) -> Value {
    with(json!({"prompt": [5], "max_tokens": 100, "temperature": 0}), more)
}

#[test]
fn over_http_any_text_is_the_same_whole_and_streamed() {
    let runtime = Runtime::new().unwrap();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(40));
    let strategy = (TEXT, stop_strings(), any::<bool>());
    runner
        .run(&strategy, |(text, stops, merged)| {
            let tokens = if merged { tokenizer().encode_more(&text).unwrap() } else { byte_tokens(text.as_bytes()) };
            let (state, thread) = recited(vec![tokens]);
            let (whole, pieces) = runtime.block_on(both(&state, asking(json!({"stop": stops}))));
            let (expected, stopped) = cut(&text, &stops);
            prop_assert_eq!(whole["text"].as_str(), Some(expected));
            prop_assert_eq!(pieces.concat(), expected);
            prop_assert_eq!(whole["stop_reason"].is_string(), stopped);
            state.drain();
            thread.join();
            Ok(())
        })
        .unwrap();
}

#[tokio::test]
async fn a_stop_string_is_found_after_a_false_start() {
    let (state, _thread) = recited(vec![byte_tokens(b"Fine.\n\n\nUser: and you?")]);
    let (whole, pieces) = both(&state, asking(json!({"stop": ["\n\nUser:"]}))).await;
    assert_eq!((&whole["text"], &whole["stop_reason"]), (&json!("Fine.\n"), &json!("\n\nUser:")));
    assert_eq!(pieces.concat(), "Fine.\n");
}

#[tokio::test]
async fn joined_emoji_are_delivered_whole_however_their_bytes_are_split() {
    let family = "a 👩‍👩‍👧‍👦 and 🏳️‍🌈 and 👍🏽";
    let (state, _thread) = recited(vec![byte_tokens(family.as_bytes())]);
    let (whole, pieces) = both(&state, asking(json!({}))).await;
    assert_eq!(whole["text"], family);
    assert_eq!(pieces.concat(), family);
    assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')));
    let (stopped, _) = both(&state, asking(json!({"stop": "\u{200D}👧"}))).await;
    assert_eq!(stopped["text"], "a 👩‍👩");
}

#[tokio::test]
async fn incomplete_characters_are_replaced_once_at_the_end() {
    let beginning = [b"ok ".as_slice(), &"🦀".as_bytes()[..3]].concat();
    let (state, _thread) = recited(vec![byte_tokens(&beginning)]);
    // The text ends by itself, or at `max_tokens`.
    for more in [json!({}), json!({"max_tokens": 6})] {
        let (whole, pieces) = both(&state, asking(more)).await;
        assert_eq!(whole["text"], "ok \u{FFFD}");
        assert_eq!(pieces.concat(), "ok \u{FFFD}");
        let shown = pieces.iter().position(|piece| piece.contains('\u{FFFD}')).unwrap();
        assert!(pieces[..shown].concat() == "ok " && pieces[shown + 1..].concat().is_empty());
    }
    let (part, _) = both(&state, asking(json!({"stop": "\u{FFFD}"}))).await;
    assert_eq!((&part["text"], &part["stop_reason"]), (&json!("ok "), &json!("\u{FFFD}")));
}
