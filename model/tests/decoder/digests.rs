//! Digests of some models' logits and states, so that no change alters their bits by accident. The bits are the same on
//! every instruction set and with any number of threads, as other tests check. A change that alters them on purpose
//! updates the digests here.

use std::path::PathBuf;

use tidegate_model::{Device, checkpoint};

use crate::common::{Numbers, bits};

/// Returns the FNV-1a hash of all bits.
fn digest(numbers: &[u32]) -> u64 {
    let bytes = numbers.iter().flat_map(|bits| bits.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Returns the digest of the logits and the state after 200 tokens.
fn of_model(fixture: &str) -> u64 {
    let folder: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", fixture].iter().collect();
    let decoder = checkpoint::load(&folder, &Device::Cpu).unwrap();
    let (ids, mut pool) = (Numbers::new(8).ids(200, decoder.config().vocab_size), decoder.new_pool(1).unwrap());
    let logits = decoder.prefill_logits(&ids, &mut pool, 0).unwrap();
    digest(&[bits(&logits), bits(&pool.export(0).unwrap())].concat())
}

#[test]
fn logits_and_states_have_these_bits() {
    let found = ["fixtures/base", "fixtures/bf16", "fixtures-rwkv7", "fixtures-mamba2"].map(of_model);
    let want = ["88cc046e05c1f28f", "dd5ede5970de9304", "13406fca302cd857", "f71554dcacbb6f52"];
    assert_eq!(found.map(|digest| format!("{digest:016x}")), want);
}
