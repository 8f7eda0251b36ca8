//! A run: a validated request in a task of its own, from its first event to its last. It sends what the client reads,
//! commits what is kept, and handles disconnects.

pub(super) mod alignment;
pub(super) mod encoder;
pub(super) mod idempotency;
pub(super) mod resume;
pub(super) mod retry;
pub(super) mod sink;
pub(super) mod spans;
pub(super) mod streams;
mod texts;
pub(super) mod tool_calls;
mod usage;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use tokio::time::{sleep, timeout};
use tracing::{Instrument, Span, debug, warn};

pub(super) use self::encoder::TokenUsage;
use self::encoder::{Committed, EventEncoder, SessionInfo, StreamEvent};
use self::idempotency::Ticket;
use self::sink::Sink;
use self::texts::Texts;
use self::usage::UsageRecorder;
use super::error::ApiError;
use super::metrics::arrived;
use super::request::ValidRequest;
use super::request::continuation::{CommitPlan, OnDisconnect};
use super::state::{AppState, RunGuard, Served};
use crate::engine::{Event, Finish, FinishReason};
use crate::metrics::{Accepted, AcceptedTurn, Meter};
use crate::session::{Owner, ReceiptKey, Snapshot, Tier, Turn, TurnNote, VersionId};

/// Longest result that is stored for retries of a request that has changed nothing. A retry of a longer one is computed
/// again.
const MAX_RECEIPT_BYTES: usize = 256 << 10;

/// How a request is answered and committed.
pub(super) struct RunOptions {
    pub(super) stream: bool,
    pub(super) plan: CommitPlan,
    pub(super) on_disconnect: OnDisconnect,
    /// Holds the request's idempotency key.
    pub(super) ticket: Option<Ticket>,
}

/// A request that the engine has accepted.
struct Run {
    state: AppState,
    served: Arc<Served>,
    texts: Texts,
    encoder: Box<dyn EventEncoder>,
    plan: CommitPlan,
    on_disconnect: OnDisconnect,
    ticket: Option<Ticket>,
}

/// Submits a request to the engine and starts its task. Returns the response: a stream at once, or one piece at the end.
pub(super) async fn start(
    state: AppState,
    request: ValidRequest,
    encoder: Box<dyn EventEncoder>,
    options: RunOptions,
) -> Result<Response, ApiError> {
    let ValidRequest { served, requests, prompts, cached, sampling, .. } = request;
    let RunOptions { stream, plan, on_disconnect, ticket } = options;
    debug!(seed = sampling.seed, prompts = prompts.len(), texts = requests.len(), stream, "completion starts");
    let streams = served.engine.submit_all(requests)?;
    let recorder = UsageRecorder::new(&prompts, cached.iter().sum(), streams.len());
    let run = Run { state, served, texts: Texts::new(recorder, streams), encoder, plan, on_disconnect, ticket };
    let (state, guard, meter) = (run.state.clone(), run.state.run_begins(), run.meter());
    let keep_alive = state.options().keep_alive;
    if stream {
        let (sink, response) = if on_disconnect == OnDisconnect::Continue {
            sink::logged(state.streams(), run.plan.owner(), keep_alive)
        } else {
            sink::streamed(keep_alive)
        };
        tokio::spawn(run.run(sink, meter, guard).instrument(Span::current()));
        return Ok(response);
    }
    let (sink, response) = sink::whole();
    tokio::spawn(run.run(sink, meter, guard).instrument(Span::current()));
    response.await
}

impl Run {
    /// Counts the request, and measures it from now on.
    fn meter(&self) -> Meter {
        let turn = match &self.plan {
            CommitPlan::Turn { turn, .. } => Some(AcceptedTurn {
                tier: if self.restores(turn) { tier(turn) } else { "new" },
                recomputed_tokens: self.recomputes(turn),
            }),
            _ => None,
        };
        let usage = self.texts.recorder.usage;
        let metrics = self.state.metrics();
        metrics.accepted(&Accepted { prompt_tokens: usage.prompt, cached_tokens: usage.cached, turn });
        Meter::new(Arc::clone(metrics), arrived(), self.texts.count())
    }

    /// Whether a new source replaces the state before it.
    fn replaces(&self) -> bool {
        self.served.reads_sources() && self.texts.recorder.usage.prompt > 0
    }

    fn restores(&self, turn: &Turn) -> bool {
        turn.head().read > 0 && !self.replaces()
    }

    /// Tokens before a turn that are computed again. The last pending token is in no state yet; the others were kept
    /// pending in case a stop string removes them.
    fn recomputes(&self, turn: &Turn) -> u64 {
        if self.replaces() { 0 } else { turn.head().pending.len().saturating_sub(1) as u64 }
    }

    async fn run(mut self, mut sink: Sink, mut meter: Meter, guard: RunGuard) {
        // Shorter than the engine's own limit: committing a turn needs the engine once more.
        let limit = self.served.engine.stall_limit().mul_f32(0.75);
        let mut time_limit = pin!(time_limit(self.state.options().max_time));
        let mut is_over = false;
        let mut out = Vec::new();
        self.encoder.start(&mut out);
        let outcome = loop {
            // A client that reads nothing for too long counts as disconnected: it must not lock the session forever.
            let event = if sink.send(&mut out, limit).await {
                meter.delivered();
                tokio::select! {
                    biased;
                    () = sink.disconnected() => None,
                    () = &mut time_limit, if !is_over => {
                        is_over = true;
                        self.texts.interrupt();
                        continue;
                    }
                    event = self.texts.next() => Some(event),
                }
            } else {
                if sink.has_reader() {
                    meter.stalled();
                }
                None
            };
            let Some(event) = event else {
                match self.on_disconnect {
                    // Dropping the run ends its texts and leaves the session as it was.
                    OnDisconnect::Rollback => return,
                    OnDisconnect::Commit => self.texts.interrupt(),
                    OnDisconnect::Continue => {}
                }
                sink = Sink::Closed;
                continue;
            };
            match event {
                Err(failure) => break Err(ApiError::from(failure)),
                Ok((index, event)) => match self.handle(index, event, &mut meter, &mut out).await {
                    Ok(true) => break Ok(()),
                    Ok(false) => {}
                    Err(error) => break Err(error),
                },
            }
        };
        let last = match outcome {
            Ok(()) => Ok(if sink.wants_body() { self.encoder.body() } else { String::new() }),
            Err(error) => {
                meter.failed(error.label());
                out.clear();
                self.encoder.fail(&error, &mut out);
                Err(error)
            }
        };
        // The session, the idempotency key and the server's shutdown wait for no reader.
        drop((self, meter, guard));
        // A reader that does not take the last events in time does not get them.
        let _ = timeout(limit, sink.close(out, last)).await;
    }

    /// Handles one event; true for the last one.
    async fn handle(
        &mut self,
        index: usize,
        event: Event,
        meter: &mut Meter,
        out: &mut Vec<StreamEvent>,
    ) -> Result<bool, ApiError> {
        match event {
            Event::Read(snapshot) => {
                if let CommitPlan::Prefixes(owner) = &self.plan {
                    self.served.prefixes.keep(*owner, &snapshot);
                }
                Ok(false)
            }
            Event::PromptLogprobs(logprobs) => {
                self.encoder.prompt_logprobs(index, &logprobs, out);
                Ok(false)
            }
            Event::Delta(delta) => {
                meter.delivering(index, delta.token_ids.len());
                self.encoder.delta(index, delta, out);
                Ok(false)
            }
            Event::Finished(finish) => {
                let (reason, timings) = (finish.reason, finish.timings);
                self.finish(index, finish, out).await?;
                meter.ended(index, reason, timings);
                Ok(self.texts.recorder.is_complete())
            }
            Event::Failed(failure) => Err(failure.into()),
        }
    }

    /// Commits a text that has ended. The client learns of its end only after that.
    async fn finish(&mut self, index: usize, finish: Finish, out: &mut Vec<StreamEvent>) -> Result<(), ApiError> {
        let missing = || ApiError::internal();
        let mut committed = Committed::default();
        match &self.plan {
            CommitPlan::Nothing(_)
            | CommitPlan::Response { .. }
            | CommitPlan::ClientState { return_state: false, .. } => {}
            CommitPlan::Prefixes(owner) => {
                if let Some(snapshot) = &finish.snapshot {
                    self.served.prefixes.keep(*owner, snapshot);
                }
            }
            CommitPlan::Turn { turn, version, .. } => {
                let snapshot = finish.snapshot.as_ref().ok_or_else(missing)?;
                committed.session = Some(self.session_info(turn, version, snapshot));
            }
            CommitPlan::ClientState { owner, .. } => {
                let snapshot = finish.snapshot.clone().ok_or_else(missing)?;
                let (codec, owner) = (Arc::clone(&self.served.codec), *owner);
                let sealed = tokio::task::spawn_blocking(move || codec.seal(&snapshot, &owner.0)).await;
                let sealed =
                    sealed.map_err(|_| missing())?.map_err(|error| ApiError::invalid(None, error.to_string()))?;
                committed.state = Some(BASE64.encode(sealed));
            }
        }
        self.encoder.end_text(index, &finish, &committed, out);
        if self.texts.recorder.is_complete() {
            self.encoder.end(self.texts.recorder.usage, out);
            self.commit(finish).await?;
        }
        Ok(())
    }

    fn session_info(&self, turn: &Turn, version: &VersionId, snapshot: &Snapshot) -> SessionInfo {
        SessionInfo {
            id: turn.session().id.to_string(),
            version: version.to_string(),
            parent: turn.session().head.id.to_string(),
            restored: self.restores(turn),
            tier: tier(turn),
            recomputed_tokens: self.recomputes(turn),
            tokens: snapshot.tokens(),
            state_bytes: self.served.state_bytes,
            held_text: snapshot.answer.as_ref().map_or_else(String::new, |answer| answer.held.clone()),
        }
    }

    async fn commit(&mut self, finish: Finish) -> Result<(), ApiError> {
        // Held to the end: until then a retry of the same request is refused.
        let ticket = self.ticket.take();
        let receipt = ticket.as_ref().map(|ticket| ticket.receipt(&self.encoder.body()));
        match std::mem::replace(&mut self.plan, CommitPlan::Nothing(Owner::default())) {
            CommitPlan::Turn { turn, version, label, .. } => {
                let snapshot = finish.snapshot.ok_or_else(ApiError::internal)?;
                let note = TurnNote {
                    label,
                    prompt_tokens: finish.prompt_tokens as u64,
                    completion_tokens: finish.completion_tokens as u64,
                    kind: if finish.reason == FinishReason::Interrupted { "interrupted" } else { "turn" }.into(),
                };
                turn.commit(snapshot, note, receipt, version).await?;
            }
            CommitPlan::Response { owner, id, parent } => {
                let snapshot = finish.snapshot.ok_or_else(ApiError::internal)?;
                let body = self.encoder.body().into_bytes();
                self.state.store()?.put_response(owner, &id, body, snapshot, parent, receipt).await?;
            }
            // The server stores nothing of a conversation that the client keeps.
            CommitPlan::ClientState { .. } => {}
            CommitPlan::Prefixes(owner) | CommitPlan::Nothing(owner) => self.keep_receipt(receipt, owner).await,
        }
        Ok(())
    }

    /// Stores the result of a request that has changed nothing. If that fails, a retry is computed again.
    async fn keep_receipt(&self, receipt: Option<(ReceiptKey, Vec<u8>)>, owner: Owner) {
        let Some((key, bytes)) = receipt.filter(|(_, bytes)| bytes.len() <= MAX_RECEIPT_BYTES) else { return };
        let kept = match self.state.store() {
            Ok(store) => store.put_receipt(owner, &key.0, bytes).await.map_err(ApiError::from),
            Err(error) => Err(error),
        };
        if let Err(error) = kept {
            warn!("the result for an idempotency key was not stored: {}", error.message());
        }
    }
}

/// Ends after `limit`, or never.
async fn time_limit(limit: Option<Duration>) {
    match limit {
        Some(limit) => sleep(limit).await,
        None => std::future::pending().await,
    }
}

fn tier(turn: &Turn) -> &'static str {
    match turn.tier() {
        Tier::Memory => "memory",
        Tier::Disk => "disk",
    }
}
