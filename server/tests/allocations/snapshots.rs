//! Checks that a refused snapshot allocates next to nothing, whatever sizes it claims.

use sha2::{Digest, Sha256};
use stats_alloc::Region;
use tidegate_model::StateLayout;
use tidegate_server::session::{Codec, Fingerprint, History, Snapshot};

use super::{ALLOCATOR, alone};

const STATE: usize = 1 << 20; // numbers, 4 MiB

/// Maximum number of bytes that reading the header and building an error message may allocate.
const LITTLE: usize = 16 << 10;

fn allocated(run: impl FnOnce()) -> usize {
    let region = Region::new(ALLOCATOR);
    run();
    region.change().bytes_allocated
}

#[test]
fn memory_is_allocated_only_for_a_valid_snapshot() {
    let _alone = alone();
    let digest = "d4".repeat(32);
    let codec = Codec {
        fingerprint: Fingerprint { architecture: digest.clone(), weights: digest.clone(), tokenizer: digest },
        layout: StateLayout { layers: 4, heads: 4, head: STATE / 16, taps: 0, channels: 0, cross: 0 },
        vocab_size: 1 << 16,
        greatest: Vec::new(),
        sources: 0,
        keys: None,
    };
    let mut snapshot = Snapshot { state: vec![0.5; STATE], read: 9, ..Snapshot::empty(1) };
    snapshot.history = History::default().extended(&[1]);
    snapshot.sampler.counts = (0..1 << 16).map(|token| (token, 1)).collect();
    let good = codec.encode(&snapshot);
    let exact = size_of_val(&*snapshot.state) + size_of_val(&*snapshot.sampler.counts);

    let taken = allocated(|| drop(codec.decode(&good).expect("it is good")));
    assert!((exact..exact + LITTLE).contains(&taken), "{taken} bytes for a good snapshot of {exact}");

    let counts = good.len() - 32 - (1 << 19);
    let body = 24 + u32::from_le_bytes(good[12..16].try_into().unwrap()) as usize;
    let faults: [(&str, usize, &[u8]); 8] = [
        ("the longest header", 12, &[0xff; 4]),
        ("the longest body", 16, &[0xff; 8]),
        ("more layers than there are", find(&good, b"\"layers\":4"), b"\"layers\":9"),
        ("the longest tensor header", body, &[0xff; 8]),
        ("more counts than there are", find(&good, b"[65536,2]"), b"[9999999]"),
        ("not a number", counts - 4, &f32::NAN.to_le_bytes()),
        ("a token twice", good.len() - 32 - 8, &0u32.to_le_bytes()),
        ("a token outside the vocabulary", good.len() - 32 - 8, &u32::MAX.to_le_bytes()),
    ];
    for (fault, at, bytes) in faults {
        let mut bad = good[..good.len() - 32].to_vec();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        let digest = Sha256::digest(&bad);
        bad.extend_from_slice(&digest);
        let taken = allocated(|| assert!(codec.decode(&bad).is_err(), "{fault}"));
        assert!(taken < LITTLE, "{taken} bytes for {fault}");
    }
    let long = vec![0; codec.max_encoded_bytes() * 2];
    let taken = allocated(|| assert!(codec.decode(&long).is_err()));
    assert!(taken < LITTLE, "{taken} bytes for a file too long");
}

fn find(bytes: &[u8], part: &[u8]) -> usize {
    bytes.windows(part.len()).position(|window| window == part).expect("the file has it")
}
