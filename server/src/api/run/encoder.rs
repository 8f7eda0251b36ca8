//! What a run needs from a wire format: an encoder of its events.

use axum::response::sse;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::engine::{Delta, Finish, TokenLogprobs};

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::api) struct TokenUsage {
    pub(in crate::api) prompt: usize,
    /// Tokens of the prompts that did not have to be computed.
    pub(in crate::api) cached: usize,
    pub(in crate::api) completion: usize,
}

/// One server-sent event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::api) struct StreamEvent {
    /// The event's name; OpenAI's completions have none.
    pub(in crate::api) name: Option<&'static str>,
    pub(in crate::api) data: String,
}

impl StreamEvent {
    /// Creates an event without a name.
    pub(in crate::api) fn data(data: impl Into<String>) -> Self {
        Self { name: None, data: data.into() }
    }

    /// Adds this event to `event`, after the fields that it already has: simple clients expect the data last.
    pub(super) fn write(self, event: sse::Event) -> sse::Event {
        let event = if let Some(name) = self.name { event.event(name) } else { event };
        event.data(self.data)
    }
}

impl From<StreamEvent> for sse::Event {
    fn from(event: StreamEvent) -> Self {
        event.write(Self::default())
    }
}

/// Serializes a wire type to JSON.
pub(in crate::api) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("wire types have text keys, and nothing in them fails to serialise")
}

/// What a response says about its session.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(in crate::api) struct SessionInfo {
    pub(in crate::api) id: String,
    /// The version that this turn created; with `keep: none`, the version that it continued.
    pub(in crate::api) version: String,
    /// The version that this turn continued.
    pub(in crate::api) parent: String,
    /// Whether the state came from a snapshot, so that the earlier text was not computed again.
    pub(in crate::api) restored: bool,
    /// Where the snapshot was: `memory` or `disk`.
    pub(in crate::api) tier: &'static str,
    /// Tokens of the earlier text that were computed again, besides those that were in no state yet.
    pub(in crate::api) recomputed_tokens: u64,
    /// Tokens of the whole conversation, including this turn.
    pub(in crate::api) tokens: u64,
    pub(in crate::api) state_bytes: u64,
    /// Text that is held back until the next turn, because it may be the beginning of a stop string.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(in crate::api) held_text: String,
    /// With `keep` `best` or `all`: the index of the text that became the new version.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(in crate::api) chosen: Option<usize>,
    /// With `keep: all`: the sessions of the other texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub(in crate::api) forks: Option<Vec<ForkInfo>>,
}

/// A session that a turn has created as a fork of its own.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = TurnFork)]
pub(in crate::api) struct ForkInfo {
    /// The index of the fork's text.
    pub(in crate::api) index: usize,
    pub(in crate::api) id: String,
    pub(in crate::api) version: String,
}

/// What the response says about the conversation that the request leaves.
#[derive(Clone, Debug, Default)]
pub(in crate::api) struct Committed {
    pub(in crate::api) session: Option<SessionInfo>,
    /// The sealed state in base64, for the client to keep.
    pub(in crate::api) state: Option<String>,
}

/// Encodes the texts of one request in a wire format. A stream sends the events as they come; a response in one piece
/// is [`Self::body`] at the end.
pub(in crate::api) trait EventEncoder: Send + Sync {
    /// Adds the events that come before any text.
    fn start(&mut self, out: &mut Vec<StreamEvent>);

    /// Adds the log probabilities of the prompt of the text `index`, before all pieces of that text. The first token
    /// has none.
    fn prompt_logprobs(&mut self, _index: usize, _logprobs: &[Option<TokenLogprobs>], _out: &mut Vec<StreamEvent>) {}

    /// Adds a piece of the text `index`.
    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<StreamEvent>);

    /// Adds the end of the text `index`.
    fn end_text(&mut self, index: usize, finish: &Finish, committed: &Committed, out: &mut Vec<StreamEvent>);

    /// Returns the tool calls of the text `index`, once all of it has arrived, as a JSON array; `None` if it is text.
    fn tool_calls(&self, _index: usize) -> Option<String> {
        None
    }

    /// Adds the end of all texts.
    fn end(&mut self, usage: TokenUsage, out: &mut Vec<StreamEvent>);

    /// Adds the error that ends a stream.
    fn fail(&mut self, error: &ApiError, out: &mut Vec<StreamEvent>) {
        out.push(StreamEvent::data(error.body().to_string()));
    }

    /// Whether the encoder holds the texts even if the response is only streamed.
    fn holds_stream(&self) -> bool {
        false
    }

    /// Returns the response in one piece. Call it after [`Self::end`].
    fn body(&self) -> String;
}
