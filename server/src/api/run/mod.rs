//! A run: the task that carries out a validated request, from its first event to its last. It sends what the client
//! reads, commits what is kept, and handles disconnects.

pub(super) mod active;
pub(super) mod alignment;
pub(super) mod answer;
mod choosing;
pub(super) mod encoder;
mod ending;
mod hold;
pub(super) mod idempotency;
mod next;
mod parking;
mod reasoning;
pub(super) mod recording;
mod register;
pub(super) mod resume;
pub(super) mod retry;
pub(super) mod sink;
pub(super) mod spans;
pub(super) mod streams;
mod takeover;
mod texts;
pub(super) mod tool_calls;
mod turn_info;
mod usage;
pub(super) mod version;
pub(super) mod waiters;

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use tokio::time::timeout;
use tracing::{Instrument, Span, debug};

use self::active::{Registration, Stop};
use self::choosing::{Chosen, Ended, EndedTexts};
pub(super) use self::encoder::TokenUsage;
use self::encoder::{Committed, EventEncoder, StreamEvent};
use self::idempotency::Ticket;
use self::recording::{Recorded, Recording};
pub(super) use self::register::register;
use self::sink::{Last, Sink};
use self::texts::Texts;
use self::turn_info::TurnInfo;
use self::usage::UsageRecorder;
use super::auth::context;
use super::auth::owner;
use super::error::ApiError;
use super::memory::Held;
use super::metrics::arrived;
use super::request::ValidRequest;
use super::request::continuation::{CommitPlan, OnDisconnect};
use super::request::recorder::Recorders;
use super::shares::Share;
use super::state::{AppState, RunGuard, Served};
use crate::engine::{Delta, Event, Failure, Finish, FinishReason};
use crate::metrics::{Accepted, AcceptedTurn, Meter};
use crate::session::Turn;

/// How a request is answered and committed.
pub(super) struct RunOptions {
    pub(super) stream: bool,
    pub(super) plan: CommitPlan,
    pub(super) on_disconnect: OnDisconnect,
    /// Holds the request's idempotency key.
    pub(super) ticket: Option<Ticket>,
    /// The record of the request, if other servers can continue its stream.
    pub(super) recorded: Option<Recorded>,
}

/// Number of tokens after which a run yields to other tasks: the tokens of a resumed text arrive all at once.
const BUSY: usize = 256;

/// What a run handles next.
enum Next {
    Event(Result<(usize, Event), Failure>),
    /// The run is stopped.
    Stop(Stop),
    /// The client has disconnected, or has read nothing for too long.
    Disconnected,
}

/// A request that the engine has accepted.
struct Run {
    state: AppState,
    served: Arc<Served>,
    texts: Texts,
    encoder: Box<dyn EventEncoder>,
    plan: CommitPlan,
    /// Whether the run starts from the state of its session.
    continues: bool,
    on_disconnect: OnDisconnect,
    ticket: Option<Ticket>,
    /// The record of the stream, as long as other servers can continue it.
    recording: Option<Recording>,
    /// Whether each token has its own event. This stays true once no other server can continue the stream, because the
    /// events are numbered.
    by_token: bool,
    registration: Registration,
    recorders: Recorders,
    /// The texts of a turn that have ended.
    ended: EndedTexts,
    /// What is kept of the turn, once all texts have ended.
    chosen: Option<Chosen>,
    /// The session's version after the turn.
    version: Option<String>,
    /// Memory for what the encoder holds until the response is written.
    memory: Option<Share>,
    /// Bytes of text that the encoder may still collect; `None` if it holds none.
    text_left: Option<usize>,
}

/// Submits a request to the engine and starts its task. Returns the response: a stream at once, or one piece at the end.
pub(super) async fn start(
    state: AppState,
    request: ValidRequest,
    encoder: Box<dyn EventEncoder>,
    options: RunOptions,
) -> Result<Response, ApiError> {
    let demand = request.demand();
    // Reserved before the request waits for a slot: what it may use is known now.
    let reservation = context::reserve(&demand)?;
    let is_stored = options.ticket.is_some();
    let needed = Held { listed: request.held_bytes, is_stored, states: request.held_states };
    let memory = state.response_memory().reserve_held(owner::current(), &needed)?;
    let ValidRequest { served, requests, prompts, cached, sampling, recorder, continues, max_tokens, identity, .. } =
        request;
    let RunOptions { stream, mut plan, on_disconnect, ticket, recorded } = options;
    let recorders = plan.prepare(&state, &served, &demand, recorder).await?;
    let session = plan.turn().map(|turn| turn.session().id.clone());
    let version = plan.version().map(ToString::to_string);
    let held = !stream || ticket.is_some() || encoder.holds_stream();
    let text_left = held.then_some(state.options().max_text_bytes);
    let at_shutdown = match on_disconnect {
        _ if recorded.is_some() => Stop::Released,
        OnDisconnect::Rollback => Stop::ShuttingDown,
        OnDisconnect::Commit | OnDisconnect::Continue => Stop::Finish,
    };
    let registration = register(&state, plan.owner(), session, at_shutdown).await?;
    let recording = match recorded {
        Some(recorded) => Some(recorded.begin(&state, &mut plan, (max_tokens, cached.iter().sum(), identity)).await?),
        None => None,
    };
    debug!(seed = sampling.seed, prompts = prompts.len(), texts = requests.len(), stream, "completion starts");
    let streams = served.engine.submit_for(context::tenant(), requests)?;
    let known = recording.as_ref().map_or(0, Recording::known);
    let recorder = UsageRecorder::new((demand.prompt_tokens, cached.iter().sum()), streams.len(), (reservation, known));
    let texts = Texts::new(recorder, streams);
    let run = Run {
        state,
        served,
        texts,
        encoder,
        ended: EndedTexts::new(plan.keep()),
        plan,
        continues,
        on_disconnect,
        ticket,
        by_token: recording.is_some(),
        recording,
        registration,
        recorders,
        chosen: None,
        version: None,
        memory,
        text_left,
    };
    let (state, guard, meter) = (run.state.clone(), run.state.run_begins(), run.meter());
    let keep_alive = state.options().keep_alive;
    if stream {
        let (sink, response) = if on_disconnect == OnDisconnect::Continue {
            let hold = run.recording.as_ref().map(|recording| Arc::clone(&recording.hold));
            sink::logged(state.streams(), (run.plan.owner(), run.registration.handle(), hold), keep_alive)
        } else {
            sink::streamed(keep_alive)
        };
        tokio::spawn(run.run(sink, meter, guard).instrument(Span::current()));
        return Ok(version::tagged(response, version.as_deref()));
    }
    let (sink, response) = sink::whole();
    tokio::spawn(run.run(sink, meter, guard).instrument(Span::current()));
    response.await
}

impl Run {
    /// Counts the request in the metrics, and starts to measure it.
    fn meter(&self) -> Meter {
        let turn = match &self.plan {
            CommitPlan::Turn { turn, .. } => {
                let info = self.info(turn);
                Some(AcceptedTurn { tier: info.source(), recomputed_tokens: info.recomputes() })
            }
            _ => None,
        };
        let usage = self.texts.recorder.usage;
        let metrics = self.state.metrics();
        metrics.accepted(&Accepted { prompt_tokens: usage.prompt, cached_tokens: usage.cached, turn });
        Meter::new(Arc::clone(metrics), arrived(), self.texts.count())
    }

    fn info<'a>(&self, turn: &'a Turn) -> TurnInfo<'a> {
        TurnInfo { turn, continues: self.continues }
    }

    async fn run(mut self, mut sink: Sink, mut meter: Meter, guard: RunGuard) {
        // Shorter than the engine's own limit, because committing a turn needs the engine once more.
        let limit = self.served.engine.stall_limit().mul_f32(0.75);
        let (mut out, mut parking, mut finishing) = (Vec::new(), false, false);
        self.encoder.start(&mut out);
        if let Some(recording) = &mut self.recording {
            recording.count(out.len(), 0);
        }
        let outcome = loop {
            match self.next(&mut sink, &mut out, &mut meter, (limit, finishing)).await {
                Next::Stop(Stop::Released) if self.can_be_parked() => {
                    parking = true;
                    self.texts.interrupt();
                }
                Next::Stop(Stop::Released) | Next::Event(Err(Failure::ShuttingDown)) if self.recording.is_some() => {
                    return self.give_up(sink, None, meter, guard).await;
                }
                Next::Event(Err(_)) if self.recording.as_ref().is_some_and(|recording| recording.known() > 0) => {
                    // What was parked cannot be continued, so the text is computed again.
                    self.recording.as_mut().map(Recording::forget_parked);
                    return self.give_up(sink, None, meter, guard).await;
                }
                Next::Event(Ok((_, Event::Finished(finish))))
                    if parking && finish.reason == FinishReason::Interrupted && self.is_held() =>
                {
                    return self.give_up(sink, finish.snapshot, meter, guard).await;
                }
                Next::Stop(stop) => {
                    if let Some(error) = stop.error() {
                        break Err(error);
                    }
                    if !self.withdraw().await {
                        return self.give_up(sink, None, meter, guard).await;
                    }
                    (parking, finishing) = (false, true);
                    self.texts.interrupt();
                }
                Next::Disconnected => {
                    match self.on_disconnect {
                        // Dropping the run ends its texts and leaves the session as it was.
                        OnDisconnect::Rollback => return,
                        OnDisconnect::Commit => self.texts.interrupt(),
                        OnDisconnect::Continue => {}
                    }
                    sink = Sink::Closed;
                }
                Next::Event(Err(failure)) => break Err(ApiError::from(failure)),
                Next::Event(Ok((index, event))) => match self.handle(index, event, &mut meter, &mut out).await {
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
        let (recording, complete) = (self.recording.take(), last.is_ok());
        let last = Last::new(last, self.memory.take(), self.version.take());
        // The session, the idempotency key and the server's shutdown do not wait for a reader.
        drop((self, meter));
        if let Some(recording) = recording {
            // The log of a recorded stream takes all events at once.
            sink.close(out, last).await;
            return recording.settle(complete).await;
        }
        drop(guard);
        // A reader that does not take the last events in time does not get them.
        let _ = timeout(limit, sink.close(out, last)).await;
    }

    /// Handles one event; returns true for the last one.
    async fn handle(
        &mut self,
        index: usize,
        event: Event,
        meter: &mut Meter,
        out: &mut Vec<StreamEvent>,
    ) -> Result<bool, ApiError> {
        match event {
            Event::PromptLogprobs(logprobs) => {
                self.encoder.prompt_logprobs(index, &logprobs, out);
                Ok(false)
            }
            Event::Delta(delta) if self.by_token => {
                let known = self.recording.as_ref().map_or(0, Recording::known);
                meter.delivering(index, delta.token_ids.len().saturating_sub(known));
                for (number, token) in delta.tokens().enumerate() {
                    if number % BUSY == BUSY - 1 {
                        tokio::task::yield_now().await;
                    }
                    self.delta(index, token, out)?;
                }
                Ok(false)
            }
            Event::Delta(delta) => {
                meter.delivering(index, delta.token_ids.len());
                self.delta(index, delta, out)?;
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

    /// Handles more text.
    fn delta(&mut self, index: usize, delta: Delta, out: &mut Vec<StreamEvent>) -> Result<(), ApiError> {
        self.collect(delta.text.len())?;
        self.recorders.generated(index, &delta.token_ids);
        if let Some(recording) = &mut self.recording {
            recording.add(&delta);
        }
        let (tokens, before) = (delta.token_ids.len(), out.len());
        self.encoder.delta(index, delta, out);
        if let Some(recording) = &mut self.recording {
            recording.count(out.len() - before, tokens);
        }
        Ok(())
    }

    /// Counts collected text, and refuses more than a response may hold.
    fn collect(&mut self, bytes: usize) -> Result<(), ApiError> {
        let Some(left) = &mut self.text_left else { return Ok(()) };
        if let Some(less) = left.checked_sub(bytes) {
            *left = less;
            return Ok(());
        }
        let most = self.state.options().max_text_bytes;
        let message = format!("the texts have more than {most} bytes, the most for a response held until its end");
        Err(ApiError::request(StatusCode::BAD_REQUEST, Some("stream"), Some("response_too_large"), message))
    }

    /// Handles the end of a text, and commits the request after its last text. The client learns of the end only after
    /// the commit.
    async fn finish(&mut self, index: usize, finish: Finish, out: &mut Vec<StreamEvent>) -> Result<(), ApiError> {
        let missing = || ApiError::internal();
        let mut committed = Committed::default();
        match &self.plan {
            CommitPlan::Nothing(_)
            | CommitPlan::Prefixes(_)
            | CommitPlan::Response { .. }
            | CommitPlan::ClientState { return_state: false, .. } => {}
            CommitPlan::Turn { turn, version, .. } => {
                let text = self.recorders.end(index, &finish, self.encoder.tool_calls(index));
                self.ended.add(Ended { index, finish: finish.clone(), text });
                if self.texts.recorder.is_complete() {
                    let (turn, bytes) = (self.info(turn), self.served.state_bytes);
                    let (chosen, session) = self.ended.choose(turn, version, bytes)?;
                    (self.chosen, self.version) = (chosen, Some(session.version.clone()));
                    committed.session = Some(session);
                }
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
            self.commit(index, finish).await?;
        }
        Ok(())
    }
}
