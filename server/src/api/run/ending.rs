//! The end of a run. Either its outcome is stored, with the result for retries of the same request, or the run is given
//! up, so that another server can continue its stream.

use std::sync::Arc;

use tracing::warn;

use super::Run;
use super::recording::Recording;
use super::sink::{Last, Sink};
use crate::api::error::ApiError;
use crate::api::request::continuation::{CommitPlan, Keep};
use crate::api::state::RunGuard;
use crate::engine::{Failure, Finish};
use crate::metrics::Meter;
use crate::session::{NewResponse, Owner, ReceiptKey, Snapshot};

/// Longest result that is stored for retries of a request that has changed nothing. If the result is longer, a retry is
/// computed again.
const MAX_RECEIPT_BYTES: usize = 256 << 10;

impl Run {
    /// Removes the record of the stream, because from now on the text depends on timing. Returns false if another
    /// server may be computing the stream: that server commits the whole text as the same version, so this run must not
    /// commit.
    pub(super) async fn withdraw(&mut self) -> bool {
        let withdrawn = match &mut self.recording {
            Some(recording) => recording.withdraw().await,
            None => true,
        };
        if withdrawn {
            self.recording = None;
        }
        withdrawn
    }

    /// Whether the text so far can be stored for another server.
    pub(super) fn can_be_parked(&self) -> bool {
        self.plan.keep() != Some(Keep::Nothing) && self.recording.as_ref().is_some_and(Recording::can_be_parked)
    }

    /// Whether the stream still has a record, which neither this run nor its client has withdrawn.
    pub(super) fn is_held(&self) -> bool {
        self.recording.as_ref().is_some_and(|recording| !recording.hold.is_withdrawn())
    }

    /// Ends without a commit or a last event. The readers of the stream ask again, and another server continues it:
    /// after the text so far if `end` is the state there, else from its beginning.
    pub(super) async fn give_up(mut self, sink: Sink, end: Option<Arc<Snapshot>>, meter: Meter, _guard: RunGuard) {
        let Some(recording) = self.recording.take() else { return };
        let state = self.state.clone();
        self.texts.recorder.fail(Failure::ShuttingDown);
        meter.released();
        // Release the session first: the server that takes over the stream needs it.
        drop(self);
        state.streams().forget(recording.hold.id());
        recording.release(end).await;
        sink.close(Vec::new(), Last::new(Ok(String::new()), None, None)).await;
    }

    /// Commits the outcome of a request, once its last text has ended.
    pub(super) async fn commit(&mut self, index: usize, finish: Finish) -> Result<(), ApiError> {
        // Held until the commit is done: until then, a retry of the same request is refused.
        let ticket = self.ticket.take();
        let plan = std::mem::replace(&mut self.plan, CommitPlan::Nothing(Owner::default()));
        let chosen = self.chosen.take();
        let changes = chosen.is_some() || matches!(plan, CommitPlan::Response { .. });
        let body =
            ticket.as_ref().map(|_| self.encoder.body()).filter(|body| changes || body.len() <= MAX_RECEIPT_BYTES);
        let receipt = ticket.as_ref().zip(body).map(|(ticket, body)| ticket.receipt(body));
        match (plan, chosen) {
            (CommitPlan::Turn { mut turn, version, label, .. }, Some(chosen)) => {
                let (snapshot, note, forks) = chosen.into_parts(label)?;
                turn.leave_forks(forks);
                turn.commit(snapshot, note, receipt, version).await?;
            }
            (CommitPlan::Response { owner, id, parent }, _) => {
                let snapshot = finish.snapshot.clone().ok_or_else(ApiError::internal)?;
                let text = self.recorders.end(index, &finish, self.encoder.tool_calls(index));
                let new = NewResponse { body: self.encoder.body().into_bytes(), snapshot, parent, text };
                self.state.store()?.put_response(owner, &id, new, receipt).await?;
            }
            // The server stores nothing of a conversation that the client keeps.
            (CommitPlan::ClientState { .. }, _) => {}
            (CommitPlan::Prefixes(owner) | CommitPlan::Nothing(owner) | CommitPlan::Turn { owner, .. }, _) => {
                self.keep_receipt(receipt, owner).await;
            }
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
