//! A snapshot as the bytes of one file, and back; `docs/snapshot-format.md` describes them one by one.
//!
//! Files come from anywhere. A reader checks all that they claim before it takes memory for what they hold.

mod body;
mod error;
mod header;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tidegate_model::StateLayout;

pub use super::keys::{KeyError, Keys};
use super::keys::{SEAL, SIGNATURE};
use super::snapshot::{MAX_PENDING, Snapshot};
use super::store::SnapshotCodec;
use body::Body;
pub use error::FormatError;
use header::Header;

/// The first bytes of a file. The last two show a transfer that changed line ends.
const MAGIC: [u8; 8] = *b"TIDEGT\r\n";

/// The version that is written, and the last that is read.
const VERSION: u32 = 1;

/// Bytes before the header: magic, version, length of the header, length of the body.
const PREFIX: usize = 24;

const DIGEST: usize = 32;

/// The most that tokens and draws of a file from outside may be: half of what they may become.
const MOST_IMPORTED: u64 = 1 << 52;

/// Bytes of the longest header, under 64 KiB: a byte of the text held back takes up to 6 in JSON, a pending token up to
/// 11, all else under 2 KiB.
const HEADER: usize = header::HELD * 6 + MAX_PENDING * 11 + 2048;

/// What a snapshot must fit: a state means nothing to a model that did not make it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// SHA-256 of the checkpoint's `config.json`, 64 hexadecimal digits; so are the others.
    pub architecture: String,
    /// That of its `model.safetensors` or `model.gguf`, whichever is loaded.
    pub weights: String,
    /// That of its `tokenizer.json`.
    pub tokenizer: String,
}

/// Writes and reads the snapshots of one model.
#[derive(Clone, Debug)]
pub struct Codec {
    /// The model.
    pub fingerprint: Fingerprint,
    /// The sizes of its state.
    pub layout: StateLayout,
    /// The size of its vocabulary.
    pub vocab_size: usize,
    /// What no maximum of a head's keys is above: (layers, heads), or empty where heads remember none.
    pub greatest: Vec<f32>,
    /// Tokens of the longest source; 0 where the model reads none.
    pub sources: usize,
    /// Where they are set, files are signed and only signed ones are read.
    pub keys: Option<Keys>,
}

impl Codec {
    /// The bytes of `snapshot`: always the same for the same snapshot, model and keys.
    ///
    /// # Panics
    /// The state does not have the numbers of the model's layout, or has numbers where nothing was read.
    pub fn encode(&self, snapshot: &Snapshot) -> Vec<u8> {
        let numbers = if snapshot.read > 0 { self.layout.numbers() } else { 0 };
        assert_eq!(snapshot.state.len(), numbers, "a snapshot's state has the numbers of its model");
        let header = header::write(self, snapshot);
        let tensor_header = body::write_header(&self.layout, snapshot);
        let body = tensor_header.len() + numbers * size_of::<f32>() + snapshot.sampler.counts.len() * body::PAIR;

        let mut bytes = Vec::with_capacity(PREFIX + header.len() + body + DIGEST + SIGNATURE);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(header.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(body as u64).to_le_bytes());
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(&tensor_header);
        body::write_numbers(&self.layout, snapshot, &mut bytes);
        bytes.extend_from_slice(&Sha256::digest(&bytes));
        if let Some(keys) = &self.keys {
            bytes.extend_from_slice(&keys.sign(&bytes));
        }
        bytes
    }

    /// The snapshot that `bytes` hold. All is checked before anything as large as the state is allocated.
    ///
    /// # Errors
    /// [`FormatError`] names the first rule that is broken.
    pub fn decode(&self, bytes: &[u8]) -> Result<Snapshot, FormatError> {
        let file = File::split(bytes, self.encoded_bytes())?;
        file.verify(self.keys.as_ref())?;
        let (mut snapshot, body) = self.read(&file)?;
        snapshot.state = body.state();
        snapshot.sampler.counts = body.counts();
        Ok(snapshot)
    }

    /// As [`Self::decode`], for a file from outside: what is so close to the most that can be counted that going on
    /// from it would pass that is refused as well.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn import(&self, bytes: &[u8]) -> Result<Snapshot, FormatError> {
        let snapshot = self.decode(bytes)?;
        for (part, found) in [("read", snapshot.read), ("sampler draws", snapshot.sampler.draws)] {
            if found > MOST_IMPORTED {
                return Err(FormatError::Count { part, found, most: MOST_IMPORTED });
            }
        }
        Ok(snapshot)
    }

    /// What the parts of a file say, once all of it fits the model.
    fn read<'a>(&self, file: &File<'a>) -> Result<(Snapshot, Body<'a>), FormatError> {
        let snapshot = Header::read(file.header)?.check(self, file.signature.is_some())?;
        let body = Body::read(file.body, self, snapshot.read)?;
        Ok((snapshot, body))
    }

    /// The same without keys: it writes no signature and asks for none.
    fn unsigned(&self) -> Self {
        Self { keys: None, ..self.clone() }
    }

    /// An upper bound of the bytes of any snapshot of this model: the state's, and a little.
    pub fn encoded_bytes(&self) -> usize {
        let numbers = self.layout.numbers() * size_of::<f32>() + self.vocab_size * body::PAIR;
        PREFIX + HEADER + body::LENGTH + body::TENSOR_HEADER + numbers + DIGEST + SIGNATURE
    }

    /// `snapshot` as a box that a client can keep and neither read nor change. `context`, the owner's bytes, is bound
    /// in: for another owner it does not open.
    ///
    /// # Errors
    /// [`FormatError::NoKey`] where the server has no secret.
    pub fn seal(&self, snapshot: &Snapshot, context: &[u8]) -> Result<Vec<u8>, FormatError> {
        let keys = self.keys.as_ref().ok_or(FormatError::NoKey)?;
        Ok(keys.seal(&self.encode(snapshot), context))
    }

    /// The snapshot in a box that [`Self::seal`] made with the same keys and `context`.
    ///
    /// # Errors
    /// [`FormatError`] says why it is refused; all changed and all foreign boxes look alike.
    pub fn open(&self, blob: &[u8], context: &[u8]) -> Result<Snapshot, FormatError> {
        let keys = self.keys.as_ref().ok_or(FormatError::NoKey)?;
        let most = self.sealed_bytes();
        if blob.len() > most {
            return Err(FormatError::TooLong { found: blob.len(), most });
        }
        self.decode(&keys.open(blob, context).ok_or(FormatError::Sealed)?)
    }

    /// An upper bound of the bytes of any sealed snapshot of this model.
    pub fn sealed_bytes(&self) -> usize {
        self.encoded_bytes() + SEAL
    }
}

/// What a store keeps is its own, and outlives a secret: it is neither signed nor asked for a signature. What leaves it
/// is signed.
impl SnapshotCodec for Codec {
    fn encode(&self, snapshot: &Snapshot) -> Vec<u8> {
        Self::encode(&self.unsigned(), snapshot)
    }

    fn decode(&self, bytes: &[u8]) -> Result<Snapshot, String> {
        Self::decode(&self.unsigned(), bytes).map_err(|error| error.to_string())
    }

    fn check(&self, bytes: &[u8]) -> Result<(), String> {
        let read = File::split(bytes, self.encoded_bytes()).and_then(|file| self.read(&file).map(drop));
        read.map_err(|error| error.to_string())
    }

    fn export(&self, stored: Bytes) -> Result<Bytes, String> {
        let snapshot = SnapshotCodec::decode(self, &stored)?;
        Ok(Self::encode(self, &snapshot).into())
    }

    fn most_bytes(&self) -> usize {
        self.encoded_bytes()
    }
}

/// The parts of a file whose lengths lead exactly to its end.
struct File<'a> {
    header: &'a [u8],
    body: &'a [u8],
    /// All that the digest is of.
    digested: &'a [u8],
    digest: &'a [u8],
    /// All that the signature is of.
    signed: &'a [u8],
    signature: Option<&'a [u8]>,
}

impl<'a> File<'a> {
    fn split(bytes: &'a [u8], most: usize) -> Result<Self, FormatError> {
        let found = bytes.len();
        let least = PREFIX + DIGEST;
        let (prefix, rest) = bytes
            .split_first_chunk::<PREFIX>()
            .filter(|_| found >= least)
            .ok_or(FormatError::TooShort { found, least })?;
        let [m @ .., v0, v1, v2, v3, h0, h1, h2, h3, b0, b1, b2, b3, b4, b5, b6, b7] = *prefix;
        if m != MAGIC {
            return Err(FormatError::Magic);
        }
        // A later version may be longer: it is told from a damaged file first.
        let version = u32::from_le_bytes([v0, v1, v2, v3]);
        if version != VERSION {
            return Err(FormatError::Version { found: version, most: VERSION });
        }
        if found > most {
            return Err(FormatError::TooLong { found, most });
        }
        let header = u32::from_le_bytes([h0, h1, h2, h3]);
        if header as usize > HEADER {
            return Err(FormatError::HeaderLength { found: header.into(), most: HEADER });
        }
        let body = u64::from_le_bytes([b0, b1, b2, b3, b4, b5, b6, b7]);
        let expected = ((PREFIX + DIGEST) as u64 + u64::from(header)).saturating_add(body);
        if found as u64 != expected && found as u64 != expected.saturating_add(SIGNATURE as u64) {
            return Err(FormatError::Length { found, expected });
        }
        // Neither cut can miss now: the file is as long as its parts.
        let expected = expected as usize;
        let (header, rest) = rest.split_at(header as usize);
        let (digested, digest) = bytes[..expected].split_at(expected - DIGEST);
        Ok(Self {
            header,
            body: &rest[..body as usize],
            digested,
            digest,
            signed: &bytes[..expected],
            signature: (found > expected).then(|| &bytes[expected..]),
        })
    }

    /// Nothing is made of the bytes before they are known to be those that were written, and by whom.
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
