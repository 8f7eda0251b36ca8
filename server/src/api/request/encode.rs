//! Encodes a text from a client, within the server's limits and in turn with other clients.

use super::blocking;
use crate::api::error::ApiError;
use crate::api::state::Served;
use crate::text::{Around, Pace, TextError};

/// Encodes `text`, which the parameter `param` gave, into token ids. Call it on a thread for blocking work.
pub(in crate::api) fn encode(text: &str, around: Around, param: &str, served: &Served) -> Result<Vec<u32>, ApiError> {
    encode_up_to(served.limits.longest_prompt(), text, around, param, served)
}

/// Like [`encode`], with another limit in tokens. The result may exceed the limit, but text far beyond it is not read.
pub(in crate::api) fn encode_up_to(
    most: usize,
    text: &str,
    around: Around,
    param: &str,
    served: &Served,
) -> Result<Vec<u32>, ApiError> {
    let ids = served.tokenizer.encode_within(text, around, &mut Pace { most, pause: &mut blocking::pause });
    ids.map_err(|error| {
        if let TextError::Tokens { read, .. } = error {
            blocking::charge(read);
        }
        let colon = if matches!(error, TextError::Encode(_)) { ":" } else { "" };
        let message = format!("{param}{colon} {error}");
        match error {
            TextError::Tokens { .. } | TextError::Bytes { .. } => ApiError::too_long(param, message),
            _ => ApiError::invalid(Some(param), message),
        }
    })
}
