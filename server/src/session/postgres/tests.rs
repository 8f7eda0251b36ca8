//! The tests of every index, on that of this folder, and its own. They need a server, named by `TIDEGATE_TEST_POSTGRES`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::session::index::tests::{conforms, excludes, interleaves};
use crate::session::index::{Index, Limits};

const NO_LIMITS: Limits = Limits { disk: u64::MAX, owner: u64::MAX };

/// A schema of one test, which is dropped with it.
pub(crate) struct Schema {
    pub(crate) url: PostgresUrl,
    pub(crate) name: String,
}

impl Schema {
    /// A new schema; `None` if there is no server to test with.
    pub(crate) fn new() -> Option<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let Ok(url) = std::env::var("TIDEGATE_TEST_POSTGRES") else {
            println!("skipped: TIDEGATE_TEST_POSTGRES names no server");
            return None;
        };
        let url = url.parse().expect("the address of a server");
        let name = format!("tidegate_test_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        Some(Self { url, name })
    }

    fn options(&self) -> PostgresOptions {
        PostgresOptions { schema: self.name.clone(), ..PostgresOptions::new(self.url.clone(), "", NO_LIMITS) }
    }

    async fn open(&self) -> Arc<dyn Index> {
        Arc::new(PostgresIndex::open(self.options(), Box::new(|_| {})).await.expect("an index"))
    }

    pub(crate) async fn execute(url: PostgresUrl, sql: String) {
        let (client, connection) = url.config.connect(url.tls.clone()).await.expect("a connection");
        let task = tokio::spawn(connection);
        client.batch_execute(&sql).await.expect("the statements run");
        task.abort();
    }
}

impl Drop for Schema {
    fn drop(&mut self) {
        // This thread may be one of a runtime.
        let (url, sql) = (self.url.clone(), format!("DROP SCHEMA IF EXISTS {} CASCADE", self.name));
        let dropped = std::thread::spawn(move || crate::sync::block_on(Self::execute(url, sql)));
        let _ = dropped.join();
    }
}

#[test]
fn an_index_in_postgres_conforms_and_lasts() {
    if Schema::new().is_none() {
        return;
    }
    let start = || {
        let schema = Schema::new().expect("a server");
        async move || schema.open().await
    };
    conforms(24, true, start);
    excludes(start);
}

#[test]
fn turns_on_two_servers_are_safe_in_every_order() {
    let Some(schema) = Schema::new() else { return };
    interleaves(false, || async || schema.open().await);
}
