//! A prompt that several requests have: one of them reads it, the others begin where it has come to.

use std::sync::{Arc, OnceLock};

use super::request::Request;
use super::scores::PromptScores;
use crate::session::Snapshot;

/// What requests with the same prompt have in common. Whoever still needs it holds it.
#[derive(Debug, Default)]
pub(super) struct SharedPrompt {
    read: OnceLock<ReadPrompt>,
}

/// A prompt that has been read, but for its last token.
#[derive(Debug)]
pub(super) struct ReadPrompt {
    pub(super) end: Arc<Snapshot>,
    /// What its tokens were scored with, where they were.
    pub(super) scores: Option<PromptScores>,
}

impl SharedPrompt {
    /// The prompt, once one of the requests has read it.
    pub(super) fn read(&self) -> Option<&ReadPrompt> {
        self.read.get()
    }

    /// Hands the prompt to those who have not read it; the first time counts.
    pub(super) fn hand_over(&self, read: ReadPrompt) {
        self.read.get_or_init(|| read);
    }

    /// Whether anyone beside its holder needs it.
    pub(super) fn has_others(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1
    }
}

/// Marks requests that have the same prompt and start, so that it is computed once. Their texts are what they would be
/// without.
pub fn share_prompt(requests: &mut [Request]) {
    for at in 1..requests.len() {
        let (before, rest) = requests.split_at_mut(at);
        let same = before.iter_mut().find(|other| other.begins_as(&rest[0]));
        rest[0].shared = same.map(|other| Arc::clone(other.shared.get_or_insert_default()));
    }
}
