//! Snapshot files of encoder-decoders, whose state includes a source, and of decoders, whose files do not mention
//! sources.

use std::sync::LazyLock;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tidegate_model::{SamplerState, StateLayout};
use tidegate_server::session::{Answer, Codec, Fingerprint, FormatError, History, Snapshot};

/// The bytes that the script under "Example" in `docs/snapshot-format.md` writes without any code of this server.
const PINNED: &[u8] = include_bytes!("fixtures/snapshot-v1-source.bin");
const PINNED_DECODER: &[u8] = include_bytes!("fixtures/snapshot-v1.bin");

const LAYOUT: StateLayout = StateLayout { layers: 2, heads: 1, head: 5, taps: 0, channels: 0, cross: 4 };

static CODEC: LazyLock<Codec> = LazyLock::new(|| codec(LAYOUT, 6));

fn codec(layout: StateLayout, sources: usize) -> Codec {
    let fingerprint =
        Fingerprint { architecture: "a1".repeat(32), weights: "b2".repeat(32), tokenizer: "c3".repeat(32) };
    Codec { fingerprint, layout, vocab_size: 16, greatest: Vec::new(), sources, keys: None }
}

/// Returns the snapshot in [`PINNED`], after five tokens of a source and two of a text.
fn pinned() -> Snapshot {
    let number = |i: u8| (f32::from(i) + 0.1) / if i.is_multiple_of(2) { 7.0 } else { -7.0 };
    Snapshot {
        state: (0..18).map(number).chain([5.0]).collect(),
        read: 7,
        pending: vec![2],
        history: History::of_source(&[3, 1, 4, 1, 5]).extended(&[0, 9]),
        sampler: SamplerState { seed: 11, draws: 3, counts: vec![(2, 1), (9, 1)] },
        answer: Some(Answer { open: true, ..Answer::default() }),
        ..Snapshot::default()
    }
}

/// Returns a file's header, tensor header, and numbers.
fn parts(file: &[u8]) -> (Value, Value, Vec<u8>) {
    let header = 24 + u32::from_le_bytes(file[12..16].try_into().unwrap()) as usize;
    let body = &file[header..file.len() - 32];
    let tensors = 8 + u64::from_le_bytes(body[..8].try_into().unwrap()) as usize;
    let json = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap();
    (json(&file[24..header]), json(&body[8..tensors]), body[tensors..].to_vec())
}

/// Returns the error for a file with changed parts.
fn changed(file: &[u8], codec: &Codec, change: impl FnOnce(&mut Value, &mut Value, &mut Vec<u8>)) -> FormatError {
    let (mut header, mut tensors, mut data) = parts(file);
    change(&mut header, &mut tensors, &mut data);
    let (header, tensors) = (header.to_string(), tensors.to_string());
    let body = [&(tensors.len() as u64).to_le_bytes()[..], tensors.as_bytes(), &data].concat();
    let lengths = (&(header.len() as u32).to_le_bytes(), &(body.len() as u64).to_le_bytes());
    let mut bytes = [b"TIDEGT\r\n\x01\0\0\0", &lengths.0[..], lengths.1, header.as_bytes(), &body].concat();
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&digest);
    codec.decode(&bytes).unwrap_err()
}

#[test]
fn the_pinned_file_can_be_read() {
    assert_eq!(CODEC.decode(PINNED), Ok(pinned()));
    assert_eq!(CODEC.encode(&pinned()), PINNED);
    assert!(PINNED.len() <= CODEC.max_encoded_bytes());
    // Before its first source, a conversation has no state at all.
    let empty = Snapshot::empty(3);
    assert_eq!(CODEC.decode(&CODEC.encode(&empty)), Ok(empty));
}

#[test]
fn files_of_decoders_do_not_mention_sources() {
    let (header, tensors, _) = parts(PINNED_DECODER);
    assert_eq!(header["layout"], json!({"layers": 2, "heads": 1, "head": 11, "taps": 2, "channels": 3}));
    let names: Vec<&String> = tensors.as_object().unwrap().keys().collect();
    assert_eq!(names, ["conv", "memory", "counts"]);
    let decoder = codec(StateLayout { layers: 2, heads: 1, head: 11, taps: 2, channels: 3, cross: 0 }, 0);
    assert!(decoder.decode(PINNED_DECODER).is_ok());
    for value in [json!(0), json!(null), json!("4")] {
        let refused = changed(PINNED_DECODER, &decoder, |header, _, _| header["layout"]["cross"] = value);
        assert!(matches!(refused, FormatError::Header(_)), "{refused}");
    }
}

#[test]
fn another_layout_is_refused_by_name() {
    let part = "cross";
    let other = codec(StateLayout { cross: 5, ..LAYOUT }, 6);
    assert_eq!(other.decode(PINNED), Err(FormatError::Layout { part, found: 4, expected: 5 }));
    let decoder = codec(StateLayout { cross: 0, ..LAYOUT }, 0);
    assert_eq!(decoder.decode(PINNED), Err(FormatError::Layout { part, found: 4, expected: 0 }));
    let without = changed(PINNED, &CODEC, |header, _, _| _ = header["layout"].as_object_mut().unwrap().remove(part));
    assert_eq!(without, FormatError::Layout { part, found: 0, expected: 4 });
}

#[test]
fn an_incomplete_source_is_refused() {
    for tensor in ["cross", "source"] {
        let refused = changed(PINNED, &CODEC, |header, tensors, data| {
            // Removes this tensor, and moves the later ones up.
            let gone = tensors.as_object_mut().unwrap().remove(tensor).unwrap();
            let at = |offset: usize| usize::try_from(gone["data_offsets"][offset].as_u64().unwrap()).unwrap();
            data.drain(at(0)..at(1));
            for entry in tensors.as_object_mut().unwrap().values_mut() {
                for offset in entry["data_offsets"].as_array_mut().unwrap() {
                    let moved = offset.as_u64().unwrap();
                    let by = if moved > at(0) as u64 { (at(1) - at(0)) as u64 } else { 0 };
                    *offset = json!(moved - by);
                }
            }
            header["read"] = json!(7);
        });
        assert_eq!(refused, FormatError::Presence { tensor, expected: "present", read: 7 });
    }
    let number = |at: usize, number: f32| {
        changed(PINNED, &CODEC, |_, _, data| data[4 * at..4 * at + 4].copy_from_slice(&number.to_le_bytes()))
    };
    assert_eq!(number(3, f32::NAN), FormatError::NotFinite { tensor: "cross", at: 3 });
    // The number of source tokens is whole, at least 1, and at most that of the longest source and of all tokens read.
    for found in [0.0, -1.0, 2.5, 7.0, f32::INFINITY, f32::NAN] {
        assert_eq!(number(18, found), FormatError::Source { found: found.to_string(), max: 6 });
    }
    let short = changed(PINNED, &CODEC, |header, _, _| header["read"] = json!(4));
    assert_eq!(short, FormatError::Source { found: "5".into(), max: 4 });
}
