//! Snapshot files with a conversation: a pinned file, and files that claim what they do not have.

use std::sync::LazyLock;

use serde_json::{Value, json};
use tidegate_model::{SamplerState, StateLayout};
use tidegate_server::session::{
    AddedMessage, AddedText, Ancestor, Answer, Codec, Content, Conversation, Fingerprint, FormatError, History, Keys,
    Role, Snapshot,
};

use crate::fuzz;
use crate::snapshots::{DIGEST, digested};

const PINNED: &[u8] = include_bytes!("fixtures/snapshot-v2.bin");

/// Number of bytes before the header, and the positions of the lengths in them.
const PREFIX: usize = 40;
const BODY: usize = 16;
const DESCRIPTION: usize = 24;
const TEXT: usize = 32;

static PLAIN: LazyLock<Codec> = LazyLock::new(|| codec(None));

fn codec(secret: Option<&[u8]>) -> Codec {
    let fingerprint =
        Fingerprint { architecture: "a1".repeat(32), weights: "b2".repeat(32), tokenizer: "c3".repeat(32) };
    let layout = StateLayout { layers: 2, heads: 1, head: 5, taps: 0, channels: 0, cross: 0 };
    let keys = secret.map(|secret| Keys::new(secret).expect("the secret is long enough"));
    Codec { fingerprint, layout, vocab_size: 16, greatest: Vec::new(), sources: 0, keys }
}

/// Returns the contents of the pinned file.
fn pinned() -> (Snapshot, Conversation) {
    let snapshot = Snapshot {
        state: (0..10).map(|i| (i as f32 + 0.1) / if i % 2 == 0 { 7.0 } else { -7.0 }).collect(),
        read: 5,
        pending: vec![9],
        history: History::default().extended(&[3, 1, 4, 1, 5]),
        sampler: SamplerState { seed: 11, draws: 3, counts: vec![(9, 1)] },
        answer: Some(Answer { open: true, ..Answer::default() }),
        ..Snapshot::default()
    };
    let message = |role, content, more: Option<&str>| AddedMessage {
        role,
        continues: false,
        content,
        more: more.map(str::to_owned),
    };
    let messages = vec![
        message(Role::System, Content::Text("Tell tales.".to_owned()), None),
        message(Role::User, Content::Tokens(0, 4), Some(r#"{"name":"Ann"}"#)),
        message(Role::Assistant, Content::Tokens(4, 6), None),
    ];
    let ancestor = |number, label: Option<&str>, time| Ancestor {
        version: format!("ver_{number:032x}"),
        label: label.map(str::to_owned),
        time,
    };
    let conversation = Conversation {
        label: Some("fox".to_owned()),
        metadata: [("tale".to_owned(), "fox".to_owned())].into(),
        lineage: vec![ancestor(1, None, 5), ancestor(2, Some("é"), 6)],
        text: Some(AddedText { kept: 0, tokens: vec![3, 1, 4, 1, 5, 9], messages }),
    };
    (snapshot, conversation)
}

#[test]
fn the_pinned_file_is_read_and_written_again() {
    assert_eq!(PLAIN.import(PINNED), Ok(pinned()));
    let (snapshot, conversation) = pinned();
    assert_eq!(PLAIN.encode_conversation(&snapshot, &conversation), PINNED);
    // The state can also be read without the conversation.
    assert_eq!(PLAIN.decode(PINNED), Ok(snapshot.clone()));
    // A server that keeps no texts writes a file without one.
    let without = Conversation { text: None, ..conversation };
    let file = PLAIN.encode_conversation(&snapshot, &without);
    assert_eq!(PLAIN.import(&file), Ok((snapshot, without)));
}

#[test]
fn the_signature_covers_the_conversation() {
    let signing = codec(Some(&[7; 32]));
    let (snapshot, conversation) = pinned();
    let file = signing.encode_conversation(&snapshot, &conversation);
    assert_eq!(signing.import(&file), Ok((snapshot, conversation)));
    assert_eq!(signing.import(PINNED), Err(FormatError::SignatureMissing));
    for at in 0..file.len() {
        let mut changed = file.clone();
        changed[at] ^= 1;
        assert!(signing.import(&changed).is_err(), "byte {at}");
        let end = file.len() - 2 * DIGEST;
        if at < end {
            // Here the digest is correct again, but the signature is not.
            let mut changed = digested(changed[..end].to_vec());
            changed.extend_from_slice(&file[end + DIGEST..]);
            assert!(signing.import(&changed).is_err(), "byte {at}");
        }
    }
}

fn length(at: usize) -> usize {
    u64::from_le_bytes(PINNED[at..at + 8].try_into().unwrap()) as usize
}

/// Imports the pinned file with another description and text.
fn with(description: &[u8], text: &[u8]) -> Result<(Snapshot, Conversation), FormatError> {
    let header = u32::from_le_bytes(PINNED[12..16].try_into().unwrap()) as usize;
    let mut file = PINNED[..PREFIX + header + length(BODY)].to_vec();
    file[DESCRIPTION..TEXT].copy_from_slice(&(description.len() as u64).to_le_bytes());
    file[TEXT..PREFIX].copy_from_slice(&(text.len() as u64).to_le_bytes());
    PLAIN.import(&digested([&file, description, text].concat()))
}

fn parts() -> (Value, Vec<u8>) {
    let text = PINNED.len() - DIGEST - length(TEXT);
    let description = serde_json::from_slice(&PINNED[text - length(DESCRIPTION)..text]).unwrap();
    (description, PINNED[text..PINNED.len() - DIGEST].to_vec())
}

#[test]
fn a_description_out_of_its_bounds_is_refused() {
    let (description, text) = parts();
    assert!(with(description.to_string().as_bytes(), &text).is_ok());
    let ancestor = |label: &str| json!({"version": format!("ver_{:032x}", 1), "label": label, "time": 1});
    let edits: [(&str, Value); 9] = [
        ("/label", json!(7)),
        ("/metadata", json!({"a": null})),
        ("/metadata", Value::Null),
        ("/lineage", json!([{"version": "ver_1", "label": null, "time": 1}])),
        ("/lineage", json!([{"version": format!("ver_{:032x}", 1), "time": 1}])),
        ("/lineage", json!([{"version": format!("ver_{:032x}", 1), "label": null, "time": -1}])),
        ("/lineage", json!([ancestor(&"é".repeat(257))])),
        ("/lineage", json!(vec![ancestor(""); 1000])),
        ("", json!({"label": null, "metadata": {}, "lineage": [], "more": 1})),
    ];
    for (place, value) in edits {
        let mut changed = description.clone();
        *changed.pointer_mut(place).unwrap() = value;
        let found = with(changed.to_string().as_bytes(), &text);
        assert!(matches!(found, Err(FormatError::Description(_))), "{place}: {found:?}");
    }
    assert!(matches!(with(b"", &text), Err(FormatError::Description(_))));
}

#[test]
fn a_text_that_the_state_has_not_read_is_refused() {
    let (description, text) = parts();
    let description = description.to_string();
    let refused = |text: &[u8], reason: &str| match with(description.as_bytes(), text) {
        Err(FormatError::Text { reason: found }) => assert!(found.contains(reason), "{found}"),
        found => panic!("{found:?}"),
    };
    assert_eq!(with(description.as_bytes(), b"").unwrap().1.text, None);
    let edited = |at: usize, byte: u8| {
        let mut changed = text.clone();
        changed[at] = byte;
        changed
    };
    // The version, the number of tokens kept of a parent's text, and the declared number of tokens.
    refused(&edited(0, 2), "unknown form");
    refused(&edited(1, 1), "unknown form");
    refused(&edited(2, 7), "unknown form");
    refused(&edited(2, 5), "another number");
    // A token that the state has read, a pending one, and one outside the vocabulary.
    refused(&edited(6, 4), "not the text");
    refused(&edited(11, 8), "not the text");
    refused(&edited(8, 16), "vocabulary");
    for length in 1..text.len() {
        // A cut may fall between two messages, so not every cut is refused.
        drop(with(description.as_bytes(), &text[..length]));
    }
    refused(&text[..text.len() - 1], "unknown form");
    refused(&[&text[..], &[0xff]].concat(), "unknown form");
}

#[test]
fn messages_that_no_writer_makes_are_refused() {
    const NONE: u8 = 3 << 4;
    let (description, text) = parts();
    let description = description.to_string();
    // `head` ends before the number of messages, and `tokens` before the first message.
    let (head, tokens) = (&text[..3], &text[4..12]);
    let file = |declared: &[u8], messages: &[u8]| {
        with(description.as_bytes(), &[head, declared, tokens, messages].concat()).map(|found| found.1.text)
    };
    let refused = |declared: &[u8], messages: &[u8], reason: &str| match file(declared, messages) {
        Err(FormatError::Text { reason: found }) => assert!(found.contains(reason), "{found}"),
        found => panic!("{messages:?}: {found:?}"),
    };
    // 10,000 and 10,001 as LEB128.
    let (most, more) = ([0x90, 0x4e], [0x91, 0x4e]);
    assert_eq!(file(&most, &[NONE; 10_000]).unwrap().unwrap().messages.len(), 10_000);
    refused(&more, &[NONE; 10_001], "10,000");
    refused(&[0], &vec![NONE; 16_000_000], "more messages");
    refused(&most, &vec![NONE; 16_000_000], "more messages");
    refused(&[2], &[NONE], "fewer messages");
    refused(&[1], &[NONE, NONE | 8], "more messages");
    refused(&[2], &[NONE, NONE | 8], "continues");
    refused(&[1], &[NONE | 8], "continues");
    // Messages that are ranges of tokens, and messages that are ranges of their bytes.
    for kind in [0, 1 << 4] {
        assert!(file(&[2], &[kind, 0, 4, kind, 4, 6]).is_ok());
        assert!(file(&[2], &[kind, 6, 6, kind, 6, 6]).is_ok());
        for [a, b, c, d] in [[0, 4, 3, 6], [4, 6, 0, 4], [4, 2, 5, 6], [0, 2, 5, 3]] {
            refused(&[2], &[kind, a, b, kind, c, d], "overlap");
        }
    }
    refused(&[1], &[0, 0, 7], "not in the text");
    for (fields, good) in
        [("{}", true), (r#"{"name":"A"}"#, true), ("[]", false), ("{", false), ("7", false), ("", false)]
    {
        let message = [&[NONE | 1 << 6, fields.len() as u8], fields.as_bytes()].concat();
        if good {
            assert!(file(&[1], &message).is_ok(), "{fields}");
        } else {
            refused(&[1], &message, "JSON object");
        }
    }
}

#[test]
fn further_fields_of_a_message_are_bounded() {
    let (snapshot, conversation) = pinned();
    let text = conversation.text.clone().unwrap();
    let with_fields = |bytes: usize| {
        let more = Some(format!("{{\"name\":\"{}\"}}", "x".repeat(bytes - 11)));
        let messages = vec![AddedMessage { more, ..text.messages[2].clone() }];
        let text = Some(AddedText { messages, ..text.clone() });
        Conversation { text, ..conversation.clone() }
    };
    let most = with_fields(1 << 20);
    let file = PLAIN.encode_conversation(&snapshot, &most);
    assert_eq!(PLAIN.import(&file), Ok((snapshot.clone(), most)));
    // A writer leaves out such a text, and a file that has one is refused.
    let file = PLAIN.encode_conversation(&snapshot, &with_fields((1 << 20) + 1));
    assert_eq!(PLAIN.import(&file), Ok((snapshot, Conversation { text: None, ..conversation.clone() })));
    let (description, text) = parts();
    let fields = format!("{{\"name\":\"{}\"}}", "x".repeat((1 << 20) - 10));
    // One message without content: its kind, the length of its fields as LEB128, and the fields.
    let message = [&[3 << 4 | 1 << 6, 0x81, 0x80, 0x40], fields.as_bytes()].concat();
    let text = [&text[..3], &[1], &text[4..12], &message].concat();
    match with(description.to_string().as_bytes(), &text) {
        Err(FormatError::Text { reason }) => assert!(reason.contains("1 MiB of further fields"), "{reason}"),
        found => panic!("{found:?}"),
    }
}

#[test]
fn lengths_are_checked_before_anything_is_allocated() {
    for (at, found) in
        [(DESCRIPTION, u64::MAX), (TEXT, u64::MAX), (DESCRIPTION, (256 << 10) + 1), (TEXT, (16 << 20) + 1)]
    {
        let mut file = PINNED[..PINNED.len() - DIGEST].to_vec();
        file[at..at + 8].copy_from_slice(&found.to_le_bytes());
        let refused = PLAIN.import(&digested(file));
        assert!(matches!(refused, Err(FormatError::Lengths { .. })), "{refused:?}");
    }
    for (at, by) in [(DESCRIPTION, 1), (TEXT, -1), (BODY, 1)] {
        let mut file = PINNED[..PINNED.len() - DIGEST].to_vec();
        file[at] = file[at].wrapping_add_signed(by);
        assert!(matches!(PLAIN.import(&digested(file)), Err(FormatError::Length { .. })));
    }
    for length in 0..PREFIX + DIGEST {
        let refused = PLAIN.import(&PINNED[..length]);
        assert!(matches!(refused, Err(FormatError::TooShort { .. } | FormatError::Length { .. })), "{refused:?}");
    }
}

#[test]
fn a_text_that_is_too_long_is_left_out() {
    let (snapshot, conversation) = pinned();
    let messages = conversation.text.as_ref().unwrap().messages.clone();
    let long = AddedMessage { content: Content::Text("x".repeat(16 << 20)), ..messages[0].clone() };
    let text = AddedText { messages: vec![long], ..conversation.text.clone().unwrap() };
    let file = PLAIN.encode_conversation(&snapshot, &Conversation { text: Some(text), ..conversation.clone() });
    assert!(file.len() <= PLAIN.max_file_bytes());
    assert_eq!(PLAIN.import(&file), Ok((snapshot, Conversation { text: None, ..conversation })));
}

#[test]
fn a_changed_file_is_refused_or_valid() {
    let words = ["\"label\":", "\"lineage\":", "\"metadata\":", "null", "-1", "[[[["];
    let unsigned = PINNED[..PINNED.len() - DIGEST].to_vec();
    for fuzz::Input { number, bytes, .. } in fuzz::inputs(&[unsigned], &words) {
        let Ok((snapshot, conversation)) = PLAIN.import(&digested(bytes)) else { continue };
        let again = PLAIN.encode_conversation(&snapshot, &conversation);
        assert_eq!(PLAIN.import(&again), Ok((snapshot, conversation)), "input {number}");
    }
}
