//! From the wire type to requests that the engine can run; nothing below checks again.

use rand::Rng;
use serde_json::{Value, json};
use tidegate_model::SamplingParams;

use super::error::ApiError;
use super::state::Served;
use super::wire::{CompletionRequest, Prompt, Seed, Stop};
use crate::engine::{Request, RequestParameters};

/// Tokens to generate where a request does not say; OpenAI's default.
const DEFAULT_MAX_TOKENS: usize = 16;

/// A request for completions whose every part has been checked.
#[derive(Debug)]
pub(super) struct Validated {
    /// One for each prompt, in order.
    pub(super) requests: Vec<Request>,
    /// The ids of each prompt.
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) return_token_ids: bool,
    pub(super) seed: u64,
}

/// Checks `wire` against what is served; the error names the parameter.
pub(super) fn validate(wire: CompletionRequest, served: &Served) -> Result<Validated, ApiError> {
    if let Some(model) = &wire.model {
        served.check_name(model, Some("model"))?;
    }
    refuse_unsupported(&wire)?;
    let stream = wire.stream.unwrap_or(false);
    if wire.stream_options.is_some() && !stream {
        return Err(ApiError::invalid(Some("stream_options"), "stream_options must be absent unless stream is true"));
    }
    if wire.stream_options.as_ref().and_then(|options| options.continuous_usage_stats).unwrap_or(false) {
        let message = "stream_options.continuous_usage_stats must be absent, null or false: it is not supported";
        return Err(ApiError::invalid(Some("stream_options"), message));
    }
    let include_usage = wire.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false);
    let sampling = sampling(&wire, &served.sampling)?;
    // A server that allows fewer must not refuse who names no number.
    let default = DEFAULT_MAX_TOKENS.min(served.limits.max_tokens);
    let max_tokens = wire.max_tokens.map_or(default, |asked| usize::try_from(asked).unwrap_or(usize::MAX));
    let stop = match wire.stop {
        None => Vec::new(),
        Some(Stop::One(one)) => vec![one],
        Some(Stop::Many(many)) => many,
    };
    let prompt = wire.prompt.ok_or_else(|| ApiError::invalid(Some("prompt"), "prompt must be given"))?;
    let prompts = encode(prompt, served)?;
    let seed = sampling.seed;
    let requests = prompts
        .iter()
        .map(|prompt| {
            let parameters = RequestParameters {
                prompt: prompt.clone(),
                max_tokens,
                stop: stop.clone(),
                sampling: sampling.clone(),
                ignore_eos: wire.ignore_eos.unwrap_or(false),
            };
            Ok(Request::new(parameters, &served.limits)?)
        })
        .collect::<Result<_, ApiError>>()?;
    let return_token_ids = wire.return_token_ids.unwrap_or(false);
    Ok(Validated { requests, prompts, stream, include_usage, return_token_ids, seed })
}

/// The request's sampling parameters over the model's recommended ones.
fn sampling(wire: &CompletionRequest, recommended: &SamplingParams) -> Result<SamplingParams, ApiError> {
    let mut sampling = recommended.clone();
    let set = |target: &mut f32, value: Option<f64>| {
        if let Some(value) = value {
            *target = value as f32;
        }
    };
    set(&mut sampling.temperature, wire.temperature);
    set(&mut sampling.top_p, wire.top_p);
    set(&mut sampling.min_p, wire.min_p);
    set(&mut sampling.typical_p, wire.typical_p);
    set(&mut sampling.repetition_penalty, wire.repetition_penalty);
    set(&mut sampling.frequency_penalty, wire.frequency_penalty);
    set(&mut sampling.presence_penalty, wire.presence_penalty);
    match wire.top_k {
        None => {}
        // Both are in use for "all tokens".
        Some(-1 | 0) => sampling.top_k = 0,
        Some(top_k) => {
            sampling.top_k = usize::try_from(top_k)
                .map_err(|_| ApiError::invalid(Some("top_k"), format!("top_k must be at least -1, found {top_k}")))?;
        }
    }
    for (key, bias) in wire.logit_bias.iter().flatten() {
        // One spelling for each id: of `7`, `07`, `+7`, … there is no end, and all would be added at every token.
        let id = key.parse::<u32>().ok().filter(|id| id.to_string() == *key).ok_or_else(|| {
            ApiError::invalid(Some("logit_bias"), format!("logit_bias must have token ids as keys, found {key:?}"))
        })?;
        sampling.logit_bias.push((id, *bias as f32));
    }
    sampling.seed = wire.seed.map_or_else(|| rand::rng().random(), Seed::bits);
    Ok(sampling)
}

/// The token ids of each prompt.
fn encode(prompt: Prompt, served: &Served) -> Result<Vec<Vec<u32>>, ApiError> {
    let text = |text: String| {
        served.tokenizer.encode(&text).map_err(|error| ApiError::invalid(Some("prompt"), format!("prompt: {error}")))
    };
    let count = match &prompt {
        Prompt::Text(_) | Prompt::Ids(_) => 1,
        Prompt::Texts(texts) => texts.len(),
        Prompt::IdLists(lists) => lists.len(),
    };
    // More than can wait at once would never be let in.
    let most = served.engine.queue_capacity();
    if count == 0 || count > most {
        let message = format!("prompt must hold from 1 to {most} prompts, found {count}");
        return Err(ApiError::invalid(Some("prompt"), message));
    }
    match prompt {
        Prompt::Text(one) => Ok(vec![text(one)?]),
        Prompt::Texts(texts) => texts.into_iter().map(text).collect(),
        Prompt::Ids(ids) => Ok(vec![ids]),
        Prompt::IdLists(lists) => Ok(lists),
    }
}

/// Fields of OpenAI and vLLM that would change the answer and that this server does not have, each with the value
/// that asks for nothing. To ignore one silently would be to answer another question.
fn unsupported() -> [(&'static str, Value); 30] {
    [
        ("n", json!(1)),
        ("best_of", json!(1)),
        ("echo", json!(false)),
        ("suffix", json!("")),
        ("logprobs", Value::Null),
        ("prompt_logprobs", Value::Null),
        ("stop_token_ids", json!([])),
        ("min_tokens", json!(0)),
        ("max_completion_tokens", Value::Null),
        ("bad_words", json!([])),
        ("allowed_token_ids", Value::Null),
        ("truncate_prompt_tokens", Value::Null),
        ("prompt_embeds", Value::Null),
        ("response_format", json!({"type": "text"})),
        ("structured_outputs", Value::Null),
        ("guided_json", Value::Null),
        ("guided_regex", Value::Null),
        ("guided_choice", Value::Null),
        ("guided_grammar", Value::Null),
        ("guided_decoding_backend", Value::Null),
        ("logits_processors", Value::Null),
        ("use_beam_search", json!(false)),
        ("length_penalty", json!(1.0)),
        ("early_stopping", json!(false)),
        ("include_stop_str_in_output", json!(false)),
        ("skip_special_tokens", json!(true)),
        ("spaces_between_special_tokens", json!(true)),
        ("detokenize", json!(true)),
        ("return_tokens_as_token_ids", json!(false)),
        ("add_special_tokens", json!(true)),
    ]
}

/// Whether two values say the same: 1 and 1.0 are one number.
fn is_same(value: &Value, other: &Value) -> bool {
    value == other || value.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}

fn refuse_unsupported(wire: &CompletionRequest) -> Result<(), ApiError> {
    for (name, neutral) in unsupported() {
        match wire.rest.get(name) {
            None | Some(Value::Null) => {}
            Some(value) if is_same(value, &neutral) => {}
            Some(_) => {
                let message = match neutral {
                    Value::Null => format!("{name} is not supported and must be absent or null"),
                    neutral => format!("{name} must be absent, null or {neutral}: nothing else is supported"),
                };
                return Err(ApiError::invalid(Some(name), message));
            }
        }
    }
    Ok(())
}
