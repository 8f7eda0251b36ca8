//! A request for text from its first event to its last, in a task of its own: what the client reads, what is kept, and
//! what happens where the client leaves.

pub(in crate::api) mod account;
pub(in crate::api) mod alignment;
pub(in crate::api) mod encoder;
pub(in crate::api) mod idempotency;
pub(in crate::api) mod sink;
pub(in crate::api) mod spans;
pub(in crate::api) mod streams;
pub(in crate::api) mod texts;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use tokio::time::{sleep, timeout};
use tracing::{Instrument, Span, warn};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::metrics::arrived;
use crate::api::run::encoder::{Dialect, Kept, Said, SessionInfo};
use crate::api::run::idempotency::Ticket;
use crate::api::run::sink::Sink;
use crate::api::run::texts::Texts;
use crate::api::state::{AppState, RunGuard, Served};
use crate::engine::{Event, Finish, FinishReason};
use crate::metrics::{Accepted, AcceptedTurn, Meter};
use crate::session::{Owner, ResponseId, Snapshot, Tier, Turn, TurnNote, VersionId};

/// Longest result that is kept for a request that has changed nothing: a longer one is computed anew.
const MAX_RECEIPT_BYTES: usize = 256 << 10;

/// What happens to a turn when its client disconnects: it is undone, it ends, or it continues and its stream can be
/// resumed. Without `session`, only `rollback`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::api) enum OnDisconnect {
    /// It is undone.
    #[default]
    Rollback,
    /// It ends with the text so far.
    Commit,
    /// It runs to its end, and its stream can be resumed.
    Continue,
}

/// What becomes of the snapshots that a request makes.
pub(in crate::api) enum Keeping {
    /// Beginnings that later requests of the same owner may share.
    Prefixes(Owner),
    /// The next version of a session.
    Turn { owner: Owner, turn: Box<Turn>, version: VersionId, label: Option<String> },
    /// A state that the client keeps, where it wants the new one.
    Sealed { owner: Owner, wanted: bool },
    /// A response to go on from.
    Response { owner: Owner, id: ResponseId, parent: Option<VersionId> },
    /// Nothing but, where it is asked for, the result for the same request sent again.
    Nothing(Owner),
}

/// A request that the engine has taken.
pub(in crate::api) struct Run {
    pub(in crate::api) state: AppState,
    pub(in crate::api) served: Arc<Served>,
    pub(in crate::api) texts: Texts,
    pub(in crate::api) dialect: Box<dyn Dialect>,
    pub(in crate::api) keeping: Keeping,
    pub(in crate::api) on_disconnect: OnDisconnect,
    /// The place of the first result where the request may be sent again.
    pub(in crate::api) ticket: Option<Ticket>,
}

impl Run {
    /// Starts the task; the answer in one piece or as a stream.
    pub(in crate::api) async fn answer(self, stream: bool) -> Result<Response, ApiError> {
        let state = self.state.clone();
        let (guard, meter) = (state.run_begins(), self.meter());
        let follow = self.on_disconnect == OnDisconnect::Continue;
        if stream {
            let owner = self.owner();
            let (sink, response) =
                if follow { sink::logged(&state, owner) } else { sink::streamed(state.options().keep_alive) };
            tokio::spawn(self.run(sink, meter, guard).instrument(Span::current()));
            return Ok(response);
        }
        let (sink, answer) = sink::whole();
        tokio::spawn(self.run(sink, meter, guard).instrument(Span::current()));
        answer.await
    }

    fn owner(&self) -> Owner {
        match &self.keeping {
            Keeping::Prefixes(owner)
            | Keeping::Turn { owner, .. }
            | Keeping::Sealed { owner, .. }
            | Keeping::Response { owner, .. }
            | Keeping::Nothing(owner) => *owner,
        }
    }

    /// Counts what has been taken, and measures it from now on.
    fn meter(&self) -> Meter {
        let turn = match &self.keeping {
            Keeping::Turn { turn, .. } => Some(AcceptedTurn {
                tier: if self.restores(turn) { tier(turn) } else { "new" },
                recomputed_tokens: self.recomputes(turn),
            }),
            _ => None,
        };
        let usage = &self.texts.account.usage;
        let (prompt_tokens, cached_tokens) = (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens);
        let metrics = self.state.metrics();
        metrics.accepted(&Accepted { prompt_tokens, cached_tokens, turn });
        Meter::new(Arc::clone(metrics), arrived(), self.texts.count())
    }

    /// Whether a new source takes the place of the state before.
    fn replaces(&self) -> bool {
        self.served.reads_sources() && self.texts.account.usage.prompt_tokens > 0
    }

    fn restores(&self, turn: &Turn) -> bool {
        turn.head().read > 0 && !self.replaces()
    }

    /// Tokens before a turn that are computed again: the last of those that wait is new to any state; the others wait in
    /// case a stop string takes them back.
    fn recomputes(&self, turn: &Turn) -> u64 {
        if self.replaces() { 0 } else { turn.head().pending.len().saturating_sub(1) as u64 }
    }

    async fn run(mut self, mut sink: Sink, mut meter: Meter, guard: RunGuard) {
        // Before the engine gives up on the reader: a turn that is to be committed needs it once more.
        let limit = self.served.engine.stall_limit().mul_f32(0.75);
        let mut over = pin!(over(self.state.options().max_time));
        let mut is_over = false;
        let mut out = Vec::new();
        self.dialect.open(&mut out);
        let outcome = loop {
            // One who reads nothing for too long has left, and must not keep the session for ever.
            let event = if sink.say(&mut out, limit).await {
                meter.delivered();
                tokio::select! {
                    biased;
                    () = sink.left() => None,
                    () = &mut over, if !is_over => {
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
                    // Dropped here: the texts end, and the session is as it was.
                    OnDisconnect::Rollback => return,
                    OnDisconnect::Commit => self.texts.interrupt(),
                    OnDisconnect::Continue => {}
                }
                sink = Sink::Nobody;
                continue;
            };
            match event {
                Err(failure) => break Err(ApiError::from(failure)),
                Ok((index, event)) => match self.take(index, event, &mut meter, &mut out).await {
                    Ok(true) => break Ok(()),
                    Ok(false) => {}
                    Err(error) => break Err(error),
                },
            }
        };
        let last = match outcome {
            Ok(()) => Ok(if sink.wants_body() { self.dialect.body() } else { String::new() }),
            Err(error) => {
                meter.failed(error.label());
                out.clear();
                self.dialect.fail(&error, &mut out);
                Err(error)
            }
        };
        // The session, the key and the server's end wait for no reader.
        drop((self, meter, guard));
        // Who does not read the last words in that time does not get them.
        let _ = timeout(limit, sink.close(out, last)).await;
    }

    /// Takes one event; whether it was the last.
    async fn take(
        &mut self,
        index: usize,
        event: Event,
        meter: &mut Meter,
        out: &mut Vec<Said>,
    ) -> Result<bool, ApiError> {
        match event {
            Event::Read(snapshot) => {
                if let Keeping::Prefixes(owner) = &self.keeping {
                    self.served.prefixes.keep(*owner, &snapshot);
                }
                Ok(false)
            }
            Event::PromptLogprobs(logprobs) => {
                self.dialect.prompt_logprobs(index, &logprobs, out);
                Ok(false)
            }
            Event::Delta(delta) => {
                meter.delivering(index, delta.token_ids.len());
                self.dialect.delta(index, delta, out);
                Ok(false)
            }
            Event::Finished(finish) => {
                let (reason, timings) = (finish.reason, finish.timings);
                self.finish(index, finish, out).await?;
                meter.ended(index, reason, timings);
                Ok(self.texts.account.is_complete())
            }
            Event::Failed(failure) => Err(failure.into()),
        }
    }

    /// Keeps what is to be kept, and only then says that the text has ended.
    async fn finish(&mut self, index: usize, finish: Finish, out: &mut Vec<Said>) -> Result<(), ApiError> {
        let missing = || ApiError::internal();
        let mut kept = Kept::default();
        match &self.keeping {
            Keeping::Nothing(_) | Keeping::Response { .. } | Keeping::Sealed { wanted: false, .. } => {}
            Keeping::Prefixes(owner) => {
                if let Some(snapshot) = &finish.snapshot {
                    self.served.prefixes.keep(*owner, snapshot);
                }
            }
            Keeping::Turn { turn, version, .. } => {
                let snapshot = finish.snapshot.as_ref().ok_or_else(missing)?;
                kept.session = Some(self.info(turn, version, snapshot));
            }
            Keeping::Sealed { owner, .. } => {
                let snapshot = finish.snapshot.clone().ok_or_else(missing)?;
                let (codec, owner) = (Arc::clone(&self.served.codec), *owner);
                let sealed = tokio::task::spawn_blocking(move || codec.seal(&snapshot, &owner.0)).await;
                let sealed =
                    sealed.map_err(|_| missing())?.map_err(|error| ApiError::invalid(None, error.to_string()))?;
                kept.state = Some(BASE64.encode(sealed));
            }
        }
        self.dialect.end(index, &finish, &kept, out);
        if self.texts.account.is_complete() {
            self.dialect.close(self.texts.account.usage, out);
            self.commit(finish).await?;
        }
        Ok(())
    }

    /// What an answer says about its session.
    fn info(&self, turn: &Turn, version: &VersionId, snapshot: &Snapshot) -> SessionInfo {
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
        // Held to the end: until then the same request sent again is refused.
        let ticket = self.ticket.take();
        let receipt = ticket.as_ref().map(|ticket| ticket.receipt(&self.dialect.body()));
        match std::mem::replace(&mut self.keeping, Keeping::Nothing(Owner::default())) {
            Keeping::Turn { turn, version, label, .. } => {
                let snapshot = finish.snapshot.ok_or_else(ApiError::internal)?;
                let note = TurnNote {
                    label,
                    prompt_tokens: finish.prompt_tokens as u64,
                    completion_tokens: finish.completion_tokens as u64,
                    kind: if finish.reason == FinishReason::Interrupted { "interrupted" } else { "turn" }.into(),
                };
                turn.commit(snapshot, note, receipt, version).await?;
            }
            Keeping::Response { owner, id, parent } => {
                let snapshot = finish.snapshot.ok_or_else(ApiError::internal)?;
                let body = self.dialect.body().into_bytes();
                self.state.store()?.put_response(owner, &id, body, snapshot, parent, receipt).await?;
            }
            // The server keeps nothing of a conversation that the client keeps.
            Keeping::Sealed { .. } => {}
            Keeping::Prefixes(owner) | Keeping::Nothing(owner) => {
                self.keep_receipt(receipt, owner).await;
            }
        }
        Ok(())
    }

    /// Keeps the first result of a request that has changed nothing: where that fails, sending it again computes anew.
    async fn keep_receipt(&self, receipt: Option<(crate::session::ReceiptKey, Vec<u8>)>, owner: Owner) {
        let Some((key, bytes)) = receipt.filter(|(_, bytes)| bytes.len() <= MAX_RECEIPT_BYTES) else { return };
        let kept = match self.state.store() {
            Ok(store) => store.put_receipt(owner, &key.0, bytes).await.map_err(ApiError::from),
            Err(error) => Err(error),
        };
        if let Err(error) = kept {
            warn!("no receipt for an idempotency key: {}", error.message());
        }
    }
}

/// Ends after `limit`; never where there is none.
async fn over(limit: Option<Duration>) {
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

/// A request that asks for what this server has no key for.
pub(in crate::api) fn no_key(param: &str) -> ApiError {
    let message = format!("{param} needs a secret on the server (--secret-file); it has none");
    ApiError::request(StatusCode::NOT_IMPLEMENTED, Some(param), Some("no_secret"), message)
}
