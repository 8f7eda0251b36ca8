//! Opens an index in PostgreSQL.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use tokio::time::{Instant, sleep};

use super::address::PostgresUrl;
use super::background::Tasks;
use super::connection::{CONNECTIONS, Connections, step};
use super::database::{Database, Freed, Parts};
use super::index::PostgresIndex;
use super::migrations::migrate;
use super::servers::Leader;
use crate::session::error::StoreError;
use crate::session::id::SessionId;
use crate::session::index::Limits;

/// How long a starting server waits for an unreachable database, and the longest pause between two attempts.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 60 });
const PAUSE: Duration = Duration::from_secs(1);

/// The options with which an index is opened.
#[derive(Clone, Debug)]
pub(crate) struct PostgresOptions {
    pub(crate) url: PostgresUrl,
    /// The schema of its tables: one per model, because sessions of one model are useless to another.
    pub(crate) schema: String,
    pub(crate) limits: Limits,
    /// How long a server counts as alive after its last heartbeat.
    pub(crate) ttl: Duration,
    /// How long a request may take.
    pub(crate) limit: Duration,
    /// How often the totals are read.
    pub(crate) refresh: Duration,
}

impl PostgresOptions {
    /// Returns options with the usual times. `model` is a name of letters and digits.
    pub(crate) fn new(url: PostgresUrl, model: &str, limits: Limits) -> Self {
        let seconds = Duration::from_secs;
        let schema = format!("tidegate_{model}");
        Self { url, schema, limits, ttl: seconds(10), limit: seconds(10), refresh: seconds(2) }
    }
}

impl PostgresOptions {
    /// Returns options for work that no client waits for.
    pub(crate) fn patient(url: PostgresUrl, model: &str, limits: Limits) -> Self {
        Self { limit: Duration::from_mins(5), ..Self::new(url, model, limits) }
    }
}

/// Repeats an attempt for some time, until the database, or whatever else it needs, can be reached.
pub(crate) async fn patiently<T, F: Future<Output = Result<T, StoreError>>>(
    attempt: impl Fn() -> F,
) -> Result<T, StoreError> {
    let (began, mut warned) = (Instant::now(), false);
    loop {
        let reason = match attempt().await {
            Err(StoreError::Unavailable { reason }) => reason,
            result => return result,
        };
        if began.elapsed() > PATIENCE {
            return Err(StoreError::Database { reason });
        }
        if !std::mem::replace(&mut warned, true) {
            tracing::warn!("the index cannot be opened yet ({reason}): trying for {} s", PATIENCE.as_secs());
        }
        let part = rand::rng().random_range(0.5..1.0);
        sleep(PAUSE.mul_f64(part)).await;
    }
}

impl PostgresIndex {
    /// Opens the index, creating or migrating its schema if necessary. `freed` is called with the versions whose
    /// objects nothing points to any more. Waits for some time for an unreachable database, which may be starting or
    /// restarting.
    pub(crate) async fn open(options: PostgresOptions, freed: Freed) -> Result<Self, StoreError> {
        let freed = Arc::new(freed);
        patiently(|| {
            let freed = Arc::clone(&freed);
            Self::open_once(options.clone(), Box::new(move |versions| freed(versions)))
        })
        .await
    }

    async fn open_once(options: PostgresOptions, freed: Freed) -> Result<Self, StoreError> {
        let PostgresOptions { url, schema, limits, ttl, limit, refresh } = options;
        if !schema.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_')) {
            return Err(StoreError::Database { reason: format!("{schema:?} is not the name of a schema") });
        }
        migrate(&url, &schema).await?;
        let connect =
            |most| Connections::new(&url, &schema, limit, most).map_err(|reason| StoreError::Database { reason });
        let [requests, own] = CONNECTIONS;
        let (connections, own) = (connect(requests)?, connect(own)?);
        // The server's id is as random as any other id.
        let server = SessionId::new().as_str().trim_start_matches("ses_").to_owned();
        let parts = Parts { connections, own, limits, limit, ttl, server, schema, freed };
        let database = Arc::new(Database::new(parts));
        database.seen().await?;
        database.refresh().await?;
        let tasks = Tasks::start(&database, refresh);
        Ok(Self { database, leader: Leader::default(), tasks })
    }

    /// Returns whether a server has used the index before.
    pub(crate) async fn has_begun(&self) -> Result<bool, StoreError> {
        Ok(!self.database.query(step!("SELECT FROM begun LIMIT 1")).await?.is_empty())
    }

    /// Marks the index as in use.
    pub(crate) async fn begin(&self) -> Result<(), StoreError> {
        self.database.query(step!("INSERT INTO begun (at) VALUES (clock_timestamp())")).await.map(drop)
    }
}
