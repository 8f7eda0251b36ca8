//! Runs the tests of every index on this one, and its own tests. They need a PostgreSQL server, named by
//! `TIDEGATE_TEST_POSTGRES`: `.ci/with_postgres cargo test` starts one.

mod address;
mod claims;
mod failures;
mod migrations;
mod servers;
mod space;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::connection::step;
use super::*;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::tests::{conforms, excludes, interleaves};
use crate::session::index::{Bounds, Commit, Create, Exempt, Head, Index, Limits, NewVersion, SessionRow, VersionRow};

const NO_LIMITS: Limits = Limits { disk: u64::MAX, owner: u64::MAX };

const OWNER: Owner = Owner([1; 16]);

/// The time of every operation.
const NOW: u64 = 1_000_000_000;

/// Longer than any test takes.
const NEVER: Duration = Duration::from_hours(1);

/// The invariants of the tables between two transactions: statements that count violations.
const AUDIT: [(&str, &str); 6] = [
    (
        "the bytes in use",
        "SELECT (SELECT coalesce(sum(bytes), 0) FROM used) - (SELECT coalesce(sum(live + receipts + texts), 0) FROM owners) - \
         (SELECT coalesce(sum(bytes), 0) FROM garbage)",
    ),
    (
        "the counts of sessions",
        "SELECT count(*) FROM sessions s WHERE (kept, known) != (SELECT count(*) FILTER (WHERE l.kept), count(*) FILTER (WHERE \
         NOT l.kept) FROM lineage l WHERE l.session = s.id)",
    ),
    (
        "the counts of versions",
        "SELECT count(*) FROM versions v WHERE owner != '' AND (kept_by, known_by) != (SELECT count(*) FILTER (WHERE kept), \
         count(*) FROM (SELECT kept FROM lineage WHERE version = v.id UNION ALL SELECT true FROM responses WHERE version = \
         v.id) h)",
    ),
    (
        "the references to texts",
        "SELECT count(*) FROM texts t WHERE refs != (SELECT count(*) FROM versions WHERE id = t.id AND owner != '') + (SELECT \
         count(*) FROM texts c WHERE c.parent = t.id)",
    ),
    (
        "the counts of owners",
        "SELECT count(*) FROM owners o WHERE (sessions, evictable, versions, live, receipts, texts) != ((SELECT count(*) FROM \
         sessions WHERE owner = o.owner), (SELECT count(*) FROM sessions WHERE owner = o.owner AND kept > 1) + (SELECT count(*) \
         FROM responses WHERE owner = o.owner), (SELECT count(*) FROM versions WHERE owner = o.owner AND kept_by > 0), (SELECT \
         coalesce(sum(bytes), 0) FROM versions WHERE owner = o.owner AND kept_by > 0), (SELECT coalesce(sum(bytes), 0) FROM \
         receipts WHERE owner = o.owner), (SELECT coalesce(sum(bytes), 0) FROM texts WHERE owner = o.owner))",
    ),
    ("lists without a session", "SELECT count(*) FROM lineage WHERE session NOT IN (SELECT id FROM sessions)"),
];

/// The schema of one test. When it is dropped, its tables are checked and removed.
pub(crate) struct Schema {
    pub(crate) url: PostgresUrl,
    pub(crate) name: String,
}

impl Schema {
    /// Creates a new schema; returns `None` if there is no server to test with.
    pub(crate) fn new() -> Option<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let Ok(url) = std::env::var("TIDEGATE_TEST_POSTGRES") else {
            println!("skipped: TIDEGATE_TEST_POSTGRES names no server");
            return None;
        };
        let mut url: PostgresUrl = url.parse().expect("the address of a server");
        let name = format!("tidegate_test_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        // A test that terminates connections finds its own by this name.
        url.config.application_name(&name);
        Some(Self { url, name })
    }

    /// Returns options with which nothing happens in the background while a test runs, except heartbeats.
    fn options(&self) -> PostgresOptions {
        let usual = PostgresOptions::new(self.url.clone(), "", NO_LIMITS);
        PostgresOptions { schema: self.name.clone(), refresh: NEVER, ..usual }
    }

    async fn open(&self) -> PostgresIndex {
        Self::open_with(self.options()).await
    }

    async fn open_with(options: PostgresOptions) -> PostgresIndex {
        PostgresIndex::open(options, Box::new(|_| {})).await.expect("an index")
    }

    /// Runs statements on a connection of their own.
    pub(crate) async fn execute(&self, sql: &str) {
        let (client, connection) = self.url.config.connect(self.url.tls.clone()).await.expect("a connection");
        let task = tokio::spawn(connection);
        let sql = format!("SET search_path TO {}; {sql}", self.name);
        client.batch_execute(&sql).await.expect("the statements run");
        task.abort();
    }

    /// Returns the invariants that the tables violate.
    async fn audit(&self) -> Vec<&'static str> {
        let (client, connection) = self.url.config.connect(self.url.tls.clone()).await.expect("a connection");
        let task = tokio::spawn(connection);
        client.batch_execute(&format!("SET search_path TO {}", self.name)).await.expect("it is set");
        let mut wrong = Vec::new();
        // A skipped test has created no tables.
        let made = client.query_one("SELECT to_regclass('owners') IS NOT NULL", &[]).await.expect("an answer");
        for (what, sql) in AUDIT.into_iter().filter(|_| made.get(0)) {
            let row = client.query_one(&format!("SELECT ({sql})::bigint"), &[]).await.expect("a number");
            if row.get::<_, i64>(0) != 0 {
                wrong.push(what);
            }
        }
        task.abort();
        wrong
    }
}

impl Drop for Schema {
    fn drop(&mut self) {
        let is_audited = !std::thread::panicking();
        // This thread may belong to a runtime, so another thread does this.
        let wrong = std::thread::scope(|scope| {
            let checked = scope.spawn(|| {
                crate::sync::block_on(async {
                    let wrong = if is_audited { self.audit().await } else { Vec::new() };
                    self.execute(&format!("DROP SCHEMA IF EXISTS {} CASCADE", self.name)).await;
                    wrong
                })
            });
            checked.join()
        });
        if is_audited {
            assert_eq!(wrong.expect("the tables are checked"), Vec::<&str>::new());
        }
    }
}

/// Runs a test with a schema, if there is a server.
fn with_schema(test: impl AsyncFnOnce(&Schema)) {
    if let Some(schema) = Schema::new() {
        crate::sync::block_on(test(&schema));
    }
}

fn version(owner: Owner, parent: Option<&VersionId>, bytes: u64) -> NewVersion {
    let row = VersionRow {
        owner,
        parent: parent.map(ToString::to_string),
        tokens: 1,
        time: NOW,
        label: Some("a\0label".to_owned()),
        kind: "turn".to_owned(),
        prompt_tokens: 1,
        completion_tokens: 1,
        bytes,
        seed: None,
        kept_by: 0,
        known_by: 0,
        origin: Vec::new(),
        session: None,
    };
    NewVersion { id: VersionId::new(), row, text: None, reserved: Vec::new() }
}

/// Makes a session with one version.
fn new_session(owner: Owner, bytes: u64, ttl: Option<u64>) -> Create {
    let version = version(owner, None, bytes);
    let mut row = SessionRow::new(owner, version.id.as_str(), ttl, NOW);
    row.metadata.insert("a\0key".to_owned(), "\u{1f30a}".to_owned());
    let (id, version) = (SessionId::new(), Some(version));
    Create { id, row, version, replace: false, max_sessions: 99, receipt: None }
}

/// Makes the next turn of a session.
fn turn(session: &SessionId, head: &str, bytes: u64) -> Commit {
    let expected = VersionId::parse(head).expect("an id");
    Commit {
        owner: OWNER,
        session: session.clone(),
        version: version(OWNER, Some(&expected), bytes),
        expected,
        forks: Vec::new(),
        max_sessions: 99,
        bounds: Bounds { keep: 2, lineage: 2 },
        now: NOW,
        receipt: None,
    }
}

/// Creates a session.
async fn create(index: &impl Index, bytes: u64, ttl: Option<u64>) -> (SessionId, Head) {
    let create = new_session(OWNER, bytes, ttl);
    (create.id.clone(), index.create(create).await.expect("a session"))
}

/// Returns an exemption that covers nothing.
fn none() -> Exempt {
    Arc::new(|_| false)
}

#[test]
fn an_index_in_postgres_conforms_and_lasts() {
    if Schema::new().is_none() {
        return;
    }
    let start = || {
        let schema = Schema::new().expect("a server");
        async move || {
            let options = PostgresOptions { refresh: Duration::from_millis(5), ..schema.options() };
            let index: Arc<dyn Index> = Arc::new(Schema::open_with(options).await);
            index
        }
    };
    conforms(24, true, start);
    excludes(start);
}

#[test]
fn turns_on_two_servers_are_safe_in_every_order() {
    with_schema(async |schema| {
        let index: Arc<dyn Index> = Arc::new(schema.open().await);
        interleaves(false, index).await;
    });
}
