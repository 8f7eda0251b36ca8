//! Chooses which texts of a turn are kept: one becomes the session's new version, and the others become forks or are
//! dropped.

use std::sync::Arc;

use super::encoder::{ForkInfo, SessionInfo};
use super::turn_info::TurnInfo;
use crate::api::error::ApiError;
use crate::api::request::continuation::Keep;
use crate::engine::{Finish, FinishReason};
use crate::session::{AddedText, SessionId, Snapshot, TurnFork, TurnNote, VersionId};

/// A text that has ended.
pub(super) struct Ended {
    pub(super) index: usize,
    pub(super) finish: Finish,
    /// What the text adds to the stored text of the conversation, if that is kept.
    pub(super) text: Option<AddedText>,
}

/// A text that becomes a fork.
struct Forked {
    text: Ended,
    id: SessionId,
    version: VersionId,
}

/// What is kept of a turn.
pub(super) struct Chosen {
    /// The text that becomes the session's new version.
    text: Ended,
    forks: Vec<Forked>,
}

impl Ended {
    /// Whether the text is likelier than `other`. Of two equally likely texts, the one with the lower index is better.
    fn is_better(&self, other: &Self) -> bool {
        // A text without tokens is the last choice.
        let score = |text: &Self| text.finish.mean_logprob().unwrap_or(f64::NEG_INFINITY);
        score(other).total_cmp(&score(self)).then(self.index.cmp(&other.index)).is_lt()
    }

    /// Returns the text's state, and what its version records.
    fn into_version(self, label: Option<String>) -> Result<(Arc<Snapshot>, TurnNote), ApiError> {
        let Finish { reason, prompt_tokens, completion_tokens, snapshot, .. } = self.finish;
        let note = TurnNote {
            label,
            prompt_tokens: prompt_tokens as u64,
            completion_tokens: completion_tokens as u64,
            kind: if reason == FinishReason::Interrupted { "interrupted" } else { "turn" }.into(),
            text: self.text,
        };
        Ok((snapshot.ok_or_else(ApiError::internal)?, note))
    }
}

/// The texts of a turn that have ended and may be kept.
pub(super) struct EndedTexts {
    keep: Option<Keep>,
    texts: Vec<Ended>,
}

impl EndedTexts {
    /// Creates an empty collection. Without `keep`, there is one text, which is kept.
    pub(super) fn new(keep: Option<Keep>) -> Self {
        Self { keep, texts: Vec::new() }
    }

    /// Adds a text. If only one text is kept, the states of the others are released at once.
    pub(super) fn add(&mut self, text: Ended) {
        match (self.keep, self.texts.first_mut()) {
            (Some(Keep::Nothing), _) => {}
            (Some(Keep::All), _) | (_, None) => self.texts.push(text),
            (_, Some(best)) if text.is_better(best) => *best = text,
            (_, Some(_)) => {}
        }
    }

    /// Chooses what is kept, once all texts have ended. Also returns what the response says about the session. Nothing
    /// is kept of a text that was interrupted before it had a slot in the engine.
    pub(super) fn choose(
        &mut self,
        turn: TurnInfo<'_>,
        version: &VersionId,
        state_bytes: u64,
    ) -> Result<(Option<Chosen>, SessionInfo), ApiError> {
        if self.keep == Some(Keep::Nothing) {
            return Ok((None, turn.session(turn.head(), turn.snapshot(), state_bytes)));
        }
        let mut texts = std::mem::take(&mut self.texts);
        texts.sort_by_key(|text| text.index);
        let best = (1..texts.len()).fold(0, |best, at| if texts[at].is_better(&texts[best]) { at } else { best });
        if texts.is_empty() {
            return Err(ApiError::internal());
        }
        let text = texts.remove(best);
        let forked = |text| Forked { text, id: SessionId::new(), version: VersionId::new() };
        let forks: Vec<Forked> = texts.into_iter().map(forked).collect();
        let Some(snapshot) = &text.finish.snapshot else {
            return Ok((None, turn.session(turn.head(), turn.snapshot(), state_bytes)));
        };
        let fork_info = |fork: &Forked| {
            let Forked { text, id, version } = fork;
            ForkInfo { index: text.index, id: id.to_string(), version: version.to_string() }
        };
        let info = SessionInfo {
            chosen: self.keep.map(|_| text.index),
            forks: (self.keep == Some(Keep::All)).then(|| forks.iter().map(fork_info).collect()),
            ..turn.session(version, snapshot, state_bytes)
        };
        Ok((Some(Chosen { text, forks }), info))
    }
}

impl Chosen {
    /// Returns the state of the new version, what the version records, and the forks.
    pub(super) fn into_parts(
        self,
        label: Option<String>,
    ) -> Result<(Arc<Snapshot>, TurnNote, Vec<TurnFork>), ApiError> {
        let fork = |Forked { text, id, version }: Forked| {
            let (snapshot, note) = text.into_version(None)?;
            Ok(TurnFork { id, version, snapshot, note })
        };
        let forks = self.forks.into_iter().map(fork).collect::<Result<_, ApiError>>()?;
        let (snapshot, note) = self.text.into_version(label)?;
        Ok((snapshot, note, forks))
    }
}
