//! Several servers: leases, the leader, and streams.

use futures_util::future::join_all;

use super::*;
use crate::session::index::{NewStream, StreamRow};
use crate::session::postgres::connection::CONNECTIONS;
use crate::session::postgres::servers::MAX_ENDED_STREAMS;

/// Ends a server as a crash does: it sends no notice, and the others find out when its heartbeat has expired.
async fn crash(schema: &Schema, index: PostgresIndex) {
    let server = index.database.server.clone();
    drop(index);
    schema.execute(&format!("UPDATE servers SET seen = seen - interval '1 hour' WHERE id = '{server}'")).await;
}

#[test]
fn a_lease_belongs_to_one_server_until_that_ends() {
    with_schema(async |schema| {
        let (one, two, session) = (schema.open().await, schema.open().await, SessionId::new());
        assert_eq!((one.lease(&session).await, two.lease(&session).await), (Ok(true), Ok(false)));
        assert_eq!(one.lease(&session).await, Ok(true));
        // Only the holder can release the lease.
        two.release(&session).await;
        assert_eq!(two.lease(&session).await, Ok(false));
        one.release(&session).await;
        assert_eq!((two.lease(&session).await, one.lease(&session).await), (Ok(true), Ok(false)));
        crash(schema, two).await;
        let three = schema.open().await;
        assert_eq!((one.lease(&session).await, three.lease(&session).await), (Ok(true), Ok(false)));
        one.close().await.expect("the index closes");
        assert_eq!(three.lease(&session).await, Ok(true));
    });
}

#[test]
fn a_server_is_alive_as_long_as_it_says_so() {
    with_schema(async |schema| {
        let quick = PostgresOptions { ttl: Duration::from_millis(300), ..schema.options() };
        let (one, session) = (Schema::open_with(quick).await, SessionId::new());
        let server = one.database.server.clone();
        schema.execute(&format!("UPDATE servers SET seen = 'epoch' WHERE id = '{server}'")).await;
        let two = schema.open().await;
        assert_eq!(one.lease(&session).await, Ok(true));
        // Its next heartbeat makes it alive again.
        while two.lease(&session).await.expect("an answer") {
            two.release(&session).await;
            assert_eq!(one.lease(&session).await, Ok(true));
        }
    });
}

#[test]
fn a_session_that_a_server_works_on_does_not_expire() {
    with_schema(async |schema| {
        let (one, two) = (schema.open().await, schema.open().await);
        let (id, _) = create(&one, 1, Some(1)).await;
        let later = NOW + 5000;
        assert_eq!(one.lease(&id).await, Ok(true));
        assert_eq!((two.can_sweep(later, none()).await, two.expire(later, none()).await), (Ok(false), Ok(0)));
        assert!(two.session(OWNER, &id).await.is_ok());
        crash(schema, one).await;
        assert_eq!((two.can_sweep(later, none()).await, two.expire(later, none()).await), (Ok(true), Ok(1)));
        assert_eq!(two.session(OWNER, &id).await, Err(StoreError::SESSION));
        // The server is removed, and so are its leases.
        assert!(two.database.query(step!("SELECT FROM leases")).await.expect("rows").is_empty());
    });
}

#[test]
fn one_server_leads_until_it_ends() {
    with_schema(async |schema| {
        let (one, two) = (schema.open().await, schema.open().await);
        assert_eq!((one.leads().await, two.leads().await), (Ok(true), Ok(false)));
        assert_eq!((one.leads().await, two.leads().await), (Ok(true), Ok(false)));
        drop(one);
        // PostgreSQL notices that the connection has ended.
        while !two.leads().await.expect("an answer") {
            tokio::task::yield_now().await;
        }
        // A leader whose connection has ended does not lead until it has the lock again.
        schema
            .execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND ((classid::bigint << 32) | \
                 objid::bigint) = hashtextextended('tidegate leads ' || current_schema, 0)",
            )
            .await;
        let three = schema.open().await;
        while !three.leads().await.expect("an answer") {
            tokio::task::yield_now().await;
        }
        let lost = two.leads().await;
        assert!(matches!(lost, Ok(false) | Err(StoreError::Unavailable { .. })), "{lost:?}");
    });
}

#[test]
fn another_server_takes_a_stream_over_once_its_holder_ends() {
    with_schema(async |schema| {
        let (one, two, other) = (schema.open().await, schema.open().await, Owner([2; 16]));
        let row = StreamRow { owner: OWNER, record: b"what it was".to_vec() };
        let stream = |id: &str, ends| NewStream { id: id.to_owned(), row: row.clone(), ends };
        let missing = || Err(StoreError::STREAM);
        one.put_stream(stream("a", u64::MAX)).await.expect("it is stored");
        assert_eq!((two.stream(OWNER, "a").await, two.stream(other, "a").await), (Ok(row.clone()), missing()));
        assert_eq!((two.take_stream(OWNER, "a").await, one.take_stream(OWNER, "a").await), (Ok(false), Ok(true)));
        assert_eq!(
            (two.take_stream(other, "a").await, two.take_stream(OWNER, "b").await),
            (Err(StoreError::STREAM), Err(StoreError::STREAM))
        );
        // Only the holder can release the stream.
        two.release_stream(OWNER, "a", None).await;
        assert_eq!(two.take_stream(OWNER, "a").await, Ok(false));
        let parked = StreamRow { record: b"and how far it was".to_vec(), ..row.clone() };
        two.release_stream(OWNER, "a", Some(parked.record.clone())).await;
        assert_eq!(two.stream(OWNER, "a").await, Ok(row.clone()));
        one.release_stream(OWNER, "a", Some(parked.record.clone())).await;
        assert_eq!(two.stream(OWNER, "a").await, Ok(parked.clone()));
        assert_eq!((two.take_stream(OWNER, "a").await, one.take_stream(OWNER, "a").await), (Ok(true), Ok(false)));
        crash(schema, two).await;
        assert_eq!(one.take_stream(OWNER, "a").await, Ok(true));
        one.delete_stream(other, "a").await.expect("it is not there");
        assert_eq!(one.stream(OWNER, "a").await, Ok(parked));
        one.delete_stream(OWNER, "a").await.expect("it is removed");
        assert_eq!(one.stream(OWNER, "a").await, missing());
        // A stream past its expiry is not found, and is removed without being counted.
        one.put_stream(stream("c", NOW)).await.expect("it is stored");
        assert_eq!((one.stream(OWNER, "c").await, one.expire(NOW, none()).await), (missing(), Ok(0)));
        assert!(one.database.query(step!("SELECT FROM streams")).await.expect("rows").is_empty());
    });
}

#[test]
fn only_the_holder_of_a_stream_withdraws_or_keeps_it() {
    with_schema(async |schema| {
        let (one, two, other) = (schema.open().await, schema.open().await, Owner([2; 16]));
        let row = StreamRow { owner: OWNER, record: b"what it was".to_vec() };
        let stream = |id: &str| NewStream { id: id.to_owned(), row: row.clone(), ends: u64::MAX };
        one.put_stream(stream("a")).await.expect("it is stored");
        assert_eq!(
            (two.withdraw_stream(OWNER, "a").await, one.withdraw_stream(other, "a").await),
            (Ok(false), Ok(false))
        );
        assert_eq!(one.stream(OWNER, "a").await, Ok(row.clone()));
        assert_eq!(
            (one.withdraw_stream(OWNER, "a").await, one.withdraw_stream(OWNER, "a").await),
            (Ok(true), Ok(false))
        );
        // A stream that is gone stays gone.
        one.keep_stream(OWNER, "a", u64::MAX).await.expect("nothing is kept");
        assert_eq!(one.stream(OWNER, "a").await, Err(StoreError::STREAM));
        // A stream that another server has taken stays with that server.
        one.put_stream(stream("b")).await.expect("it is stored");
        one.release_stream(OWNER, "b", None).await;
        assert_eq!(two.take_stream(OWNER, "b").await, Ok(true));
        one.keep_stream(OWNER, "b", NOW).await.expect("nothing is kept");
        assert_eq!((one.stream(OWNER, "b").await, one.take_stream(OWNER, "b").await), (Ok(row.clone()), Ok(false)));
        two.keep_stream(OWNER, "b", u64::MAX).await.expect("it is kept");
        assert_eq!(one.take_stream(OWNER, "b").await, Ok(true));
        one.keep_stream(OWNER, "b", NOW).await.expect("it is kept");
        assert_eq!(one.stream(OWNER, "b").await, Err(StoreError::STREAM), "its time has passed");
    });
}

#[test]
fn an_owner_keeps_the_streams_that_ended_last() {
    with_schema(async |schema| {
        let (one, other, most) = (schema.open().await, Owner([2; 16]), MAX_ENDED_STREAMS as i64);
        let put = |owner, id: &str| {
            let row = StreamRow { owner, record: b"what it was".to_vec() };
            one.put_stream(NewStream { id: id.to_owned(), row, ends: NOW * 2 })
        };
        for (owner, id) in [(OWNER, "given up"), (OWNER, "held"), (OWNER, "ends"), (OWNER, "lost"), (other, "ends too")]
        {
            put(owner, id).await.expect("it is stored");
        }
        one.release_stream(OWNER, "given up", None).await;
        schema
            .execute(&format!(
                "INSERT INTO streams SELECT n::text, owner, NULL, {} + n, true, '' FROM streams, generate_series(1, {most}) n \
                 WHERE id = 'held'",
                NOW * 3
            ))
            .await;
        let gone = async |all: &[&str]| {
            let mut gone = Vec::new();
            for id in all {
                let rows = one.database.query(step!("SELECT FROM streams WHERE id = $1", (*id).to_owned())).await;
                if rows.expect("rows").is_empty() {
                    gone.push((*id).to_owned());
                }
            }
            gone
        };
        let all = ["given up", "held", "ends", "lost", "ends too", "1", "2", "3"];
        // Streams of other owners, and streams that have not ended, do not count.
        one.keep_stream(other, "ends too", NOW * 4).await.expect("it is kept");
        assert!(gone(&all).await.is_empty());
        one.keep_stream(OWNER, "ends", NOW * 4).await.expect("it is kept");
        assert_eq!(gone(&all).await, ["1"]);
        // The same call again, as after a lost answer, and a call for a stream that does not exist.
        one.keep_stream(OWNER, "ends", NOW * 4).await.expect("nothing is kept");
        one.keep_stream(OWNER, "none", NOW * 4).await.expect("nothing is kept");
        assert_eq!(gone(&all).await, ["1"]);
        one.keep_stream(OWNER, "lost", NOW * 4).await.expect("it is kept");
        assert_eq!(gone(&all).await, ["1", "2"]);
    });
}

#[test]
fn reads_of_one_owner_leave_connections_to_others() {
    with_schema(async |schema| {
        let index = schema.open().await;
        let (id, _) = create(&index, 100, None).await;
        let (client, connection) = schema.url.config.connect(schema.url.tls.clone()).await.expect("a connection");
        let task = tokio::spawn(connection);
        client.batch_execute(&format!("BEGIN; LOCK TABLE {}.sessions", schema.name)).await.expect("it is locked");
        // There are more reads than connections, and each running read waits for the lock.
        let mut reads = join_all((0..3 * CONNECTIONS[0]).map(|_| index.session(OWNER, &id)));
        let other = VersionId::new();
        tokio::select! {
            biased;
            _ = &mut reads => panic!("nobody can read sessions"),
            found = index.version(Owner([2; 16]), &other) => assert_eq!(found, Ok(None)),
        }
        client.batch_execute("COMMIT").await.expect("it is unlocked");
        assert!(reads.await.iter().all(Result::is_ok));
        task.abort();
    });
}
