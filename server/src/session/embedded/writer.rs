//! The thread that writes the index. Waiting requests share one transaction, because a commit is the expensive part.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use redb::{Database, Durability};
use tokio::sync::oneshot;

use super::database::OpenIndex;
use super::error::IndexError;
use super::queue::{MAX_WAITING, Queue, Refused};
use super::transaction::Write;
use crate::session::error::StoreError;
use crate::session::id::VersionId;

/// Called with the versions whose snapshots nothing points to any more.
pub(super) type Freed = Box<dyn Fn(&[VersionId]) + Send>;

/// Syncs objects to disk before the index that names them is synced.
pub(super) type SyncObjects = Box<dyn Fn() -> Result<(), StoreError> + Send>;

/// A request to the thread. Its work may run again if the transaction fails.
trait Operation: Send {
    fn run(&mut self, write: &mut Write<'_>) -> Result<(), IndexError>;

    /// Sends the reply, once the transaction has committed or failed.
    fn reply(self: Box<Self>, committed: Result<(), StoreError>);
}

struct Call<T, F> {
    work: F,
    result: Option<Result<T, StoreError>>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<T, F> Operation for Call<T, F>
where
    T: Send,
    F: FnMut(&mut Write<'_>) -> Result<T, IndexError> + Send,
{
    fn run(&mut self, write: &mut Write<'_>) -> Result<(), IndexError> {
        self.result = Some(match (self.work)(write) {
            Ok(value) => Ok(value),
            Err(IndexError::Refused(error)) => Err(error),
            Err(error) => return Err(error),
        });
        Ok(())
    }

    fn reply(self: Box<Self>, committed: Result<(), StoreError>) {
        let Self { result, reply, .. } = *self;
        let gone = || StoreError::Unavailable { reason: "the index did not reply".to_owned() };
        // The caller may have been canceled.
        drop(reply.send(committed.and_then(|()| result.unwrap_or_else(|| Err(gone())))));
    }
}

struct Job {
    request: Box<dyn Operation>,
    writes: bool,
    /// Whether to sync to disk before replying, whatever the store's durability.
    durable: bool,
}

/// Sends requests to the thread.
pub(crate) struct Writer {
    queue: Queue<Job>,
    transactions: Arc<AtomicU64>,
}

/// The state of the thread.
struct WriterThread {
    index: Arc<OpenIndex>,
    durable: bool,
    transactions: Arc<AtomicU64>,
    /// Called after each commit that freed any version.
    freed: Freed,
    /// Called before each commit that is synced to disk.
    sync_objects: SyncObjects,
}

impl Writer {
    /// Starts the thread, which stops when the writer is dropped.
    pub(crate) fn start(
        index: Arc<OpenIndex>,
        durable: bool,
        freed: Freed,
        sync_objects: SyncObjects,
    ) -> Result<Self, StoreError> {
        let transactions = Arc::default();
        let state = WriterThread { index, durable, transactions: Arc::clone(&transactions), freed, sync_objects };
        let queue = Queue::start("index", move |jobs| state.group(jobs))
            .map_err(|error| StoreError::from_io("starting the index's thread failed", &error))?;
        Ok(Self { queue, transactions })
    }

    /// Runs `work` in a transaction and returns once it is committed.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, IndexError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, true, false).await
    }

    /// Like [`Self::run`], but always syncs to disk before it returns.
    pub(crate) async fn run_to_disk<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, IndexError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, true, true).await
    }

    /// Reads what the next transaction would see. `work` must not change anything.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, IndexError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, false, false).await
    }

    /// Returns the number of committed transactions.
    pub(crate) fn transactions(&self) -> u64 {
        self.transactions.load(Ordering::Relaxed)
    }

    /// Waits until the thread has done all waiting work and stopped.
    pub(crate) fn stop(&self) {
        self.queue.stop();
    }

    async fn submit<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, IndexError> + Send + 'static,
        writes: bool,
        durable: bool,
    ) -> Result<T, StoreError> {
        let (reply, replied) = oneshot::channel();
        let request = Box::new(Call { work, result: None, reply });
        let gone = || StoreError::Unavailable { reason: "the index's thread has stopped".to_owned() };
        let busy =
            || StoreError::Unavailable { reason: format!("{MAX_WAITING} requests are already waiting for the index") };
        self.queue.send(Job { request, writes, durable }).map_err(|refused| match refused {
            Refused::Full => busy(),
            Refused::Stopped => gone(),
        })?;
        replied.await.map_err(|_| gone())?
    }
}

impl WriterThread {
    /// Runs the jobs in one transaction, and replies to each of them whether or not it succeeds.
    fn group(&self, mut jobs: Vec<Job>) {
        let opened = self.index.opened();
        let result = self.index.with(|database| self.transaction(database, &mut jobs));
        let result = match result {
            Ok(freed) => {
                if !freed.is_empty() {
                    (self.freed)(&freed);
                }
                Ok(())
            }
            // One request hit a damaged row; the other requests must not fail because of it.
            Err(IndexError::Row(reason)) if jobs.len() > 1 => {
                tracing::error!(reason, "an index transaction failed; retrying its requests one by one");
                for job in jobs {
                    self.group(vec![job]);
                }
                return;
            }
            Err(error) => {
                tracing::error!(?error, "an index transaction failed");
                let failure = error.to_store_error();
                // A damaged row is a failure of its own session only.
                let of_row = matches!(error, IndexError::Row(_));
                let failure = match error.needs_reopen().then(|| self.index.reopen(opened)) {
                    Some(Err(error)) => {
                        tracing::error!(%error, "the index could not be reopened");
                        // Report the cause that the operator can act on.
                        if matches!(failure, StoreError::Full { .. }) { failure } else { error }
                    }
                    _ => failure,
                };
                // The journal may be ahead of the index; failed changes must not reappear after a restart.
                if let Err(error) = self.index.with(|database| self.index.prepare_journal(database)) {
                    tracing::error!(?error, "the journal could not be rewound; the next transaction tries again");
                }
                if !of_row {
                    self.index.set_failure(Some(failure.clone()));
                }
                Err(failure)
            }
        };
        for job in jobs {
            job.request.reply(result.clone());
        }
    }

    fn transaction(&self, database: &Database, jobs: &mut [Job]) -> Result<Vec<VersionId>, IndexError> {
        self.index.prepare_journal(database)?;
        let mut transaction = database.begin_write()?;
        let (mut writes, mut durable) = (false, self.durable);
        let mut write = Write::new(&transaction)?;
        for job in jobs {
            writes |= job.writes;
            durable |= job.durable;
            job.request.run(&mut write)?;
        }
        let freed: Vec<VersionId> = write.freed.iter().filter_map(|id| VersionId::parse(id)).collect();
        if !writes {
            drop(write);
            transaction.abort()?;
            return Ok(freed);
        }
        self.index.check_place().map_err(IndexError::Refused)?;
        if durable {
            // Objects must be on disk before the index that names them.
            (self.sync_objects)().map_err(IndexError::Refused)?;
        }
        let mut journal = self.index.journal();
        let record = journal.as_ref().and_then(|journal| journal.record(&write.take_changes()));
        if let Some(record) = &record {
            write.tables.set_position(record.position)?;
        }
        let change = std::mem::take(&mut write.change);
        drop(write);
        if durable {
            // Without this, opening the file after a crash would read all of it.
            transaction.set_quick_repair(true);
        } else {
            transaction.set_durability(Durability::None)?;
        }
        if let (Some(journal), Some(record)) = (&mut *journal, &record) {
            let failed = |error| IndexError::Refused(StoreError::from_io("writing the journal failed", &error));
            journal.append(record).map_err(failed)?;
        }
        // Either file can be completed from the other, whichever reaches the disk first, so both are synced in
        // parallel.
        let (committed, synced) = thread::scope(|scope| {
            let syncing = journal.as_ref().filter(|_| durable).map(|journal| scope.spawn(|| journal.sync()));
            let committed = transaction.commit();
            (committed, syncing.map_or(Ok(()), |thread| thread.join().unwrap_or_else(|_| Err(ErrorKind::Other.into()))))
        });
        committed?;
        if let Some(journal) = &mut *journal {
            journal.commit(durable);
            if let Err(error) = synced {
                tracing::error!(%error, "the journal could not be synced; the next transaction rewrites it");
                journal.break_off();
            }
        }
        drop(journal);
        // Update the totals before anyone gets a reply, so that a caller that then asks for space or reopens the index
        // sees them.
        self.index.capacity.apply(change);
        self.transactions.fetch_add(1, Ordering::Relaxed);
        self.index.set_failure(None);
        if durable {
            self.index.compact_journal(database);
        }
        Ok(freed)
    }
}
