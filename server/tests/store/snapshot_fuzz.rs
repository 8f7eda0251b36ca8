//! Fuzzes snapshot files. A changed file is either refused or a valid file of another snapshot.

use crate::fuzz;
use crate::snapshots::{DIGEST, PINNED, PINNED_SIGNED, PLAIN, SIGNING, digested};

/// Strings to insert: names in the header, and numbers at the limits of types.
const WORDS: [&str; 16] = [
    "\"read\":",
    "\"pending\":",
    "\"draws\":",
    "\"seed\":",
    "\"counts\":",
    "\"held\":",
    "\"dtype\":\"F32\"",
    "\"shape\":[",
    "\"data_offsets\":[",
    "null",
    "-1",
    "1e99",
    "18446744073709551615",
    "9007199254740993",
    "[[[[",
    "\\ud800",
];

#[test]
fn a_changed_snapshot_is_refused_or_valid() {
    let unsigned = PINNED[..PINNED.len() - DIGEST].to_vec();
    for fuzz::Input { number, bytes, .. } in fuzz::inputs(&[unsigned], &WORDS) {
        // The digest is computed anew, because otherwise every change would fail the first check.
        let bytes = digested(bytes);
        assert!(SIGNING.import(&bytes).is_err(), "input {number} has no signature");
        let Ok((snapshot, _)) = PLAIN.import(&bytes) else { continue };
        let again = PLAIN.decode(&PLAIN.encode(&snapshot)).unwrap();
        assert_eq!(PLAIN.encode(&again), PLAIN.encode(&snapshot), "input {number}");
    }
}

#[test]
fn a_changed_signed_snapshot_is_refused() {
    for fuzz::Input { number, bytes, .. } in fuzz::inputs(&[PINNED_SIGNED.to_vec()], &WORDS) {
        assert!(bytes == PINNED_SIGNED || SIGNING.import(&bytes).is_err(), "input {number}");
    }
}
