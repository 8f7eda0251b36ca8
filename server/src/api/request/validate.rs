//! The one validation of a request for text, from what a format asks for to what the engine runs.

use std::sync::Arc;

use tidegate_model::SamplingParams;

use super::choices::{Choices, longest_text};
use super::continuation::Continuation;
use super::grammar::GrammarRequest;
use super::names::ParameterNames;
use super::prompt::Prompt;
use super::sampling::SamplingOverrides;
use super::tools::Tools;
use crate::api::error::ApiError;
use crate::api::state::Served;
use crate::engine::{Request, RequestError, RequestParameters, Snapshots, share_prompt};
use crate::session::Snapshot;

/// The longest text that a request allows, in tokens.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) enum MaxTokens {
    /// As the request says.
    Given(u64),
    /// The format's default, or the server's bound if that is lower: a request without a number is never refused.
    Default(usize),
    /// As many as a request of this size may have.
    Longest,
}

/// A request for text in any format, not yet validated.
#[derive(Debug)]
pub(in crate::api) struct TextRequest {
    pub(in crate::api) names: ParameterNames,
    pub(in crate::api) model: Option<String>,
    pub(in crate::api) prompt: Prompt,
    pub(in crate::api) max_tokens: MaxTokens,
    pub(in crate::api) min_tokens: u64,
    pub(in crate::api) stop: Vec<String>,
    pub(in crate::api) stop_token_ids: Vec<u32>,
    pub(in crate::api) ignore_eos: bool,
    pub(in crate::api) sampling: SamplingOverrides,
    pub(in crate::api) choices: Choices,
    /// How many log probabilities to list with each token beside its own; none if not asked for.
    pub(in crate::api) logprobs: Option<usize>,
    /// Whether the response begins with the prompt.
    pub(in crate::api) echo: bool,
    pub(in crate::api) grammar: Option<GrammarRequest>,
    pub(in crate::api) tools: Option<Tools>,
}

impl TextRequest {
    /// A request for one text with everything else left to the server.
    pub(in crate::api) fn new(names: ParameterNames, prompt: Prompt, max_tokens: MaxTokens) -> Self {
        Self {
            names,
            model: None,
            prompt,
            max_tokens,
            min_tokens: 0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            sampling: SamplingOverrides::default(),
            choices: Choices::default(),
            logprobs: None,
            echo: false,
            grammar: None,
            tools: None,
        }
    }

    /// Checks the request against what is served and the conversation that it continues. To be called on a thread for
    /// blocking work.
    pub(in crate::api) fn validate(
        self,
        served: &Arc<Served>,
        continuation: &Continuation,
    ) -> Result<ValidRequest, ApiError> {
        let Self { names, choices, logprobs, echo, tools, .. } = self;
        if let Some(model) = &self.model {
            served.check_name(model, Some("model"))?;
        }
        let base = continuation.snapshot();
        if echo {
            check_echo(served, base.is_some())?;
        }
        if base.is_some() {
            choices.check_single()?;
        }
        let reseed = self.sampling.seed.is_some();
        let sampling = self.sampling.apply(&served.sampling)?;
        // Refused before the prompts are encoded, which takes longer.
        let given = match self.max_tokens {
            MaxTokens::Given(given) => Some(check_max_tokens(given, &names, echo, served)?),
            MaxTokens::Default(default) => Some(default.min(served.limits.max_tokens)),
            MaxTokens::Longest => None,
        };
        let prompts = self.prompt.encode(names.prompt, tools.as_ref(), served, base.map(AsRef::as_ref))?;
        let listed = logprobs.unwrap_or(0);
        let max_tokens = given.unwrap_or_else(|| longest_text(&prompts, listed, served));
        choices.check_size(&prompts, max_tokens, (listed, echo), &names, served)?;
        let parameters = RequestParameters {
            max_tokens,
            stop: self.stop,
            sampling: sampling.clone(),
            reseed,
            ignore_eos: self.ignore_eos,
            min_tokens: usize::try_from(self.min_tokens).unwrap_or(usize::MAX),
            stop_token_ids: self.stop_token_ids,
            // Ranking needs the texts' log probabilities, even if none are listed.
            logprobs: logprobs.or(choices.are_ranked().then_some(0)),
            prompt_logprobs: logprobs.filter(|_| echo),
            grammar: GrammarRequest::compile(self.grammar.as_ref(), tools.as_ref(), served)?,
            ..RequestParameters::default()
        };
        let (mut requests, mut cached) = (Vec::with_capacity(prompts.len() * choices.generated), Vec::new());
        for prompt in &prompts {
            let mut texts =
                texts(prompt, &parameters, choices, served, continuation).map_err(|error| names.error(&error))?;
            share_prompt(&mut texts);
            cached.push(texts.first().map_or(0, Request::cached_tokens));
            requests.extend(texts);
        }
        let (served, base) = (Arc::clone(served), base.cloned());
        Ok(ValidRequest { served, requests, prompts, cached, base, choices, sampling, max_tokens, logprobs, tools })
    }
}

/// The engine's requests for one prompt, each with the seed after the one before.
fn texts(
    prompt: &[u32],
    parameters: &RequestParameters,
    choices: Choices,
    served: &Served,
    continuation: &Continuation,
) -> Result<Vec<Request>, RequestError> {
    let (start, snapshots) = continuation.start(served, prompt);
    let text = |choice: usize| {
        let mut sampling = parameters.sampling.clone();
        sampling.seed = sampling.seed.wrapping_add(choice as u64);
        let snapshots = Snapshots {
            prompt: snapshots.prompt && choice == 0,
            // Nobody knows which of several texts will be continued, and keeping all of them would evict others. A
            // request that only reads has nothing but its end.
            end: (snapshots.end && choices.generated == 1) || parameters.max_tokens == 0,
        };
        let (start, prompt) = (start.clone(), prompt.to_vec());
        Request::new(RequestParameters { start, prompt, sampling, snapshots, ..parameters.clone() }, &served.limits)
    };
    (0..choices.generated).map(text).collect()
}

/// Only an echoed prompt can be read without generating anything.
fn check_max_tokens(given: u64, names: &ParameterNames, echo: bool, served: &Served) -> Result<usize, ApiError> {
    let (fewest, most) = (usize::from(!echo), served.limits.max_tokens);
    let tokens = usize::try_from(given).ok().filter(|tokens| (fewest..=most).contains(tokens));
    let name = names.max_tokens;
    let message = || format!("{name} must be from {fewest} to {most}, found {given}");
    tokens.ok_or_else(|| ApiError::invalid(Some(name), message()))
}

fn check_echo(served: &Served, continues: bool) -> Result<(), ApiError> {
    let reason = if served.reads_sources() {
        ": the prompt is a source, which no text continues"
    } else if continues {
        " with a conversation, whose text is not kept"
    } else {
        return Ok(());
    };
    Err(ApiError::invalid(Some("echo"), format!("echo must be absent, null or false{reason}")))
}

/// A request for text that has been validated.
pub(in crate::api) struct ValidRequest {
    pub(in crate::api) served: Arc<Served>,
    /// For each prompt in order, a request for each of its texts.
    pub(in crate::api) requests: Vec<Request>,
    /// The token ids of each prompt.
    pub(in crate::api) prompts: Vec<Vec<u32>>,
    /// How many tokens of each prompt need not be computed.
    pub(in crate::api) cached: Vec<usize>,
    /// The conversation that is continued.
    pub(in crate::api) base: Option<Arc<Snapshot>>,
    pub(in crate::api) choices: Choices,
    /// Those of the first text of each prompt.
    pub(in crate::api) sampling: SamplingParams,
    pub(in crate::api) max_tokens: usize,
    pub(in crate::api) logprobs: Option<usize>,
    pub(in crate::api) tools: Option<Tools>,
}
