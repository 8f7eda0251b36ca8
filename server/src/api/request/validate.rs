//! Validates a request for text: turns what a format asks for into what the engine runs.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use tidegate_model::{SamplerState, SamplingParams};

use super::choices::{Choices, longest_text};
use super::continuation::Continuation;
use super::grammar::{GrammarLookup, GrammarParameters};
use super::identity::Identity;
use super::listing::{DEFAULT_PART, Listing};
use super::names::ParameterNames;
use super::prompt::Prompt;
use super::recorder::TextRecorder;
use super::sampling::SamplingOverrides;
use super::start::TextStart;
use super::tools::Tools;
use crate::api::auth::context::{AuthContext, Demand};
use crate::api::error::ApiError;
use crate::api::state::Served;
use crate::engine::{Begun, Grammar, Request, RequestError, RequestParameters, share_prompt};
use crate::session::Snapshot;
use crate::text::{ChatTemplate, ReasoningStart};

/// Number of tokens at the end of a prompt that are searched for the start of reasoning: enough for its tag in single
/// bytes and white space.
const TAG_TOKENS: usize = 16;

/// The longest text that a request allows, in tokens.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) enum MaxTokens {
    /// As the request says.
    Given(u64),
    /// The format's default, or the server's limit if that is lower: a request without a number is never refused.
    Default(usize),
    /// As many as a request of this size may have.
    Longest,
}

/// A request for text in any format, not yet validated.
#[expect(clippy::struct_excessive_bools, reason = "each is a parameter of its own")]
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
    /// How many log probabilities to list with each token besides its own; `None` if not requested.
    pub(in crate::api) logprobs: Option<usize>,
    /// Whether the response begins with the prompt.
    pub(in crate::api) echo: bool,
    /// Whether the request may only read the prompt and generate nothing, because the state is kept.
    pub(in crate::api) may_only_read: bool,
    /// Whether the response is held until its end.
    pub(in crate::api) collected: bool,
    /// Whether the response is streamed. With an `Idempotency-Key`, it may be held as well.
    pub(in crate::api) streamed: bool,
    pub(in crate::api) grammar: GrammarParameters,
    pub(in crate::api) tools: Option<Tools>,
    /// How answers that follow a grammar may begin with reasoning, if they may. [`Self::find_grammar`] sets it.
    pub(in crate::api) reasoning: Option<ReasoningStart>,
    pub(in crate::api) identity: Identity,
    /// What another server has already generated of the request's only text.
    pub(in crate::api) begun: Option<Begun>,
    /// The number of cached tokens that another server has reported, if it has begun to send the events of the only
    /// text.
    pub(in crate::api) reported_cached: Option<usize>,
}

impl TextRequest {
    /// Creates a request for one text with everything else left to the server.
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
            may_only_read: false,
            collected: true,
            streamed: false,
            grammar: GrammarParameters::default(),
            tools: None,
            reasoning: None,
            identity: Identity::new(),
            begun: None,
            reported_cached: None,
        }
    }

    /// Looks up the grammar, which [`Self::validate`] takes compiled. Call it on a thread for blocking work.
    pub(in crate::api) fn find_grammar(&mut self, served: &Served) -> Result<GrammarLookup, ApiError> {
        let Some(grammar) = std::mem::take(&mut self.grammar).of(self.tools.as_mut())? else {
            return Ok(GrammarLookup::Absent);
        };
        self.names.grammar = grammar.param;
        let start = self.prompt.reasoning_start(self.tools.as_ref(), served);
        let grammar = match start {
            Some(start) => grammar.after_reasoning(start),
            None => grammar,
        };
        self.reasoning = start.filter(|_| !grammar.is_json());
        grammar.find(served)
    }

    /// Checks the request against what is served, the conversation that it continues, and the quota of its key. Call it
    /// on a thread for blocking work.
    pub(in crate::api) fn validate(
        self,
        served: &Arc<Served>,
        continuation: &Continuation,
        grammar: Option<Arc<dyn Grammar>>,
        auth: Option<&AuthContext>,
    ) -> Result<ValidRequest, ApiError> {
        let Self { names, choices, logprobs, echo, collected, tools, identity, .. } = self;
        let Self { begun, reported_cached, .. } = self;
        if let Some(model) = &self.model {
            served.check_name(model, Some("model"))?;
        }
        let base = continuation.snapshot();
        if echo {
            check_echo(served, base.is_some())?;
        }
        let keep = continuation.keep();
        if base.is_some() {
            choices.check_conversation(keep)?;
        }
        let held_states =
            choices.held_states(keep, self.streamed, served)? + begun.as_ref().map_or(0, |_| served.state_bytes);
        let reseed = self.sampling.seed.is_some();
        let sampling = self.sampling.apply(&served.sampling)?;
        // Refused before the prompts are encoded, which takes longer.
        let given = match self.max_tokens {
            MaxTokens::Given(given) => Some(check_max_tokens(given, &names, echo || self.may_only_read, served)?),
            MaxTokens::Default(_) | MaxTokens::Longest => None,
        };
        // Only a prompt of messages has turns.
        let template = served.template.as_deref().filter(|_| matches!(self.prompt, Prompt::Messages(_)));
        let turns = template.filter(|_| !self.ignore_eos).map(ChatTemplate::turns).unwrap_or_default();
        // Messages can be read back where a conversation is stored.
        let conversation = match &self.prompt {
            Prompt::Messages(conversation) if base.is_some() => Some(conversation.clone()),
            _ => None,
        };
        let prompts = self.prompt.encode(names.prompt, tools.as_ref(), served, base.map(AsRef::as_ref))?;
        let messages = conversation.zip(prompts.first()).map(|(messages, prompt)| messages.added(prompt, served));
        let prompt_says = || reasoning_after(template?, prompts.first()?, served);
        let reasoning = if grammar.is_some() { self.reasoning } else { prompt_says() };
        let listed = logprobs.unwrap_or(0);
        let listing = Listing::new(logprobs, (&prompts, choices), echo, collected);
        let max_tokens = given.unwrap_or_else(|| {
            let (longest, part) = match self.max_tokens {
                MaxTokens::Default(default) => (default.min(served.limits.max_tokens), 1),
                MaxTokens::Given(_) | MaxTokens::Longest => (longest_text(&prompts, listed, served), DEFAULT_PART),
            };
            let longest = listing.default_tokens(part).map_or(longest, |tokens| longest.min(tokens));
            // A request that sets no limit gets what the quota allows, instead of a refusal.
            let quota = auth.and_then(|auth| auth.default_tokens(prompts.iter().map(Vec::len).sum()));
            let texts = (prompts.len() * choices.generated).max(1);
            quota.map_or(longest, |quota| longest.min((quota / texts).max(1)))
        });
        choices.check_size(&prompts, max_tokens, (listed, echo), &names, served)?;
        let held_bytes = listing.bytes(max_tokens, &names)?;
        let parameters = RequestParameters {
            max_tokens,
            stop: self.stop,
            turns,
            sampling: sampling.clone(),
            reseed,
            ignore_eos: self.ignore_eos,
            min_tokens: usize::try_from(self.min_tokens).unwrap_or(usize::MAX),
            stop_token_ids: self.stop_token_ids,
            // Ranking needs the texts' log probabilities, even if none are listed.
            logprobs: logprobs.or((choices.are_ranked() || keep.is_some()).then_some(0)),
            prompt_logprobs: logprobs.filter(|_| echo),
            grammar,
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
        if let (Some(begun), [request]) = (begun, &mut requests[..]) {
            request.resume(begun);
        }
        let prompt = prompts.first().map_or_else(Default::default, Vec::as_slice);
        let recorder = continuation.recorder(prompt, messages, served);
        let new_source = served.reads_sources() && !prompt.is_empty();
        // In a slot, the text continues only from the slot's own state, not from a longer one in the prefix cache.
        let known = cached.iter().sum::<usize>() as u64;
        let in_slot = recorder.as_ref().is_some_and(|recorder| known > 0 && recorder.read() == known);
        let continues = !new_source && (base.is_some() || in_slot);
        let cached = reported_cached.map_or(cached, |reported| vec![reported]);
        let (served, base) = (Arc::clone(served), base.cloned());
        Ok(ValidRequest {
            names,
            served,
            requests,
            prompts,
            recorder,
            cached,
            base,
            continues,
            choices,
            sampling,
            max_tokens,
            logprobs,
            means: keep.is_some(),
            held_bytes,
            held_states,
            tools,
            reasoning,
            identity,
        })
    }
}

/// Returns where a prompt leaves the reasoning of a model that reasons.
fn reasoning_after(template: &ChatTemplate, prompt: &[u32], served: &Served) -> Option<ReasoningStart> {
    let last = &prompt[prompt.len().saturating_sub(TAG_TOKENS)..];
    template.has_reasoning().then(|| ReasoningStart::after(&served.tokenizer.vocabulary().bytes_of(last)))
}

/// Creates the engine's requests for one prompt, one for each text, with different seeds.
fn texts(
    prompt: &[u32],
    parameters: &RequestParameters,
    choices: Choices,
    served: &Served,
    continuation: &Continuation,
) -> Result<Vec<Request>, RequestError> {
    let only_read = parameters.max_tokens == 0;
    let TextStart { start, snapshot, keeper } =
        TextStart::new(continuation, served, prompt, (choices.generated, only_read));
    let text = |choice: usize| {
        let (mut sampling, mut reseed) = (parameters.sampling.clone(), parameters.reseed);
        sampling.seed = sampling.seed.wrapping_add(choice as u64);
        // Without a seed, the first text draws from the conversation's own random numbers, and the others get derived
        // seeds.
        if let Some(base) = continuation.snapshot().filter(|_| choice > 0 && !reseed) {
            (sampling.seed, reseed) = (derived_seed(&base.sampler, choice), true);
        }
        // The first text reads the prompt for all.
        let keeper = keeper.clone().filter(|_| choice == 0);
        let (start, prompt) = (start.clone(), prompt.to_vec());
        let parameters = RequestParameters { start, prompt, sampling, reseed, snapshot, keeper, ..parameters.clone() };
        Request::new(parameters, &served.limits)
    };
    (0..choices.generated).map(text).collect()
}

/// Derives the seed of a further text of a conversation. It depends only on the position in the conversation's own
/// random numbers and on `choice`.
fn derived_seed(sampler: &SamplerState, choice: usize) -> u64 {
    let numbers = [sampler.seed, sampler.draws, choice as u64].map(u64::to_le_bytes).concat();
    let digest: [u8; 32] = Sha256::digest(numbers).into();
    digest.iter().take(8).fold(0, |seed, byte| seed << 8 | u64::from(*byte))
}

/// Checks the limit on tokens. It may be 0 only if `reads` is true: the prompt is echoed, or its state is kept.
fn check_max_tokens(given: u64, names: &ParameterNames, reads: bool, served: &Served) -> Result<usize, ApiError> {
    let (fewest, most) = (usize::from(!reads), served.limits.max_tokens);
    let tokens = usize::try_from(given).ok().filter(|tokens| (fewest..=most).contains(tokens));
    let name = names.max_tokens;
    let message = || format!("{name} must be from {fewest} to {most}, found {given}");
    tokens.ok_or_else(|| ApiError::invalid(Some(name), message()))
}

fn check_echo(served: &Served, continues: bool) -> Result<(), ApiError> {
    let reason = if served.reads_sources() {
        ": the prompt is a source, which no text continues"
    } else if continues {
        " with a conversation, whose text is not read again"
    } else {
        return Ok(());
    };
    Err(ApiError::invalid(Some("echo"), format!("echo must be absent, null or false{reason}")))
}

/// A request for text that has been validated.
pub(in crate::api) struct ValidRequest {
    names: ParameterNames,
    pub(in crate::api) served: Arc<Served>,
    /// For each prompt in order, a request for each of its texts.
    pub(in crate::api) requests: Vec<Request>,
    /// The token ids of each prompt.
    pub(in crate::api) prompts: Vec<Vec<u32>>,
    /// Records the text that the request adds to a conversation.
    pub(in crate::api) recorder: Option<TextRecorder>,
    /// How many tokens of each prompt need not be computed.
    pub(in crate::api) cached: Vec<usize>,
    /// The conversation that is continued.
    pub(in crate::api) base: Option<Arc<Snapshot>>,
    /// Whether the text starts from the state of its session.
    pub(in crate::api) continues: bool,
    pub(in crate::api) choices: Choices,
    /// The sampling parameters of the first text of each prompt.
    pub(in crate::api) sampling: SamplingParams,
    pub(in crate::api) max_tokens: usize,
    pub(in crate::api) logprobs: Option<usize>,
    /// Whether the response states the mean log probability of each text.
    pub(in crate::api) means: bool,
    /// The most bytes that the log probabilities of the response take until it is written.
    pub(in crate::api) held_bytes: u64,
    /// Bytes of states that are held until the last text has ended.
    pub(in crate::api) held_states: u64,
    pub(in crate::api) tools: Option<Tools>,
    /// How the answers may begin with reasoning, if they may.
    pub(in crate::api) reasoning: Option<ReasoningStart>,
    pub(in crate::api) identity: Identity,
}

impl ValidRequest {
    /// Returns the most that the request may use of its key's quota.
    pub(in crate::api) fn demand(&self) -> Demand {
        let ParameterNames { prompt, max_tokens, .. } = self.names;
        let several = if self.choices.generated > 1 { self.choices.name() } else { prompt };
        Demand {
            texts: self.requests.len(),
            prompt_tokens: self.prompts.iter().map(Vec::len).sum(),
            max_tokens: self.max_tokens,
            names: [prompt, max_tokens, several],
        }
    }
}
