//! From the wire type to requests that the engine can run; nothing below checks again.

use std::sync::Arc;

use rand::Rng;
use tidegate_model::SamplingParams;

use crate::api::error::ApiError;
use crate::api::formats::completions::echo::Echo;
use crate::api::formats::openai::logprobs;
use crate::api::formats::openai::wire::{Format, GenerationRequest, Seed, Stop};
use crate::api::request::choices::{Choices, Sizes};
use crate::api::request::grammar;
use crate::api::request::origin::Origin;
use crate::api::request::prompt;
use crate::api::request::tools::Tools;
use crate::api::run::alignment::Opening;
use crate::api::state::Served;
use crate::engine::{Keep, Request, RequestParameters, share_prompt};
use crate::text::Tokenizer;

/// Tokens to generate where a request does not say; OpenAI's default.
const DEFAULT_MAX_TOKENS: usize = 16;

/// The same for chat, where OpenAI has no bound and a text ends by itself: enough for an answer.
const DEFAULT_MAX_CHAT_TOKENS: usize = 1024;

/// A request for text whose every part has been checked.
pub(in crate::api) struct Validated {
    /// The texts of each prompt, in order.
    pub(in crate::api) requests: Vec<Request>,
    /// The ids of each prompt.
    pub(in crate::api) prompts: Vec<Vec<u32>>,
    /// Tokens of the prompts that need not be computed.
    pub(in crate::api) cached: usize,
    pub(in crate::api) include_usage: bool,
    pub(in crate::api) return_token_ids: bool,
    pub(in crate::api) seed: u64,
    pub(in crate::api) details: Details,
}

/// What the answer's format has to know.
pub(in crate::api) struct Details {
    pub(in crate::api) tokenizer: Arc<Tokenizer>,
    /// How many texts each prompt gets.
    pub(in crate::api) choices: Choices,
    /// What the texts of each of them begin with.
    pub(in crate::api) openings: Vec<Opening>,
    /// Log probabilities that are listed with each token beside its own; none where none are told.
    pub(in crate::api) logprobs: Option<usize>,
    /// Whether tokens are called by their ids.
    pub(in crate::api) names_by_id: bool,
    /// The prompts' own texts, where they are told.
    pub(in crate::api) echoes: Vec<Echo>,
    /// The tools that an answer may call.
    pub(in crate::api) tools: Option<Tools>,
}

/// Checks `wire` against what is served and where it begins; the error names the parameter.
pub(in crate::api) fn validate(
    format: Format,
    mut wire: GenerationRequest,
    served: &Served,
    origin: &Origin,
) -> Result<Validated, ApiError> {
    if let Some(model) = &wire.model {
        served.check_name(model, Some("model"))?;
    }
    check_stream(&wire)?;
    let include_usage = wire.include_usage();
    let choices = Choices::read(format, &wire)?;
    let echo = echo(format, &wire, served, origin)?;
    if !origin.is_plain() {
        choices.check_single("a conversation")?;
    }
    let logprobs = logprobs::read(format, &wire)?;
    let sampling = sampling(&wire, &served.sampling)?;
    let max_tokens = max_tokens(format, &wire, served, echo)?;
    let stop = match wire.stop.take() {
        None => Vec::new(),
        Some(Stop::One(one)) => vec![one],
        Some(Stop::Many(many)) => many,
    };
    let given = if echo { wire.prompt.clone() } else { None };
    let base = origin.snapshot().map(AsRef::as_ref);
    let prompts = prompt::encode(format, &mut wire, served, base)?;
    let sizes = Sizes { prompts: &prompts, max_tokens, listed: logprobs.unwrap_or(0), echoed: echo };
    choices.check_room(&sizes, served)?;
    let follows = max_tokens > 0;
    let echoes = if echo { Echo::all(given.as_ref(), &prompts, &served.tokenizer, follows) } else { Vec::new() };
    let opening = |(at, ids): (usize, &Vec<u32>)| {
        // No character of a translation begins in its source.
        let new = served.reads_sources() && !ids.is_empty();
        let opening = if new { Opening::default() } else { Opening::new(ids, base, &served.tokenizer) };
        Opening { offset: echoes.get(at).map_or(0, |echo| echo.text.chars().count()), ..opening }
    };
    let openings = prompts.iter().enumerate().map(opening).collect();
    let seed = sampling.seed;
    let grammar = grammar::grammar(format, &wire, served)?;
    let parameters = RequestParameters {
        max_tokens,
        stop,
        sampling,
        reseed: wire.seed.is_some(),
        ignore_eos: wire.ignore_eos.unwrap_or(false),
        min_tokens: wire.min_tokens.map_or(0, |tokens| usize::try_from(tokens).unwrap_or(usize::MAX)),
        stop_token_ids: wire.stop_token_ids.take().unwrap_or_default(),
        // The best is the one whose log probability is known to be.
        logprobs: logprobs.or(choices.are_ranked().then_some(0)),
        prompt_logprobs: logprobs.filter(|_| echo),
        grammar,
        ..RequestParameters::default()
    };
    let plan = Plan { choices, parameters, served, origin };
    let (mut requests, mut cached) = (Vec::with_capacity(prompts.len() * choices.generated), 0);
    for prompt in &prompts {
        let texts = plan.texts(prompt)?;
        cached += texts.first().map_or(0, Request::cached_tokens);
        requests.extend(texts);
    }
    let return_token_ids = wire.return_token_ids.unwrap_or(false);
    let names_by_id = wire.return_tokens_as_token_ids.unwrap_or(false);
    let (tokenizer, tools) = (Arc::clone(&served.tokenizer), wire.tools.take());
    let details = Details { tokenizer, choices, openings, logprobs, names_by_id, echoes, tools };
    Ok(Validated { requests, prompts, cached, include_usage, return_token_ids, seed, details })
}

/// What the texts of a request have in common.
struct Plan<'a> {
    choices: Choices,
    parameters: RequestParameters,
    served: &'a Served,
    origin: &'a Origin,
}

impl Plan<'_> {
    /// The texts of one prompt, each with the seed after the one before.
    fn texts(&self, prompt: &[u32]) -> Result<Vec<Request>, ApiError> {
        let (start, keep) = self.origin.start(self.served, prompt);
        let parameters = &self.parameters;
        let several = self.choices.generated > 1;
        let text = |choice: usize| {
            let mut sampling = parameters.sampling.clone();
            sampling.seed = sampling.seed.wrapping_add(choice as u64);
            let keep = Keep {
                prompt: keep.prompt && choice == 0,
                // Which of several is gone on with nobody knows, and all would drive others out. One that only reads
                // has an end and nothing else.
                end: (keep.end && !several) || parameters.max_tokens == 0,
            };
            let (start, prompt) = (start.clone(), prompt.to_vec());
            Ok(Request::new(
                RequestParameters { start, prompt, sampling, keep, ..parameters.clone() },
                &self.served.limits,
            )?)
        };
        let mut texts = (0..self.choices.generated).map(text).collect::<Result<Vec<_>, ApiError>>()?;
        share_prompt(&mut texts);
        Ok(texts)
    }
}

fn check_stream(wire: &GenerationRequest) -> Result<(), ApiError> {
    if wire.stream_options.is_some() && !wire.stream.unwrap_or(false) {
        return Err(ApiError::invalid(Some("stream_options"), "stream_options must be absent unless stream is true"));
    }
    if wire.stream_options.as_ref().and_then(|options| options.continuous_usage_stats).unwrap_or(false) {
        let message = "stream_options.continuous_usage_stats must be absent, null or false: it is not supported";
        return Err(ApiError::invalid(Some("stream_options"), message));
    }
    Ok(())
}

/// Whether the prompts' own texts are told.
fn echo(format: Format, wire: &GenerationRequest, served: &Served, origin: &Origin) -> Result<bool, ApiError> {
    if !wire.echo.unwrap_or(false) {
        return Ok(false);
    }
    let refused = |message: String| Err(ApiError::invalid(Some("echo"), message));
    if format != Format::Completions {
        return refused(format!("echo must be absent, null or false at {}", format.path()));
    }
    if served.reads_sources() {
        return refused(
            "echo must be absent, null or false: the prompt is a source, and no text goes on with it".into(),
        );
    }
    if !origin.is_plain() {
        return refused("echo must be absent, null or false with a conversation, whose text is not kept".into());
    }
    Ok(true)
}

/// Tokens to generate at most; at least 1: only an echoed prompt and a session's own routes read without writing.
fn max_tokens(format: Format, wire: &GenerationRequest, served: &Served, echo: bool) -> Result<usize, ApiError> {
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
    let (fewest, most) = (usize::from(!echo), served.limits.max_tokens);
    let tokens = asked.map_or(default.min(most), |asked| usize::try_from(asked).unwrap_or(usize::MAX));
    if (fewest..=most).contains(&tokens) {
        return Ok(tokens);
    }
    Err(ApiError::invalid(Some(name), format!("{name} must be from {fewest} to {most}, found {tokens}")))
}

/// The request's sampling parameters over the model's recommended ones.
pub(in crate::api) fn sampling(
    wire: &GenerationRequest,
    recommended: &SamplingParams,
) -> Result<SamplingParams, ApiError> {
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
