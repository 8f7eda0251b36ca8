//! Snapshots as files; `docs/snapshot-format.md` describes every byte.
//!
//! Files may come from anyone. A reader checks every claim before it allocates memory for the contents.

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::body::{self, Body};
use super::codec::Codec;
use super::conversation::{self, MAX_DESCRIPTION, MAX_TEXT};
use super::error::FormatError;
use super::header::{self, Header};
use crate::session::conversation::Conversation;
use crate::session::keys::{Keys, SEAL, SIGNATURE};
use crate::session::snapshot::{MAX_PENDING, Snapshot};
use crate::session::store::SnapshotCodec;

/// The first bytes of a file. The last two reveal transfers that change line endings.
const MAGIC: [u8; 8] = *b"TIDEGT\r\n";

/// The version of files with a snapshot alone: the store's objects, and sealed states.
const VERSION: u32 = 1;

/// The version of files that also hold the conversation; also the newest version that can be read.
const WITH_CONVERSATION: u32 = 2;

/// Bytes before the header: magic, version, length of the header, length of the body.
const PREFIX: usize = 24;

/// Further bytes before the header in a file with a conversation: lengths of the description and the text.
const FURTHER: usize = 16;

const DIGEST: usize = 32;

/// Maximum number of tokens or draws in an imported file: half of the largest number that a file may contain.
const MAX_IMPORTED: u64 = 1 << 52;

/// Maximum bytes that a conversation adds to a file.
const CONVERSATION: usize = FURTHER + MAX_DESCRIPTION + MAX_TEXT;

/// Maximum size of the header, under 64 KiB. A byte of held text takes up to 6 bytes of JSON, a pending token up to 11,
/// and the rest under 2 KiB.
const MAX_HEADER: usize = header::MAX_HELD_BYTES * 6 + MAX_PENDING * 11 + 2048;

impl Codec {
    /// Encodes a snapshot. The same snapshot, model and keys always give the same bytes.
    ///
    /// # Panics
    /// The state does not have the size of the model's layout, or is not empty although nothing was read.
    pub fn encode(&self, snapshot: &Snapshot) -> Vec<u8> {
        self.write(snapshot, None)
    }

    /// Like [`Self::encode`], but with the conversation. A text that is too long for a file is omitted.
    ///
    /// # Panics
    /// As [`Self::encode`].
    pub fn encode_conversation(&self, snapshot: &Snapshot, conversation: &Conversation) -> Vec<u8> {
        self.write(snapshot, Some(conversation))
    }

    fn write(&self, snapshot: &Snapshot, conversation: Option<&Conversation>) -> Vec<u8> {
        let numbers = if snapshot.read > 0 { self.layout.numbers() } else { 0 };
        assert_eq!(snapshot.state.len(), numbers, "the state has the size of the model's layout");
        let header = header::write(self, snapshot);
        let tensor_header = body::write_header(&self.layout, snapshot);
        let body = tensor_header.len() + numbers * size_of::<f32>() + snapshot.sampler.counts.len() * body::PAIR;
        let (description, text) = conversation.map(conversation::write).unwrap_or_default();

        let further = description.len() + text.len();
        let mut bytes = Vec::with_capacity(PREFIX + FURTHER + header.len() + body + further + DIGEST + SIGNATURE);
        bytes.extend_from_slice(&MAGIC);
        let version = if conversation.is_some() { WITH_CONVERSATION } else { VERSION };
        bytes.extend_from_slice(&version.to_le_bytes());
        bytes.extend_from_slice(&(header.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(body as u64).to_le_bytes());
        if conversation.is_some() {
            bytes.extend([description.len(), text.len()].into_iter().flat_map(|length| (length as u64).to_le_bytes()));
        }
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(&tensor_header);
        body::write_numbers(&self.layout, snapshot, &mut bytes);
        bytes.extend_from_slice(&description);
        bytes.extend_from_slice(&text);
        bytes.extend_from_slice(&Sha256::digest(&bytes));
        if let Some(keys) = &self.keys {
            bytes.extend_from_slice(&keys.sign(&bytes));
        }
        bytes
    }

    /// Decodes a file. Everything is checked before anything as large as the state is allocated.
    ///
    /// # Errors
    /// [`FormatError`] names the first rule that is broken.
    pub fn decode(&self, bytes: &[u8]) -> Result<Snapshot, FormatError> {
        let (mut snapshot, body) = self.read(&self.verified(bytes)?)?;
        (snapshot.state, snapshot.sampler.counts) = (body.state(), body.counts());
        Ok(snapshot)
    }

    fn verified<'a>(&self, bytes: &'a [u8]) -> Result<File<'a>, FormatError> {
        let file = File::split(bytes, self.max_encoded_bytes())?;
        file.verify(self.keys.as_ref())?;
        Ok(file)
    }

    /// Like [`Self::decode`], for a file from outside: also refuses counts so large that continuing could exceed the
    /// limit.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn import(&self, bytes: &[u8]) -> Result<(Snapshot, Conversation), FormatError> {
        let file = self.verified(bytes)?;
        let (mut snapshot, body) = self.read(&file)?;
        for (part, found) in [("read", snapshot.read), ("sampler draws", snapshot.sampler.draws)] {
            if found > MAX_IMPORTED {
                return Err(FormatError::Count { part, found, max: MAX_IMPORTED });
            }
        }
        let conversation = match file.conversation {
            Some(parts) => conversation::read(parts, self, &snapshot, body.source_tokens())?,
            None => Conversation::default(),
        };
        (snapshot.state, snapshot.sampler.counts) = (body.state(), body.counts());
        Ok((snapshot, conversation))
    }

    /// Reads the parts of a file and checks that they match the model.
    fn read<'a>(&self, file: &File<'a>) -> Result<(Snapshot, Body<'a>), FormatError> {
        let snapshot = Header::read(file.header)?.check(self, file.signature.is_some())?;
        let body = Body::read(file.body, self, snapshot.read)?;
        Ok((snapshot, body))
    }

    /// Returns the same codec without keys: it neither writes nor requires signatures.
    fn unsigned(&self) -> Self {
        Self { keys: None, ..self.clone() }
    }

    /// Returns an upper bound of the size of this model's files with a conversation.
    pub fn max_file_bytes(&self) -> usize {
        self.max_encoded_bytes() + CONVERSATION
    }

    /// Returns an upper bound of the size of this model's snapshot files: a little more than the state's bytes.
    pub fn max_encoded_bytes(&self) -> usize {
        let numbers = self.layout.numbers() * size_of::<f32>() + self.vocab_size * body::PAIR;
        PREFIX + MAX_HEADER + body::LENGTH + body::MAX_TENSOR_HEADER + numbers + DIGEST + SIGNATURE
    }

    /// Seals a snapshot, so that a client can keep it but neither read nor change it. It can only be opened with the
    /// same `context`, the owner's id.
    ///
    /// # Errors
    /// [`FormatError::NoKey`] if the server has no secret.
    pub fn seal(&self, snapshot: &Snapshot, context: &[u8]) -> Result<Vec<u8>, FormatError> {
        let keys = self.keys.as_ref().ok_or(FormatError::NoKey)?;
        Ok(keys.seal(&self.encode(snapshot), context))
    }

    /// Opens a snapshot that [`Self::seal`] made with the same keys and `context`.
    ///
    /// # Errors
    /// [`FormatError`] says why the data is refused. It does not distinguish changed data from data sealed by others.
    pub fn open(&self, blob: &[u8], context: &[u8]) -> Result<Snapshot, FormatError> {
        let keys = self.keys.as_ref().ok_or(FormatError::NoKey)?;
        let max = self.max_sealed_bytes();
        if blob.len() > max {
            return Err(FormatError::TooLong { found: blob.len(), max });
        }
        self.decode(&keys.open(blob, context).ok_or(FormatError::Sealed)?)
    }

    /// Returns an upper bound of the size of this model's sealed snapshots.
    pub fn max_sealed_bytes(&self) -> usize {
        self.max_encoded_bytes() + SEAL
    }
}

/// Checks that a file, of any model, is whole: its lengths and its digest.
pub(crate) fn check_digest(bytes: &[u8]) -> Result<(), FormatError> {
    File::split(bytes, usize::MAX)?.verify(None)
}

/// The store's own files are not signed, so that they stay readable when the secret changes. Exported files are signed.
impl SnapshotCodec for Codec {
    fn encode(&self, snapshot: &Snapshot) -> Vec<u8> {
        Self::encode(&self.unsigned(), snapshot)
    }

    fn decode(&self, bytes: &[u8]) -> Result<Snapshot, String> {
        Self::decode(&self.unsigned(), bytes).map_err(|error| error.to_string())
    }

    fn check(&self, bytes: &[u8]) -> Result<(), String> {
        let read = File::split(bytes, self.max_encoded_bytes()).and_then(|file| self.read(&file).map(drop));
        read.map_err(|error| error.to_string())
    }

    fn export(&self, stored: Bytes, conversation: &Conversation) -> Result<Bytes, String> {
        let snapshot = SnapshotCodec::decode(self, &stored)?;
        Ok(self.encode_conversation(&snapshot, conversation).into())
    }

    fn max_bytes(&self) -> usize {
        self.max_encoded_bytes()
    }
}

/// The parts of a file, whose lengths add up to the file's length.
struct File<'a> {
    header: &'a [u8],
    body: &'a [u8],
    /// The description and the text.
    conversation: Option<(&'a [u8], &'a [u8])>,
    /// Everything that the digest covers.
    digested: &'a [u8],
    digest: &'a [u8],
    /// Everything that the signature covers.
    signed: &'a [u8],
    signature: Option<&'a [u8]>,
}

impl<'a> File<'a> {
    fn split(bytes: &'a [u8], max: usize) -> Result<Self, FormatError> {
        let found = bytes.len();
        let min = PREFIX + DIGEST;
        let (prefix, rest) =
            bytes.split_first_chunk::<PREFIX>().filter(|_| found >= min).ok_or(FormatError::TooShort { found, min })?;
        let [m @ .., v0, v1, v2, v3, h0, h1, h2, h3, b0, b1, b2, b3, b4, b5, b6, b7] = *prefix;
        if m != MAGIC {
            return Err(FormatError::Magic);
        }
        // Check the version before the length, because later versions may have longer files.
        let version = u32::from_le_bytes([v0, v1, v2, v3]);
        let has_conversation = version == WITH_CONVERSATION;
        if version != VERSION && !has_conversation {
            return Err(FormatError::Version { found: version, max: WITH_CONVERSATION });
        }
        let max = if has_conversation { max.saturating_add(CONVERSATION) } else { max };
        if found > max {
            return Err(FormatError::TooLong { found, max });
        }
        let header = u32::from_le_bytes([h0, h1, h2, h3]);
        if header as usize > MAX_HEADER {
            return Err(FormatError::HeaderLength { found: header.into(), max: MAX_HEADER });
        }
        let body = u64::from_le_bytes([b0, b1, b2, b3, b4, b5, b6, b7]);
        let (lengths, rest) = if has_conversation { lengths(rest, found)? } else { (None, rest) };
        let (description, text) = lengths.unwrap_or_default();
        let prefix = PREFIX + if has_conversation { FURTHER } else { 0 };
        let expected =
            [(prefix + DIGEST) as u64, header.into(), description, text].iter().sum::<u64>().saturating_add(body);
        if found as u64 != expected && found as u64 != expected.saturating_add(SIGNATURE as u64) {
            return Err(FormatError::Length { found, expected });
        }
        // The splits below cannot fail, because the lengths add up.
        let expected = expected as usize;
        let (header, rest) = rest.split_at(header as usize);
        let (body, rest) = rest.split_at(body as usize);
        let (description, rest) = rest.split_at(description as usize);
        let (digested, digest) = bytes[..expected].split_at(expected - DIGEST);
        Ok(Self {
            header,
            body,
            conversation: lengths.map(|_| (description, &rest[..text as usize])),
            digested,
            digest,
            signed: &bytes[..expected],
            signature: (found > expected).then(|| &bytes[expected..]),
        })
    }

    /// Checks the digest and the signature, before anything else is read.
    fn verify(&self, keys: Option<&Keys>) -> Result<(), FormatError> {
        if Sha256::digest(self.digested)[..] != *self.digest {
            return Err(FormatError::Digest);
        }
        let Some(keys) = keys else { return Ok(()) };
        let signature = self.signature.ok_or(FormatError::SignatureMissing)?;
        if !keys.verify(self.signed, signature) {
            return Err(FormatError::SignatureWrong);
        }
        Ok(())
    }
}

/// The lengths of a file's description and text.
type Lengths = Option<(u64, u64)>;

/// Reads the lengths of the description and the text, and checks that each is within its limit.
fn lengths(rest: &[u8], found: usize) -> Result<(Lengths, &[u8]), FormatError> {
    let short = FormatError::TooShort { found, min: PREFIX + FURTHER + DIGEST };
    let (lengths, rest) = rest.split_first_chunk::<FURTHER>().ok_or(short)?;
    let [description, text] =
        [&lengths[..8], &lengths[8..]].map(|bytes| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)));
    if description > MAX_DESCRIPTION as u64 || text > MAX_TEXT as u64 {
        let max = format!("{MAX_DESCRIPTION} and {MAX_TEXT}");
        return Err(FormatError::Lengths { description, text, max });
    }
    Ok((Some((description, text)), rest))
}
