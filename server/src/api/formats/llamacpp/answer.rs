//! A completion in words: the chunks of its stream, and the object at its end.

use std::sync::Arc;

use serde::Serialize;
use utoipa::ToSchema;

use super::wire::Settings;
use crate::api::error::ApiError;
use crate::api::formats::foreign::Begun;
use crate::api::formats::openai::answer::Usage;
use crate::api::run::encoder::{Dialect, Kept, Said};
use crate::engine::{Delta, Finish, FinishReason, StopCause, TokenLogprobs};
use crate::text::Tokenizer;

/// How fast each part went.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = LlamaTimings)]
struct Timings {
    /// Tokens of the prompt that were known already.
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
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = LlamaToken)]
struct Listed {
    id: u32,
    token: String,
    bytes: Vec<u8>,
    logprob: f32,
}

/// A token of the text, with those that were likeliest in its place.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = LlamaProbability)]
struct Probability {
    #[serde(flatten)]
    token: Listed,
    top_logprobs: Vec<Listed>,
}

/// A piece of a stream.
#[derive(Serialize, ToSchema)]
#[schema(as = LlamaChunk)]
pub(super) struct Chunk<'a> {
    index: usize,
    content: &'a str,
    tokens: &'a [u32],
    stop: bool,
    id_slot: i64,
    tokens_predicted: usize,
    tokens_evaluated: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    completion_probabilities: Vec<Probability>,
}

/// A whole completion, and the last chunk of a stream, which has no text.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = LlamaCompletion)]
pub(super) struct Whole {
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
    #[schema(pattern = "^(none|eos|limit|word)$")]
    stop_type: &'static str,
    stopping_word: String,
    tokens_cached: usize,
    timings: Timings,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    completion_probabilities: Vec<Probability>,
}

/// One completion, or one for each prompt.
#[derive(ToSchema)]
#[serde(untagged)]
#[schema(as = LlamaCompletions)]
#[expect(dead_code, reason = "describes the two bodies; the writer chooses one")]
pub(super) enum Completions {
    One(Whole),
    Many(Vec<Whole>),
}

/// The format of `/completion`.
pub(super) struct Completion {
    tokenizer: Arc<Tokenizer>,
    /// Whether the answer goes out as it comes.
    stream: bool,
    settings: Settings,
    texts: Vec<Whole>,
}

impl Completion {
    pub(super) fn new(settings: Settings, begun: &Begun<'_>) -> Self {
        let tokenizer = Arc::clone(&begun.served.tokenizer);
        let whole = |(index, ids): (usize, &Vec<u32>)| Whole {
            index,
            content: String::new(),
            tokens: Vec::new(),
            // Whichever was free: a request is not bound to one.
            id_slot: -1,
            stop: true,
            model: begun.served.name.clone(),
            tokens_predicted: 0,
            tokens_evaluated: ids.len(),
            generation_settings: settings.clone(),
            prompt: shown(ids.iter().flat_map(|id| tokenizer.piece(*id)).copied().collect()),
            has_new_line: false,
            // There is no context that could overflow.
            truncated: false,
            stop_type: "none",
            stopping_word: String::new(),
            tokens_cached: begun.cached.get(index).copied().unwrap_or(0),
            timings: Timings::default(),
            completion_probabilities: Vec::new(),
        };
        let texts = begun.prompts.iter().enumerate().map(whole).collect();
        Self { stream: begun.stream, settings, texts, tokenizer }
    }

    fn listed(&self, id: u32, logprob: f32) -> Listed {
        let bytes = self.tokenizer.piece(id).to_vec();
        Listed { id, token: shown(bytes.clone()), bytes, logprob }
    }

    fn probability(&self, token: &TokenLogprobs) -> Probability {
        let most = usize::try_from(self.settings.n_probs).unwrap_or(usize::MAX);
        let top = token.top.iter().take(most);
        Probability {
            token: self.listed(token.token, token.logprob),
            top_logprobs: top.map(|(id, logprob)| self.listed(*id, *logprob)).collect(),
        }
    }
}

fn shown(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn json(value: &impl Serialize) -> String {
    // Strings, numbers and lists of them: there is nothing in it that JSON cannot say.
    serde_json::to_string(value).unwrap_or_default()
}

impl Dialect for Completion {
    fn open(&mut self, _: &mut Vec<Said>) {}

    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<Said>) {
        let probabilities: Vec<Probability> = delta.logprobs.iter().map(|token| self.probability(token)).collect();
        let text = &mut self.texts[index];
        text.tokens_predicted += delta.token_ids.len();
        text.has_new_line |= delta.text.contains('\n');
        if self.stream {
            out.push(Said::data(json(&Chunk {
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
        if self.settings.return_tokens {
            text.tokens.extend(&delta.token_ids);
        }
    }

    fn end(&mut self, index: usize, finish: &Finish, _: &Kept, out: &mut Vec<Said>) {
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
            out.push(Said::data(json(text)));
        }
    }

    fn close(&mut self, _: Usage, _: &mut Vec<Said>) {}

    fn fail(&mut self, error: &ApiError, out: &mut Vec<Said>) {
        out.push(Said::data(super::refusal(error).to_string()));
    }

    fn body(&self) -> String {
        match self.texts.as_slice() {
            [one] => json(one),
            several => json(&several),
        }
    }
}
