//! A request that the engine can run. [`Request::new`] validates all of its parameters; the engine does not check them
//! again.

use std::sync::Arc;

use super::generation::{Generation, StopConditions};
use super::guide::Guide;
use super::logprobs::{Logprobs, PromptLogprobs};
use super::output::TextOutput;
use super::parameters::{Keeper, Limits, RequestError, RequestParameters, Start};
use super::prompt::{Begun, Opening, Prompt, TextKind};
use crate::text::StopStrings;

/// Most log probabilities that can be reported with each token.
const MAX_LOGPROBS: usize = 20;

/// Most token ids that a request can name as stop tokens.
const MAX_STOP_TOKENS: usize = 64;

/// A validated request.
#[derive(Debug)]
pub struct Request {
    pub(super) prompt: Prompt,
    pub(super) generation: Generation,
    pub(super) output: TextOutput,
    pub(super) kind: TextKind,
    pub(super) snapshot: bool,
    pub(super) keeper: Option<Keeper>,
}

impl Request {
    /// Validates `parameters` against `limits`.
    ///
    /// # Errors
    /// A parameter is out of bounds; reports the first one found.
    pub fn new(parameters: RequestParameters, limits: &Limits) -> Result<Self, RequestError> {
        check_prompt(&parameters, limits)?;
        check_max_tokens(&parameters, limits)?;
        check_stop(&parameters, limits)?;
        check_logprobs(&parameters, limits)?;
        let RequestParameters { start, prompt, max_tokens, stop, turns, sampling, reseed, snapshot, grammar, .. } =
            parameters;
        let strings = StopStrings::new(&stop)?.with_turns(turns);
        // A state for a known prefix has no logits, so a prompt with log probabilities is computed from its first
        // token.
        let start = if parameters.prompt_logprobs.is_some() { Start::Empty } else { start };
        let prompt_tokens = prompt.len();
        let (opening, sampler) = Opening::new(start, prompt, (sampling, reseed), limits)?;
        if opening.kind == TextKind::Continuation && grammar.is_some() {
            return Err(RequestError::bound("grammar", "absent where the previous answer continues", "one"));
        }
        if opening.input.is_empty() && max_tokens > 0 {
            let bound = "at least one token long where the previous answer has ended";
            return Err(RequestError::bound("prompt", bound, "none"));
        }
        let stop = StopConditions::new(parameters.ignore_eos, parameters.stop_token_ids, parameters.min_tokens);
        let output = TextOutput::new(strings, &opening.answer, stop.may_end_at(1));
        let Opening { start, cached, source, input, last_tokens, recent, kind, .. } = opening;
        let logprobs = parameters.prompt_logprobs.map(PromptLogprobs::new);
        let mark = parameters.keeper.as_ref().and_then(|keeper| keeper.mark?.checked_sub(cached));
        // A snapshot is taken after the last token but one in any case.
        let mark = mark.filter(|mark| *mark > 0 && *mark + 1 < input.len());
        let prompt = Prompt {
            start,
            source,
            input,
            last_tokens,
            recent,
            mark,
            tokens: prompt_tokens,
            cached,
            logprobs,
            shared: None,
            computed: false,
            begun: None,
        };
        let generation = Generation {
            sampler,
            stop,
            max_tokens,
            generated: 0,
            logprobs: parameters.logprobs.map(Logprobs::new),
            guide: grammar.map(|grammar| Guide::new(grammar, limits.vocab_size)),
        };
        Ok(Self { prompt, generation, output, kind, snapshot, keeper: parameters.keeper })
    }

    /// Continues the text that the same request began elsewhere, instead of reading the prompt. The events are those of
    /// the whole text, but none are about the prompt, and no snapshots are taken for other requests: what is read first
    /// is the end of the text so far.
    pub fn resume(&mut self, begun: Begun) {
        self.keeper = None;
        self.prompt.mark = None;
        self.prompt.begun = Some(begun);
    }

    /// Number of tokens in the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt.tokens
    }

    /// Number of prompt tokens that need not be computed.
    pub fn cached_tokens(&self) -> usize {
        self.prompt.cached
    }
}

/// Marks the requests that have the same prompt and start, so that one of them computes it for all. The generated texts
/// do not change.
pub fn share_prompt(requests: &mut [Request]) {
    for at in 1..requests.len() {
        let (before, rest) = requests.split_at_mut(at);
        let same = before.iter_mut().find(|other| other.prompt.is_read_as(&rest[0].prompt));
        rest[0].prompt.shared = same.map(|other| Arc::clone(other.prompt.shared.get_or_insert_default()));
    }
}

fn check_prompt(parameters: &RequestParameters, limits: &Limits) -> Result<(), RequestError> {
    let RequestParameters { start, prompt, .. } = parameters;
    let (least, most) = (usize::from(!start.is_conversation()), limits.longest_prompt());
    if prompt.len() > most {
        return Err(RequestError::TooLong { least, most, found: prompt.len() });
    }
    if prompt.len() < least {
        let found = format!("{} tokens", prompt.len());
        return Err(RequestError::bound("prompt", format!("{least} to {most} tokens long"), found));
    }
    check_ids("prompt", prompt, limits)
}

fn check_ids(parameter: &'static str, ids: &[u32], limits: &Limits) -> Result<(), RequestError> {
    match ids.iter().find(|id| **id as usize >= limits.vocab_size) {
        Some(id) => Err(RequestError::bound(parameter, format!("made of token ids below {}", limits.vocab_size), id)),
        None => Ok(()),
    }
}

fn check_max_tokens(parameters: &RequestParameters, limits: &Limits) -> Result<(), RequestError> {
    let RequestParameters { max_tokens, min_tokens, .. } = *parameters;
    if max_tokens > limits.max_tokens {
        return Err(RequestError::bound("max_tokens", format!("from 0 to {}", limits.max_tokens), max_tokens));
    }
    if min_tokens > max_tokens {
        let bound = format!("from 0 to max_tokens, which is {max_tokens}");
        return Err(RequestError::bound("min_tokens", bound, min_tokens));
    }
    Ok(())
}

fn check_stop(parameters: &RequestParameters, limits: &Limits) -> Result<(), RequestError> {
    let RequestParameters { ignore_eos, stop_token_ids, grammar, .. } = parameters;
    if *ignore_eos && grammar.is_some() {
        // Where a grammar ends, it allows only an end-of-text token.
        return Err(RequestError::bound("ignore_eos", "absent or false beside a grammar, a schema or tools", "true"));
    }
    if stop_token_ids.len() > MAX_STOP_TOKENS {
        let bound = format!("at most {MAX_STOP_TOKENS} token ids");
        return Err(RequestError::bound("stop_token_ids", bound, stop_token_ids.len()));
    }
    check_ids("stop_token_ids", stop_token_ids, limits)
}

fn check_logprobs(parameters: &RequestParameters, limits: &Limits) -> Result<(), RequestError> {
    let RequestParameters { logprobs, prompt_logprobs, start, .. } = parameters;
    for (parameter, count) in [("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)] {
        if let Some(count) = count.filter(|count| *count > MAX_LOGPROBS) {
            return Err(RequestError::bound(parameter, format!("from 0 to {MAX_LOGPROBS}"), count));
        }
    }
    if prompt_logprobs.is_none() {
        return Ok(());
    }
    let refused = |bound: &str| Err(RequestError::bound("prompt_logprobs", bound, "it"));
    if limits.sources.is_some() {
        return refused("absent where the prompt is a source, which the model does not predict");
    }
    if start.is_conversation() {
        return refused("absent where a conversation continues");
    }
    Ok(())
}
