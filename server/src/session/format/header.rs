//! The header of a snapshot file: JSON with everything except the tensors.

use std::num::NonZeroUsize;

use serde::{Deserialize, Deserializer, Serialize};
use tidegate_model::{SamplerState, StateLayout};

use super::codec::{Codec, Fingerprint};
use super::error::FormatError;
use super::error::shown;
use crate::session::hex::{hex, unhex};
use crate::session::snapshot::{Answer, History, MAX_PENDING, Recent, Snapshot};

/// The value of `signed` in a signed file.
const SIGNED: &str = "hmac-sha256";

const DTYPE: &str = "f32";

/// Maximum number of tokens or draws. Every language represents JSON numbers up to here exactly, and adding one token
/// never overflows.
const MAX_COUNT: u64 = 1 << 53;

/// Maximum length of held-back text in bytes: the longest stop string of the format, whatever a server allows.
pub(super) const MAX_HELD_BYTES: usize = 1024;

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
    // This attribute makes the key mandatory, here and below: by default, a missing key would count as null.
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
    /// Only present for models that read a source, so that the files of other models stay unchanged.
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

/// Returns the header of `snapshot`, padded with spaces to a multiple of 8 bytes so that the body is aligned.
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

    /// Returns the snapshot without its tensors, after checking that the header matches the model.
    pub(super) fn check(self, codec: &Codec, signed: bool) -> Result<Snapshot, FormatError> {
        self.check_model(codec)?;
        if self.signed.as_deref() != signed.then_some(SIGNED) {
            let header = shown(self.signed.as_deref().unwrap_or("null"));
            return Err(FormatError::Signed { header, end: if signed { "with" } else { "without" } });
        }
        for (part, found) in [("read", self.read), ("sampler draws", self.sampler.draws)] {
            if found > MAX_COUNT {
                return Err(FormatError::Count { part, found, max: MAX_COUNT });
            }
        }
        if self.pending.len() > MAX_PENDING {
            return Err(FormatError::PendingLength { found: self.pending.len(), max: MAX_PENDING });
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
            recent: Recent::default(),
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

/// Deserializes a non-zero number. Refuses null and zero, although both could mean absence.
fn given<'de, D: Deserializer<'de>>(from: D) -> Result<Option<NonZeroUsize>, D::Error> {
    NonZeroUsize::deserialize(from).map(Some)
}

fn history(text: &str, read: u64) -> Result<History, FormatError> {
    let refused = |expected| FormatError::History { found: shown(text), expected };
    let digest = unhex(text).and_then(|bytes| bytes.try_into().ok());
    let history = History(digest.ok_or_else(|| refused("64 hexadecimal digits"))?);
    if read == 0 && history != History::default() {
        return Err(refused("zeros if no token is read"));
    }
    Ok(history)
}

fn checked_answer(fields: AnswerFields) -> Result<Answer, FormatError> {
    let AnswerFields { open, held, bytes } = fields;
    if !(open || held.is_empty() && bytes.is_empty()) {
        return Err(FormatError::EndedAnswer);
    }
    if held.len() > MAX_HELD_BYTES {
        return Err(FormatError::HeldLength { found: held.len(), max: MAX_HELD_BYTES });
    }
    match unhex(&bytes).filter(|bytes| begins_a_character(bytes)) {
        Some(bytes) => Ok(Answer { open, held, bytes }),
        None => Err(FormatError::Bytes { found: shown(&bytes) }),
    }
}

/// Returns whether `bytes` are the beginning of a single incomplete character; if so, they are at most 3.
fn begins_a_character(bytes: &[u8]) -> bool {
    bytes.is_empty()
        || std::str::from_utf8(bytes).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_beginning_of_one_character_is_accepted() {
        for bytes in [&b""[..], b"\xc3", b"\xf0\x9f", b"\xf0\x9f\x8c"] {
            assert!(begins_a_character(bytes), "{bytes:x?}");
        }
        for bytes in [&b"a"[..], b"\xc3\xa9", b"\xff", b"\x80", b"a\xc3", b"\xed\xa0", b"\xf0\x9f\x8c\x8a"] {
            assert!(!begins_a_character(bytes), "{bytes:x?}");
        }
    }
}
