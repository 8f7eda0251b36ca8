//! The responses of `/completion`: the chunks of a stream, or one object.

use std::sync::Arc;

use serde::Serialize;

use super::settings::{Options, Settings};
use crate::api::error::ApiError;
use crate::api::request::ValidRequest;
use crate::api::run::TokenUsage;
use crate::api::run::encoder::{Committed, EventEncoder, StreamEvent, to_json};
use crate::engine::{Delta, Finish, FinishReason, StopCause, TokenLogprobs};
use crate::text::Tokenizer;

/// The speed of prefill (prompt) and decode (predicted).
#[derive(Clone, Debug, Default, Serialize)]
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
}

impl Timings {
    fn new(cache_n: usize, finish: &Finish) -> Self {
        let (prompt_n, predicted_n) = (finish.prompt_tokens.saturating_sub(cache_n), finish.completion_tokens);
        let ms = |duration: std::time::Duration| duration.as_micros() as f64 / 1e3;
        let (prompt_ms, predicted_ms) = (ms(finish.timings.prefill), ms(finish.timings.decode));
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
        }
    }
}

/// A token with its log probability.
#[derive(Clone, Debug, Serialize)]
struct TokenProbability {
    id: u32,
    token: String,
    bytes: Vec<u8>,
    logprob: f32,
}

/// A token of the text, with the likeliest tokens in its place.
#[derive(Clone, Debug, Serialize)]
struct Alternatives {
    #[serde(flatten)]
    token: TokenProbability,
    top_logprobs: Vec<TokenProbability>,
}

/// A piece of a stream.
#[derive(Serialize)]
struct Chunk<'a> {
    index: usize,
    content: &'a str,
    tokens: &'a [u32],
    stop: bool,
    id_slot: i64,
    tokens_predicted: usize,
    tokens_evaluated: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    completion_probabilities: Vec<Alternatives>,
}

/// A complete text, and the last chunk of a stream, which has no content.
#[derive(Clone, Debug, Serialize)]
struct Whole {
    index: usize,
    content: String,
    tokens: Vec<u32>,
    id_slot: i64,
    stop: bool,
    model: String,
    tokens_predicted: usize,
    tokens_evaluated: usize,
    generation_settings: Settings,
    prompt: String,
    has_new_line: bool,
    truncated: bool,
    stop_type: &'static str,
    stopping_word: String,
    tokens_cached: usize,
    timings: Timings,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    completion_probabilities: Vec<Alternatives>,
}

/// Encodes the responses of `/completion`.
pub(super) struct LlamaEncoder {
    tokenizer: Arc<Tokenizer>,
    stream: bool,
    n_probs: usize,
    return_tokens: bool,
    texts: Vec<Whole>,
}

impl LlamaEncoder {
    pub(super) fn new(options: Options, request: &ValidRequest, stream: bool) -> Self {
        let tokenizer = Arc::clone(&request.served.tokenizer);
        let Options { stop, ignore_eos, n_probs, return_tokens } = options;
        let mut settings = Settings::new(&request.sampling, request.max_tokens);
        (settings.stop, settings.ignore_eos, settings.stream, settings.n_probs) = (stop, ignore_eos, stream, n_probs);
        let whole = |(index, ids): (usize, &Vec<u32>)| Whole {
            index,
            content: String::new(),
            tokens: Vec::new(),
            // Any slot: a request is not bound to one.
            id_slot: -1,
            stop: true,
            model: request.served.name.clone(),
            tokens_predicted: 0,
            tokens_evaluated: ids.len(),
            generation_settings: settings.clone(),
            prompt: lossy(ids.iter().flat_map(|id| tokenizer.piece(*id)).copied().collect()),
            has_new_line: false,
            // The context has no bound.
            truncated: false,
            stop_type: "none",
            stopping_word: String::new(),
            tokens_cached: request.cached.get(index).copied().unwrap_or(0),
            timings: Timings::default(),
            completion_probabilities: Vec::new(),
        };
        let texts = request.prompts.iter().enumerate().map(whole).collect();
        Self { tokenizer, stream, n_probs, return_tokens, texts }
    }

    fn token(&self, id: u32, logprob: f32) -> TokenProbability {
        let bytes = self.tokenizer.piece(id).to_vec();
        TokenProbability { id, token: lossy(bytes.clone()), bytes, logprob }
    }

    fn alternatives(&self, token: &TokenLogprobs) -> Alternatives {
        let top = token.top.iter().take(self.n_probs);
        Alternatives {
            token: self.token(token.token, token.logprob),
            top_logprobs: top.map(|(id, logprob)| self.token(*id, *logprob)).collect(),
        }
    }
}

fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

impl EventEncoder for LlamaEncoder {
    fn start(&mut self, _: &mut Vec<StreamEvent>) {}

    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<StreamEvent>) {
        let probabilities: Vec<Alternatives> = delta.logprobs.iter().map(|token| self.alternatives(token)).collect();
        let text = &mut self.texts[index];
        text.tokens_predicted += delta.token_ids.len();
        text.has_new_line |= delta.text.contains('\n');
        if self.stream {
            out.push(StreamEvent::data(to_json(&Chunk {
                index,
                content: &delta.text,
                tokens: &delta.token_ids,
                stop: false,
                id_slot: -1,
                tokens_predicted: text.tokens_predicted,
                tokens_evaluated: text.tokens_evaluated,
                completion_probabilities: probabilities,
            })));
            return;
        }
        text.content.push_str(&delta.text);
        text.completion_probabilities.extend(probabilities);
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
            out.push(StreamEvent::data(to_json(text)));
        }
    }

    fn end(&mut self, _: TokenUsage, _: &mut Vec<StreamEvent>) {}

    fn fail(&mut self, error: &ApiError, out: &mut Vec<StreamEvent>) {
        out.push(StreamEvent::data(super::error_body(error).to_string()));
    }

    fn body(&self) -> String {
        match self.texts.as_slice() {
            [one] => to_json(one),
            several => to_json(&several),
        }
    }
}
