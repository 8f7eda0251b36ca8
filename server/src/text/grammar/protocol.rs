//! The protocol between the server and a helper process: frames of JSON or bytes, each preceded by its length as a
//! 4-byte little-endian number. The server first sends the vocabulary, and the helper replies with an empty answer.
//! After that, each grammar gets an answer.

use std::io::{Error, ErrorKind, Read, Result, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::text::vocabulary::Vocabulary;

/// Longest frame. A vocabulary of a million tokens is shorter.
const MAX_FRAME: usize = 64 << 20;

/// The lengths of all tokens (their bytes are the next frame), and the tokens that end a text.
#[derive(Serialize, Deserialize)]
struct Tokens {
    lengths: Vec<usize>,
    eos: Vec<u32>,
}

/// A helper's answer.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Answer {
    /// The bytes that the compiled grammar added to the process, or why it was refused.
    pub(super) compiled: std::result::Result<u64, String>,
    /// Whether compiling took so long that the helper lowered its priority.
    pub(super) long: bool,
    /// Whether the helper ends after this answer.
    pub(super) last: bool,
}

pub(super) fn write(mut to: impl Write, bytes: &[u8]) -> Result<()> {
    let length = u32::try_from(bytes.len()).map_err(|_| ErrorKind::InvalidInput)?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(bytes)?;
    to.flush()
}

pub(super) fn read(mut from: impl Read) -> Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_FRAME {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

pub(super) fn read_json<T: DeserializeOwned>(from: impl Read) -> Result<T> {
    serde_json::from_slice(&read(from)?).map_err(Error::from)
}

/// Returns the frames that the server sends first.
pub(super) fn vocabulary_frames(vocabulary: &Vocabulary, eos: &[u32]) -> Result<Vec<u8>> {
    let tokens = Tokens { lengths: vocabulary.tokens().map(<[u8]>::len).collect(), eos: eos.to_vec() };
    let mut frames = Vec::new();
    write(&mut frames, &serde_json::to_vec(&tokens)?)?;
    write(&mut frames, &vocabulary.tokens().collect::<Vec<_>>().concat())?;
    Ok(frames)
}

/// Reads the vocabulary and the end-of-text tokens that [`vocabulary_frames`] wrote.
pub(super) fn read_vocabulary(mut from: impl Read) -> Result<(Vocabulary, Vec<u32>)> {
    let Tokens { lengths, eos } = read_json(&mut from)?;
    let bytes = read(&mut from)?;
    let mut rest = bytes.as_slice();
    let mut tokens = Vec::with_capacity(lengths.len());
    for length in lengths {
        let (token, more) = rest.split_at_checked(length).ok_or(ErrorKind::InvalidData)?;
        tokens.push(token.into());
        rest = more;
    }
    Ok((Vocabulary::new(tokens), eos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_survives_and_a_long_frame_is_refused() {
        let vocabulary = Vocabulary::new(["", "a", "\u{ff}bc", ""].map(|token| token.as_bytes().into()).into());
        let frames = vocabulary_frames(&vocabulary, &[3]).unwrap();
        let (read, eos) = read_vocabulary(frames.as_slice()).unwrap();
        assert!(read.tokens().eq(vocabulary.tokens()));
        assert_eq!(eos, [3]);
        assert_eq!(super::read([0xff; 8].as_slice()).unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(super::read([9, 0, 0, 0, 1].as_slice()).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
