//! Transactions: the code that all requests share.

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex};
use std::time::Duration;

use rand::Rng as _;
use tokio::sync::{Mutex, Notify, Semaphore, SemaphorePermit};
use tokio::time::{sleep, timeout};
use tokio_postgres::Row;

use super::connection::{Connection, Connections, Step};
use super::failure::{Failure, damaged};
use super::health::Health;
use super::reads::{Access, Reads};
use super::rows::get;
use super::totals::Ledger;
use super::work::{Account, Work};
use super::writes::Writes;
use crate::session::error::StoreError;
use crate::session::id::{Owner, VersionId};
use crate::session::index::{Change, Limits, Reservation};

/// The callback for versions whose objects nothing points to any more.
pub(crate) type Freed = Box<dyn Fn(&[VersionId]) + Send + Sync>;

/// Maximum number of attempts of a transaction that conflicts with others.
const ATTEMPTS: u32 = 6;

/// Maximum pause between two attempts, in milliseconds; the first pauses are shorter.
const PAUSE: u64 = 100;

/// Number of lanes. Each owner has one; owners that happen to share a lane wait for each other.
const LANES: usize = 256;

/// Maximum number of concurrent reads of one owner, so that others always find a connection.
const READS: usize = 4;

/// A database, and this server's state for it.
pub(super) struct Database {
    pub(super) connections: Connections,
    /// Connections for the server's own work.
    pub(super) own: Connections,
    pub(super) health: Health,
    pub(super) ledger: Ledger,
    pub(super) limits: Limits,
    /// Time limit of a request; after that, it counts as unanswered.
    pub(super) limit: Duration,
    /// How long a server counts as alive after its last heartbeat.
    pub(super) ttl: Duration,
    /// The id of this server.
    pub(super) server: String,
    /// The name of the schema, which is also part of the names of locks.
    pub(super) schema: String,
    pub(super) transactions: AtomicU64,
    pub(super) freed: Freed,
    /// Wakes the task that reads the totals.
    pub(super) stale: Notify,
    /// Sessions whose leases are released once the database can be reached.
    pub(super) unreleased: StdMutex<HashSet<String>>,
    /// Locked while such leases are released, and while a lease is taken that may be one of them.
    pub(super) releasing_late: Mutex<()>,
    lanes: Vec<Lane>,
}

/// Where the requests of one owner wait for each other. If they waited in the database, each would take a connection.
struct Lane {
    writes: Mutex<()>,
    reads: Semaphore,
}

/// The parts from which a database is made.
pub(super) struct Parts {
    pub(super) connections: Connections,
    pub(super) own: Connections,
    pub(super) limits: Limits,
    pub(super) limit: Duration,
    pub(super) ttl: Duration,
    pub(super) server: String,
    pub(super) schema: String,
    pub(super) freed: Freed,
}

/// Returns whether an error is about space: this server may believe that there is more than the others have left.
fn is_about_space(error: &StoreError) -> bool {
    matches!(error, StoreError::Quota { quota, .. } if *quota != "sessions") || matches!(error, StoreError::Full { .. })
}

fn too_many() -> StoreError {
    super::failure::unavailable("too many requests of one owner are waiting")
}

async fn pause(attempt: u32, reason: &str) {
    tracing::debug!(attempt, reason, "another transaction was in the way");
    let pause = rand::rng().random_range(0..=(1 << attempt).min(PAUSE));
    sleep(Duration::from_millis(pause)).await;
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").field("schema", &self.schema).finish_non_exhaustive()
    }
}

impl Database {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { connections, own, limits, limit, ttl, server, schema, freed } = parts;
        Self {
            connections,
            own,
            health: Health::default(),
            ledger: Ledger::default(),
            limits,
            limit,
            ttl,
            server,
            schema,
            transactions: AtomicU64::new(0),
            freed,
            stale: Notify::new(),
            unreleased: StdMutex::default(),
            releasing_late: Mutex::default(),
            lanes: (0..LANES).map(|_| Lane { writes: Mutex::default(), reads: Semaphore::new(READS) }).collect(),
        }
    }

    /// Bounds the time of work on the database, and records whether the database can be reached.
    pub(super) async fn bounded<T>(
        &self,
        work: impl Future<Output = Result<T, Failure>> + Send,
    ) -> Result<T, StoreError> {
        self.health.check()?;
        self.unchecked(work).await.map_err(|failure| self.health.note(failure))
    }

    /// Returns a connection for a request. The wait for it has its own bound, and running into that bound says nothing
    /// about the database.
    async fn connection(&self) -> Result<Connection, StoreError> {
        self.health.check()?;
        self.connections.get().await.map_err(|failure| self.health.note(failure))
    }

    pub(super) async fn unchecked<T>(
        &self,
        work: impl Future<Output = Result<T, Failure>> + Send,
    ) -> Result<T, Failure> {
        let late = |_| Err(Failure::Down(format!("no answer within {:?}", self.limit)));
        timeout(self.limit, work).await.unwrap_or_else(late)
    }

    /// Runs statements, each as its own transaction.
    pub(super) async fn run(&self, steps: &[Step]) -> Result<Vec<Vec<Row>>, StoreError> {
        let mut connection = self.connection().await?;
        self.bounded(connection.run(steps)).await
    }

    /// Runs one statement.
    pub(super) async fn query(&self, step: Step) -> Result<Vec<Row>, StoreError> {
        Ok(self.run(&[step]).await?.swap_remove(0))
    }

    /// Runs statements that read one consistent snapshot.
    pub(super) async fn snapshot(&self, steps: &[Step]) -> Result<Vec<Vec<Row>>, StoreError> {
        let mut connection = self.connection().await?;
        self.bounded(connection.snapshot(steps)).await
    }

    /// Reads data of an owner.
    pub(super) async fn query_of(&self, owner: Owner, step: Step) -> Result<Vec<Row>, StoreError> {
        let _permit = self.read_permit(owner).await?;
        self.query(step).await
    }

    /// Reads data of an owner from one consistent snapshot.
    pub(super) async fn snapshot_of(&self, owner: Owner, steps: &[Step]) -> Result<Vec<Vec<Row>>, StoreError> {
        let _permit = self.read_permit(owner).await?;
        self.snapshot(steps).await
    }

    /// Waits until fewer than [`READS`] reads of the owner are running.
    async fn read_permit(&self, owner: Owner) -> Result<SemaphorePermit<'_>, StoreError> {
        self.health.check()?;
        // The semaphore is never closed.
        let permit = timeout(self.limit, self.lane(owner).reads.acquire()).await.ok().and_then(Result::ok);
        permit.ok_or_else(too_many)
    }

    fn lane(&self, owner: Owner) -> &Lane {
        &self.lanes[usize::from(owner.0[0].wrapping_add(owner.0[15]))]
    }

    /// Runs one statement, and repeats it if it conflicts with other transactions.
    pub(super) async fn retry(&self, step: Step) -> Result<Vec<Row>, StoreError> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let mut connection = self.connection().await?;
            match self.unchecked(connection.run(std::slice::from_ref(&step))).await {
                Err(Failure::Conflict(reason)) if attempt < ATTEMPTS => pause(attempt, &reason).await,
                Err(failure) => return Err(self.health.note(failure)),
                Ok(mut rows) => return Ok(rows.swap_remove(0)),
            }
        }
    }

    /// Reads rows of an owner from one consistent snapshot.
    pub(super) async fn read(&self, owner: Owner, reads: &Reads) -> Result<Work, StoreError> {
        let steps = reads.steps(owner, Access::Read);
        let rows = self.snapshot_of(owner, &steps).await?;
        match Reads::load(owner, &steps, &rows)? {
            Some(found) => Ok(found),
            None => Reads::fill(Work::new(owner, Account::default(), 0), &steps, &rows),
        }
    }

    /// Runs a transaction on the rows of one owner: reads what it needs, and stores the changes that `work` makes.
    /// While it runs, no other transaction writes these rows. If it conflicts with others, `work` runs again.
    pub(super) async fn write<T: Send>(
        &self,
        owner: Owner,
        reads: Reads,
        work: impl Fn(&mut Work) -> Result<T, StoreError> + Send + Sync,
    ) -> Result<T, StoreError> {
        self.health.check()?;
        let _lock = timeout(self.limit, self.lane(owner).writes.lock()).await.map_err(|_| too_many())?;
        let mut attempt = 0;
        loop {
            attempt += 1;
            match self.bounded_attempt(owner, &reads, &work).await {
                Err(Failure::Conflict(reason)) if attempt < ATTEMPTS => pause(attempt, &reason).await,
                done => return done.map_err(|failure| self.health.note(failure)),
            }
        }
    }

    async fn bounded_attempt<T: Send>(
        &self,
        owner: Owner,
        reads: &Reads,
        work: &(impl Fn(&mut Work) -> Result<T, StoreError> + Send + Sync),
    ) -> Result<T, Failure> {
        self.health.check()?;
        let mut connection = self.connections.get().await?;
        self.unchecked(async {
            let mut found = self.begin(&mut connection, owner, reads).await?;
            let (done, writes) = match work(&mut found).and_then(|done| Ok((done, found.finish(self.limits)?))) {
                Ok(done) => done,
                Err(error) => {
                    connection.rollback().await?;
                    if is_about_space(&error) {
                        self.stale.notify_one();
                    }
                    return Err(error.into());
                }
            };
            self.store(&mut connection, writes).await?;
            Ok(done)
        })
        .await
    }

    async fn begin(&self, connection: &mut Connection, owner: Owner, reads: &Reads) -> Result<Work, Failure> {
        let steps = reads.steps(owner, Access::Lock);
        let rows = connection.begin("BEGIN", &steps).await?;
        if let Some(work) = Reads::load(owner, &steps, &rows)? {
            return Ok(work);
        }
        let steps = reads.steps(owner, Access::Add);
        let rows = connection.run(&steps).await?;
        Ok(Reads::load(owner, &steps, &rows)?.ok_or_else(|| damaged("an owner that was added has no row"))?)
    }

    async fn store(&self, connection: &mut Connection, writes: Writes) -> Result<(), Failure> {
        let Writes { steps, change, fulfilled, freed } = writes;
        if steps.is_empty() {
            return connection.rollback().await;
        }
        let rows = connection.commit(&steps).await?;
        self.committed(rows.last(), change, fulfilled)?;
        if !freed.is_empty() {
            (self.freed)(&freed);
        }
        Ok(())
    }

    /// Adds a committed transaction's changes to the totals. Its last statement returned the transaction's number.
    pub(super) fn committed(
        &self,
        last: Option<&Vec<Row>>,
        change: Change,
        fulfilled: Vec<Arc<Reservation>>,
    ) -> Result<(), Failure> {
        self.transactions.fetch_add(1, Ordering::Relaxed);
        let row = last.and_then(|rows| rows.first()).ok_or_else(|| damaged("a transaction has no number"))?;
        let text: &str = get(row, 0)?;
        self.ledger.add(text.parse().map_err(|_| damaged("a transaction has no number"))?, change, fulfilled);
        Ok(())
    }
}
