//! Log probabilities of one request's tokens.

use tidegate_model::sampling::LogSoftmax;

use super::event::TokenLogprobs;

/// `token` with its log probability among the logits (vocab), and the `count` most likely tokens.
fn score(logits: &[f32], token: u32, count: usize) -> TokenLogprobs {
    let row = LogSoftmax::new(logits);
    let top = row.likeliest(count).into_iter().map(|token| (token, row.logprob(token) as f32)).collect();
    TokenLogprobs { token, logprob: row.logprob(token) as f32, top }
}

/// The log probabilities of generated tokens.
#[derive(Debug)]
pub(super) struct Logprobs {
    count: usize,
    /// The model's own logits (vocab): sampling changes the others.
    raw: Vec<f32>,
    sum: f64,
}

impl Logprobs {
    pub(super) fn new(count: usize) -> Self {
        Self { count, raw: Vec::new(), sum: 0.0 }
    }

    /// Keeps a copy of a row of logits (vocab).
    pub(super) fn keep(&mut self, logits: &[f32]) {
        self.raw.clear();
        self.raw.extend_from_slice(logits);
    }

    /// The log probabilities of the token sampled from the row kept last.
    pub(super) fn score(&mut self, token: u32) -> TokenLogprobs {
        let scored = score(&self.raw, token, self.count);
        self.add(&scored);
        scored
    }

    /// Adds those of a token.
    pub(super) fn add(&mut self, scored: &TokenLogprobs) {
        self.sum += f64::from(scored.logprob);
    }

    /// The log probability of all tokens so far.
    pub(super) fn sum(&self) -> f64 {
        self.sum
    }
}

/// The log probabilities of a prompt's tokens, computed while it is read token by token.
#[derive(Clone, Debug)]
pub(super) struct PromptLogprobs {
    count: usize,
    tokens: Vec<Option<TokenLogprobs>>,
}

impl PromptLogprobs {
    /// The first token has none.
    pub(super) fn new(count: usize) -> Self {
        Self { count, tokens: vec![None] }
    }

    /// The number of most likely tokens reported with each.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Adds the next token of the prompt, predicted by these logits (vocab).
    pub(super) fn push(&mut self, logits: &[f32], token: u32) {
        self.tokens.push(Some(score(logits, token, self.count)));
    }

    /// One entry for each token.
    pub(super) fn into_all(self) -> Vec<Option<TokenLogprobs>> {
        self.tokens
    }
}
