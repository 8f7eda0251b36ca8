//! The header of a snapshot file: JSON with all that is not a tensor.

use std::num::NonZeroUsize;

use serde::{Deserialize, Deserializer, Serialize};
use tidegate_model::{SamplerState, StateLayout};

use super::error::shown;
use super::{Codec, Fingerprint, FormatError};
use crate::session::{Answer, History, MAX_PENDING, Snapshot, hex, unhex};

/// What `signed` says under a signature.
const SIGNED: &str = "hmac-sha256";

const DTYPE: &str = "f32";

/// The most that tokens and draws may be. JSON numbers are exact up to here in every language, and one more token
/// never overflows.
const MOST: u64 = 1 << 53;

/// Bytes of the longest text held back: those of the longest stop string, for ever, whatever a server allows.
pub(super) const HELD: usize = 1024;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    fingerprint: Fingerprint,
    dtype: String,
    layout: Layout,
    read: u64,
    pending: Vec<u32>,
    history: String,
    sampler: Sampler,
    // Named so that the key may not be left out, here and below: a missing one would pass as null.
    #[serde(deserialize_with = "Option::deserialize")]
    answer: Option<AnswerFields>,
    #[serde(deserialize_with = "Option::deserialize")]
    signed: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Layout {
    layers: usize,
    heads: usize,
    head: usize,
    taps: usize,
    channels: usize,
    /// There only for a model that reads sources, so that the files of others are what they always were.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    cross: Option<NonZeroUsize>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sampler {
    seed: u64,
    draws: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AnswerFields {
    open: bool,
    held: String,
    bytes: String,
}

/// The header of `snapshot`, padded with spaces to a multiple of 8 bytes so that the body's numbers are aligned.
pub(super) fn write(codec: &Codec, snapshot: &Snapshot) -> Vec<u8> {
    let StateLayout { layers, heads, head, taps, channels, cross } = codec.layout;
    let header = Header {
        fingerprint: codec.fingerprint.clone(),
        dtype: DTYPE.to_owned(),
        layout: Layout { layers, heads, head, taps, channels, cross: NonZeroUsize::new(cross) },
        read: snapshot.read,
        pending: snapshot.pending.clone(),
        history: hex(&snapshot.history.0),
        sampler: Sampler { seed: snapshot.sampler.seed, draws: snapshot.sampler.draws },
        answer: snapshot.answer.as_ref().map(|answer| AnswerFields {
            open: answer.open,
            held: answer.held.clone(),
            bytes: hex(&answer.bytes),
        }),
        signed: codec.keys.is_some().then(|| SIGNED.to_owned()),
    };
    let mut bytes = serde_json::to_vec(&header).expect("strings and numbers become JSON");
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    bytes
}

impl Header {
    pub(super) fn read(bytes: &[u8]) -> Result<Self, FormatError> {
        serde_json::from_slice(bytes).map_err(|error| FormatError::Header(shown(&error.to_string())))
    }

    /// The snapshot without what the tensors hold, once all that the header says fits the model.
    pub(super) fn check(self, codec: &Codec, signed: bool) -> Result<Snapshot, FormatError> {
        self.check_model(codec)?;
        if self.signed.as_deref() != signed.then_some(SIGNED) {
            let header = shown(self.signed.as_deref().unwrap_or("null"));
            return Err(FormatError::Signed { header, end: if signed { "with" } else { "without" } });
        }
        for (part, found) in [("read", self.read), ("sampler draws", self.sampler.draws)] {
            if found > MOST {
                return Err(FormatError::Count { part, found, most: MOST });
            }
        }
        if self.pending.len() > MAX_PENDING {
            return Err(FormatError::PendingLength { found: self.pending.len(), most: MAX_PENDING });
        }
        if let Some(&found) = self.pending.iter().find(|&&token| token as usize >= codec.vocab_size) {
            return Err(FormatError::Pending { found, vocab_size: codec.vocab_size });
        }
        Ok(Snapshot {
            state: Vec::new(),
            read: self.read,
            pending: self.pending,
            history: history(&self.history, self.read)?,
            sampler: SamplerState { seed: self.sampler.seed, draws: self.sampler.draws, counts: Vec::new() },
            answer: self.answer.map(checked_answer).transpose()?,
        })
    }

    fn check_model(&self, codec: &Codec) -> Result<(), FormatError> {
        let (found, expected) = (&self.fingerprint, &codec.fingerprint);
        for (part, found, expected) in [
            ("architecture", &found.architecture, &expected.architecture),
            ("weights", &found.weights, &expected.weights),
            ("tokenizer", &found.tokenizer, &expected.tokenizer),
        ] {
            if found != expected {
                return Err(FormatError::Fingerprint { part, found: shown(found), expected: shown(expected) });
            }
        }
        if self.dtype != DTYPE {
            return Err(FormatError::Dtype { found: shown(&self.dtype), expected: DTYPE });
        }
        let (found, expected) = (&self.layout, codec.layout);
        for (part, found, expected) in [
            ("layers", found.layers, expected.layers),
            ("heads", found.heads, expected.heads),
            ("head", found.head, expected.head),
            ("taps", found.taps, expected.taps),
            ("channels", found.channels, expected.channels),
            ("cross", found.cross.map_or(0, NonZeroUsize::get), expected.cross),
        ] {
            if found != expected {
                return Err(FormatError::Layout { part, found, expected });
            }
        }
        Ok(())
    }
}

/// A number that is there: what else could stand for its absence is refused.
fn given<'de, D: Deserializer<'de>>(from: D) -> Result<Option<NonZeroUsize>, D::Error> {
    NonZeroUsize::deserialize(from).map(Some)
}

fn history(text: &str, read: u64) -> Result<History, FormatError> {
    let refused = |expected| FormatError::History { found: shown(text), expected };
    let digest = unhex(text).and_then(|bytes| bytes.try_into().ok());
    let history = History(digest.ok_or_else(|| refused("64 hexadecimal digits"))?);
    if read == 0 && history != History::default() {
        return Err(refused("zeros where no token is read"));
    }
    Ok(history)
}

fn checked_answer(fields: AnswerFields) -> Result<Answer, FormatError> {
    let AnswerFields { open, held, bytes } = fields;
    if !(open || held.is_empty() && bytes.is_empty()) {
        return Err(FormatError::EndedAnswer);
    }
    if held.len() > HELD {
        return Err(FormatError::Held { found: held.len(), most: HELD });
    }
    match unhex(&bytes).filter(|bytes| begins_a_character(bytes)) {
        Some(bytes) => Ok(Answer { open, held, bytes }),
        None => Err(FormatError::Bytes { found: shown(&bytes) }),
    }
}

/// Whether all of `bytes` are the beginning of one character that is still to end; so they are at most 3.
fn begins_a_character(bytes: &[u8]) -> bool {
    bytes.is_empty()
        || std::str::from_utf8(bytes).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_begins_with_the_bytes_that_begin_it() {
        for bytes in [&b""[..], b"\xc3", b"\xf0\x9f", b"\xf0\x9f\x8c"] {
            assert!(begins_a_character(bytes), "{bytes:x?}");
        }
        for bytes in [&b"a"[..], b"\xc3\xa9", b"\xff", b"\x80", b"a\xc3", b"\xed\xa0", b"\xf0\x9f\x8c\x8a"] {
            assert!(!begins_a_character(bytes), "{bytes:x?}");
        }
    }
}
