//! Log probabilities of one request's tokens, where they were asked for.

use tidegate_model::sampling::LogSoftmax;

use super::event::TokenLogprobs;

/// `token` among the logits (vocab) that it was chosen from, with the `count` likeliest.
pub(super) fn score(logits: &[f32], token: u32, count: usize) -> TokenLogprobs {
    let row = LogSoftmax::new(logits);
    let top = row.likeliest(count).into_iter().map(|token| (token, row.logprob(token) as f32)).collect();
    TokenLogprobs { token, logprob: row.logprob(token) as f32, top }
}

/// The scores of a text that grows.
#[derive(Debug)]
pub(super) struct Scores {
    count: usize,
    /// The logits (vocab) as the model gave them: those that are chosen from are changed before.
    raw: Vec<f32>,
    sum: f64,
}

impl Scores {
    pub(super) fn new(count: usize) -> Self {
        Self { count, raw: Vec::new(), sum: 0.0 }
    }

    /// Keeps a row of logits (vocab) as it is.
    pub(super) fn keep(&mut self, logits: &[f32]) {
        self.raw.clear();
        self.raw.extend_from_slice(logits);
    }

    /// The score of the token that was chosen from the row kept last.
    pub(super) fn score(&mut self, token: u32) -> TokenLogprobs {
        let scored = score(&self.raw, token, self.count);
        self.sum += f64::from(scored.logprob);
        scored
    }

    /// The log probability of all tokens so far.
    pub(super) fn sum(&self) -> f64 {
        self.sum
    }
}

/// The scores of a prompt, made while it is read token by token.
#[derive(Clone, Debug)]
pub(super) struct PromptScores {
    count: usize,
    scores: Vec<Option<TokenLogprobs>>,
}

impl PromptScores {
    /// Nothing speaks for or against the first token.
    pub(super) fn new(count: usize) -> Self {
        Self { count, scores: vec![None] }
    }

    /// Scores the next token of the prompt by the logits (vocab) before it.
    pub(super) fn push(&mut self, logits: &[f32], token: u32) {
        self.scores.push(Some(score(logits, token, self.count)));
    }

    /// One for each token.
    pub(super) fn into_all(self) -> Vec<Option<TokenLogprobs>> {
        self.scores
    }
}
