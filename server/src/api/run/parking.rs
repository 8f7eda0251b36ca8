//! Parking: a server that shuts down stores the state and the tokens of a turn, and another server continues the turn
//! after the text so far.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::api::error::ApiError;
use crate::engine::{Begun, Delta, TokenLogprobs};
use crate::session::{Snapshot, Store, StoreError, VersionId};

/// Most tokens and log probabilities of a turn that is parked. A longer text is computed again instead: the engine
/// replays the tokens all at once, and other texts wait for that.
const MOST: usize = 1 << 14;

/// A token's log probability, and the most likely tokens with theirs.
type Logprobs = (f32, Vec<(u32, f32)>);

/// A parked turn. The events so far follow from its tokens, and so does the position in the stream.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Parked {
    /// The object with the state after the text so far, and its size in bytes.
    object: String,
    bytes: u64,
    tokens: Vec<u32>,
    /// One entry for each token; empty if they were not requested.
    logprobs: Vec<Logprobs>,
}

/// The tokens of a turn that may be parked.
#[derive(Debug, Default)]
pub(super) struct TextSoFar {
    tokens: Vec<u32>,
    logprobs: Vec<Logprobs>,
    /// Number of tokens and log probabilities.
    size: usize,
}

impl TextSoFar {
    /// Adds a piece of the text.
    pub(super) fn add(&mut self, delta: &Delta) {
        self.size += delta.token_ids.len() + delta.logprobs.iter().map(|each| 1 + each.top.len()).sum::<usize>();
        if self.size > MOST {
            (self.tokens, self.logprobs) = (Vec::new(), Vec::new());
            return;
        }
        self.tokens.extend_from_slice(&delta.token_ids);
        self.logprobs.extend(delta.logprobs.iter().map(|each| (each.logprob, each.top.clone())));
    }

    /// Whether there is any text to park, and not too much.
    pub(super) fn can_be_parked(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// Parks the text, with `end`, the state after it.
    pub(super) async fn park(self, store: &Store, end: &Arc<Snapshot>) -> Result<Parked, StoreError> {
        let (object, bytes) = store.park(end).await?;
        let Self { tokens, logprobs, .. } = self;
        Ok(Parked { object: object.to_string(), bytes, tokens, logprobs })
    }
}

impl Parked {
    /// Loads the text so far; returns `None` if its state is gone, so that the text has to be computed again.
    pub(super) async fn load(&self, store: &Store) -> Result<Option<Begun>, ApiError> {
        let Some(id) = VersionId::parse(&self.object) else { return Ok(None) };
        let Some(end) = store.parked(&id, self.bytes).await? else { return Ok(None) };
        let logprobs = self.tokens.iter().zip(self.logprobs.iter().cloned());
        let logprobs = logprobs.map(|(token, (logprob, top))| TokenLogprobs { token: *token, logprob, top }).collect();
        Ok(Some(Begun { end, token_ids: self.tokens.clone(), logprobs }))
    }

    /// Removes the parked state, which is no longer needed.
    pub(super) async fn remove(&self, store: &Store) {
        if let Some(id) = VersionId::parse(&self.object) {
            store.remove_parked(&id).await;
        }
    }
}
