//! Migrations of the schema of the tables, which only ever move forward.

use std::error::Error as _;
use std::io;

use tokio::time::timeout;
use tokio_postgres::{Client, Error};

use super::address::PostgresUrl;
use super::failure::{Failure, described, unavailable};
use crate::session::error::StoreError;

/// The migrations; each brings the schema to the next version.
const MIGRATIONS: [&str; 1] = [include_str!("migrations/0001.sql")];

/// The oldest PostgreSQL version that supports the statements, as in `server_version_num`.
const OLDEST: i32 = 130_000;

/// Creates a schema, or migrates it to the version that this program knows.
pub(super) async fn migrate(url: &PostgresUrl, schema: &str) -> Result<(), StoreError> {
    let connect = async {
        let (client, connection) = url.config.connect(url.tls.clone()).await?;
        Ok::<_, Error>((client, tokio::spawn(connection)))
    };
    let connected = timeout(2 * super::address::CONNECT, connect).await;
    let (client, task) = connected
        .map_err(|_| unavailable("no connection within the time limit"))?
        .map_err(|error| if may_pass(&error) { unavailable(described(&error)) } else { refused(described(&error)) })?;
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
        Err(Failure::Down(reason)) => Err(unavailable(reason)),
        Err(failure) => match failure.into_store_error() {
            StoreError::Unavailable { reason } => Err(refused(reason)),
            error => Err(error),
        },
        Ok(_) => Ok(()),
    }
}

fn refused(reason: String) -> StoreError {
    StoreError::Database { reason }
}

/// Returns whether connecting may succeed later: nobody answers, or PostgreSQL is starting, stopping or out of
/// connections.
fn may_pass(error: &Error) -> bool {
    let io = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    match error.code() {
        Some(code) => ["08", "53", "57P"].iter().any(|class| code.code().starts_with(class)),
        // An untrusted certificate is reported as invalid data.
        None => error.is_closed() || io.is_some_and(|error| error.kind() != io::ErrorKind::InvalidData),
    }
}

/// Runs the migrations, and returns whether the connection uses TLS.
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
