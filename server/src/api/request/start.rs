//! Chooses what a text starts from (the conversation before it, or a state in the prefix cache), and which states it
//! adds to the cache.

use std::sync::Arc;

use super::continuation::{CommitPlan, Continuation};
use crate::api::state::Served;
use crate::engine::{Keeper, Start, TakeSnapshots};
use crate::session::{Owner, PrefixIndex, Snapshot, Turn};

/// What an engine request for a text gets besides its parameters.
pub(in crate::api) struct TextStart {
    pub(in crate::api) start: Start,
    /// Whether the state at the end of the text is needed.
    pub(in crate::api) snapshot: bool,
    /// Takes the text's states into the prefix cache; `None` if none go there.
    pub(in crate::api) keeper: Option<Keeper>,
}

impl TextStart {
    /// Returns the start of `texts` texts with this prompt. `only_read` says that they only read the prompt and
    /// generate nothing.
    pub(super) fn new(
        continuation: &Continuation,
        served: &Served,
        prompt: &[u32],
        (texts, only_read): (usize, bool),
    ) -> Self {
        let plan = continuation.plan();
        // A request that only reads has no result but its end state.
        let end = plan.needs_ends(texts) || only_read;
        let snapshot = end && !matches!(plan, CommitPlan::Prefixes(_));
        // The next turn continues from the session's state. Without a session, the next request may extend this
        // request's text, even after a stored response.
        let cached_end = only_read || (end && plan.turn().is_none());
        match continuation.snapshot() {
            // The server keeps nothing of a conversation that the client keeps.
            Some(conversation) if matches!(plan, CommitPlan::ClientState { .. }) => {
                Self { start: Start::Session(Arc::clone(conversation)), snapshot, keeper: None }
            }
            Some(conversation) => {
                Self { snapshot, ..Self::turn(conversation, served, plan.owner(), (prompt, cached_end)) }
            }
            None => {
                let head = plan.turn().map(Turn::head);
                let head = head.filter(|head| !served.reads_sources() && head.is_prefix_of(prompt));
                let (prefix, keeper) = known(served, plan.owner(), (prompt, cached_end), head);
                Self { start: prefix.map_or(Start::Empty, Start::Prefix), snapshot, keeper }
            }
        }
    }

    /// Returns the start of a turn, which ends with a snapshot. The first turn of a conversation may share a prefix
    /// with other texts, so it starts from the prefix cache and adds the states of its prompt to it, and with `end`
    /// also its end state.
    pub(in crate::api) fn turn(
        conversation: &Arc<Snapshot>,
        served: &Served,
        owner: Owner,
        (prompt, end): (&[u32], bool),
    ) -> Self {
        let conversation = Arc::clone(conversation);
        if conversation.tokens() > 0 || served.reads_sources() {
            return Self { start: Start::Session(conversation), snapshot: true, keeper: None };
        }
        let (start, keeper) = match known(served, owner, (prompt, end), None) {
            (Some(prefix), keeper) => (Start::FirstTurn { conversation, prefix }, keeper),
            (None, keeper) => (Start::Session(conversation), keeper),
        };
        Self { start, snapshot: true, keeper }
    }
}

/// Returns the longest known state of `prompt`, from the prefix cache or `other`, and what takes the text's states into
/// the cache, with `end` also its end state.
fn known(
    served: &Served,
    owner: Owner,
    (prompt, end): (&[u32], bool),
    other: Option<&Arc<Snapshot>>,
) -> (Option<Arc<Snapshot>>, Option<Keeper>) {
    let prefixes = &served.prefixes;
    let known = [prefixes.longest(owner, prompt), other.cloned()].into_iter().flatten();
    let known = known.max_by_key(|known| known.read);
    let keeper = prefixes.is_on().then(|| {
        let mark = prefixes.mark(owner, prompt, known.as_ref().map_or(0, |known| known.read));
        let taker = Taker { prefixes: Arc::clone(prefixes), owner, prompt: prompt.into() };
        Keeper { taker: Arc::new(taker), mark, end }
    });
    (known, keeper)
}

/// Takes a text's snapshots into the prefix cache.
#[derive(Debug)]
struct Taker {
    prefixes: Arc<PrefixIndex>,
    owner: Owner,
    prompt: Arc<[u32]>,
}

impl TakeSnapshots for Taker {
    fn take(&self, snapshot: &Arc<Snapshot>) {
        let is_prompt = snapshot.tokens() == self.prompt.len() as u64;
        self.prefixes.keep(self.owner, snapshot, is_prompt.then(|| Arc::clone(&self.prompt)));
    }
}
