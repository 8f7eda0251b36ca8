//! What distinguishes the responses to two identical requests: their ids and their times.

use std::time::{SystemTime, UNIX_EPOCH};

use rand::Rng;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::session::hex;

/// What is random in the events of a response, and what depends on the time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::api) struct Identity {
    /// The response's id, without the format's prefix.
    pub(in crate::api) id: String,
    /// When the response began, in seconds since 1970.
    pub(in crate::api) created: u64,
    /// Whether the response states how long its texts took.
    #[serde(skip)]
    pub(in crate::api) timed: bool,
}

impl Identity {
    /// Creates the identity of a new response.
    pub(in crate::api) fn new() -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { id: format!("{:032x}", rand::rng().random::<u128>()), created, timed: true }
    }

    /// Returns the id of a call in the text `index`, without the format's prefix.
    pub(in crate::api) fn call(&self, index: usize, call: usize) -> String {
        hex(&Sha256::digest(format!("{} {index} {call}", self.id))[..16])
    }
}
