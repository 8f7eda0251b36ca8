//! What the response to a turn says about its session, and what the metrics count.

use super::encoder::SessionInfo;
use crate::session::{Snapshot, Tier, Turn, VersionId};

/// A turn, and whether it continues the text before it.
#[derive(Clone, Copy)]
pub(super) struct TurnInfo<'a> {
    pub(super) turn: &'a Turn,
    /// Whether the turn starts from the state before it. It does not if a new source replaces that state, or if a
    /// slot's prompt does not begin with the state's text.
    pub(super) continues: bool,
}

impl TurnInfo<'_> {
    fn restores(self) -> bool {
        self.turn.head().read > 0 && self.continues
    }

    /// Returns the number of earlier tokens that are computed again. The last pending token is in no state yet; the
    /// others were kept pending in case a stop string removes them.
    pub(super) fn recomputes(self) -> u64 {
        if self.continues { self.turn.head().pending.len().saturating_sub(1) as u64 } else { 0 }
    }

    /// Returns where the state came from.
    pub(super) fn source(self) -> &'static str {
        if self.restores() { self.tier() } else { "new" }
    }

    fn tier(self) -> &'static str {
        match self.turn.tier() {
            Tier::Memory => "memory",
            Tier::Disk => "disk",
        }
    }

    /// Returns the version that the turn continues.
    pub(super) fn head(&self) -> &VersionId {
        &self.turn.session().head.id
    }

    /// Returns the snapshot of the version that the turn continues.
    pub(super) fn snapshot(&self) -> &Snapshot {
        self.turn.head()
    }

    /// Describes the session once `snapshot` is its `version`.
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
