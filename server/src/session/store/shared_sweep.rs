//! The sweep of a store whose index is shared by several servers. Each server records its last uses and removes the
//! leftovers of its own requests; one server, the leader, does the rest. The index chooses the leader.

use std::sync::{Arc, Weak};

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::inner::{Inner, now};
use super::sweep::{log_failure, sweep_orphans};
use crate::session::error::StoreError;

/// Starts the task; it stops when the store is dropped.
pub(super) fn start(inner: &Arc<Inner>) {
    tokio::spawn(run(Arc::downgrade(inner), Arc::clone(&inner.garbage)));
}

async fn run(store: Weak<Inner>, woken: Arc<Notify>) {
    let Some((every, grace)) = store.upgrade().map(|inner| (inner.options.sweep_every, inner.options.orphan_grace))
    else {
        return;
    };
    let mut swept = Instant::now();
    // The random delay keeps servers from listing the objects at every start, and all at the same time.
    let mut listed = swept + grace.mul_f64(rand::random());
    let mut listing: Option<JoinHandle<()>> = None;
    loop {
        let Some(inner) = store.upgrade() else { return };
        // While the index is unreachable, each step would only fail.
        if inner.index.failure().is_none() {
            log_failure(inner.remove_suspects().await);
            if swept.elapsed() >= every {
                log_failure(inner.save_last_uses().await);
                log_failure(inner.sweep_if_leading().await);
            }
            let is_listing = listing.as_ref().is_some_and(|listing| !listing.is_finished());
            if Instant::now() >= listed && !is_listing && matches!(inner.index.leads().await, Ok(true)) {
                listing = Some(tokio::spawn(sweep_orphans(store.clone())));
                listed = Instant::now() + grace.max(every);
            }
        }
        if swept.elapsed() >= every {
            swept = Instant::now();
        }
        drop(inner);
        tokio::select! {
            () = woken.notified() => {}
            () = sleep_until(swept + every) => {}
        }
    }
}

impl Inner {
    /// Removes expired items, unused texts and garbage, as long as this server is the leader.
    pub(super) async fn sweep_if_leading(&self) -> Result<(), StoreError> {
        if self.index.leads().await? {
            self.index.expire(now(), self.exempt()).await?;
        }
        if self.index.leads().await? {
            self.index.prune_texts().await?;
        }
        self.remove_garbage_if_leading().await
    }
}
