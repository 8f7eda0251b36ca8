//! The responses of `/v1/completions`: one object, or the chunks of a stream.

use std::sync::Arc;

use serde::Serialize;
use utoipa::ToSchema;

use super::echo::Echo;
use crate::api::formats::openai::answer::{
    Ending, Envelope, ResponseOptions, StopReason, TimingsMs, UsageField, openai_object, usage_at_start,
};
use crate::api::formats::openai::logprobs::{CompletionLogprobs, TokenNames};
use crate::api::openapi::literals::literals;
use crate::api::request::ValidRequest;
use crate::api::request::choices::Choices;
use crate::api::run::TokenUsage;
use crate::api::run::alignment::{AlignedToken, Carried, TokenAligner, carried as carried_of};
use crate::api::run::encoder::{Committed, EventEncoder, StreamEvent};
use crate::engine::{Delta, Finish, TokenLogprobs};
use crate::text::Tokenizer;

literals!(TextCompletion = "text_completion");

openai_object! {
    /// A response with one or more texts.
    Completion, TextCompletion, Choice
}

openai_object! {
    /// One event of a streamed completion.
    CompletionChunk, TextCompletion, Choice
}

/// A whole text, or a piece of one.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = CompletionChoice)]
struct Choice {
    /// The text's number among the texts of all prompts; those of the first prompt come first.
    index: usize,
    text: String,
    /// Null without `logprobs`.
    #[schema(required)]
    logprobs: Option<CompletionLogprobs>,
    /// Null until the text has ended.
    #[schema(required)]
    finish_reason: Option<Ending>,
    /// Absent until the text has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    stop_reason: Option<StopReason>,
    /// With `return_token_ids`: the ids of the prompt; in a stream, only in the text's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    prompt_token_ids: Option<Vec<u32>>,
    /// With `return_token_ids`: the ids of the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    token_ids: Option<Vec<u32>>,
    /// Absent until the text has ended, and in a stream that other servers can continue.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    timings: Option<TimingsMs>,
    /// With `keep`, once the text has ended: the mean log probability of its tokens. Absent for a text without tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    mean_logprob: Option<f64>,
}

/// A text that is being generated.
struct PartialText {
    whole: Choice,
    /// The prompt's ids, if asked for, until they have been sent.
    prompt: Option<Vec<u32>>,
    aligner: Option<TokenAligner>,
    /// The mean log probability of its tokens.
    score: f64,
}

/// Encodes the responses of `/v1/completions`.
pub(in crate::api) struct CompletionEncoder {
    envelope: Envelope,
    options: ResponseOptions,
    /// Whether the whole texts are needed at the end.
    collect: bool,
    /// Whether the response has the mean log probability of each text.
    means: bool,
    choices: Choices,
    tokenizer: Arc<Tokenizer>,
    names: TokenNames,
    /// One for each prompt if prompts are echoed; otherwise empty.
    echoes: Vec<Echo>,
    texts: Vec<PartialText>,
    committed: Committed,
    /// Whether the response has timings.
    timed: bool,
    /// The tokens used so far.
    so_far: TokenUsage,
    usage: UsageField,
}

impl CompletionEncoder {
    pub(super) fn new(request: &ValidRequest, options: ResponseOptions, echoes: Vec<Echo>, collect: bool) -> Self {
        let (tokenizer, choices) = (&request.served.tokenizer, request.choices);
        let carried = |(at, carried): (usize, Carried)| {
            let offset = echoes.get(at).map_or(0, |echo| echo.text.chars().count());
            Carried { offset, ..carried }
        };
        let carried: Vec<Carried> = carried_of(request).enumerate().map(carried).collect();
        let names = TokenNames::new(Arc::clone(tokenizer), options.tokens_as_ids);
        let text = |index: usize| {
            let prompt = index / choices.generated;
            PartialText {
                whole: Choice {
                    index,
                    token_ids: options.token_ids.then(Vec::new),
                    logprobs: request.logprobs.map(|_| CompletionLogprobs::new(&names)),
                    ..Choice::default()
                },
                prompt: options.token_ids.then(|| request.prompts[prompt].clone()),
                aligner: request.logprobs.map(|_| TokenAligner::new(Arc::clone(tokenizer), &carried[prompt])),
                score: f64::NEG_INFINITY,
            }
        };
        Self {
            texts: (0..request.prompts.len() * choices.generated).map(text).collect(),
            names,
            envelope: Envelope::new("cmpl", request),
            options,
            collect,
            means: request.means,
            choices,
            tokenizer: Arc::clone(tokenizer),
            echoes,
            committed: Committed::default(),
            timed: request.identity.timed,
            so_far: usage_at_start(request),
            usage: UsageField::Absent,
        }
    }

    /// Makes a chunk from a piece. If the whole text is needed, adds the piece to it.
    fn chunk(&mut self, mut choice: Choice, committed: &Committed) -> StreamEvent {
        let text = &mut self.texts[choice.index];
        choice.prompt_token_ids = text.prompt.take();
        let usage = self.options.usage.of_chunk(self.so_far);
        let event = StreamEvent::data(CompletionChunk::json(&self.envelope, None, &[&choice], usage, committed));
        if self.collect {
            let whole = &mut text.whole;
            whole.text.push_str(&choice.text);
            if let (Some(ids), Some(more)) = (&mut whole.token_ids, &choice.token_ids) {
                ids.extend(more);
            }
            if let (Some(logprobs), Some(more)) = (&mut whole.logprobs, choice.logprobs) {
                logprobs.append(more);
            }
            if choice.prompt_token_ids.is_some() {
                whole.prompt_token_ids = choice.prompt_token_ids;
            }
        }
        event
    }

    fn logprobs(&self, tokens: Vec<AlignedToken>) -> Option<CompletionLogprobs> {
        Some(CompletionLogprobs::of(tokens, &self.names)).filter(|logprobs| !logprobs.is_empty())
    }

    fn echo(&self, index: usize) -> Option<&Echo> {
        self.echoes.get(index / self.choices.generated)
    }

    /// Keeps the likeliest texts of each prompt, the likeliest first.
    fn rank(&mut self) {
        let Choices { generated, returned } = self.choices;
        let mut prompts = Vec::new();
        while !self.texts.is_empty() {
            let rest = self.texts.split_off(generated.min(self.texts.len()));
            prompts.push(std::mem::replace(&mut self.texts, rest));
        }
        for mut texts in prompts {
            // The sort is stable: texts with equal scores keep their order.
            texts.sort_by(|a, b| b.score.total_cmp(&a.score));
            self.texts.extend(texts.into_iter().take(returned));
        }
        for (index, text) in self.texts.iter_mut().enumerate() {
            text.whole.index = index;
        }
    }
}

impl EventEncoder for CompletionEncoder {
    fn start(&mut self, out: &mut Vec<StreamEvent>) {
        for index in 0..self.texts.len() {
            // An echo with log probabilities is sent later, together with them.
            let Some(echo) = self.echo(index).filter(|_| self.texts[index].aligner.is_none()) else { continue };
            let token_ids = self.options.token_ids.then(Vec::new);
            let choice = Choice { index, text: echo.text.clone(), token_ids, ..Choice::default() };
            let event = self.chunk(choice, &Committed::default());
            out.push(event);
        }
    }

    fn prompt_logprobs(&mut self, index: usize, logprobs: &[Option<TokenLogprobs>], out: &mut Vec<StreamEvent>) {
        let Some(echo) = self.echo(index) else { return };
        let lists = echo.logprobs(logprobs, &self.tokenizer, &self.names);
        let token_ids = self.options.token_ids.then(Vec::new);
        let text = echo.text.clone();
        let event = self.chunk(
            Choice { index, text, token_ids, logprobs: Some(lists), ..Choice::default() },
            &Committed::default(),
        );
        out.push(event);
    }

    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<StreamEvent>) {
        let Delta { text, token_ids, logprobs, .. } = delta;
        self.so_far.completion += token_ids.len();
        let aligned = self.texts[index].aligner.as_mut().map(|aligner| aligner.push(&text, logprobs));
        let logprobs = aligned.and_then(|tokens| self.logprobs(tokens));
        // Without token ids, there is nothing to send until there is text.
        if !text.is_empty() || logprobs.is_some() || self.options.token_ids {
            let token_ids = self.options.token_ids.then_some(token_ids);
            let choice = Choice { index, text, logprobs, token_ids, ..Choice::default() };
            let event = self.chunk(choice, &Committed::default());
            out.push(event);
        }
    }

    fn end_text(&mut self, index: usize, finish: &Finish, committed: &Committed, out: &mut Vec<StreamEvent>) {
        let aligned = self.texts[index].aligner.as_mut().map(|aligner| aligner.finish(finish.stop.as_ref()));
        let (reason, timings) = (Some(Ending::from(finish.reason)), self.timed.then(|| finish.timings.into()));
        let stop_reason = Some(StopReason::of(finish.stop.as_ref()));
        let choice = Choice {
            index,
            logprobs: aligned.and_then(|tokens| self.logprobs(tokens)),
            token_ids: self.options.token_ids.then(Vec::new),
            finish_reason: reason,
            stop_reason: stop_reason.clone(),
            timings,
            mean_logprob: finish.mean_logprob().filter(|_| self.means),
            ..Choice::default()
        };
        let mean_logprob = choice.mean_logprob;
        let event = self.chunk(choice, committed);
        out.push(event);
        let text = &mut self.texts[index];
        (text.whole.finish_reason, text.whole.stop_reason) = (reason, stop_reason);
        (text.whole.timings, text.whole.mean_logprob) = (timings, mean_logprob);
        // A text that was interrupted before its first token ranks last.
        text.score = finish.mean_logprob().unwrap_or(f64::NEG_INFINITY);
        self.committed = committed.clone();
    }

    fn end(&mut self, usage: TokenUsage, out: &mut Vec<StreamEvent>) {
        self.usage = UsageField::Known(usage.into());
        if self.choices.are_ranked() {
            self.rank();
        }
        if self.options.usage.is_on() {
            // The state is large, and has been sent already.
            let committed = Committed { state: None, ..self.committed.clone() };
            out.push(StreamEvent::data(CompletionChunk::json(&self.envelope, None, &[], self.usage, &committed)));
        }
        out.push(StreamEvent::data("[DONE]"));
    }

    fn body(&self) -> String {
        let choices: Vec<&Choice> = self.texts.iter().map(|text| &text.whole).collect();
        Completion::json(&self.envelope, None, &choices, self.usage, &self.committed)
    }
}
