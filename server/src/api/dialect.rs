//! What all formats of answers have in common: each says the same texts in its own words.

use serde::Serialize;
use utoipa::ToSchema;

use super::answer::Usage;
use super::error::ApiError;
use crate::engine::{Delta, Finish, TokenLogprobs};

/// The data of one server-sent event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Said {
    /// Its name; OpenAI's completions have none.
    pub(super) name: Option<&'static str>,
    pub(super) data: String,
}

impl Said {
    /// An event without a name.
    pub(super) fn data(data: impl Into<String>) -> Self {
        Self { name: None, data: data.into() }
    }
}

/// What an answer says about the conversation that it belongs to.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(super) struct SessionInfo {
    pub(super) id: String,
    /// The version that this turn has made.
    pub(super) version: String,
    /// The version that it began from.
    pub(super) parent: String,
    /// Whether the state came out of a snapshot: the text before was not computed again.
    pub(super) restored: bool,
    /// Where from: `memory` or `disk`.
    pub(super) tier: &'static str,
    /// Tokens of the text before that had to be computed again, beside those that no state had yet.
    pub(super) recomputed_tokens: u64,
    /// Tokens of the whole conversation now.
    pub(super) tokens: u64,
    pub(super) state_bytes: u64,
    /// Text that waits for the next turn, since it may be the beginning of a stop string.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) held_text: String,
}

/// What has become of a text's end.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    pub(super) session: Option<SessionInfo>,
    /// The sealed state, for the client to keep.
    pub(super) state: Option<String>,
}

/// A format of answers, with the texts of one request as they grow. A stream sends what comes out as it comes; an
/// answer in one piece is [`Self::body`] at the end.
pub(super) trait Dialect: Send + Sync {
    /// What a stream says before any text.
    fn open(&mut self, out: &mut Vec<Said>);

    /// The log probabilities of the tokens of the prompt of the text `index`, before all of its pieces; the first has
    /// none.
    fn prompt_logprobs(&mut self, _index: usize, _logprobs: &[Option<TokenLogprobs>], _out: &mut Vec<Said>) {}

    /// A piece of the text `index`.
    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<Said>);

    /// The end of the text `index`.
    fn end(&mut self, index: usize, finish: &Finish, kept: &Kept, out: &mut Vec<Said>);

    /// The end of all texts.
    fn close(&mut self, usage: Usage, out: &mut Vec<Said>);

    /// The end of a stream by an error.
    fn fail(&mut self, error: &ApiError, out: &mut Vec<Said>) {
        out.push(Said::data(error.body().to_string()));
    }

    /// The whole answer, after [`Self::close`].
    fn body(&self) -> String;
}
