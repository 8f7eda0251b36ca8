//! What all formats of answers have in common: each says the same texts in its own words.

use serde::Serialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::formats::openai::answer::Usage;
use crate::engine::{Delta, Finish, TokenLogprobs};

/// The data of one server-sent event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::api) struct Said {
    /// Its name; OpenAI's completions have none.
    pub(in crate::api) name: Option<&'static str>,
    pub(in crate::api) data: String,
}

impl Said {
    /// An event without a name.
    pub(in crate::api) fn data(data: impl Into<String>) -> Self {
        Self { name: None, data: data.into() }
    }
}

/// What an answer says about the conversation that it belongs to.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(in crate::api) struct SessionInfo {
    pub(in crate::api) id: String,
    /// The version that this turn has made.
    pub(in crate::api) version: String,
    /// The version that it began from.
    pub(in crate::api) parent: String,
    /// Whether the state came out of a snapshot: the text before was not computed again.
    pub(in crate::api) restored: bool,
    /// Where from: `memory` or `disk`.
    pub(in crate::api) tier: &'static str,
    /// Tokens of the text before that had to be computed again, beside those that no state had yet.
    pub(in crate::api) recomputed_tokens: u64,
    /// Tokens of the whole conversation now.
    pub(in crate::api) tokens: u64,
    pub(in crate::api) state_bytes: u64,
    /// Text that waits for the next turn, since it may be the beginning of a stop string.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(in crate::api) held_text: String,
}

/// What has become of a text's end.
#[derive(Clone, Debug, Default)]
pub(in crate::api) struct Kept {
    pub(in crate::api) session: Option<SessionInfo>,
    /// The sealed state, for the client to keep.
    pub(in crate::api) state: Option<String>,
}

/// A format of answers, with the texts of one request as they grow. A stream sends what comes out as it comes; an
/// answer in one piece is [`Self::body`] at the end.
pub(in crate::api) trait Dialect: Send + Sync {
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
