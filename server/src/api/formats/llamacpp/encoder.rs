//! The responses of `/completion`: the chunks of a stream, or one object.

use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};
use utoipa::ToSchema;

use super::settings::{Options, Settings};
use crate::api::error::ApiError;
use crate::api::request::ValidRequest;
use crate::api::run::TokenUsage;
use crate::api::run::encoder::{Committed, EventEncoder, StreamEvent, to_json};
use crate::engine::{Delta, Finish, FinishReason, StopCause, TokenLogprobs};
use crate::text::Tokenizer;

/// The speed of prefill (`prompt_…`) and decode (`predicted_…`).
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = LlamaTimings)]
struct Timings {
    /// Tokens of the prompt that were not computed.
    cache_n: usize,
    prompt_n: usize,
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    predicted_n: usize,
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
    /// Draft tokens that the model has read, if there were any.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_n: Option<usize>,
    /// Draft tokens that were accepted into the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_n_accepted: Option<usize>,
}

impl Timings {
    fn new(cache_n: usize, finish: &Finish) -> Self {
        let (prompt_n, predicted_n) = (finish.prompt_tokens.saturating_sub(cache_n), finish.completion_tokens);
        let ms = |duration: std::time::Duration| duration.as_micros() as f64 / 1e3;
        let (prompt_ms, predicted_ms) = (ms(finish.timings.prefill), ms(finish.timings.decode));
        let drafts = Some(finish.drafts).filter(|drafts| drafts.drafted > 0);
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        Self {
            cache_n,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: share(prompt_ms, prompt_n as f64),
            prompt_per_second: share(prompt_n as f64 * 1e3, prompt_ms),
            predicted_n,
            predicted_ms,
            predicted_per_token_ms: share(predicted_ms, predicted_n as f64),
            predicted_per_second: share(predicted_n as f64 * 1e3, predicted_ms),
            draft_n: drafts.map(|drafts| drafts.drafted),
            draft_n_accepted: drafts.map(|drafts| drafts.accepted),
        }
    }
}

/// A token with its log probability.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = LlamaToken)]
struct TokenProbability {
    id: u32,
    token: String,
    bytes: Vec<u8>,
    logprob: f32,
}

/// A token of the text, with the likeliest tokens at its position.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = LlamaAlternatives)]
struct Alternatives {
    #[serde(flatten)]
    token: TokenProbability,
    top_logprobs: Vec<TokenProbability>,
}

/// Log probabilities in a compact form: tokens are named one by one as they are serialized, because their names take
/// many times the memory of their ids.
#[derive(Clone)]
struct Probabilities {
    tokens: Vec<TokenLogprobs>,
    /// How many alternatives to list with each token.
    count: usize,
    tokenizer: Arc<Tokenizer>,
}

impl Probabilities {
    fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    fn token(&self, id: u32, logprob: f32) -> TokenProbability {
        let bytes = self.tokenizer.piece(id).to_vec();
        TokenProbability { id, token: lossy(bytes.clone()), bytes, logprob }
    }

    fn alternatives(&self, token: &TokenLogprobs) -> Alternatives {
        let top = token.top.iter().take(self.count);
        Alternatives {
            token: self.token(token.token, token.logprob),
            top_logprobs: top.map(|(id, logprob)| self.token(*id, *logprob)).collect(),
        }
    }
}

impl Serialize for Probabilities {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.tokens.iter().map(|token| self.alternatives(token)))
    }
}

impl fmt::Debug for Probabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens", self.tokens.len())
    }
}

/// A piece of a text.
#[derive(Serialize, ToSchema)]
#[schema(as = LlamaChunk)]
pub(in crate::api) struct Chunk<'a> {
    /// The position of the prompt in the request.
    index: usize,
    content: &'a str,
    tokens: &'a [u32],
    /// Always false: this is not the last event.
    stop: bool,
    id_slot: i64,
    /// Tokens of the text so far.
    tokens_predicted: usize,
    /// Tokens of the prompt.
    tokens_evaluated: usize,
    /// With `n_probs`.
    #[serde(skip_serializing_if = "Probabilities::is_empty")]
    #[schema(value_type = Vec<Alternatives>)]
    completion_probabilities: Probabilities,
}

/// A whole text, or the last event of a streamed text, which has no content.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = LlamaCompletion)]
pub(in crate::api) struct Whole {
    /// The position of the prompt in the request.
    index: usize,
    content: String,
    /// With `return_tokens`.
    tokens: Vec<u32>,
    /// The slot that the request named; -1 if it named none.
    id_slot: i64,
    /// Always true.
    stop: bool,
    model: String,
    /// Tokens of the text.
    tokens_predicted: usize,
    /// Tokens of the prompt.
    tokens_evaluated: usize,
    generation_settings: Settings,
    /// The text of the prompt.
    prompt: String,
    has_new_line: bool,
    /// Always false: the context has no limit.
    truncated: bool,
    /// `none`, `eos`, `limit` or `word`.
    stop_type: &'static str,
    stopping_word: String,
    /// Tokens of the prompt that were not computed.
    tokens_cached: usize,
    timings: Timings,
    /// With `n_probs`.
    #[serde(skip_serializing_if = "Probabilities::is_empty")]
    #[schema(value_type = Vec<Alternatives>)]
    completion_probabilities: Probabilities,
}

/// An event of a stream.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = LlamaEvent)]
pub(in crate::api) enum Event<'a> {
    Piece(Chunk<'a>),
    End(&'a Whole),
}

/// One completion, or one for each prompt.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = LlamaCompletions)]
pub(in crate::api) enum Completions<'a> {
    One(&'a Whole),
    Several(&'a [Whole]),
}

/// Encodes the responses of `/completion`.
pub(super) struct LlamaEncoder {
    stream: bool,
    return_tokens: bool,
    texts: Vec<Whole>,
}

impl LlamaEncoder {
    pub(super) fn new(options: Options, request: &ValidRequest, stream: bool) -> Self {
        let tokenizer = Arc::clone(&request.served.tokenizer);
        let Options { slot, stop, ignore_eos, n_probs, return_tokens } = options;
        let id_slot = slot.map_or(-1, |slot| slot.number() as i64);
        let mut settings = Settings::new(&request.sampling, request.max_tokens);
        (settings.stop, settings.ignore_eos, settings.stream, settings.n_probs) = (stop, ignore_eos, stream, n_probs);
        let none = Probabilities { tokens: Vec::new(), count: n_probs, tokenizer: Arc::clone(&tokenizer) };
        let whole = |(index, ids): (usize, &Vec<u32>)| Whole {
            index,
            content: String::new(),
            tokens: Vec::new(),
            id_slot,
            stop: true,
            model: request.served.name.clone(),
            tokens_predicted: 0,
            tokens_evaluated: ids.len(),
            generation_settings: settings.clone(),
            prompt: lossy(tokenizer.pieces(ids)),
            has_new_line: false,
            // The context has no limit.
            truncated: false,
            stop_type: "none",
            stopping_word: String::new(),
            tokens_cached: request.cached.get(index).copied().unwrap_or(0),
            timings: Timings::default(),
            completion_probabilities: none.clone(),
        };
        let texts = request.prompts.iter().enumerate().map(whole).collect();
        Self { stream, return_tokens, texts }
    }
}

fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

impl EventEncoder for LlamaEncoder {
    fn start(&mut self, _: &mut Vec<StreamEvent>) {}

    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<StreamEvent>) {
        let text = &mut self.texts[index];
        text.tokens_predicted += delta.token_ids.len();
        text.has_new_line |= delta.text.contains('\n');
        if self.stream {
            out.push(StreamEvent::data(to_json(&Event::Piece(Chunk {
                index,
                content: &delta.text,
                tokens: &delta.token_ids,
                stop: false,
                id_slot: text.id_slot,
                tokens_predicted: text.tokens_predicted,
                tokens_evaluated: text.tokens_evaluated,
                completion_probabilities: Probabilities {
                    tokens: delta.logprobs,
                    ..text.completion_probabilities.clone()
                },
            }))));
            return;
        }
        text.content.push_str(&delta.text);
        text.completion_probabilities.tokens.extend(delta.logprobs);
        if self.return_tokens {
            text.tokens.extend(&delta.token_ids);
        }
    }

    fn end_text(&mut self, index: usize, finish: &Finish, _: &Committed, out: &mut Vec<StreamEvent>) {
        let text = &mut self.texts[index];
        text.timings = Timings::new(text.tokens_cached, finish);
        text.stop_type = match (finish.reason, &finish.stop) {
            (FinishReason::Stop, Some(StopCause::String(word))) => {
                text.stopping_word.clone_from(word);
                "word"
            }
            (FinishReason::Stop, _) => "eos",
            (FinishReason::Length | FinishReason::Interrupted, _) => "limit",
        };
        if self.stream {
            out.push(StreamEvent::data(to_json(&Event::End(text))));
        }
    }

    fn end(&mut self, _: TokenUsage, _: &mut Vec<StreamEvent>) {}

    fn fail(&mut self, error: &ApiError, out: &mut Vec<StreamEvent>) {
        out.push(StreamEvent::data(to_json(&super::ErrorBody::new(error))));
    }

    fn body(&self) -> String {
        to_json(&match self.texts.as_slice() {
            [one] => Completions::One(one),
            several => Completions::Several(several),
        })
    }
}
