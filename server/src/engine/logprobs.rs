//! Log probabilities of one request's tokens.

use tidegate_model::sampling::LogSoftmax;

use super::event::TokenLogprobs;

/// Returns `token` with its log probability according to the logits (vocab), and the `count` most likely tokens.
fn score(logits: &[f32], token: u32, count: usize) -> TokenLogprobs {
    let row = LogSoftmax::new(logits);
    let top = row.likeliest(count).into_iter().map(|token| (token, row.logprob(token) as f32)).collect();
    TokenLogprobs { token, logprob: row.logprob(token) as f32, top }
}

/// The log probabilities of generated tokens.
#[derive(Debug)]
pub(super) struct Logprobs {
    count: usize,
    /// A copy of the model's own logits (vocab): sampling changes the original.
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

    /// Returns the log probabilities of a token sampled from the last kept row, and adds them to the sum.
    pub(super) fn score(&mut self, token: u32) -> TokenLogprobs {
        let scored = score(&self.raw, token, self.count);
        self.add(&scored);
        scored
    }

    /// Adds the log probability of a token to the sum.
    pub(super) fn add(&mut self, scored: &TokenLogprobs) {
        self.sum += f64::from(scored.logprob);
    }

    /// The sum of the log probabilities of all tokens so far.
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
    /// Starts with the first token, which has no log probability.
    pub(super) fn new(count: usize) -> Self {
        Self { count, tokens: vec![None] }
    }

    /// The number of most likely tokens reported with each token.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Adds the next token of the prompt, predicted by these logits (vocab).
    pub(super) fn push(&mut self, logits: &[f32], token: u32) {
        self.tokens.push(Some(score(logits, token, self.count)));
    }

    /// Returns one entry per token.
    pub(super) fn into_all(self) -> Vec<Option<TokenLogprobs>> {
        self.tokens
    }
}
