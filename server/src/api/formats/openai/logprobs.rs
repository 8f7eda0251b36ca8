//! Log probabilities in the formats of OpenAI's completions and chat.

use std::borrow::Cow;
use std::fmt::Write;
use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::api::error::ApiError;
use crate::api::formats::openai::wire::{Format, GenerationRequest, Logprobs};
use crate::api::run::alignment::Placed;
use crate::engine::TokenLogprobs;
use crate::text::Tokenizer;

/// Most log probabilities beside a token's own.
const MOST: u64 = 20;

/// What stands for minus infinity, which JSON does not have, and for whatever is below.
const LEAST: f32 = -9999.0;

/// How many log probabilities `wire` asks for with each token beside its own; none where it asks for none.
pub(in crate::api) fn read(format: Format, wire: &GenerationRequest) -> Result<Option<usize>, ApiError> {
    let invalid = |name, message: String| Err(ApiError::invalid(Some(name), message));
    let bounded = |name, count: u64| match usize::try_from(count) {
        Ok(small) if count <= MOST => Ok(Some(small)),
        _ => invalid(name, format!("{name} must be from 0 to {MOST}, found {count}")),
    };
    if format == Format::Completions {
        if wire.top_logprobs.is_some() {
            return invalid("top_logprobs", "top_logprobs must be absent: it is logprobs here".into());
        }
        return match wire.logprobs {
            None => Ok(None),
            Some(Logprobs::Top(count)) => bounded("logprobs", count),
            Some(Logprobs::Switch(_)) => {
                invalid("logprobs", format!("logprobs must be an integer from 0 to {MOST}, found a boolean"))
            }
        };
    }
    match (wire.logprobs, wire.top_logprobs) {
        (Some(Logprobs::Top(_)), _) => {
            invalid("logprobs", "logprobs must be true or false; top_logprobs is how many".into())
        }
        (Some(Logprobs::Switch(true)), top) => bounded("top_logprobs", top.unwrap_or(0)),
        // 0 asks for nothing.
        (_, None | Some(0)) => Ok(None),
        (_, Some(_)) => invalid("top_logprobs", "top_logprobs must be absent unless logprobs is true".into()),
    }
}

/// What tokens are called.
#[derive(Clone)]
pub(in crate::api) struct TokenNames {
    tokenizer: Arc<Tokenizer>,
    /// By their ids: texts alone can be the same for two.
    by_id: bool,
}

impl TokenNames {
    pub(in crate::api) fn new(tokenizer: Arc<Tokenizer>, by_id: bool) -> Self {
        Self { tokenizer, by_id }
    }

    /// The bytes that `token` adds to a text.
    fn bytes(&self, token: u32) -> &[u8] {
        self.tokenizer.vocabulary().bytes(token)
    }

    /// The text of `token`; a special one's own name; `bytes:\xe2\x80` where its bytes are no text.
    fn text(&self, token: u32) -> Cow<'_, str> {
        if self.by_id {
            return Cow::Owned(format!("token_id:{token}"));
        }
        if let Some(name) = self.tokenizer.special(token) {
            return Cow::Borrowed(name);
        }
        let bytes = self.bytes(token);
        std::str::from_utf8(bytes).map_or_else(|_| Cow::Owned(escaped(bytes)), Cow::Borrowed)
    }
}

fn escaped(bytes: &[u8]) -> String {
    let mut out = String::from("bytes:");
    for byte in bytes {
        // A string takes whatever is written to it.
        let _ = write!(out, "\\x{byte:02x}");
    }
    out
}

fn finite(logprob: f32) -> f32 {
    // Also of what is no number: `max` gives the other one.
    logprob.max(LEAST)
}

/// The likeliest texts of a token, with its own: a map in which each text stands once, the likelier of two.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::api) struct TopTexts(Vec<(String, f32)>);

impl TopTexts {
    fn new(logprobs: &TokenLogprobs, names: &TokenNames) -> Self {
        let own = (logprobs.token, logprobs.logprob);
        let mut texts: Vec<(String, f32)> = Vec::with_capacity(logprobs.top.len() + 1);
        for (token, logprob) in logprobs.top.iter().copied().chain([own]) {
            let (text, logprob) = (names.text(token), finite(logprob));
            match texts.iter_mut().find(|(known, _)| *known == text) {
                Some((_, known)) => *known = known.max(logprob),
                None => texts.push((text.into_owned(), logprob)),
            }
        }
        Self(texts)
    }
}

impl Serialize for TopTexts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (text, logprob) in &self.0 {
            map.serialize_entry(text, logprob)?;
        }
        map.end()
    }
}

/// Those of completions: lists with one entry for each token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(in crate::api) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<TopTexts>>,
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// Those of `placed`.
    pub(in crate::api) fn of(placed: &[Placed], names: &TokenNames) -> Self {
        let mut lists = Self::default();
        for Placed { logprobs, offset, .. } in placed {
            lists.push(logprobs.token, Some(logprobs), *offset, names);
        }
        lists
    }

    /// Adds a token that begins at `offset`; the first of a text has no log probability.
    pub(in crate::api) fn push(
        &mut self,
        token: u32,
        logprobs: Option<&TokenLogprobs>,
        offset: usize,
        names: &TokenNames,
    ) {
        self.tokens.push(names.text(token).into_owned());
        self.token_logprobs.push(logprobs.map(|logprobs| finite(logprobs.logprob)));
        self.top_logprobs.push(logprobs.map(|logprobs| TopTexts::new(logprobs, names)));
        self.text_offset.push(offset);
    }

    pub(in crate::api) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(in crate::api) fn extend(&mut self, more: &Self) {
        self.tokens.extend_from_slice(&more.tokens);
        self.token_logprobs.extend_from_slice(&more.token_logprobs);
        self.top_logprobs.extend_from_slice(&more.top_logprobs);
        self.text_offset.extend_from_slice(&more.text_offset);
    }
}

/// A token in chat.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(in crate::api) struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    /// Those of the likeliest themselves have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<ChatToken>>,
}

impl ChatToken {
    fn new(token: u32, logprob: f32, names: &TokenNames) -> Self {
        let (text, bytes) = (names.text(token).into_owned(), names.bytes(token).to_vec());
        Self { token: text, logprob: finite(logprob), bytes, top_logprobs: None }
    }
}

/// Those of chat.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(in crate::api) struct ChatLogprobs {
    content: Vec<ChatToken>,
    /// Null: the model refuses nothing.
    refusal: Option<()>,
}

impl ChatLogprobs {
    /// Those of `placed`.
    pub(in crate::api) fn of(placed: &[Placed], names: &TokenNames) -> Self {
        let token = |placed: &Placed| {
            let TokenLogprobs { token, logprob, top } = &placed.logprobs;
            let top = top.iter().map(|(token, logprob)| ChatToken::new(*token, *logprob, names)).collect();
            ChatToken { top_logprobs: Some(top), ..ChatToken::new(*token, *logprob, names) }
        };
        Self { content: placed.iter().map(token).collect(), refusal: None }
    }

    pub(in crate::api) fn is_empty(&self) -> bool {
        self.content.is_empty()
    }

    pub(in crate::api) fn extend(&mut self, more: &Self) {
        self.content.extend_from_slice(&more.content);
    }
}
