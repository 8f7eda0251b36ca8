//! `POST /v1/completions`: prompts in, texts out, as one object or as the chunks of a stream.

pub(in crate::api) mod echo;

use std::sync::Arc;

use serde::Serialize;

use crate::api::formats::completions::echo::Echo;
use crate::api::formats::openai::answer::{Head, StopReason, TimingsMs, Usage, UsageField, Wanted, finish_reason};
use crate::api::formats::openai::logprobs::{CompletionLogprobs, TokenNames};
use crate::api::request::choices::Choices;
use crate::api::request::validate::Details;
use crate::api::run::alignment::{Aligner, Placed};
use crate::api::run::encoder::{Dialect, Kept, Said};
use crate::engine::{Delta, Finish, TokenLogprobs};
use crate::text::Tokenizer;

/// One text, or a piece of it.
#[derive(Debug, Default, Serialize)]
struct Choice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<TimingsMs>,
}

/// A text while it grows.
struct Growing {
    whole: Choice,
    /// The prompt's ids until they have been sent; none where nobody asked.
    prompt: Option<Vec<u32>>,
    aligner: Option<Aligner>,
    /// The log probability of its tokens on average.
    score: f64,
}

/// The format of `/v1/completions`.
pub(in crate::api) struct Completions {
    head: Head,
    wanted: Wanted,
    choices: Choices,
    tokenizer: Arc<Tokenizer>,
    names: TokenNames,
    /// One for each prompt, or none.
    echoes: Vec<Echo>,
    texts: Vec<Growing>,
    kept: Kept,
    usage: UsageField,
}

impl Completions {
    pub(in crate::api) fn new(head: Head, wanted: Wanted, prompts: &[Vec<u32>], details: Details) -> Self {
        let Details { tokenizer, choices, openings, logprobs, names_by_id, echoes, .. } = details;
        let growing = |index: usize| {
            let prompt = index / choices.generated;
            let opening = &openings[prompt];
            Growing {
                whole: Choice {
                    index,
                    token_ids: wanted.token_ids.then(Vec::new),
                    logprobs: logprobs.map(|_| CompletionLogprobs::default()),
                    ..Choice::default()
                },
                prompt: wanted.token_ids.then(|| prompts[prompt].clone()),
                aligner: logprobs.map(|_| Aligner::new(Arc::clone(&tokenizer), opening)),
                score: f64::NEG_INFINITY,
            }
        };
        Self {
            texts: (0..prompts.len() * choices.generated).map(growing).collect(),
            names: TokenNames::new(Arc::clone(&tokenizer), names_by_id),
            head,
            wanted,
            choices,
            tokenizer,
            echoes,
            kept: Kept::default(),
            usage: UsageField::Absent,
        }
    }

    fn json(&self, choices: &[&Choice], usage: UsageField, kept: &Kept) -> String {
        self.head.json("text_completion", choices, usage, kept)
    }

    /// Adds a piece to the whole, where that is wanted, and makes a chunk of it.
    fn chunk(&mut self, mut choice: Choice, kept: &Kept) -> Said {
        let growing = &mut self.texts[choice.index];
        choice.prompt_token_ids = growing.prompt.take();
        if self.wanted.whole {
            let whole = &mut growing.whole;
            whole.text.push_str(&choice.text);
            if let (Some(ids), Some(more)) = (&mut whole.token_ids, &choice.token_ids) {
                ids.extend(more);
            }
            if let (Some(logprobs), Some(more)) = (&mut whole.logprobs, &choice.logprobs) {
                logprobs.extend(more);
            }
            if choice.prompt_token_ids.is_some() {
                whole.prompt_token_ids.clone_from(&choice.prompt_token_ids);
            }
        }
        let usage = if self.wanted.include_usage { UsageField::Later } else { UsageField::Absent };
        Said::data(self.json(&[&choice], usage, kept))
    }

    fn logprobs(&self, placed: &[Placed]) -> Option<CompletionLogprobs> {
        Some(CompletionLogprobs::of(placed, &self.names)).filter(|logprobs| !logprobs.is_empty())
    }

    fn echo(&self, index: usize) -> Option<&Echo> {
        self.echoes.get(index / self.choices.generated)
    }

    /// Leaves the likeliest texts of each prompt, the likeliest first.
    fn rank(&mut self) {
        let (generated, told) = (self.choices.generated, self.choices.told);
        let mut prompts = Vec::new();
        while !self.texts.is_empty() {
            let rest = self.texts.split_off(generated.min(self.texts.len()));
            prompts.push(std::mem::replace(&mut self.texts, rest));
        }
        for mut texts in prompts {
            // Stable: of equals the first is first.
            texts.sort_by(|a, b| b.score.total_cmp(&a.score));
            self.texts.extend(texts.into_iter().take(told));
        }
        for (index, text) in self.texts.iter_mut().enumerate() {
            text.whole.index = index;
        }
    }
}

impl Dialect for Completions {
    fn open(&mut self, out: &mut Vec<Said>) {
        for index in 0..self.texts.len() {
            // With log probabilities it comes with them.
            let Some(echo) = self.echo(index).filter(|_| self.texts[index].aligner.is_none()) else { continue };
            let token_ids = self.wanted.token_ids.then(Vec::new);
            let choice = Choice { index, text: echo.text.clone(), token_ids, ..Choice::default() };
            let said = self.chunk(choice, &Kept::default());
            out.push(said);
        }
    }

    fn prompt_logprobs(&mut self, index: usize, logprobs: &[Option<TokenLogprobs>], out: &mut Vec<Said>) {
        let Some(echo) = self.echo(index) else { return };
        let lists = echo.logprobs(logprobs, &self.tokenizer, &self.names);
        let token_ids = self.wanted.token_ids.then(Vec::new);
        let text = echo.text.clone();
        let said =
            self.chunk(Choice { index, text, token_ids, logprobs: Some(lists), ..Choice::default() }, &Kept::default());
        out.push(said);
    }

    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<Said>) {
        let Delta { text, token_ids, logprobs } = delta;
        let placed = self.texts[index].aligner.as_mut().map(|aligner| aligner.push(&text, logprobs));
        let logprobs = placed.and_then(|placed| self.logprobs(&placed));
        // Without ids there is nothing to say until there is text.
        if !text.is_empty() || logprobs.is_some() || self.wanted.token_ids {
            let token_ids = self.wanted.token_ids.then_some(token_ids);
            let said = self.chunk(Choice { index, text, logprobs, token_ids, ..Choice::default() }, &Kept::default());
            out.push(said);
        }
    }

    fn end(&mut self, index: usize, finish: &Finish, kept: &Kept, out: &mut Vec<Said>) {
        let placed = self.texts[index].aligner.as_mut().map(|aligner| aligner.finish(finish.stop.as_ref()));
        let (reason, timings) = (Some(finish_reason(finish.reason)), Some(finish.timings.into()));
        let stop_reason = Some(StopReason::of(finish.stop.as_ref()));
        let choice = Choice {
            index,
            logprobs: placed.and_then(|placed| self.logprobs(&placed)),
            token_ids: self.wanted.token_ids.then(Vec::new),
            finish_reason: reason,
            stop_reason: stop_reason.clone(),
            timings,
            ..Choice::default()
        };
        let said = self.chunk(choice, kept);
        out.push(said);
        let growing = &mut self.texts[index];
        (growing.whole.finish_reason, growing.whole.stop_reason) = (reason, stop_reason);
        growing.whole.timings = timings;
        // A text that was interrupted before its first token has a sum of 0, and is no likely one for that.
        if let Some(sum) = finish.cumulative_logprob.filter(|_| finish.completion_tokens > 0) {
            growing.score = sum / finish.completion_tokens as f64;
        }
        self.kept = kept.clone();
    }

    fn close(&mut self, usage: Usage, out: &mut Vec<Said>) {
        self.usage = UsageField::Known(usage);
        if self.choices.are_ranked() {
            self.rank();
        }
        if self.wanted.include_usage {
            // The state is large, and has been sent.
            let kept = Kept { state: None, ..self.kept.clone() };
            out.push(Said::data(self.json(&[], self.usage, &kept)));
        }
        out.push(Said::data("[DONE]"));
    }

    fn body(&self) -> String {
        let choices: Vec<&Choice> = self.texts.iter().map(|text| &text.whole).collect();
        self.json(&choices, self.usage, &self.kept)
    }
}
