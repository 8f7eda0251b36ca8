//! Fuzzes the snapshot reader with arbitrary bytes: unchanged, with a correct digest, and with correct lengths too.
//!
//! Nothing may panic. An accepted snapshot must satisfy every promise of the format, and survive writing and reading. The
//! seeds are the pinned files of the tests, so the models match theirs: a decoder and an encoder-decoder.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use sha2::{Digest, Sha256};
use tidegate_model::StateLayout;
use tidegate_server::session::{Codec, Fingerprint, History, Keys, MAX_PENDING, Snapshot};

/// Bytes before the header.
const PREFIX: usize = 24;

/// Bytes of the digest at the end.
const DIGEST: usize = 32;

static DECODER: LazyLock<Codec> =
    LazyLock::new(|| codec(StateLayout { layers: 2, heads: 1, head: 11, taps: 2, channels: 3, cross: 0 }, 0));

static ENCODER_DECODER: LazyLock<Codec> =
    LazyLock::new(|| codec(StateLayout { layers: 2, heads: 1, head: 5, taps: 0, channels: 0, cross: 4 }, 6));

/// Servers with a secret of their own, which must refuse everything.
static OTHER_SERVERS: LazyLock<[Codec; 2]> = LazyLock::new(|| {
    let keys = Some(Keys::new(&[0x5a; 32]).expect("32 bytes are enough"));
    [&DECODER, &ENCODER_DECODER].map(|codec| Codec { keys: keys.clone(), ..(**codec).clone() })
});

fn codec(layout: StateLayout, sources: usize) -> Codec {
    let fingerprint =
        Fingerprint { architecture: "a1".repeat(32), weights: "b2".repeat(32), tokenizer: "c3".repeat(32) };
    Codec { fingerprint, layout, vocab_size: 16, greatest: Vec::new(), sources, keys: None }
}

fuzz_target!(|data: &[u8]| {
    check(data);
    if let Some(end) = data.len().checked_sub(DIGEST) {
        check(&digested(data[..end].to_vec()));
    }
    if let Some(file) = framed(data) {
        check(&file);
    }
});

fn check(bytes: &[u8]) {
    for server in &*OTHER_SERVERS {
        assert!(server.decode(bytes).is_err(), "accepted a forged signature");
        assert!(server.open(bytes, b"owner").is_err(), "opened a forged sealed state");
    }
    for codec in [&*DECODER, &*ENCODER_DECODER] {
        if let Ok((snapshot, conversation)) = codec.import(bytes) {
            check_promises(&snapshot, codec);
            let written = codec.encode_conversation(&snapshot, &conversation);
            let again = codec.import(&written).expect("an accepted file can be written and read back");
            assert_eq!(again, (snapshot, conversation));
        }
        let Ok(snapshot) = codec.decode(bytes) else { continue };
        check_promises(&snapshot, codec);
        let written = codec.encode(&snapshot);
        let again = codec.decode(&written).expect("an accepted snapshot can be written and read back");
        assert_eq!(again, snapshot);
        assert_eq!(codec.encode(&again), written);
    }
}

/// Checks everything that the rest of the server relies on.
fn check_promises(snapshot: &Snapshot, codec: &Codec) {
    let numbers = if snapshot.read > 0 { codec.layout.numbers() } else { 0 };
    assert_eq!(snapshot.state.len(), numbers);
    assert!(snapshot.state.iter().all(|number| number.is_finite()));
    if let Some(tokens) = snapshot.state.last().filter(|_| codec.sources > 0) {
        let max = snapshot.read.min(codec.sources as u64) as f32;
        assert!(tokens.fract() == 0.0 && (1.0..=max).contains(tokens), "a source of {tokens} tokens");
    }
    assert!(snapshot.read > 0 || snapshot.history == History::default());
    assert!(snapshot.read <= 1 << 53 && snapshot.sampler.draws <= 1 << 53);
    assert!(snapshot.pending.len() <= MAX_PENDING);
    assert!(snapshot.pending.iter().all(|&token| (token as usize) < codec.vocab_size));
    assert!(snapshot.sampler.counts.iter().all(|&(token, _)| (token as usize) < codec.vocab_size));
    assert!(snapshot.sampler.counts.is_sorted_by(|(before, _), (after, _)| before < after));
    if let Some(answer) = &snapshot.answer {
        assert!(answer.held.len() <= 1024 && answer.bytes.len() <= 3);
        assert!(answer.open || answer.held.is_empty() && answer.bytes.is_empty());
    }
}

/// The file with its correct digest.
fn digested(mut file: Vec<u8>) -> Vec<u8> {
    let digest = Sha256::digest(&file);
    file.extend_from_slice(&digest);
    file
}

/// A file with the header and body of `data` and the correct lengths, so that insertions and deletions still reach the
/// parsers of both.
fn framed(data: &[u8]) -> Option<Vec<u8>> {
    let (prefix, rest) = data.split_at_checked(PREFIX)?;
    let claimed = u32::from_le_bytes(prefix[12..16].try_into().ok()?) as usize;
    let rest = &rest[..rest.len().saturating_sub(DIGEST)];
    // The body begins with the tensor header's length. A header that grew or shrank is found by its last brace.
    let header = rest.iter().take(claimed + 32).rposition(|&byte| byte == b'}').map_or(claimed, |brace| brace + 1);
    let (header, body) = rest.split_at(header.min(rest.len()));
    let body = body.trim_ascii_start();
    let mut file = b"TIDEGT\r\n\x01\0\0\0".to_vec();
    file.extend_from_slice(&(header.len() as u32).to_le_bytes());
    file.extend_from_slice(&(body.len() as u64).to_le_bytes());
    file.extend_from_slice(header);
    file.extend_from_slice(body);
    Some(digested(file))
}
