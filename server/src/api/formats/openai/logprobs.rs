//! Log probabilities in OpenAI's formats for completions and chat.

use std::borrow::Cow;
use std::fmt::Write;
use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::openapi::schemas::nothing;
use crate::api::run::alignment::AlignedToken;
use crate::engine::TokenLogprobs;
use crate::text::Tokenizer;

/// The most alternatives that can be listed with each token.
const MAX_LOGPROBS: u64 = 20;

/// The lowest log probability in responses. It also stands for minus infinity, which JSON cannot express.
const MIN_LOGPROB: f32 = -9999.0;

/// Checks how many alternatives to each token the parameter `name` asks for.
pub(in crate::api::formats) fn check(name: &str, count: u64) -> Result<usize, ApiError> {
    if count <= MAX_LOGPROBS {
        return Ok(count as usize);
    }
    Err(ApiError::invalid(Some(name), format!("{name} must be from 0 to {MAX_LOGPROBS}, found {count}")))
}

/// Names tokens in responses.
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

    /// Returns the bytes that `token` adds to a text.
    fn bytes(&self, token: u32) -> &[u8] {
        self.tokenizer.vocabulary().bytes(token)
    }

    /// Returns the name of `token`: its id, a special token's own name, its text, or `bytes:\xe2\x80` if its bytes are
    /// not valid text.
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

/// The likeliest texts at a token's position, its own included: a map from each text to its highest log probability.
struct TopTexts(Vec<(String, f32)>);

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

/// A list in a compact form, whose entries are converted to their wire form one by one as they are serialized: names of
/// tokens take many times the memory of their ids.
#[derive(Clone)]
struct Compact<T> {
    /// Shared with the copy that is serialized.
    entries: Arc<Vec<T>>,
    names: TokenNames,
}

impl<T: Clone> Compact<T> {
    fn new(names: &TokenNames) -> Self {
        Self { entries: Arc::default(), names: names.clone() }
    }

    fn entries(&mut self) -> &mut Vec<T> {
        Arc::make_mut(&mut self.entries)
    }

    fn write<S: Serializer, W: Serialize>(
        &self,
        serializer: S,
        wire: impl Fn(&T, &TokenNames) -> W,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.entries.iter().map(|entry| wire(entry, &self.names)))
    }
}

impl Serialize for Compact<u32> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.write(serializer, |token, names| names.text(*token).into_owned())
    }
}

impl Serialize for Compact<Option<TokenLogprobs>> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.write(serializer, |entry, names| entry.as_ref().map(|logprobs| TopTexts::new(logprobs, names)))
    }
}

impl Serialize for Compact<TokenLogprobs> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.write(serializer, ChatToken::of)
    }
}

impl<T> std::fmt::Debug for Compact<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} entries", self.entries.len())
    }
}

/// The log probabilities of completions: lists with one entry for each token.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(in crate::api) struct CompletionLogprobs {
    #[schema(value_type = Vec<String>)]
    tokens: Compact<u32>,
    /// Null for the first token of an echoed prompt.
    token_logprobs: Vec<Option<f32>>,
    /// The likeliest tokens at each token's position, that token included.
    #[schema(value_type = Vec<Option<BTreeMap<String, f32>>>)]
    top_logprobs: Compact<Option<TokenLogprobs>>,
    /// Where each token begins in the text, in characters.
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    pub(in crate::api) fn new(names: &TokenNames) -> Self {
        Self {
            tokens: Compact::new(names),
            token_logprobs: Vec::new(),
            top_logprobs: Compact::new(names),
            text_offset: Vec::new(),
        }
    }

    pub(in crate::api) fn of(tokens: Vec<AlignedToken>, names: &TokenNames) -> Self {
        let mut lists = Self::new(names);
        for AlignedToken { logprobs, offset, .. } in tokens {
            lists.push(logprobs.token, Some(logprobs), offset);
        }
        lists
    }

    /// Adds a token that begins at `offset`. The first token of a prompt has no log probability.
    pub(in crate::api) fn push(&mut self, token: u32, logprobs: Option<TokenLogprobs>, offset: usize) {
        self.tokens.entries().push(token);
        self.token_logprobs.push(logprobs.as_ref().map(|logprobs| finite(logprobs.logprob)));
        self.top_logprobs.entries().push(logprobs);
        self.text_offset.push(offset);
    }

    pub(in crate::api) fn is_empty(&self) -> bool {
        self.text_offset.is_empty()
    }

    pub(in crate::api) fn append(&mut self, mut more: Self) {
        self.tokens.entries().append(more.tokens.entries());
        self.token_logprobs.append(&mut more.token_logprobs);
        self.top_logprobs.entries().append(more.top_logprobs.entries());
        self.text_offset.append(&mut more.text_offset);
    }
}

/// A token of an answer, with its log probability.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub(in crate::api) struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    /// The likeliest tokens at its position; absent in the entries of this list.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, no_recursion)]
    top_logprobs: Option<Vec<ChatToken>>,
}

impl ChatToken {
    fn new(token: u32, logprob: f32, names: &TokenNames) -> Self {
        let (text, bytes) = (names.text(token).into_owned(), names.bytes(token).to_vec());
        Self { token: text, logprob: finite(logprob), bytes, top_logprobs: None }
    }

    /// Creates a token with its alternatives.
    fn of(logprobs: &TokenLogprobs, names: &TokenNames) -> Self {
        let TokenLogprobs { token, logprob, top } = logprobs;
        let top = top.iter().map(|(token, logprob)| Self::new(*token, *logprob, names)).collect();
        Self { top_logprobs: Some(top), ..Self::new(*token, *logprob, names) }
    }
}

/// The log probabilities of an answer in chat.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(in crate::api) struct ChatLogprobs {
    #[schema(value_type = Vec<ChatToken>)]
    content: Compact<TokenLogprobs>,
    /// Always null: the model refuses nothing.
    #[schema(required, schema_with = nothing)]
    refusal: Option<()>,
}

impl ChatLogprobs {
    pub(in crate::api) fn new(names: &TokenNames) -> Self {
        Self { content: Compact::new(names), refusal: None }
    }

    pub(in crate::api) fn of(tokens: Vec<AlignedToken>, names: &TokenNames) -> Self {
        let mut list = Self::new(names);
        list.content.entries().extend(tokens.into_iter().map(|token| token.logprobs));
        list
    }

    pub(in crate::api) fn is_empty(&self) -> bool {
        self.content.entries.is_empty()
    }

    pub(in crate::api) fn append(&mut self, mut more: Self) {
        self.content.entries().append(more.content.entries());
    }
}
