//! What the response to a turn says about its session, and what the metrics count.

use super::encoder::SessionInfo;
use crate::session::{Snapshot, Tier, Turn, VersionId};

/// How much of the text before a turn its request used.
#[derive(Clone, Copy)]
pub(super) struct TurnInfo<'a> {
    pub(super) turn: &'a Turn,
    /// Whether it starts from the state before it. A new source replaces that, and so does a slot's prompt that does not begin
    /// with its text.
    pub(super) continues: bool,
}

impl TurnInfo<'_> {
    fn restores(self) -> bool {
        self.turn.head().read > 0 && self.continues
    }

    /// Tokens before the turn that are computed again. The last pending token is in no state yet; the others were kept
    /// pending in case a stop string removes them.
    pub(super) fn recomputes(self) -> u64 {
        if self.continues { self.turn.head().pending.len().saturating_sub(1) as u64 } else { 0 }
    }

    /// Where the state came from.
    pub(super) fn source(self) -> &'static str {
        if self.restores() { self.tier() } else { "new" }
    }

    fn tier(self) -> &'static str {
        match self.turn.tier() {
            Tier::Memory => "memory",
            Tier::Disk => "disk",
        }
    }

    /// The version that the turn continues.
    pub(super) fn head(&self) -> &VersionId {
        &self.turn.session().head.id
    }

    /// The snapshot of that.
    pub(super) fn snapshot(&self) -> &Snapshot {
        self.turn.head()
    }

    /// The session once `snapshot` is its `version`.
    pub(super) fn session(self, version: &VersionId, snapshot: &Snapshot, state_bytes: u64) -> SessionInfo {
        SessionInfo {
            id: self.turn.session().id.to_string(),
            version: version.to_string(),
            parent: self.turn.session().head.id.to_string(),
            restored: self.restores(),
            tier: self.tier(),
            recomputed_tokens: self.recomputes(),
            tokens: snapshot.tokens(),
            state_bytes,
            held_text: snapshot.answer.as_ref().map_or_else(String::new, |answer| answer.held.clone()),
            chosen: None,
            forks: None,
        }
    }
}
