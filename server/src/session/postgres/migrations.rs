//! The schema of the tables, which only ever moves forward.

use tokio::time::timeout;
use tokio_postgres::Client;

use super::address::PostgresUrl;
use super::failure::{Failure, described};
use crate::session::error::StoreError;

/// Each brings the schema to the next version.
const MIGRATIONS: [&str; 1] = [include_str!("migrations/0001.sql")];

/// The oldest server that has what the statements use.
const OLDEST: i32 = 130_000;

/// Creates a schema, or brings it to the version that this program knows.
pub(super) async fn migrate(url: &PostgresUrl, schema: &str) -> Result<(), StoreError> {
    let connect = async {
        let (client, connection) = url.config.connect(url.tls.clone()).await?;
        Ok::<_, tokio_postgres::Error>((client, tokio::spawn(connection)))
    };
    let connected = timeout(2 * super::address::CONNECT, connect).await;
    let refused = |reason: String| StoreError::Database { reason };
    let (client, task) = connected
        .map_err(|_| refused("no connection within the time limit".to_owned()))?
        .map_err(|error| refused(described(&error)))?;
    let migrated = run(&client, schema).await;
    task.abort();
    if url.sends_password() && matches!(migrated, Ok(false)) {
        tracing::warn!(
            "the connection to {url} has no TLS: the password and all sessions can be read on the way; sslmode=require in \
             the URL of the index asks for it"
        );
    }
    match migrated {
        Err(Failure::Refused(error)) => Err(error),
        Err(failure) => match failure.into_store_error() {
            StoreError::Unavailable { reason } => Err(refused(reason)),
            error => Err(error),
        },
        Ok(_) => Ok(()),
    }
}

/// Returns whether the connection has TLS.
async fn run(client: &Client, schema: &str) -> Result<bool, Failure> {
    let refused = |reason| Failure::Refused(StoreError::Database { reason });
    let version = client.query_one("SELECT current_setting('server_version_num')::integer", &[]).await?;
    if version.get::<_, i32>(0) < OLDEST {
        let found = client.query_one("SELECT current_setting('server_version')", &[]).await?.get::<_, String>(0);
        return Err(refused(format!("PostgreSQL must have at least version {}, found {found}", OLDEST / 10_000)));
    }
    let tls = client.query_opt("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &[]).await?;
    // Servers that start at the same time wait for each other here.
    client.batch_execute("SET client_min_messages TO warning; SET lock_timeout TO '60s'; BEGIN").await?;
    client.execute("SELECT pg_advisory_xact_lock(hashtextextended('tidegate migrates ' || $1, 0))", &[&schema]).await?;
    let exists = client.query_one("SELECT to_regnamespace($1) IS NOT NULL", &[&schema]).await?;
    if !exists.get::<_, bool>(0) {
        client.batch_execute(&format!("CREATE SCHEMA {schema}")).await?;
    }
    client.batch_execute(&format!("SET LOCAL search_path TO {schema}")).await?;
    let table = "CREATE TABLE IF NOT EXISTS migrations (version integer PRIMARY KEY, applied timestamptz NOT NULL DEFAULT now())";
    client.batch_execute(table).await?;
    let found = client.query_one("SELECT coalesce(max(version), 0) FROM migrations", &[]).await?.get::<_, i32>(0);
    let known = MIGRATIONS.len() as i32;
    if found > known {
        return Err(refused(format!(
            "its schema {schema} has version {found}, and this version of Tidegate knows up to version {known}; use the \
             version of Tidegate that wrote it, or a later one"
        )));
    }
    for (number, sql) in (1..).zip(MIGRATIONS).skip(found as usize) {
        client.batch_execute(sql).await?;
        client.execute("INSERT INTO migrations (version) VALUES ($1)", &[&number]).await?;
        tracing::info!(schema, version = number, "the schema in PostgreSQL was migrated");
    }
    client.batch_execute("COMMIT").await?;
    Ok(tls.is_some_and(|row| row.get(0)))
}
