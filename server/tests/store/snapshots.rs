//! Snapshot files: what was written can be read, pinned files stay readable, and invalid files are refused.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tidegate_model::{SamplerState, StateLayout};
use tidegate_server::session::{Answer, Codec, Fingerprint, FormatError, History, Keys, MAX_PENDING, Snapshot};

pub(crate) const PINNED: &[u8] = include_bytes!("fixtures/snapshot-v1.bin");
pub(crate) const PINNED_SIGNED: &[u8] = include_bytes!("fixtures/snapshot-v1-signed.bin");
const SECRET: &[u8; 32] = b"the secret of the pinned file, 1";

pub(crate) const PREFIX: usize = 24;
pub(crate) const DIGEST: usize = 32;
const LAYOUT: StateLayout = StateLayout { layers: 2, heads: 1, head: 11, taps: 2, channels: 3, cross: 0 };

pub(crate) static PLAIN: LazyLock<Codec> = LazyLock::new(|| codec(LAYOUT, None));
pub(crate) static SIGNING: LazyLock<Codec> = LazyLock::new(|| codec(LAYOUT, Some(SECRET)));

fn codec(layout: StateLayout, secret: Option<&[u8]>) -> Codec {
    let fingerprint =
        Fingerprint { architecture: "a1".repeat(32), weights: "b2".repeat(32), tokenizer: "c3".repeat(32) };
    let keys = secret.map(|secret| Keys::new(secret).expect("the secret is long enough"));
    Codec { fingerprint, layout, vocab_size: 16, greatest: Vec::new(), sources: 0, keys }
}

/// Returns the contents of the pinned files. Every part is present, and no number is round.
fn pinned() -> Snapshot {
    let counts = vec![(0, 2), (3, 0), (7, 1 << 31 | 5), (15, u32::MAX)];
    Snapshot {
        state: (0..LAYOUT.numbers()).map(|i| (i as f32 + 0.1) / if i % 2 == 0 { 7.0 } else { -7.0 }).collect(),
        read: 1_000_003,
        pending: vec![7, 15, 0],
        history: History::default().extended(&[3, 1, 4, 1, 5]),
        sampler: SamplerState { seed: u64::MAX - 1, draws: 41, counts },
        answer: Some(Answer { open: true, held: "\"né\n🌊".to_owned(), bytes: vec![0xf0, 0x9f] }),
        ..Snapshot::default()
    }
}

// ---- Hand-made files

/// Returns a file with any header and body, and with correct lengths and digest.
fn framed(header: &[u8], body: &[u8]) -> Vec<u8> {
    let lengths = (&(header.len() as u32).to_le_bytes(), &(body.len() as u64).to_le_bytes());
    digested([b"TIDEGT\r\n\x01\0\0\0", &lengths.0[..], lengths.1, header, body].concat())
}

pub(crate) fn digested(mut bytes: Vec<u8>) -> Vec<u8> {
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&digest);
    bytes
}

/// Returns the header and the body of an unsigned file.
fn parts(file: &[u8]) -> (&[u8], &[u8]) {
    let header = u32::from_le_bytes(file[12..16].try_into().unwrap()) as usize;
    file[PREFIX..file.len() - DIGEST].split_at(header)
}

/// Returns a safetensors file.
fn blob(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// Returns the error for the pinned file with a changed header.
fn with_header(edit: impl FnOnce(&mut Value)) -> FormatError {
    let (header, body) = parts(PINNED);
    let mut header = serde_json::from_slice(header).unwrap();
    edit(&mut header);
    PLAIN.decode(&framed(header.to_string().as_bytes(), body)).expect_err(&header.to_string())
}

/// Returns the error for the pinned file with another body.
fn with_body(body: &[u8]) -> FormatError {
    PLAIN.decode(&framed(parts(PINNED).0, body)).expect_err("another body")
}

/// Returns the tensor header and the tensor data of the pinned file.
fn tensors() -> (Value, Vec<u8>) {
    let body = parts(PINNED).1;
    let length = u64::from_le_bytes(body[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&body[8..8 + length]).unwrap(), body[8 + length..].to_vec())
}

/// Returns the error for the pinned file with changed tensors.
fn with_tensors(edit: impl FnOnce(&mut Value, &mut Vec<u8>)) -> FormatError {
    let (mut header, mut data) = tensors();
    edit(&mut header, &mut data);
    with_body(&blob(&header.to_string(), &data))
}

/// Checks everything that the rest of the server assumes about a snapshot.
fn holds(codec: &Codec, snapshot: &Snapshot) {
    assert_eq!(snapshot.state.len(), if snapshot.read > 0 { codec.layout.numbers() } else { 0 });
    assert!(snapshot.state.iter().all(|number| number.is_finite()));
    assert!(snapshot.read > 0 || snapshot.history == History::default());
    assert!(snapshot.read <= 1 << 53 && snapshot.sampler.draws <= 1 << 53);
    assert!(snapshot.pending.len() <= MAX_PENDING);
    let tokens = snapshot.sampler.counts.iter().map(|(token, _)| token);
    assert!(tokens.clone().chain(&snapshot.pending).all(|&token| (token as usize) < codec.vocab_size));
    assert!(tokens.is_sorted_by(|before, after| before < after));
    let answers = || snapshot.answer.iter();
    assert!(answers().all(|answer| answer.held.len() <= 1024 && answer.bytes.len() <= 3));
    assert!(answers().all(|answer| answer.open || answer.held.is_empty() && answer.bytes.is_empty()));
}

// ---- Reading what was written

#[test]
fn the_pinned_files_can_be_read() {
    assert_eq!(PLAIN.decode(PINNED), Ok(pinned()));
    assert_eq!(SIGNING.decode(PINNED_SIGNED), Ok(pinned()));
    // A server without a secret also reads signed files.
    assert_eq!(PLAIN.decode(PINNED_SIGNED), Ok(pinned()));
    assert_eq!(PLAIN.encode(&pinned()), PINNED);
    assert_eq!(SIGNING.encode(&pinned()), PINNED_SIGNED);
}

/// Incomplete UTF-8 characters.
const BEGUN: [&[u8]; 4] = [b"", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x8c"];

prop_compose! {
    fn snapshots()(
        conv in any::<bool>(),
        keyed in any::<bool>(),
        read in prop_oneof![Just(0), 1..=1u64 << 53],
        numbers in prop::collection::vec(prop::num::f32::NORMAL | prop::num::f32::ZERO | prop::num::f32::SUBNORMAL, 34),
        pending in prop::collection::vec(0..16u32, 0..20),
        history in any::<[u8; 32]>(),
        seed in any::<u64>(),
        draws in 0..=1u64 << 53,
        counts in prop::collection::btree_map(0..16u32, any::<u32>(), 0..=16),
        answer in prop::option::of(prop::option::of((".{0,64}", prop::sample::select(&BEGUN[..])))),
    ) -> (Codec, Snapshot) {
        let (taps, channels) = if conv { (2, 3) } else { (0, 0) };
        let codec = codec(StateLayout { taps, channels, ..LAYOUT }, keyed.then_some(SECRET));
        let state = if read > 0 { numbers[..codec.layout.numbers()].to_vec() } else { Vec::new() };
        let history = if read > 0 { History(history) } else { History::default() };
        let sampler = SamplerState { seed, draws, counts: counts.into_iter().collect() };
        let open = |(held, bytes): (_, &[u8])| Answer { open: true, held, bytes: bytes.to_vec() };
        let answer = answer.map(|answer| answer.map(open).unwrap_or_default());
        (codec, Snapshot { state, read, pending, history, sampler, answer, ..Snapshot::default() })
    }
}

proptest! {
    #[test]
    fn written_snapshots_are_read_back_exactly((codec, snapshot) in snapshots(), context in any::<[u8; 16]>()) {
        let bytes = codec.encode(&snapshot);
        prop_assert!(bytes.len() <= codec.max_encoded_bytes());
        let read = codec.decode(&bytes).unwrap();
        holds(&codec, &read);
        prop_assert_eq!(&read, &snapshot);
        // Compares bits, because -0.0 equals 0.0.
        prop_assert!(read.state.iter().map(|x| x.to_bits()).eq(snapshot.state.iter().map(|x| x.to_bits())));
        prop_assert_eq!(codec.encode(&read), bytes);
        match codec.seal(&snapshot, &context) {
            Ok(sealed) => {
                prop_assert!(sealed.len() <= codec.max_sealed_bytes());
                prop_assert_eq!(codec.open(&sealed, &context), Ok(snapshot));
            }
            Err(error) => prop_assert!(codec.keys.is_none() && error == FormatError::NoKey),
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused(header in any::<Vec<u8>>(), body in any::<Vec<u8>>()) {
        prop_assert!(PLAIN.decode(&header).is_err());
        prop_assert!(PLAIN.decode(&framed(&header, &body)).is_err());
    }
}

#[test]
fn the_longest_snapshot_is_within_the_limit() {
    let codec = Codec { vocab_size: 1 << 32, ..PLAIN.clone() };
    let snapshot = Snapshot {
        read: 1 << 53,
        pending: vec![u32::MAX; MAX_PENDING],
        sampler: SamplerState { seed: u64::MAX, draws: 1 << 53, counts: vec![(u32::MAX, u32::MAX)] },
        answer: Some(Answer { open: true, held: "\u{1}".repeat(1024), bytes: b"\xf0\x9f\x8c".to_vec() }),
        ..pinned()
    };
    let bytes = codec.encode(&snapshot);
    assert_eq!(codec.decode(&bytes), Ok(snapshot));
    assert!(codec.encode(&Snapshot::empty(u64::MAX)).len() < 1024);
}

// ---- Hostile bytes

#[test]
fn a_truncated_file_is_refused() {
    for (codec, file) in [(&PLAIN, PINNED), (&SIGNING, PINNED_SIGNED)] {
        for end in 0..file.len() {
            assert!(codec.decode(&file[..end]).is_err(), "cut at {end}");
            let with_digest = digested(file[..end].to_vec());
            assert!(with_digest == file || codec.decode(&with_digest).is_err(), "cut at {end}, with a digest");
        }
        assert!(codec.decode(&[file, b"\0"].concat()).is_err());
    }
    let (header, body) = parts(PINNED);
    for end in 0..header.len() {
        assert!(PLAIN.decode(&framed(&header[..end], body)).is_err(), "header cut at {end}");
    }
    for end in 0..body.len() {
        assert!(PLAIN.decode(&framed(header, &body[..end])).is_err(), "body cut at {end}");
    }
}

#[test]
fn a_file_with_a_flipped_bit_is_refused() {
    for bit in 0..PINNED_SIGNED.len() * 8 {
        let mut file = PINNED_SIGNED.to_vec();
        file[bit / 8] ^= 1 << (bit % 8);
        assert!(SIGNING.decode(&file).is_err(), "bit {bit}, signed");
    }
    for bit in 0..PINNED.len() * 8 {
        let mut file = PINNED.to_vec();
        file[bit / 8] ^= 1 << (bit % 8);
        assert!(PLAIN.decode(&file).is_err(), "bit {bit}");
        file.truncate(file.len() - DIGEST);
        if let Ok(snapshot) = PLAIN.decode(&digested(file)) {
            holds(&PLAIN, &snapshot);
        }
    }
}

#[test]
fn a_file_of_another_kind_version_or_length_is_refused() {
    let edited = |at: usize, bytes: &[u8]| {
        let mut file = PINNED[..PINNED.len() - DIGEST].to_vec();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        PLAIN.decode(&digested(file)).unwrap_err()
    };
    assert_eq!(PLAIN.decode(&[]), Err(FormatError::TooShort { found: 0, min: 56 }));
    assert_eq!(edited(0, b"t"), FormatError::Magic);
    assert_eq!(edited(8, &[3]), FormatError::Version { found: 3, max: 2 });
    let most = 53_248;
    assert_eq!(edited(12, &[0xff; 4]), FormatError::HeaderLength { found: u32::MAX.into(), max: most });
    let found = PINNED.len();
    assert_eq!(edited(16, &[0xff; 8]), FormatError::Length { found, expected: u64::MAX });
    let long = [PINNED, &vec![0; PLAIN.max_encoded_bytes()]].concat();
    let most = PLAIN.max_encoded_bytes();
    assert_eq!(PLAIN.decode(&long), Err(FormatError::TooLong { found: long.len(), max: most }));
    assert_eq!(PLAIN.decode(&[&PINNED[..found - 1], b"?"].concat()), Err(FormatError::Digest));
}

#[test]
fn an_invalid_header_is_refused() {
    for key in ["fingerprint", "dtype", "layout", "read", "pending", "history", "sampler", "answer", "signed"] {
        let without = with_header(|header| _ = header.as_object_mut().unwrap().remove(key));
        assert!(without.to_string().contains(&format!("missing field `{key}`")), "{without}");
    }
    let unknown = with_header(|header| header["note"] = json!("x".repeat(1000)));
    assert!(matches!(&unknown, FormatError::Header(_)) && unknown.to_string().len() < 200, "{unknown}");
    let (header, body) = parts(PINNED);
    let twice = String::from_utf8(header.to_vec()).unwrap().replacen('{', "{\"read\":1,", 1);
    assert!(matches!(PLAIN.decode(&framed(twice.as_bytes(), body)), Err(FormatError::Header(_))));
    let deep = "[".repeat(50_000);
    assert!(matches!(PLAIN.decode(&framed(deep.as_bytes(), body)), Err(FormatError::Header(_))));

    for part in ["architecture", "weights", "tokenizer"] {
        let error = with_header(|header| header["fingerprint"][part] = json!("00\n"));
        assert!(matches!(&error, FormatError::Fingerprint { part: found, .. } if *found == part), "{error}");
        assert!(error.to_string().ends_with(r"found 00\n"), "{error}");
    }
    for (part, expected) in [("layers", 2), ("heads", 1), ("head", 11), ("taps", 2), ("channels", 3)] {
        let error = with_header(|header| header["layout"][part] = json!(u64::MAX));
        assert_eq!(error, FormatError::Layout { part, found: usize::MAX, expected });
    }
    let f16 = FormatError::Dtype { found: "f16".to_owned(), expected: "f32" };
    assert_eq!(with_header(|header| header["dtype"] = json!("f16")), f16);
    let count = |part| FormatError::Count { part, found: (1 << 53) + 1, max: 1 << 53 };
    assert_eq!(with_header(|header| header["read"] = json!((1u64 << 53) + 1)), count("read"));
    assert_eq!(with_header(|header| header["sampler"]["draws"] = json!((1u64 << 53) + 1)), count("sampler draws"));
    let pending = with_header(|header| header["pending"] = json!([3, 16]));
    assert_eq!(pending, FormatError::Pending { found: 16, vocab_size: 16 });
    let pending = with_header(|header| header["pending"] = json!(vec![0; MAX_PENDING + 1]));
    assert_eq!(pending, FormatError::PendingLength { found: MAX_PENDING + 1, max: MAX_PENDING });
    for history in ["", "0g", &"0".repeat(62), &"0".repeat(66)] {
        let error = with_header(|header| header["history"] = json!(history));
        assert!(matches!(error, FormatError::History { expected: "64 hexadecimal digits", .. }), "{error}");
    }
    let held = with_header(|header| header["answer"]["held"] = json!("é".repeat(513)));
    assert_eq!(held, FormatError::HeldLength { found: 1026, max: 1024 });
    assert_eq!(with_header(|header| header["answer"]["open"] = json!(false)), FormatError::EndedAnswer);
    for bytes in ["f", "f09f8c8a", "41", "ff", "zz"] {
        let error = with_header(|header| header["answer"]["bytes"] = json!(bytes));
        assert_eq!(error, FormatError::Bytes { found: bytes.to_owned() });
    }
    let signed = with_header(|header| header["signed"] = json!("hmac-sha256"));
    assert_eq!(signed, FormatError::Signed { header: "hmac-sha256".to_owned(), end: "without" });
    let read = with_header(|header| header["read"] = json!(0));
    assert!(matches!(read, FormatError::History { expected: "zeros if no token is read", .. }), "{read}");
}

#[test]
fn invalid_tensors_are_refused() {
    let nothing_read = with_header(|header| {
        header["read"] = json!(0);
        header["history"] = json!("0".repeat(64));
    });
    assert_eq!(nothing_read, FormatError::Presence { tensor: "memory", expected: "absent", read: 0 });
    let alone = blob(r#"{"counts":{"dtype":"U32","shape":[0,2],"data_offsets":[0,0]}}"#, &[]);
    assert_eq!(with_body(&alone), FormatError::Presence { tensor: "memory", expected: "present", read: pinned().read });

    for length in [u64::MAX, 1 << 60, 1025, 1024] {
        let error = with_body(&[&length.to_le_bytes()[..], b"{}"].concat());
        assert_eq!(error, FormatError::TensorHeaderLength { found: length, max: 1024 });
    }
    for (tensor, dtype) in [("memory", "F64"), ("counts", "I32"), ("conv", "F99")] {
        let error = with_tensors(|header, _| header[tensor]["dtype"] = json!(dtype));
        assert!(matches!(error, FormatError::Tensors(_) | FormatError::Dtype { .. }), "{error}");
    }
    let error = with_tensors(|header, _| header["memory"]["dtype"] = json!("I32"));
    assert_eq!(error, FormatError::Dtype { found: "I32".to_owned(), expected: "F32" });
    for shape in [json!([2, 11, 1]), json!([22]), json!([1, 2, 11]), json!([2, 1, 11, 1])] {
        let error = with_tensors(|header, _| header["memory"]["shape"] = shape);
        assert!(matches!(error, FormatError::Shape { tensor: "memory", .. }), "{error}");
    }
    let error = with_tensors(|header, _| header["counts"]["shape"] = json!([8, 1]));
    assert!(matches!(error, FormatError::Shape { tensor: "counts", .. }), "{error}");
    for shape in [json!([1u64 << 60, 1u64 << 60]), json!([1u64 << 60]), json!([0, 2])] {
        let error = with_tensors(|header, _| header["counts"]["shape"] = shape);
        assert!(matches!(error, FormatError::Tensors(_)), "{error}");
    }
    let many = with_tensors(|header, data| {
        let start = header["counts"]["data_offsets"][0].as_u64().unwrap();
        header["counts"] = json!({"dtype": "U32", "shape": [17, 2], "data_offsets": [start, start + 17 * 8]});
        data.resize(start as usize + 17 * 8, 0);
    });
    assert!(matches!(many, FormatError::Shape { tensor: "counts", .. }), "{many}");
    for offsets in [json!([0, u64::MAX]), json!([u64::MAX, 0]), json!([0, 0]), json!([1, 49])] {
        let error = with_tensors(|header, _| header["conv"]["data_offsets"] = offsets);
        assert!(matches!(error, FormatError::Tensors(_)), "{error}");
    }
    for name in ["more", "__metadata__"] {
        let error = with_tensors(|header, _| header[name] = json!({}));
        assert!(matches!(error, FormatError::Tensors(_)), "{error}");
    }
    let (header, data) = tensors();
    let counts = header["counts"].to_string();
    let twice = header.to_string().replacen('{', &format!("{{\"counts\":{counts},"), 1);
    assert!(matches!(with_body(&blob(&twice, &data)), FormatError::Tensors(_)));
    assert!(matches!(with_tensors(|_, data| data.push(0)), FormatError::Tensors(_)));

    for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0xffa0_0001)] {
        for (tensor, start, at) in [("conv", 0, 11), ("memory", 48, 0), ("memory", 48, 21)] {
            let error = with_tensors(|_, data| data[start + at * 4..][..4].copy_from_slice(&number.to_le_bytes()));
            assert_eq!(error, FormatError::NotFinite { tensor, at });
        }
    }
    let counts = LAYOUT.numbers() * 4;
    let error = with_tensors(|_, data| data[counts + 8] = 0);
    assert_eq!(error, FormatError::CountsOrder { found: 0, before: 0 });
    let error = with_tensors(|_, data| data[counts + 24] = 16);
    assert_eq!(error, FormatError::CountsToken { found: 16, vocab_size: 16 });
}

#[test]
fn only_signatures_of_the_right_secret_are_accepted() {
    assert_eq!(SIGNING.decode(PINNED), Err(FormatError::SignatureMissing));
    let other = codec(LAYOUT, Some(b"another secret than the first, 2"));
    assert_eq!(other.decode(PINNED_SIGNED), Err(FormatError::SignatureWrong));
    // A second digest is as long as a signature, but is not one.
    assert_eq!(SIGNING.decode(&digested(PINNED.to_vec())), Err(FormatError::SignatureWrong));
    let end = FormatError::Signed { header: "null".to_owned(), end: "with" };
    assert_eq!(PLAIN.decode(&digested(PINNED.to_vec())), Err(end));
    // Removing the signature leaves a header that mentions one.
    let stripped = &PINNED_SIGNED[..PINNED_SIGNED.len() - 32];
    let end = FormatError::Signed { header: "hmac-sha256".to_owned(), end: "without" };
    assert_eq!(PLAIN.decode(stripped), Err(end));
}

#[test]
fn only_the_owner_opens_a_sealed_state() {
    assert_eq!(PLAIN.open(&[], b"owner"), Err(FormatError::NoKey));
    let sealed = SIGNING.seal(&pinned(), b"owner").unwrap();
    assert_eq!(SIGNING.open(&sealed, b"owner"), Ok(pinned()));
    for context in [&b"other"[..], b"", b"owner\0"] {
        assert_eq!(SIGNING.open(&sealed, context), Err(FormatError::Sealed));
    }
    let other = codec(LAYOUT, Some(b"another secret than the first, 2"));
    assert_eq!(other.open(&sealed, b"owner"), Err(FormatError::Sealed));
    for end in 0..sealed.len() {
        assert_eq!(SIGNING.open(&sealed[..end], b"owner"), Err(FormatError::Sealed), "cut at {end}");
    }
    for bit in 0..sealed.len() * 8 {
        let mut changed = sealed.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(SIGNING.open(&changed, b"owner"), Err(FormatError::Sealed), "bit {bit}");
    }
    let found = SIGNING.max_sealed_bytes() + 1;
    let long = FormatError::TooLong { found, max: found - 1 };
    assert_eq!(SIGNING.open(&vec![0; found], b"owner"), Err(long));
}
