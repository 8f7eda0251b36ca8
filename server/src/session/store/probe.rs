//! Probes a remote object store: from time to time, and about every second while it fails.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::select;
use tokio::time::sleep;

use super::inner::Inner;
use crate::session::backend::{Backend, pauses};

/// Pauses between probes while the object store fails.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(1);

/// Starts the task; it stops when the store is dropped.
pub(super) fn start(inner: &Arc<Inner>) {
    tokio::spawn(watch(Arc::downgrade(inner), Arc::clone(inner.objects.backend()), inner.options.sweep_every));
}

async fn watch(store: Weak<Inner>, backend: Arc<Backend>, every: Duration) {
    loop {
        for pause in pauses(FIRST, LONGEST) {
            let Some(inner) = store.upgrade() else { return };
            if inner.objects.probe().await.is_ok() {
                break;
            }
            drop(inner);
            sleep(pause).await;
        }
        select(pin!(backend.failed()), pin!(sleep(every))).await;
    }
}
