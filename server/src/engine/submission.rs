//! A request that waits for a slot.

use std::time::Instant;

use tokio::sync::mpsc::Sender;
use tracing::Span;

use super::event::{Event, Interrupt};
use super::prompt::TextKind;
use super::request::Request;

/// Generated tokens that count toward the tenant's virtual time as soon as a text gets a slot. Otherwise a tenant that
/// submits many texts at once would get a slot for each of them before the first had counted.
const ADVANCE: usize = 256;

/// A queued request.
pub(super) struct Submission {
    pub(super) request: Request,
    pub(super) sender: Sender<Event>,
    pub(super) interrupt: Interrupt,
    pub(super) submitted: Instant,
    /// The span of the engine's log lines about this request.
    pub(super) span: Span,
    /// Passes that the engine had made at submission.
    pub(super) submitted_at: u64,
    /// The index of its tenant, set by the queue.
    pub(super) tenant: usize,
    /// Tokens that the tenant's virtual time has counted in advance; set when the request leaves the queue for a slot.
    pub(super) advance: usize,
}

impl Submission {
    /// Whether the request was interrupted and can end without a slot.
    pub(super) fn is_interrupted(&self) -> bool {
        self.interrupt.is_requested() && self.request.kind == TextKind::Completion
    }

    /// Whether its client has left.
    pub(super) fn is_abandoned(&self) -> bool {
        self.sender.is_closed()
    }

    /// The tokens to count in advance, at least one: the prompt, whose length is known, and the beginning of the text.
    pub(super) fn cost(&self) -> usize {
        let Request { prompt, generation, .. } = &self.request;
        let unread = match &prompt.begun {
            Some(begun) => begun.end.pending.len(),
            None => prompt.source.len() + prompt.input.len(),
        };
        (unread + generation.max_tokens.min(ADVANCE)).max(1)
    }
}
