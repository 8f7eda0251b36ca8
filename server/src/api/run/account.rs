//! One log line for each request for completions, however it ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use opentelemetry::Context;
use tracing::{Span, info, warn};

use crate::api::auth::context::{self, AuthContext};
use crate::api::formats::openai::answer::Usage;
use crate::api::run::spans;
use crate::engine::{Failure, Finish, Timings};

/// Adds up a request's tokens and times, and logs them when it is dropped.
pub(in crate::api) struct Account {
    span: Span,
    context: Context,
    /// The key's place, and what is charged for the tokens; none where the server has no keys.
    auth: Option<Arc<AuthContext>>,
    started: Instant,
    pub(in crate::api) usage: Usage,
    longest: Timings,
    open: usize,
    failure: Option<Failure>,
}

impl Account {
    /// The account of a request for texts after each of `prompts`, in the current span.
    ///
    /// `cached` of the prompts' tokens need no computing.
    pub(in crate::api) fn new(prompts: &[Vec<u32>], cached: usize) -> Self {
        Self {
            span: Span::current(),
            context: Context::current(),
            auth: context::current(),
            started: Instant::now(),
            usage: Usage::of_prompts(prompts.iter().map(Vec::len).sum(), cached),
            longest: Timings::default(),
            open: 0,
            failure: None,
        }
    }

    /// Sets how many texts have to end.
    pub(in crate::api) fn expect(&mut self, texts: usize) {
        self.open = texts;
    }

    /// The engine has taken the request: its key is charged for the prompts.
    pub(in crate::api) fn taken(&self) {
        self.charge(self.usage.prompt_tokens);
    }

    fn charge(&self, tokens: usize) {
        if let Some(auth) = &self.auth {
            auth.charge(tokens);
        }
    }

    /// Adds tokens as they come, so that the account is right at whatever moment the request ends.
    pub(in crate::api) fn generated(&mut self, tokens: usize) {
        self.usage.add_completion(tokens);
        self.charge(tokens);
    }

    /// Adds a text that has ended.
    pub(in crate::api) fn finish(&mut self, finish: &Finish) {
        spans::text(&self.context, finish);
        self.longest.queue = self.longest.queue.max(finish.timings.queue);
        self.longest.prefill = self.longest.prefill.max(finish.timings.prefill);
        self.longest.decode = self.longest.decode.max(finish.timings.decode);
        self.open -= 1;
    }

    /// Notes why the request cannot be finished.
    pub(in crate::api) fn fail(&mut self, failure: Failure) {
        self.failure = Some(failure);
    }

    /// Whether every text has ended.
    pub(in crate::api) fn is_complete(&self) -> bool {
        self.open == 0
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let ms = |duration: Duration| (duration.as_secs_f64() * 1e4).round() / 10.0;
        self.span.record("prompt_tokens", self.usage.prompt_tokens);
        self.span.record("completion_tokens", self.usage.completion_tokens);
        self.span.record("queue_ms", ms(self.longest.queue));
        self.span.record("prefill_ms", ms(self.longest.prefill));
        self.span.record("decode_ms", ms(self.longest.decode));
        spans::done(&self.context, &self.usage, self.failure);
        let total_ms = ms(self.started.elapsed());
        self.span.in_scope(|| match self.failure {
            Some(Failure::Grammar) => info!(total_ms, "completion ended: {}", Failure::Grammar),
            Some(failure) => warn!(total_ms, "completion failed: {failure}"),
            None if self.is_complete() => info!(total_ms, "completion finished"),
            None => info!(total_ms, "completion cancelled by the client"),
        });
    }
}
