//! An unreachable database: a proxy between the index and the server stops passing bytes on.

use std::sync::Arc;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_postgres::config::Host;

use super::*;

/// What the proxy does with connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Pass,
    /// Closes them.
    Refuse,
    /// Neither passes bytes on nor closes, like a network that drops packets.
    Drop,
}

/// Starts a proxy; returns the sender that sets its mode, and the URL.
async fn proxy(schema: &Schema) -> (watch::Sender<Mode>, PostgresUrl) {
    let config = &schema.url.config;
    let [Host::Tcp(host)] = config.get_hosts() else { panic!("one host by TCP") };
    let place = (host.clone(), config.get_ports()[0]);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let (sender, mode) = watch::channel(Mode::Pass);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let (mut mode, place) = (mode.clone(), place.clone());
            tokio::spawn(async move {
                let mut server = TcpStream::connect(place).await.expect("the server");
                loop {
                    let now = *mode.borrow_and_update();
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server), if now == Mode::Pass => return,
                        changed = mode.changed(), if now != Mode::Refuse => if changed.is_err() { return },
                        () = std::future::ready(()), if now == Mode::Refuse => return,
                    }
                }
            });
        }
    });
    let (user, database) = (config.get_user().unwrap_or("postgres"), config.get_dbname().unwrap_or("postgres"));
    let password = config.get_password().map(|word| format!(":{}", String::from_utf8_lossy(word))).unwrap_or_default();
    let url = format!("postgres://{user}{password}@127.0.0.1:{port}/{database}?sslmode=disable");
    (sender, url.parse().expect("a URL"))
}

async fn open(schema: &Schema) -> (watch::Sender<Mode>, Arc<PostgresIndex>) {
    let (mode, url) = proxy(schema).await;
    let options = PostgresOptions { url, limit: Duration::from_secs(4), ..schema.options() };
    (mode, Arc::new(Schema::open_with(options).await))
}

fn is_unavailable<T>(result: &Result<T, StoreError>) -> bool {
    matches!(result, Err(StoreError::Unavailable { .. }))
}

/// Waits until the index has noticed that the database is back.
async fn recovers(index: &PostgresIndex) {
    while index.ready().await.is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(index.failure(), None);
}

#[test]
fn a_server_without_its_database_refuses_until_that_is_back() {
    for broken in [Mode::Refuse, Mode::Drop] {
        with_schema(async |schema| {
            let (mode, index) = open(schema).await;
            let (id, (row, _)) = create(&*index, 1, None).await;
            mode.send_replace(broken);
            // The request never hangs. Whether the commit was carried out is unknown.
            assert!(is_unavailable(&index.commit(turn(&id, &row.head, 1)).await), "{broken:?}");
            let failure = index.failure().expect("a failure");
            assert_eq!((index.ready().await, index.flush().await), (Err(failure.clone()), Err(failure.clone())));
            // From now on, requests are refused without being sent.
            let refused = tokio::time::timeout(Duration::ZERO, index.head(OWNER, &id)).await;
            assert_eq!(refused.expect("at once").map(drop), Err(failure));
            assert!(is_unavailable(&index.lease(&id).await) && is_unavailable(&index.leads().await));
            mode.send_replace(Mode::Pass);
            recovers(&index).await;
            let head = index.session(OWNER, &id).await.expect("the session").head;
            index.commit(turn(&id, &head, 1)).await.expect("a turn");
            assert_eq!(index.leads().await, Ok(true));
        });
    }
}

#[test]
fn a_transaction_whose_server_is_gone_holds_no_lock() {
    with_schema(async |schema| {
        let (mode, index) = open(schema).await;
        let (id, (row, _)) = create(&*index, 1, None).await;
        let other = schema.open().await;
        for _ in 0..3 {
            let head = other.session(OWNER, &id).await.expect("the session").head;
            let (lost, turned) = (Arc::clone(&index), turn(&id, &head, 1));
            let lost = tokio::spawn(async move { lost.commit(turned).await });
            tokio::task::yield_now().await;
            mode.send_replace(Mode::Drop);
            drop(lost.await.expect("it ends"));
            // The other server waits for the lock only until PostgreSQL drops the silent connection.
            let head = other.session(OWNER, &id).await.expect("the session").head;
            other.commit(turn(&id, &head, 1)).await.expect("a turn");
            mode.send_replace(Mode::Pass);
            recovers(&index).await;
        }
        assert_ne!(other.session(OWNER, &id).await.expect("the session").head, row.head);
    });
}

#[test]
fn a_connection_that_is_ended_is_replaced() {
    with_schema(async |schema| {
        let index = schema.open().await;
        let (id, _) = create(&index, 1, None).await;
        // If it ends no connection, the statement fails with a division by zero.
        schema
            .execute(
                "SELECT 1 / count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = current_schema AND pid != \
                 pg_backend_pid() AND query LIKE '%COMMIT%' AND state = 'idle'",
            )
            .await;
        while index.head(OWNER, &id).await.is_err() {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn a_closed_index_refuses_everything() {
    with_schema(async |schema| {
        let index = schema.open().await;
        let (id, _) = create(&index, 1, None).await;
        index.close().await.expect("the index closes");
        assert!(is_unavailable(&index.head(OWNER, &id).await) && is_unavailable(&index.ready().await));
        assert!(is_unavailable(&index.delete(OWNER, &id).await) && is_unavailable(&index.expire(NOW, none()).await));
    });
}
