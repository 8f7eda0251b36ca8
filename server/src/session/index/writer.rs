//! The one thread that writes the index. Whatever waits shares one transaction, since what is dear is its last write.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use redb::{Durability, WriteTransaction};
use tokio::sync::oneshot;

use super::tables::Tables;
use super::{Fault, Index, Write};
use crate::session::{StoreError, VersionId};

/// Requests that share a transaction at most.
const GROUP: usize = 256;

/// Requests that wait for the thread at most; more are refused.
const WAITING: usize = 4096;

/// Told the versions whose snapshots nobody points to any more.
type Freed = Box<dyn Fn(&[VersionId]) + Send>;

/// Puts the objects that the index names on disk, for an index that is about to be.
type Settle = Box<dyn Fn() -> Result<(), StoreError> + Send>;

/// A request to the thread. Its work may be done more than once: what a transaction did that failed never was.
trait Request: Send {
    fn work(&mut self, write: &mut Write<'_>) -> Result<(), Fault>;

    /// Once it is known whether the transaction was committed.
    fn tell(self: Box<Self>, end: Result<(), StoreError>);
}

struct Asked<T, F> {
    work: F,
    result: Option<Result<T, StoreError>>,
    tell: oneshot::Sender<Result<T, StoreError>>,
}

impl<T, F> Request for Asked<T, F>
where
    T: Send,
    F: FnMut(&mut Write<'_>) -> Result<T, Fault> + Send,
{
    fn work(&mut self, write: &mut Write<'_>) -> Result<(), Fault> {
        self.result = Some(match (self.work)(write) {
            Ok(value) => Ok(value),
            Err(Fault::Refused(error)) => Err(error),
            Err(fault) => return Err(fault),
        });
        Ok(())
    }

    fn tell(self: Box<Self>, end: Result<(), StoreError>) {
        let Self { result, tell, .. } = *self;
        let gone = || StoreError::Unavailable { reason: "the index did not answer".to_owned() };
        // Who no longer waits is not told.
        drop(tell.send(end.and_then(|()| result.unwrap_or_else(|| Err(gone())))));
    }
}

struct Job {
    request: Box<dyn Request>,
    writes: bool,
    /// To be on disk before the reply, whatever the durability of the store is.
    durable: bool,
}

enum Message {
    Job(Job),
    End,
}

/// The way to the thread.
#[derive(Debug)]
pub(crate) struct Writer {
    jobs: SyncSender<Message>,
    transactions: Arc<AtomicU64>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the thread has.
struct Desk {
    index: Arc<Index>,
    durable: bool,
    transactions: Arc<AtomicU64>,
    /// After each commit that freed any.
    freed: Freed,
    /// Before each commit that is to be on disk.
    settle: Settle,
}

impl Writer {
    /// Starts the thread, which ends with the last way to it.
    pub(crate) fn start(
        index: Arc<Index>,
        durable: bool,
        freed: impl Fn(&[VersionId]) + Send + 'static,
        settle: impl Fn() -> Result<(), StoreError> + Send + 'static,
    ) -> Result<Self, StoreError> {
        let (jobs, inbox) = sync_channel(WAITING);
        let transactions = Arc::default();
        let (freed, settle) = (Box::new(freed), Box::new(settle));
        let desk = Desk { index, durable, transactions: Arc::clone(&transactions), freed, settle };
        let thread = thread::Builder::new()
            .name("index".to_owned())
            .spawn(move || desk.serve(&inbox))
            .map_err(|error| StoreError::from_io("no thread for the index", &error))?;
        Ok(Self { jobs, transactions, thread: Mutex::new(Some(thread)) })
    }

    /// Does `work` in a transaction and returns once that is committed.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, true, false).await
    }

    /// As [`Self::run`], and returns once it is on disk, in a store that does not sync its turns too.
    pub(crate) async fn run_to_disk<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, true, true).await
    }

    /// Looks at what the next transaction would see; `work` changes nothing.
    pub(crate) async fn look<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, false, false).await
    }

    /// Transactions committed.
    pub(crate) fn transactions(&self) -> u64 {
        self.transactions.load(Ordering::Relaxed)
    }

    /// Ends the thread once it has done what waits, and waits for that.
    pub(crate) fn end(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && self.jobs.send(Message::End).is_ok()
        {
            drop(thread.join());
        }
    }

    async fn submit<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, Fault> + Send + 'static,
        writes: bool,
        durable: bool,
    ) -> Result<T, StoreError> {
        let (tell, told) = oneshot::channel();
        let request = Box::new(Asked { work, result: None, tell });
        let gone = || StoreError::Unavailable { reason: "the index does not answer".to_owned() };
        let busy = || StoreError::Unavailable { reason: format!("{WAITING} requests wait for the index") };
        self.jobs.try_send(Message::Job(Job { request, writes, durable })).map_err(|error| match error {
            std::sync::mpsc::TrySendError::Full(_) => busy(),
            std::sync::mpsc::TrySendError::Disconnected(_) => gone(),
        })?;
        told.await.map_err(|_| gone())?
    }
}

impl Desk {
    fn serve(self, inbox: &Receiver<Message>) {
        let mut waiting = VecDeque::new();
        let mut ends = false;
        while !ends && let Ok(first) = inbox.recv() {
            for message in std::iter::once(first).chain(inbox.try_iter()) {
                match message {
                    Message::Job(job) => waiting.push_back(job),
                    Message::End => ends = true,
                }
            }
            while !waiting.is_empty() {
                self.group(waiting.drain(..GROUP.min(waiting.len())).collect());
            }
        }
    }

    /// One transaction, for as many as there are. Whatever comes of it, each of them is told.
    fn group(&self, mut jobs: Vec<Job>) {
        let opened = self.index.opened();
        let end = self.index.with(|database| self.transaction(database.begin_write()?, &mut jobs));
        let end = match end {
            Ok(freed) => {
                if !freed.is_empty() {
                    (self.freed)(&freed);
                }
                Ok(())
            }
            // One of them met a row that is not as it should be: the others are not to suffer from it.
            Err(Fault::Row(reason)) if jobs.len() > 1 => {
                tracing::error!(reason, "a transaction of the index failed; its requests are tried one by one");
                for job in jobs {
                    self.group(vec![job]);
                }
                return;
            }
            Err(fault) => {
                tracing::error!(?fault, "a transaction of the index failed");
                let mut error = fault.told();
                if fault.wants_opening()
                    && let Err(reopening) = self.index.reopen(opened)
                {
                    tracing::error!(error = %reopening, "the index cannot be opened again");
                    // Of two reasons the one that says what to do.
                    if !matches!(error, StoreError::Full { .. }) {
                        error = reopening;
                    }
                }
                Err(error)
            }
        };
        for job in jobs {
            job.request.tell(end.clone());
        }
    }

    fn transaction(&self, mut transaction: WriteTransaction, jobs: &mut [Job]) -> Result<Vec<VersionId>, Fault> {
        let (mut writes, mut durable) = (false, self.durable);
        let (change, freed) = {
            let mut write = Write::new(Tables::writing(&transaction)?);
            for job in jobs {
                writes |= job.writes;
                durable |= job.durable;
                job.request.work(&mut write)?;
            }
            let freed = write.freed.iter().filter_map(|id| VersionId::parse(id)).collect();
            (write.change, freed)
        };
        if !writes {
            transaction.abort()?;
            return Ok(freed);
        }
        if durable {
            // What the index is about to name for good must be there for good.
            (self.settle)().map_err(Fault::Refused)?;
            // Opening it after a crash would otherwise read all of it.
            transaction.set_quick_repair(true);
        } else {
            transaction.set_durability(Durability::None)?;
        }
        transaction.commit()?;
        // At once, and before anybody is told: whoever then opens the index again counts this too, and whoever asks
        // for room finds the sums that hold now.
        self.index.ledger.apply(change);
        self.transactions.fetch_add(1, Ordering::Relaxed);
        Ok(freed)
    }
}
