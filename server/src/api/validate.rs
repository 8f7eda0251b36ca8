//! From the wire type to requests that the engine can run; nothing below checks again.

use rand::Rng;
use tidegate_model::SamplingParams;

use super::error::ApiError;
use super::origin::Origin;
use super::prompt;
use super::state::Served;
use super::wire::{Format, GenerationRequest, Seed, Stop};
use crate::engine::{Request, RequestParameters};

/// Tokens to generate where a request does not say; OpenAI's default.
const DEFAULT_MAX_TOKENS: usize = 16;

/// The same for chat, where OpenAI has no bound and a text ends by itself: enough for an answer.
const DEFAULT_MAX_CHAT_TOKENS: usize = 1024;

/// A request for completions whose every part has been checked.
#[derive(Debug)]
pub(super) struct Validated {
    /// One for each prompt, in order.
    pub(super) requests: Vec<Request>,
    /// The ids of each prompt.
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) include_usage: bool,
    pub(super) return_token_ids: bool,
    pub(super) seed: u64,
}

/// Checks `wire` against what is served and where it begins; the error names the parameter.
pub(super) fn validate(
    format: Format,
    mut wire: GenerationRequest,
    served: &Served,
    origin: &Origin,
) -> Result<Validated, ApiError> {
    if let Some(model) = &wire.model {
        served.check_name(model, Some("model"))?;
    }
    let stream = wire.stream.unwrap_or(false);
    if wire.stream_options.is_some() && !stream {
        return Err(ApiError::invalid(Some("stream_options"), "stream_options must be absent unless stream is true"));
    }
    if wire.stream_options.as_ref().and_then(|options| options.continuous_usage_stats).unwrap_or(false) {
        let message = "stream_options.continuous_usage_stats must be absent, null or false: it is not supported";
        return Err(ApiError::invalid(Some("stream_options"), message));
    }
    let include_usage = wire.include_usage();
    let sampling = sampling(&wire, &served.sampling)?;
    let max_tokens = max_tokens(format, &wire, served)?;
    let stop = match wire.stop.take() {
        None => Vec::new(),
        Some(Stop::One(one)) => vec![one],
        Some(Stop::Many(many)) => many,
    };
    let prompts = prompt::encode(format, &mut wire, served, origin.snapshot().map(AsRef::as_ref))?;
    let seed = sampling.seed;
    let requests = prompts
        .iter()
        .map(|prompt| {
            let (start, keep) = origin.start(served, prompt);
            let parameters = RequestParameters {
                start,
                prompt: prompt.clone(),
                max_tokens,
                stop: stop.clone(),
                sampling: sampling.clone(),
                reseed: wire.seed.is_some(),
                ignore_eos: wire.ignore_eos.unwrap_or(false),
                keep,
                ..RequestParameters::default()
            };
            Ok(Request::new(parameters, &served.limits)?)
        })
        .collect::<Result<_, ApiError>>()?;
    let return_token_ids = wire.return_token_ids.unwrap_or(false);
    Ok(Validated { requests, prompts, include_usage, return_token_ids, seed })
}

/// Tokens to generate at most; at least 1: only a session's own routes read without writing.
fn max_tokens(format: Format, wire: &GenerationRequest, served: &Served) -> Result<usize, ApiError> {
    let name = match (format, wire.max_completion_tokens) {
        (Format::Completions, Some(_)) => {
            let message = "max_completion_tokens must be absent: it is max_tokens here";
            return Err(ApiError::invalid(Some("max_completion_tokens"), message));
        }
        (Format::Chat, Some(_)) => "max_completion_tokens",
        (Format::Responses, _) => "max_output_tokens",
        _ => "max_tokens",
    };
    // A server that allows fewer must not refuse who names no number.
    let default = match format {
        Format::Completions => DEFAULT_MAX_TOKENS,
        Format::Chat | Format::Responses => DEFAULT_MAX_CHAT_TOKENS,
    };
    let asked = wire.max_completion_tokens.or(wire.max_tokens);
    let most = served.limits.max_tokens;
    let tokens = asked.map_or(default.min(most), |asked| usize::try_from(asked).unwrap_or(usize::MAX));
    if (1..=most).contains(&tokens) {
        return Ok(tokens);
    }
    Err(ApiError::invalid(Some(name), format!("{name} must be from 1 to {most}, found {tokens}")))
}

/// The request's sampling parameters over the model's recommended ones.
pub(super) fn sampling(wire: &GenerationRequest, recommended: &SamplingParams) -> Result<SamplingParams, ApiError> {
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
