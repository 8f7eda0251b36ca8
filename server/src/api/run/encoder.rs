//! What a run needs of a wire format: an encoder of its events.

use axum::response::sse;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::engine::{Delta, Finish, TokenLogprobs};

/// Tokens that a request took.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::api) struct TokenUsage {
    pub(in crate::api) prompt: usize,
    /// Tokens of the prompts that were not computed.
    pub(in crate::api) cached: usize,
    pub(in crate::api) completion: usize,
}

/// One server-sent event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::api) struct StreamEvent {
    /// OpenAI's completions have none.
    pub(in crate::api) name: Option<&'static str>,
    pub(in crate::api) data: String,
}

impl StreamEvent {
    /// An event without a name.
    pub(in crate::api) fn data(data: impl Into<String>) -> Self {
        Self { name: None, data: data.into() }
    }

    /// The event, written after what `event` already has: simple clients expect the data last.
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

/// The JSON of a wire type.
pub(in crate::api) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("wire types have text keys, and nothing in them fails to serialise")
}

/// What a response says about its session.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(in crate::api) struct SessionInfo {
    pub(in crate::api) id: String,
    /// The version that this turn made; with `keep: none` the one that it continued.
    pub(in crate::api) version: String,
    /// The version that it continued.
    pub(in crate::api) parent: String,
    /// Whether the state came from a snapshot, so that the text before was not computed again.
    pub(in crate::api) restored: bool,
    /// Where the snapshot was: `memory` or `disk`.
    pub(in crate::api) tier: &'static str,
    /// Tokens of the text before that were computed again, besides those that were in no state yet.
    pub(in crate::api) recomputed_tokens: u64,
    /// Tokens of the whole conversation, this turn included.
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

/// A session that a turn has left beside its own.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = TurnFork)]
pub(in crate::api) struct ForkInfo {
    /// The index of its text.
    pub(in crate::api) index: usize,
    pub(in crate::api) id: String,
    pub(in crate::api) version: String,
}

/// What a request leaves of its conversation.
#[derive(Clone, Debug, Default)]
pub(in crate::api) struct Committed {
    pub(in crate::api) session: Option<SessionInfo>,
    /// The sealed state in base64, for the client to keep.
    pub(in crate::api) state: Option<String>,
}

/// Encodes the texts of one request in a wire format. A stream sends the events as they come; a response in one piece
/// is [`Self::body`] at the end.
pub(in crate::api) trait EventEncoder: Send + Sync {
    /// The events before any text.
    fn start(&mut self, out: &mut Vec<StreamEvent>);

    /// The log probabilities of the prompt of the text `index`, before all pieces of that text; the first token has
    /// none.
    fn prompt_logprobs(&mut self, _index: usize, _logprobs: &[Option<TokenLogprobs>], _out: &mut Vec<StreamEvent>) {}

    /// A piece of the text `index`.
    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<StreamEvent>);

    /// The end of the text `index`.
    fn end_text(&mut self, index: usize, finish: &Finish, committed: &Committed, out: &mut Vec<StreamEvent>);

    /// The calls that the text `index` makes, after its end: a JSON array. `None` if it is text.
    fn tool_calls(&self, _index: usize) -> Option<String> {
        None
    }

    /// The end of all texts.
    fn end(&mut self, usage: TokenUsage, out: &mut Vec<StreamEvent>);

    /// The end of a stream by an error.
    fn fail(&mut self, error: &ApiError, out: &mut Vec<StreamEvent>) {
        out.push(StreamEvent::data(error.body().to_string()));
    }

    /// Whether it holds the texts even where nothing but a stream is asked for.
    fn holds_stream(&self) -> bool {
        false
    }

    /// The response in one piece, after [`Self::end`].
    fn body(&self) -> String;
}
