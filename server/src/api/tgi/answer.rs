//! A text in words: one event for each token, and the object at its end.

use std::sync::Arc;

use serde::Serialize;

use super::wire::Generate;
use crate::api::answer::Usage;
use crate::api::dialect::{Dialect, Kept, Said};
use crate::api::error::ApiError;
use crate::api::foreign::Begun;
use crate::engine::{Delta, Finish, FinishReason, StopCause, TokenLogprobs};
use crate::text::{Detokenizer, Tokenizer};

/// A token of a text.
#[derive(Clone, Debug, Serialize)]
struct Token {
    id: u32,
    text: String,
    logprob: Option<f32>,
    special: bool,
}

/// A token of the prompt; the first has no log probability.
#[derive(Clone, Debug, Serialize)]
struct PrefillToken {
    id: u32,
    text: String,
    logprob: Option<f32>,
}

/// A token with those that were likeliest in its place.
#[derive(Clone, Debug)]
struct Placed {
    token: Token,
    top: Vec<Token>,
}

/// What is told of a text besides itself.
#[derive(Serialize)]
struct Details<'a> {
    finish_reason: &'static str,
    generated_tokens: usize,
    seed: Option<u64>,
    prefill: &'a [PrefillToken],
    tokens: Vec<&'a Token>,
    #[serde(skip_serializing_if = "Option::is_none")]
    best_of_sequences: Option<Vec<Sequence<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_tokens: Option<Vec<&'a [Token]>>,
}

/// A text that was not the best.
#[derive(Serialize)]
struct Sequence<'a> {
    generated_text: String,
    #[serde(flatten)]
    details: Details<'a>,
}

#[derive(Serialize)]
struct Whole<'a> {
    generated_text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details<'a>>,
}

#[derive(Serialize)]
struct StreamDetails {
    finish_reason: &'static str,
    generated_tokens: usize,
    input_length: usize,
    seed: Option<u64>,
}

/// An event of a stream.
#[derive(Serialize)]
struct Event<'a> {
    index: usize,
    token: &'a Token,
    #[serde(skip_serializing_if = "<[Token]>::is_empty")]
    top_tokens: &'a [Token],
    generated_text: Option<String>,
    details: Option<StreamDetails>,
}

/// One text as it grows.
#[derive(Default)]
struct Text {
    detokenizer: Detokenizer,
    said: String,
    tokens: Vec<Placed>,
    generated: usize,
    reason: &'static str,
}

impl Text {
    /// How likely each token is on the average; what is known of no token is least likely, and so is no token at all.
    fn likelihood(&self) -> f64 {
        if self.tokens.is_empty() {
            return f64::NEG_INFINITY;
        }
        let sum: f64 = self.tokens.iter().map(|placed| placed.token.logprob.map_or(f64::MIN, f64::from)).sum();
        sum / self.tokens.len() as f64
    }
}

/// The format of `/generate`. The text is that of all tokens: what ends it is in it, as in the format's own server.
pub(super) struct Answer {
    asked: Generate,
    tokenizer: Arc<Tokenizer>,
    /// Whether the answer goes out as it comes.
    stream: bool,
    /// None where nothing was drawn.
    seed: Option<u64>,
    input_length: usize,
    prompt: Vec<u32>,
    prefill: Vec<PrefillToken>,
    texts: Vec<Text>,
    /// The last token of a stream that has not been sent: the one at the end comes with the whole.
    last: Option<Placed>,
}

impl Answer {
    pub(super) fn new(asked: Generate, begun: &Begun<'_>) -> Self {
        let prompt = begun.prompts.first().cloned().unwrap_or_default();
        Self {
            texts: (0..asked.best_of).map(|_| Text::default()).collect(),
            tokenizer: Arc::clone(&begun.served.tokenizer),
            stream: begun.stream,
            seed: asked.draws.then_some(begun.seed),
            input_length: prompt.len(),
            prompt: if asked.prefill { prompt } else { Vec::new() },
            prefill: Vec::new(),
            last: None,
            asked,
        }
    }

    /// A token as such, whatever stands before it.
    fn token(&self, id: u32, logprob: Option<f32>) -> Token {
        let text = String::from_utf8_lossy(self.tokenizer.piece(id)).into_owned();
        Token { id, text, logprob, special: self.tokenizer.special(id).is_some() }
    }

    /// A token of the text `index`: a special one has its name, any other the characters that it completes.
    fn placed(&mut self, index: usize, id: u32, logprobs: Option<&TokenLogprobs>) -> Placed {
        let mut token = self.token(id, logprobs.map(|logprobs| logprobs.logprob));
        let top = logprobs.map_or(&[][..], |logprobs| &logprobs.top).iter().take(self.asked.top);
        let top = top.map(|(id, logprob)| self.token(*id, Some(*logprob))).collect();
        let text = &mut self.texts[index];
        if !token.special {
            token.text.clear();
            text.detokenizer.push(self.tokenizer.vocabulary().bytes(id), &mut token.text);
            text.said.push_str(&token.text);
        }
        Placed { token, top }
    }

    fn whole(&self, text: &Text) -> String {
        format!("{}{}", self.asked.before, text.said)
    }

    fn details(&self, index: usize) -> Details<'_> {
        let text = &self.texts[index];
        let top = || text.tokens.iter().map(|placed| placed.top.as_slice()).collect();
        Details {
            finish_reason: text.reason,
            generated_tokens: text.generated,
            seed: self.seed.map(|seed| seed.wrapping_add(index as u64)),
            prefill: &self.prefill,
            tokens: text.tokens.iter().map(|placed| &placed.token).collect(),
            best_of_sequences: None,
            top_tokens: (self.asked.top > 0).then(top),
        }
    }
}

fn event(placed: &Placed, index: usize, end: Option<(String, StreamDetails)>) -> Said {
    let (generated_text, details) = end.unzip();
    let event = Event { index, token: &placed.token, top_tokens: &placed.top, generated_text, details };
    Said::data(serde_json::to_string(&event).unwrap_or_default())
}

impl Dialect for Answer {
    fn open(&mut self, _: &mut Vec<Said>) {}

    fn prompt_logprobs(&mut self, _: usize, logprobs: &[Option<TokenLogprobs>], _: &mut Vec<Said>) {
        let told = |(id, logprobs): (&u32, &Option<TokenLogprobs>)| {
            let token = self.token(*id, logprobs.as_ref().map(|logprobs| logprobs.logprob));
            PrefillToken { id: token.id, text: token.text, logprob: token.logprob }
        };
        self.prefill = self.prompt.iter().zip(logprobs).map(told).collect();
    }

    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<Said>) {
        for (at, id) in delta.token_ids.iter().enumerate() {
            let placed = self.placed(index, *id, delta.logprobs.get(at));
            self.texts[index].generated += 1;
            if self.stream {
                if let Some(before) = self.last.replace(placed) {
                    out.push(event(&before, self.texts[index].generated - 1, None));
                }
            } else if self.asked.details || self.asked.best_of > 1 {
                self.texts[index].tokens.push(placed);
            }
        }
    }

    fn end(&mut self, index: usize, finish: &Finish, _: &Kept, out: &mut Vec<Said>) {
        let text = &mut self.texts[index];
        text.reason = match (finish.reason, &finish.stop) {
            (FinishReason::Stop, Some(StopCause::String(_))) => "stop_sequence",
            (FinishReason::Stop, _) => "eos_token",
            (FinishReason::Length | FinishReason::Interrupted, _) => "length",
        };
        // A character that was never completed.
        text.detokenizer.finish(&mut text.said);
        if self.stream {
            // Where it was interrupted before its first token: clients read the end from an event, and an event has a
            // token.
            let none = Token { id: 0, text: String::new(), logprob: None, special: true };
            let last = self.last.take().unwrap_or(Placed { token: none, top: Vec::new() });
            let text = &self.texts[index];
            let details = StreamDetails {
                finish_reason: text.reason,
                generated_tokens: text.generated,
                input_length: self.input_length,
                seed: self.seed,
            };
            out.push(event(&last, text.generated, Some((self.whole(text), details))));
        }
    }

    fn close(&mut self, _: Usage, _: &mut Vec<Said>) {}

    fn fail(&mut self, error: &ApiError, out: &mut Vec<Said>) {
        out.push(Said::data(super::refusal(error).1.to_string()));
    }

    fn body(&self) -> String {
        let indices = 0..self.texts.len();
        let best = indices.clone().max_by(|a, b| {
            let [a, b] = [*a, *b].map(|index| (self.texts[index].likelihood(), std::cmp::Reverse(index)));
            a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
        });
        let best = best.unwrap_or(0);
        let others = || {
            let others = indices.filter(|index| *index != best);
            others
                .map(|index| {
                    let generated_text = self.whole(&self.texts[index]);
                    Sequence { generated_text, details: self.details(index) }
                })
                .collect()
        };
        let details = self
            .asked
            .details
            .then(|| Details { best_of_sequences: (self.asked.best_of > 1).then(others), ..self.details(best) });
        let whole = Whole { generated_text: self.whole(&self.texts[best]), details };
        let json = if self.asked.listed { serde_json::to_string(&[whole]) } else { serde_json::to_string(&whole) };
        // Strings, numbers and lists of them: there is nothing in it that JSON cannot say.
        json.unwrap_or_default()
    }
}
