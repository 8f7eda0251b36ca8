//! Log probabilities in OpenAI's formats of completions and chat.

use std::borrow::Cow;
use std::fmt::Write;
use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::api::error::ApiError;
use crate::api::run::alignment::AlignedToken;
use crate::engine::TokenLogprobs;
use crate::text::Tokenizer;

/// Most log probabilities with each token beside its own.
const MAX_LOGPROBS: u64 = 20;

/// Stands for minus infinity, which JSON does not have, and for everything below this.
const MIN_LOGPROB: f32 = -9999.0;

/// Checks how many log probabilities the parameter `name` asks for with each token beside its own.
pub(in crate::api::formats) fn check(name: &str, count: u64) -> Result<usize, ApiError> {
    if count <= MAX_LOGPROBS {
        return Ok(count as usize);
    }
    Err(ApiError::invalid(Some(name), format!("{name} must be from 0 to {MAX_LOGPROBS}, found {count}")))
}

/// The names of tokens.
#[derive(Clone)]
pub(in crate::api) struct TokenNames {
    tokenizer: Arc<Tokenizer>,
    /// Whether tokens are named by their ids: two tokens can have the same text.
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

    /// The text of `token`: a special token's own name, and `bytes:\xe2\x80` if its bytes are not valid text.
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
        // Writing to a string cannot fail.
        let _ = write!(out, "\\x{byte:02x}");
    }
    out
}

fn finite(logprob: f32) -> f32 {
    // `max` also replaces a NaN.
    logprob.max(MIN_LOGPROB)
}

/// The likeliest texts in a token's place, its own included: a map in which each text has its highest log probability.
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

/// The log probabilities of completions: lists with one entry for each token.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(in crate::api) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<TopTexts>>,
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    pub(in crate::api) fn of(tokens: &[AlignedToken], names: &TokenNames) -> Self {
        let mut lists = Self::default();
        for AlignedToken { logprobs, offset, .. } in tokens {
            lists.push(logprobs.token, Some(logprobs), *offset, names);
        }
        lists
    }

    /// Adds a token that begins at `offset`. The first token of a prompt has no log probability.
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

/// A token of chat.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(in crate::api) struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    /// Absent in the entries of this list.
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<ChatToken>>,
}

impl ChatToken {
    fn new(token: u32, logprob: f32, names: &TokenNames) -> Self {
        let (text, bytes) = (names.text(token).into_owned(), names.bytes(token).to_vec());
        Self { token: text, logprob: finite(logprob), bytes, top_logprobs: None }
    }
}

/// The log probabilities of chat.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(in crate::api) struct ChatLogprobs {
    content: Vec<ChatToken>,
    /// Always null: the model refuses nothing.
    refusal: Option<()>,
}

impl ChatLogprobs {
    pub(in crate::api) fn of(tokens: &[AlignedToken], names: &TokenNames) -> Self {
        let entry = |token: &AlignedToken| {
            let TokenLogprobs { token, logprob, top } = &token.logprobs;
            let top = top.iter().map(|(token, logprob)| ChatToken::new(*token, *logprob, names)).collect();
            ChatToken { top_logprobs: Some(top), ..ChatToken::new(*token, *logprob, names) }
        };
        Self { content: tokens.iter().map(entry).collect(), refusal: None }
    }

    pub(in crate::api) fn is_empty(&self) -> bool {
        self.content.is_empty()
    }

    pub(in crate::api) fn extend(&mut self, more: &Self) {
        self.content.extend_from_slice(&more.content);
    }
}
