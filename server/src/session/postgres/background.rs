//! The background tasks of a server: it sends heartbeats, gives back leases, reads the totals, and tries again when the
//! database could not be reached.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rand::Rng as _;
use tokio::task::AbortHandle;
use tokio::time::sleep;

use super::connection::step;
use super::database::Database;

/// The first and the longest pause between two attempts to reach the database.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// The pause after reading the totals is at least this many times as long as the read.
const SHARE: u32 = 20;

/// Running tasks, which stop when this value is dropped.
#[derive(Debug, Default)]
pub(super) struct Tasks(Mutex<Vec<AbortHandle>>);

impl Tasks {
    /// Starts the tasks. `refresh` is the interval between reads of the totals.
    pub(super) fn start(database: &Arc<Database>, refresh: Duration) -> Self {
        let tasks = [
            tokio::spawn(heartbeat(Arc::clone(database))).abort_handle(),
            tokio::spawn(release_late(Arc::clone(database))).abort_handle(),
            tokio::spawn(read_totals(Arc::clone(database), refresh)).abort_handle(),
            tokio::spawn(try_again(Arc::clone(database))).abort_handle(),
        ];
        Self(Mutex::new(tasks.into()))
    }

    pub(super) fn stop(&self) {
        for task in self.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn heartbeat(database: Arc<Database>) {
    loop {
        sleep(database.ttl / 3).await;
        if let Err(error) = database.seen().await {
            tracing::debug!(%error, "other servers cannot see that this one is alive");
        }
    }
}

/// Not a part of the heartbeat, which must not wait for it.
async fn release_late(database: Arc<Database>) {
    loop {
        sleep(database.ttl / 3).await;
        if let Err(error) = database.release_late().await {
            tracing::debug!(%error, "leases are given back later");
        }
    }
}

async fn read_totals(database: Arc<Database>, every: Duration) {
    let mut took = Duration::ZERO;
    loop {
        let pause = took * SHARE;
        sleep(pause).await;
        tokio::select! {
            () = sleep(every.saturating_sub(pause)) => {}
            () = database.stale.notified() => {}
        }
        let began = Instant::now();
        if let Err(error) = database.refresh().await {
            tracing::debug!(%error, "the totals could not be read");
        }
        took = began.elapsed();
    }
}

async fn try_again(database: Arc<Database>) {
    loop {
        database.health.failed.notified().await;
        let mut pause = PAUSES[0];
        while database.health.failure().is_some() {
            let answer = database.unchecked(async { database.own.get().await?.run(&[step!("SELECT 1")]).await });
            if answer.await.is_ok() {
                database.health.recover();
                break;
            }
            // The servers must not all come back at the same moment.
            let jitter = rand::rng().random_range(pause / 2..pause);
            sleep(jitter).await;
            pause = (pause * 2).min(PAUSES[1]);
        }
    }
}
