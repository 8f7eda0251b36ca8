//! The servers that share the index: which are alive, which of them works on a session, which one is the leader, and
//! the streams that one server can take over from another. Only the database's clock decides whether a server is alive.

use std::collections::HashSet;
use std::sync::{MutexGuard, PoisonError};

use deadpool_postgres::ClientWrapper;
use tokio::sync::Mutex;

use super::connection::step;
use super::database::Database;
use super::failure::Failure;
use super::rows::{column, get, owner, owner_column};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId};
use crate::session::index::{NewStream, StreamRow};

/// Maximum number of ended streams kept per owner. They need a bound because their records count toward no quota.
pub(super) const MAX_ENDED_STREAMS: u64 = 256;

const SEEN: &str = "INSERT INTO servers (id, seen) VALUES ($1, clock_timestamp()) ON CONFLICT (id) DO UPDATE SET seen = \
    clock_timestamp()";

const LEASE: &str = "INSERT INTO leases (session, server) VALUES ($1, $2) ON CONFLICT (session) DO UPDATE SET server = \
    excluded.server WHERE leases.server = excluded.server OR NOT EXISTS (SELECT FROM servers v WHERE v.id = leases.server AND \
    v.seen > clock_timestamp() - make_interval(secs => $3::double precision)) RETURNING true";

const RELEASE: &str = "DELETE FROM leases WHERE session = ANY($1) AND server = $2";

const LEAVE: [&str; 3] = [
    "DELETE FROM leases WHERE server = $1",
    "UPDATE streams SET server = NULL WHERE server = $1",
    "DELETE FROM servers WHERE id = $1",
];

const LEAD: &str = "SELECT pg_try_advisory_lock(hashtextextended('tidegate leads ' || $1, 0))";

const PUT_STREAM: &str = "INSERT INTO streams (id, owner, server, ends, record) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (id) DO \
    UPDATE SET server = excluded.server, ends = excluded.ends, record = excluded.record WHERE streams.owner = excluded.owner";

const STREAM: &str = "SELECT owner, record FROM streams WHERE id = $1 AND owner = $2 AND ends > extract(epoch FROM \
    clock_timestamp()) * 1000";

const TAKE_STREAM: &str = "UPDATE streams s SET server = $3 WHERE s.id = $1 AND s.owner = $2 AND (s.server IS NULL OR s.server = \
    $3 OR NOT EXISTS (SELECT FROM servers v WHERE v.id = s.server AND v.seen > clock_timestamp() - make_interval(secs => $4::double precision))) \
    RETURNING true";

const RELEASE_STREAM: &str = "UPDATE streams SET server = NULL, record = coalesce($4::bytea, record) WHERE id = $1 AND \
    owner = $2 AND server = $3";

/// Both parts of the statement see the streams as they were before it, so the stream that is kept does not count among
/// the others.
const KEEP_STREAM: &str = "WITH kept AS (UPDATE streams SET server = NULL, ends = $4, ended = true WHERE id = $1 AND owner = $2 AND \
    server = $3 RETURNING id) DELETE FROM streams WHERE EXISTS (SELECT FROM kept) AND id IN (SELECT id FROM streams WHERE owner = $2 \
    AND ended AND id <> $1 ORDER BY ends DESC OFFSET $5)";

const WITHDRAW_STREAM: &str = "DELETE FROM streams WHERE id = $1 AND owner = $2 AND server = $3 RETURNING true";

const DELETE_STREAM: &str = "DELETE FROM streams WHERE id = $1 AND owner = $2";

/// The connection whose lock makes a server the leader, and whether it has the lock.
#[derive(Debug, Default)]
pub(super) struct Leader(Mutex<Option<(ClientWrapper, bool)>>);

impl Leader {
    pub(super) async fn leave(&self) {
        drop(self.0.lock().await.take());
    }
}

impl Database {
    /// Sends a heartbeat: records that this server is alive.
    pub(super) async fn seen(&self) -> Result<(), StoreError> {
        let seen = step!(SEEN, self.server.clone());
        self.bounded(async { self.own.get().await?.run(&[seen]).await }).await.map(drop)
    }

    /// Records that this server has stopped, so that others need not wait for it.
    pub(super) async fn leave(&self) -> Result<(), StoreError> {
        for sql in LEAVE {
            self.retry(step!(sql, self.server.clone())).await?;
        }
        Ok(())
    }

    pub(super) async fn lease(&self, session: &SessionId) -> Result<bool, StoreError> {
        if self.unreleased().contains(session.as_str()) {
            // A late release that is under way would give the new lease away.
            let _none_releases = self.releasing_late.lock().await;
            self.unreleased().remove(session.as_str());
        }
        let lease = step!(LEASE, session.to_string(), self.server.clone(), self.ttl.as_secs_f64());
        Ok(!self.retry(lease).await?.is_empty())
    }

    pub(super) async fn release(&self, session: &SessionId) {
        // Recorded before the release, because the release may be interrupted, and nobody else can take the lease as
        // long as this server is alive.
        self.unreleased().insert(session.to_string());
        let release = step!(RELEASE, vec![session.to_string()], self.server.clone());
        match (self.retry(release).await, self.releasing_late.try_lock()) {
            (Ok(_), Ok(_none_releases)) => _ = self.unreleased().remove(session.as_str()),
            // A late release may have this lease too, so new leases must wait for it.
            (Ok(_), Err(_)) => {}
            (Err(error), _) => tracing::debug!(%session, %error, "a lease is given back later"),
        }
    }

    /// Releases all leases that are still to be released.
    pub(super) async fn release_late(&self) -> Result<(), StoreError> {
        let _releasing = self.releasing_late.lock().await;
        let sessions: Vec<String> = self.unreleased().iter().cloned().collect();
        if sessions.is_empty() {
            return Ok(());
        }
        self.retry(step!(RELEASE, sessions.clone(), self.server.clone())).await?;
        self.unreleased().retain(|session| !sessions.contains(session));
        Ok(())
    }

    fn unreleased(&self) -> MutexGuard<'_, HashSet<String>> {
        self.unreleased.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether this server is the leader. The leader holds a lock of a connection, which ends with the
    /// connection.
    pub(super) async fn leads(&self, leader: &Leader) -> Result<bool, StoreError> {
        let mut held = leader.0.lock().await;
        let work = async {
            let (client, leads) = match held.take() {
                Some(held) => held,
                None => (self.own.detached().await?, false),
            };
            let leads = if leads {
                client.simple_query("SELECT 1").await?;
                true
            } else {
                client.query_one(LEAD, &[&self.schema]).await?.get(0)
            };
            *held = Some((client, leads));
            Ok::<_, Failure>(leads)
        };
        self.bounded(work).await
    }

    pub(super) async fn put_stream(&self, stream: NewStream) -> Result<(), StoreError> {
        let NewStream { id, row, ends } = stream;
        let owner = owner_column(row.owner);
        self.retry(step!(PUT_STREAM, id, owner, self.server.clone(), column(ends), row.record)).await.map(drop)
    }

    pub(super) async fn stream(&self, of: Owner, id: &str) -> Result<StreamRow, StoreError> {
        let rows = self.query_of(of, step!(STREAM, id.to_owned(), owner_column(of))).await?;
        let row = rows.first().ok_or(StoreError::STREAM)?;
        Ok(StreamRow { owner: owner(row, 0)?, record: get(row, 1)? })
    }

    pub(super) async fn take_stream(&self, of: Owner, id: &str) -> Result<bool, StoreError> {
        self.stream(of, id).await?;
        let (server, ttl) = (self.server.clone(), self.ttl.as_secs_f64());
        Ok(!self.retry(step!(TAKE_STREAM, id.to_owned(), owner_column(of), server, ttl)).await?.is_empty())
    }

    pub(super) async fn release_stream(&self, of: Owner, id: &str, record: Option<Vec<u8>>) {
        let release = step!(RELEASE_STREAM, id.to_owned(), owner_column(of), self.server.clone(), record);
        if let Err(error) = self.retry(release).await {
            tracing::debug!(stream = id, %error, "a stream was not given up; its holder ends by itself");
        }
    }

    pub(super) async fn keep_stream(&self, of: Owner, id: &str, ends: u64) -> Result<(), StoreError> {
        let (server, others) = (self.server.clone(), column(MAX_ENDED_STREAMS - 1));
        self.retry(step!(KEEP_STREAM, id.to_owned(), owner_column(of), server, column(ends), others)).await.map(drop)
    }

    pub(super) async fn withdraw_stream(&self, of: Owner, id: &str) -> Result<bool, StoreError> {
        let withdraw = step!(WITHDRAW_STREAM, id.to_owned(), owner_column(of), self.server.clone());
        Ok(!self.retry(withdraw).await?.is_empty())
    }

    pub(super) async fn delete_stream(&self, of: Owner, id: &str) -> Result<(), StoreError> {
        self.retry(step!(DELETE_STREAM, id.to_owned(), owner_column(of))).await.map(drop)
    }
}
