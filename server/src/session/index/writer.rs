//! The one thread that writes the index. Whatever waits shares one transaction, since what is dear is its last write.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use redb::{Durability, WriteTransaction};
use tokio::sync::oneshot;

use super::tables::Tables;
use super::{Change, Fault, Index, Write};
use crate::session::{StoreError, VersionId};

/// Requests that share a transaction at most.
const GROUP: usize = 256;

/// Tells the caller, once it is known whether the transaction was committed.
type Reply = Box<dyn FnOnce(Result<(), StoreError>) + Send>;

/// The work in the transaction, or what came in its way; a fault that it returns ends the transaction.
type Work = Box<dyn FnOnce(Result<&mut Write<'_>, StoreError>) -> (Option<Fault>, Reply) + Send>;

/// Told the versions whose snapshots nobody points to any more.
type Freed = Box<dyn Fn(&[VersionId]) + Send>;

struct Job {
    work: Work,
    writes: bool,
    /// To be on disk before the reply, whatever the durability of the store is.
    durable: bool,
}

/// The way to the thread.
#[derive(Debug)]
pub(crate) struct Writer {
    jobs: Sender<Job>,
    transactions: Arc<AtomicU64>,
}

/// What the thread has.
struct Desk {
    index: Arc<Index>,
    durable: bool,
    transactions: Arc<AtomicU64>,
    /// After each commit that freed any.
    freed: Freed,
}

impl Writer {
    /// Starts the thread, which ends with the last way to it.
    pub(crate) fn start(
        index: Arc<Index>,
        durable: bool,
        freed: impl Fn(&[VersionId]) + Send + 'static,
    ) -> Result<Self, StoreError> {
        let (jobs, inbox) = channel();
        let transactions = Arc::default();
        let desk = Desk { index, durable, transactions: Arc::clone(&transactions), freed: Box::new(freed) };
        thread::Builder::new()
            .name("index".to_owned())
            .spawn(move || desk.serve(&inbox))
            .map_err(|error| StoreError::from_io("no thread for the index", &error))?;
        Ok(Self { jobs, transactions })
    }

    /// Does `work` in a transaction and returns once that is committed.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Write<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, true, false).await
    }

    /// Looks at what the next transaction would see; `work` changes nothing.
    pub(crate) async fn look<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Write<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.submit(work, false, false).await
    }

    /// Returns once everything before is on disk.
    pub(crate) async fn flush(&self) -> Result<(), StoreError> {
        self.submit(|_| Ok(()), true, true).await
    }

    /// Transactions committed.
    pub(crate) fn transactions(&self) -> u64 {
        self.transactions.load(Ordering::Relaxed)
    }

    async fn submit<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Write<'_>) -> Result<T, Fault> + Send + 'static,
        writes: bool,
        durable: bool,
    ) -> Result<T, StoreError> {
        let (tell, told) = oneshot::channel();
        let work: Work = Box::new(move |write| {
            let (fault, result) = match write.map_err(Fault::Refused).and_then(work) {
                Ok(value) => (None, Ok(value)),
                Err(Fault::Refused(error)) => (None, Err(error)),
                Err(fault) => {
                    let told = fault.told();
                    (Some(fault), Err(told))
                }
            };
            // Who no longer waits is not told.
            let reply: Reply = Box::new(move |end| drop(tell.send(result.and_then(|value| end.map(|()| value)))));
            (fault, reply)
        });
        let gone = || StoreError::Unavailable { reason: "the index does not answer".to_owned() };
        self.jobs.send(Job { work, writes, durable }).map_err(|_| gone())?;
        told.await.map_err(|_| gone())?
    }
}

impl Desk {
    fn serve(self, inbox: &Receiver<Job>) {
        let mut waiting = VecDeque::new();
        while let Ok(job) = inbox.recv() {
            waiting.push_back(job);
            while !waiting.is_empty() {
                waiting.extend(inbox.try_iter());
                self.group(&mut waiting);
            }
        }
    }

    /// One transaction, for as many as wait.
    fn group(&self, waiting: &mut VecDeque<Job>) {
        let opened = self.index.opened();
        let mut replies = Vec::new();
        let mut began = false;
        let end = self.index.with(|database| {
            let transaction = database.begin_write()?;
            began = true;
            self.transaction(transaction, waiting, &mut replies)
        });
        let end = match end {
            Ok((change, freed)) => {
                // Before anybody is told: who then asks for room finds the sums that hold now.
                self.index.ledger.apply(change);
                if !freed.is_empty() {
                    (self.freed)(&freed);
                }
                Ok(())
            }
            Err(fault) => {
                tracing::error!(?fault, "a transaction of the index failed");
                if fault.wants_opening()
                    && let Err(error) = self.index.reopen(opened)
                {
                    tracing::error!(%error, "the index cannot be opened again");
                }
                let error = fault.told();
                if !began {
                    replies.extend(waiting.drain(..).map(|job| (job.work)(Err(error.clone())).1));
                }
                Err(error)
            }
        };
        for reply in replies {
            reply(end.clone());
        }
    }

    fn transaction(
        &self,
        mut transaction: WriteTransaction,
        waiting: &mut VecDeque<Job>,
        replies: &mut Vec<Reply>,
    ) -> Result<(Change, Vec<VersionId>), Fault> {
        let (mut writes, mut durable) = (false, self.durable);
        let (change, freed) = {
            let mut write = Write::new(Tables::writing(&transaction)?);
            while replies.len() < GROUP
                && let Some(job) = waiting.pop_front()
            {
                writes |= job.writes;
                durable |= job.durable;
                // A panic takes its own caller's answer along; the others are told that the transaction failed.
                let (fault, reply) = catch_unwind(AssertUnwindSafe(|| (job.work)(Ok(&mut write))))
                    .map_err(|_| super::broken("a request ended in a panic".to_owned()))?;
                replies.push(reply);
                if let Some(fault) = fault {
                    return Err(fault);
                }
            }
            let freed = write.freed.iter().filter_map(|id| VersionId::parse(id)).collect();
            (write.change, freed)
        };
        if writes {
            transaction.set_durability(if durable { Durability::Immediate } else { Durability::None })?;
            transaction.commit()?;
            self.transactions.fetch_add(1, Ordering::Relaxed);
        } else {
            transaction.abort()?;
        }
        Ok((change, freed))
    }
}
