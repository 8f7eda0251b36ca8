//! The thread that writes the index. Waiting requests share one transaction, because committing is the expensive part.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use redb::Durability;
use tokio::sync::oneshot;

use super::database::Index;
use super::error::IndexError;
use super::tables::Tables;
use super::transaction::Write;
use crate::session::error::StoreError;
use crate::session::id::VersionId;

/// Most requests in one transaction.
const MAX_GROUP: usize = 256;

/// Most requests that may wait for the thread; more are refused.
const MAX_WAITING: usize = 4096;

/// Called with the versions whose snapshots nothing points to any more.
type Freed = Box<dyn Fn(&[VersionId]) + Send>;

/// Syncs objects to disk, before an index that names them is.
type SyncObjects = Box<dyn Fn() -> Result<(), StoreError> + Send>;

/// A request to the thread. Its work may run again if its transaction fails.
trait Operation: Send {
    fn run(&mut self, write: &mut Write<'_>) -> Result<(), IndexError>;

    /// Replies, once the transaction has committed or failed.
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
        // The caller may have gone.
        drop(reply.send(committed.and_then(|()| result.unwrap_or_else(|| Err(gone())))));
    }
}

struct Job {
    request: Box<dyn Operation>,
    writes: bool,
    /// Sync to disk before replying, whatever the store's durability.
    durable: bool,
}

enum Message {
    Job(Job),
    Stop,
}

/// Sends requests to the thread.
#[derive(Debug)]
pub(crate) struct Writer {
    jobs: SyncSender<Message>,
    transactions: Arc<AtomicU64>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// State of the thread.
struct WriterThread {
    index: Arc<Index>,
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
        index: Arc<Index>,
        durable: bool,
        freed: impl Fn(&[VersionId]) + Send + 'static,
        sync_objects: impl Fn() -> Result<(), StoreError> + Send + 'static,
    ) -> Result<Self, StoreError> {
        let (jobs, inbox) = sync_channel(MAX_WAITING);
        let transactions = Arc::default();
        let (freed, sync_objects) = (Box::new(freed), Box::new(sync_objects));
        let state = WriterThread { index, durable, transactions: Arc::clone(&transactions), freed, sync_objects };
        let thread = thread::Builder::new()
            .name("index".to_owned())
            .spawn(move || state.serve(&inbox))
            .map_err(|error| StoreError::from_io("starting the index's thread failed", &error))?;
        Ok(Self { jobs, transactions, thread: Mutex::new(Some(thread)) })
    }

    /// Runs `work` in a transaction and returns once that is committed.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, IndexError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, true, false).await
    }

    /// As [`Self::run`], but always syncs to disk before returning.
    pub(crate) async fn run_to_disk<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, IndexError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, true, true).await
    }

    /// Reads what the next transaction would see. `work` must change nothing.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, IndexError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, false, false).await
    }

    /// Number of committed transactions.
    pub(crate) fn transactions(&self) -> u64 {
        self.transactions.load(Ordering::Relaxed)
    }

    /// Waits until the thread has done all waiting work and has stopped.
    pub(crate) fn stop(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && self.jobs.send(Message::Stop).is_ok()
        {
            drop(thread.join());
        }
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
        self.jobs.try_send(Message::Job(Job { request, writes, durable })).map_err(|error| match error {
            std::sync::mpsc::TrySendError::Full(_) => busy(),
            std::sync::mpsc::TrySendError::Disconnected(_) => gone(),
        })?;
        replied.await.map_err(|_| gone())?
    }
}

impl WriterThread {
    fn serve(self, inbox: &Receiver<Message>) {
        let mut waiting = VecDeque::new();
        let mut stopping = false;
        while !stopping && let Ok(first) = inbox.recv() {
            for message in std::iter::once(first).chain(inbox.try_iter()) {
                match message {
                    Message::Job(job) => waiting.push_back(job),
                    Message::Stop => stopping = true,
                }
            }
            while !waiting.is_empty() {
                self.group(waiting.drain(..MAX_GROUP.min(waiting.len())).collect());
            }
        }
    }

    /// Runs the jobs in one transaction, and replies to each whatever happens.
    fn group(&self, mut jobs: Vec<Job>) {
        let opened = self.index.opened();
        let result = self.index.with(|database| self.transaction(database.begin_write()?, &mut jobs));
        let result = match result {
            Ok(freed) => {
                if !freed.is_empty() {
                    (self.freed)(&freed);
                }
                Ok(())
            }
            // One request met a damaged row; the others must not fail because of it.
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
                match error.needs_reopen().then(|| self.index.reopen(opened)) {
                    Some(Err(error)) => {
                        tracing::error!(%error, "the index could not be reopened");
                        // Report the cause that the operator can act on.
                        Err(if matches!(failure, StoreError::Full { .. }) { failure } else { error })
                    }
                    _ => Err(failure),
                }
            }
        };
        for job in jobs {
            job.request.reply(result.clone());
        }
    }

    fn transaction(
        &self,
        mut transaction: redb::WriteTransaction,
        jobs: &mut [Job],
    ) -> Result<Vec<VersionId>, IndexError> {
        let (mut writes, mut durable) = (false, self.durable);
        let (change, freed) = {
            let mut write = Write::new(Tables::writing(&transaction)?);
            for job in jobs {
                writes |= job.writes;
                durable |= job.durable;
                job.request.run(&mut write)?;
            }
            let freed = write.freed.iter().filter_map(|id| VersionId::parse(id)).collect();
            (write.change, freed)
        };
        if !writes {
            transaction.abort()?;
            return Ok(freed);
        }
        if durable {
            // Objects must be on disk before the index that names them.
            (self.sync_objects)().map_err(IndexError::Refused)?;
            // Without this, opening the file after a crash reads all of it.
            transaction.set_quick_repair(true);
        } else {
            transaction.set_durability(Durability::None)?;
        }
        transaction.commit()?;
        // Before anyone gets a reply, so that a caller who then asks for space, or reopens the index, sees these totals.
        self.index.capacity.apply(change);
        self.transactions.fetch_add(1, Ordering::Relaxed);
        Ok(freed)
    }
}
