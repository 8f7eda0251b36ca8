//! `POST /v1/completions`.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tracing::debug;

use super::account::Account;
use super::answer::{Answer, Choice, UsageField};
use super::error::ApiError;
use super::state::AppState;
use super::validate::{Validated, validate};
use super::wire;
use crate::engine::{Event, EventStream, Failure};

/// Handles the request.
pub(super) async fn create(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = wire::body(&headers, body, state.options().max_body_bytes)?;
    let served = Arc::clone(state.ready()?);
    let answer = Answer::new(&served);
    let engine = served.engine.clone();
    let permit = state.reader().await;
    // A long prompt takes a while to parse and to encode, and other connections must not wait for it.
    let reading = tokio::task::spawn_blocking(move || {
        // Held to the end of the work, also where the client leaves before.
        let _permit = permit;
        validate(wire::parse(&body)?, &served)
    });
    let validated = reading.await.map_err(|_| ApiError::internal())??;
    let Validated { requests, prompts, stream, include_usage, return_token_ids, seed } = validated;
    debug!(seed, prompts = prompts.len(), stream, "completion starts");
    let streams = engine.submit_all(requests)?;
    let choices = Choices {
        account: Account::new(&prompts),
        streams: streams.into_iter().map(Some).collect(),
        turn: 0,
        prompts: prompts.into_iter().map(|ids| return_token_ids.then_some(ids)).collect(),
        return_token_ids,
    };
    if !stream {
        return whole(&answer, choices).await;
    }
    let chunks = Chunks { answer, choices, include_usage, ready: VecDeque::new(), ended: false };
    let events = stream::unfold(chunks, |mut chunks| async move {
        let data = chunks.next().await?;
        Some((Ok::<_, Infallible>(sse::Event::default().data(data)), chunks))
    });
    let keep_alive = KeepAlive::new().interval(state.options().keep_alive).text("alive");
    // Proxies that collect a response before they pass it on would undo the streaming.
    let unbuffered = [(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"))];
    Ok((unbuffered, Sse::new(events).keep_alive(keep_alive)).into_response())
}

/// The texts of one request while they grow. Dropping it cancels them.
struct Choices {
    account: Account,
    streams: Vec<Option<EventStream>>,
    /// The text that is asked first: each in turn, or one that always has something would let the others stall.
    turn: usize,
    /// The ids of each prompt until they have been sent; `None` too where nobody asked.
    prompts: Vec<Option<Vec<u32>>>,
    return_token_ids: bool,
}

impl Choices {
    /// The next event of any text, with the text's index. Must not be called when all have ended.
    async fn next(&mut self) -> Result<(usize, Event), Failure> {
        let count = self.streams.len();
        let (index, event) = poll_fn(|context| {
            for offset in 0..count {
                let index = (self.turn + offset) % count;
                if let Some(stream) = &mut self.streams[index]
                    && let Poll::Ready(event) = stream.poll_next(context)
                {
                    return Poll::Ready((index, event));
                }
            }
            Poll::Pending
        })
        .await;
        self.turn = index + 1;
        // A channel that closes without a last event belongs to an engine that is gone.
        let outcome = match event.unwrap_or(Event::Failed(Failure::Internal)) {
            Event::Failed(failure) => Err(failure),
            event => Ok((index, event)),
        };
        match &outcome {
            Ok((_, Event::Delta(delta))) => self.account.generated(delta.token_ids.len()),
            Ok((_, Event::Finished(finish))) => {
                self.account.finish(finish);
                self.streams[index] = None;
            }
            Err(failure) => self.account.fail(*failure),
            Ok(_) => {}
        }
        outcome
    }
}

/// The answer in one piece.
async fn whole(answer: &Answer, mut choices: Choices) -> Result<Response, ApiError> {
    let mut texts: Vec<Choice> = choices
        .prompts
        .iter_mut()
        .enumerate()
        .map(|(index, prompt)| Choice {
            index,
            prompt_token_ids: prompt.take(),
            token_ids: choices.return_token_ids.then(Vec::new),
            ..Choice::default()
        })
        .collect();
    while !choices.account.is_complete() {
        let (index, event) = choices.next().await?;
        let choice = &mut texts[index];
        match event {
            Event::Delta(delta) => {
                choice.text.push_str(&delta.text);
                if let Some(ids) = &mut choice.token_ids {
                    ids.extend(delta.token_ids);
                }
            }
            Event::Finished(finish) => choice.end(&finish),
            Event::Failed(failure) => return Err(failure.into()),
        }
    }
    let body = answer.json(&texts, UsageField::Known(choices.account.usage));
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// The answer as the data of server-sent events.
struct Chunks {
    answer: Answer,
    choices: Choices,
    include_usage: bool,
    ready: VecDeque<String>,
    ended: bool,
}

impl Chunks {
    /// The next event's data; `None` after the last.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Some(data);
            }
            if self.ended {
                return None;
            }
            match self.choices.next().await {
                Ok((index, event)) => self.take(index, event),
                Err(failure) => self.fail(failure),
            }
        }
    }

    fn take(&mut self, index: usize, event: Event) {
        let mut choice = Choice { index, ..Choice::default() };
        match event {
            // Without ids there is nothing to say until there is text.
            Event::Delta(delta) if delta.text.is_empty() && !self.choices.return_token_ids => return,
            Event::Delta(delta) => {
                choice.text = delta.text;
                choice.token_ids = self.choices.return_token_ids.then_some(delta.token_ids);
            }
            Event::Finished(finish) => {
                choice.token_ids = self.choices.return_token_ids.then(Vec::new);
                choice.end(&finish);
            }
            Event::Failed(failure) => return self.fail(failure),
        }
        choice.prompt_token_ids = self.choices.prompts[index].take();
        let usage = if self.include_usage { UsageField::Later } else { UsageField::Absent };
        self.ready.push_back(self.answer.json(&[choice], usage));
        if self.choices.account.is_complete() {
            if self.include_usage {
                self.ready.push_back(self.answer.json(&[], UsageField::Known(self.choices.account.usage)));
            }
            self.ready.push_back("[DONE]".into());
            self.ended = true;
        }
    }

    fn fail(&mut self, failure: Failure) {
        self.ready.push_back(ApiError::from(failure).body().to_string());
        self.ended = true;
        // The other texts of the request end with it.
        self.choices.streams.clear();
    }
}
