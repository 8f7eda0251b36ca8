//! Connections to the database. Statements are sent together and answered together, so that a transaction takes two
//! round trips: one for its reads and one for its writes.

use std::time::Duration;

use deadpool_postgres::{
    Client, Hook, HookError, Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime, Timeouts,
};
use futures_util::future::{BoxFuture, try_join_all};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Error, Row};

use super::address::{CONNECT, PostgresUrl};
use super::failure::Failure;

/// Maximum number of connections of one model's index: for requests, and for the server's own work, so that requests
/// cannot delay its heartbeats. One more connection holds the leader's lock.
pub(super) const CONNECTIONS: [usize; 2] = [14, 2];

/// A statement with its parameters.
pub(super) struct Step {
    pub(super) sql: &'static str,
    pub(super) params: Vec<Param>,
}

pub(super) type Param = Box<dyn ToSql + Send + Sync>;

/// Makes a [`Step`] from a statement and its parameters.
macro_rules! step {
    ($sql:expr $(, $param:expr)* $(,)?) => {
        $crate::session::postgres::connection::Step { sql: $sql, params: vec![$(Box::new($param)),*] }
    };
}
pub(super) use step;

/// Maximum number of statements that are sent together: more futures than this would not be started in order.
const MOST_STEPS: usize = 28;

/// The connection pool of one index.
#[derive(Clone, Debug)]
pub(super) struct Connections(Pool);

/// A connection in use. If it is dropped before its statements are answered and its transaction has ended, it is closed
/// instead of returned to the pool: whatever still runs would make the next request wait.
pub(super) struct Connection {
    object: Option<Object>,
    is_busy: bool,
}

impl Connections {
    /// Creates a pool of at most `most` connections. A statement may run for four fifths of `limit`, and may wait for a
    /// lock for half of it.
    pub(super) fn new(url: &PostgresUrl, schema: &str, limit: Duration, most: usize) -> Result<Self, String> {
        let manager = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_config(url.config.clone(), url.tls.clone(), manager);
        let (statement, lock) = (limit.as_millis() * 4 / 5, limit.as_millis() / 2);
        // The server's side of a connection must not outlive this side for long, because it may hold locks.
        let setup = format!(
            "SET search_path TO {schema}; SET client_min_messages TO warning; SET synchronous_commit TO on; SET statement_timeout TO {statement}; \
             SET lock_timeout TO {lock}; SET idle_in_transaction_session_timeout TO {}; SET tcp_keepalives_idle TO 5; \
             SET tcp_keepalives_interval TO 2; SET tcp_keepalives_count TO 3; SET tcp_user_timeout TO 10000",
            limit.as_millis()
        );
        let prepare = Hook::async_fn(move |client: &mut deadpool_postgres::ClientWrapper, _| {
            let setup = setup.clone();
            Box::pin(async move { client.batch_execute(&setup).await.map_err(HookError::Backend) })
        });
        let pool = Pool::builder(manager).max_size(most).runtime(Runtime::Tokio1).post_create(prepare);
        let wait = Some(CONNECT.min(limit));
        let timeouts = Timeouts { wait, create: wait, recycle: wait };
        Ok(Self(pool.timeouts(timeouts).build().map_err(|error| error.to_string())?))
    }

    pub(super) async fn get(&self) -> Result<Connection, Failure> {
        Ok(Connection { object: Some(self.0.get().await?), is_busy: false })
    }

    /// Takes a connection out of the pool for good.
    pub(super) async fn detached(&self) -> Result<deadpool_postgres::ClientWrapper, Failure> {
        Ok(Client::take(self.0.get().await?))
    }

    pub(super) fn close(&self) {
        self.0.close();
    }
}

impl Connection {
    /// Sends the statements together, and returns the rows of each.
    pub(super) async fn run(&mut self, steps: &[Step]) -> Result<Vec<Vec<Row>>, Failure> {
        self.is_busy = true;
        let rows = self.send(None, steps, None).await?;
        self.is_busy = false;
        Ok(rows)
    }

    /// Begins a transaction, and runs these statements in it.
    pub(super) async fn begin(&mut self, begin: &str, steps: &[Step]) -> Result<Vec<Vec<Row>>, Failure> {
        self.is_busy = true;
        self.send(Some(begin), steps, None).await
    }

    /// Runs these statements, and commits the transaction.
    pub(super) async fn commit(&mut self, steps: &[Step]) -> Result<Vec<Vec<Row>>, Failure> {
        let rows = self.send(None, steps, Some("COMMIT")).await?;
        self.is_busy = false;
        Ok(rows)
    }

    pub(super) async fn rollback(&mut self) -> Result<(), Failure> {
        self.send(None, &[], Some("ROLLBACK")).await?;
        self.is_busy = false;
        Ok(())
    }

    /// Runs these statements on one consistent snapshot.
    pub(super) async fn snapshot(&mut self, steps: &[Step]) -> Result<Vec<Vec<Row>>, Failure> {
        self.is_busy = true;
        let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
        let rows = self.send(Some(begin), steps, Some("COMMIT")).await?;
        self.is_busy = false;
        Ok(rows)
    }

    async fn send(&self, begin: Option<&str>, steps: &[Step], end: Option<&str>) -> Result<Vec<Vec<Row>>, Failure> {
        assert!(steps.len() <= MOST_STEPS);
        let client = self.object.as_ref().expect("only `drop` takes it");
        // All statements are prepared before the first is sent, so that they are sent in order. This takes no time once
        // the connection has been used for them.
        let statements = try_join_all(steps.iter().map(|step| client.prepare_cached(step.sql))).await?;
        let mut sent: Vec<BoxFuture<'_, Result<Vec<Row>, Error>>> = Vec::new();
        if let Some(begin) = begin {
            sent.push(Box::pin(async move { client.batch_execute(begin).await.map(|()| Vec::new()) }));
        }
        for (step, statement) in steps.iter().zip(&statements) {
            sent.push(Box::pin(async move {
                let params: Vec<_> = step.params.iter().map(|param| &**param as &(dyn ToSql + Sync)).collect();
                client.query(statement, &params).await
            }));
        }
        if let Some(end) = end {
            sent.push(Box::pin(async move { client.batch_execute(end).await.map(|()| Vec::new()) }));
        }
        let mut rows = try_join_all(sent).await?;
        rows.drain(..usize::from(begin.is_some()));
        rows.truncate(steps.len());
        Ok(rows)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(object) = self.object.take().filter(|_| self.is_busy) {
            drop(Client::take(object));
        }
    }
}
