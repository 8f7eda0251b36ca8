//! The server's secret at work: signatures under snapshots, and sealed boxes that clients keep for the server.

use chacha20poly1305::aead::{AeadInOut, KeyInit};
use chacha20poly1305::{Tag, XChaCha20Poly1305, XNonce};
use hmac::{Hmac, Mac};
use rand::RngCore;
use sha2::Sha256;

/// Bytes of a signature.
pub(super) const SIGNATURE: usize = 32;

/// Bytes that a sealed box takes more than what is in it: the nonce in front, the tag behind.
pub(super) const SEAL: usize = NONCE + TAG;

const NONCE: usize = 24;
const TAG: usize = 16;
const LEAST_SECRET: usize = 32;

/// Why a secret was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the secret must have at least {LEAST_SECRET} bytes, found {found}")]
pub struct KeyError {
    /// Bytes of the secret.
    pub found: usize,
}

/// Keys for signing and sealing, made from one secret so that neither tells anything of the other.
#[derive(Clone)]
pub struct Keys {
    signing: [u8; 32],
    sealing: [u8; 32],
}

impl Keys {
    /// The keys of `secret`: for each use HMAC-SHA256 of its label, so one secret serves all uses.
    ///
    /// # Errors
    /// The secret is shorter than 32 bytes.
    pub fn new(secret: &[u8]) -> Result<Self, KeyError> {
        if secret.len() < LEAST_SECRET {
            return Err(KeyError { found: secret.len() });
        }
        let key = |label: &[u8]| mac(secret).chain_update(label).finalize().into_bytes().into();
        Ok(Self { signing: key(b"tidegate snapshot signature 1"), sealing: key(b"tidegate sealed snapshot 1") })
    }

    pub(super) fn sign(&self, message: &[u8]) -> [u8; SIGNATURE] {
        mac(&self.signing).chain_update(message).finalize().into_bytes().into()
    }

    /// Whether `signature` is the one of `message`; takes as long whichever byte is wrong.
    pub(super) fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        mac(&self.signing).chain_update(message).verify_slice(signature).is_ok()
    }

    /// A box that only [`Self::open`] with the same `context` opens: nonce, then ciphertext, then tag.
    ///
    /// The nonce is random; 24 bytes are so many that no two are ever the same.
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

    /// What is in a box; none where a byte of it, the context or the secret is another. The tag is checked first.
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
    /// Nothing of a secret gets into a log.
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
    fn a_secret_is_long_enough_and_tells_nothing() {
        assert_eq!(Keys::new(&[7; 31]).unwrap_err(), KeyError { found: 31 });
        let keys = Keys::new(&[7; 32]).unwrap();
        assert_ne!(keys.signing, keys.sealing);
        assert_eq!(format!("{keys:?}"), "Keys { .. }");
    }

    #[test]
    fn a_box_never_looks_the_same_and_opens_in_its_own_context_alone() {
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
