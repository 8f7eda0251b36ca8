//! Cryptography with the server's secret: signed snapshots, and sealed snapshots that clients keep.

use chacha20poly1305::aead::{AeadInOut, KeyInit};
use chacha20poly1305::{Tag, XChaCha20Poly1305, XNonce};
use hmac::{Hmac, Mac};
use rand::RngCore;
use sha2::Sha256;

/// Size of a signature in bytes.
pub(super) const SIGNATURE: usize = 32;

/// Bytes that sealing adds: the nonce in front and the tag at the end.
pub(super) const SEAL: usize = NONCE + TAG;

const NONCE: usize = 24;
const TAG: usize = 16;
/// Minimum size of a secret in bytes.
pub const MIN_SECRET: usize = 32;

/// The error for a secret that is too short.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the secret must have at least {MIN_SECRET} bytes, found {found}")]
pub struct KeyError {
    /// Size of the secret in bytes.
    pub found: usize,
}

/// Keys for signing and sealing, derived from one secret so that neither reveals anything about the other.
#[derive(Clone)]
pub struct Keys {
    signing: [u8; 32],
    sealing: [u8; 32],
}

impl Keys {
    /// Derives each key as HMAC-SHA256 of its label under `secret`.
    ///
    /// # Errors
    /// The secret is shorter than 32 bytes.
    pub fn new(secret: &[u8]) -> Result<Self, KeyError> {
        if secret.len() < MIN_SECRET {
            return Err(KeyError { found: secret.len() });
        }
        let key = |label: &[u8]| mac(secret).chain_update(label).finalize().into_bytes().into();
        Ok(Self { signing: key(b"tidegate snapshot signature 1"), sealing: key(b"tidegate sealed snapshot 1") })
    }

    pub(super) fn sign(&self, message: &[u8]) -> [u8; SIGNATURE] {
        mac(&self.signing).chain_update(message).finalize().into_bytes().into()
    }

    /// Returns whether `signature` belongs to `message`. Compares in constant time.
    pub(super) fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        mac(&self.signing).chain_update(message).verify_slice(signature).is_ok()
    }

    /// Encrypts `message` so that only [`Self::open`] with the same `context` can read it: nonce, ciphertext, tag.
    ///
    /// The nonce is random. With 24 bytes, two nonces are never equal in practice.
    pub(super) fn seal(&self, message: &[u8], context: &[u8]) -> Vec<u8> {
        let mut nonce = [0; NONCE];
        rand::rng().fill_bytes(&mut nonce);
        let mut sealed = Vec::with_capacity(message.len() + SEAL);
        sealed.extend_from_slice(&nonce);
        sealed.extend_from_slice(message);
        let tag = XChaCha20Poly1305::new(&self.sealing.into())
            .encrypt_inout_detached(&XNonce::from(nonce), context, (&mut sealed[NONCE..]).into())
            .expect("a message of less than 256 GiB can be encrypted");
        sealed.extend_from_slice(&tag);
        sealed
    }

    /// Decrypts a sealed message; `None` if any byte of it, the context or the secret differs. The tag is checked
    /// first.
    pub(super) fn open(&self, sealed: &[u8], context: &[u8]) -> Option<Vec<u8>> {
        let (nonce, rest) = sealed.split_first_chunk::<NONCE>()?;
        let (ciphertext, tag) = rest.split_last_chunk::<TAG>()?;
        let mut message = ciphertext.to_vec();
        XChaCha20Poly1305::new(&self.sealing.into())
            .decrypt_inout_detached(&XNonce::from(*nonce), context, message.as_mut_slice().into(), &Tag::from(*tag))
            .ok()?;
        Some(message)
    }
}

impl std::fmt::Debug for Keys {
    /// Keeps secrets out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys").finish_non_exhaustive()
    }
}

fn mac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes a key of any length")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_secrets_are_refused_and_debug_output_hides_the_keys() {
        assert_eq!(Keys::new(&[7; 31]).unwrap_err(), KeyError { found: 31 });
        let keys = Keys::new(&[7; 32]).unwrap();
        assert_ne!(keys.signing, keys.sealing);
        assert_eq!(format!("{keys:?}"), "Keys { .. }");
    }

    #[test]
    fn sealing_is_randomised_and_opens_only_in_its_context() {
        let keys = Keys::new(&[7; 32]).unwrap();
        let sealed = keys.seal(b"text", b"owner");
        assert_ne!(keys.seal(b"text", b"owner"), sealed);
        assert_eq!(sealed.len(), 4 + SEAL);
        assert_eq!(keys.open(&sealed, b"owner").as_deref(), Some(&b"text"[..]));
        assert_eq!(keys.open(&sealed, b"other"), None);
        assert_eq!(Keys::new(&[8; 32]).unwrap().open(&sealed, b"owner"), None);
        assert!((0..sealed.len()).all(|end| keys.open(&sealed[..end], b"owner").is_none()));
    }
}
