//! The sweep of one server, against what another one does.

use std::time::Duration;

use super::shared::{Servers, until};
use super::*;
use crate::session::index::{Create, SessionRow};
use crate::session::store::sweep::sweep_orphans;

async fn with_grace(orphan_grace: Duration) -> Servers {
    Servers::with(StoreOptions { orphan_grace, ..StoreOptions::new(Location::Memory) }).await
}

/// Creates a session with a time to live of one minute that was last used `seconds` ago.
async fn used_before(servers: &Servers, seconds: u64) -> SessionId {
    let (id, version) = (SessionId::new(), VersionId::new());
    let row = SessionRow::new(ANN, version.as_str(), Some(60), now() - seconds * 1000);
    let version = NewVersion { id: version, row: empty_version(), text: None, reserved: Vec::new() };
    let create = Create { id, row, version: Some(version), replace: false, max_sessions: 99, receipt: None };
    servers.stores[0].inner.index.create(create.clone()).await.expect("a session");
    create.id
}

#[test]
fn an_upload_is_removed_after_the_time_of_grace_unless_it_was_committed_before() {
    crate::sync::block_on(async {
        let hour = Duration::from_hours(1);
        for (grace, is_late) in [(hour, false), (hour, true), (Duration::ZERO, false), (Duration::ZERO, true)] {
            let Servers { stores: [one, two], indexes, .. } = with_grace(grace).await;
            let id = one.create(ANN, new_session()).await.expect("a session").id;
            let before = one.get(ANN, &id).await.expect("the session").head.id;
            let turn = one.begin(ANN, &id, None, Duration::ZERO).await.expect("the session");
            indexes[1].lead();
            let closed = indexes[0].gate.lock().await;
            let version = VersionId::new();
            let ended = tokio::spawn(turn.commit(snapshot(1), TurnNote::default(), None, version.clone()));
            indexes[0].arrived.notified().await;
            // Its object is written by now.
            if is_late {
                sweep_orphans(Arc::downgrade(&two.inner)).await;
            }
            drop(closed);
            let ended = ended.await.expect("a task");
            sweep_orphans(Arc::downgrade(&two.inner)).await;
            let head = one.get(ANN, &id).await.expect("the session").head.id;
            if is_late && grace.is_zero() {
                assert!(matches!(ended, Err(StoreError::Unavailable { .. })), "{ended:?}");
                assert_eq!(head, before, "nothing of it is there");
            } else {
                assert_eq!((ended.map(|session| session.head.id), &head), (Ok(version.clone()), &version));
                two.load(ANN, &id, None).await.expect("its snapshot is there");
            }
        }
    });
}

#[test]
fn one_server_sweeps() {
    crate::sync::block_on(async {
        let servers = Servers::start().await;
        let id = used_before(&servers, 61).await;
        let Servers { stores: [one, two], indexes, .. } = servers;
        let is_there = async || one.inner.index.session(ANN, &id).await.is_ok();
        indexes[0].lead();
        two.inner.sweep_if_leading().await.expect("a sweep");
        assert!(is_there().await);
        assert_eq!(two.get(ANN, &id).await, Err(StoreError::SESSION), "it is expired all the same");
        indexes[1].lead();
        two.inner.sweep_if_leading().await.expect("a sweep");
        assert!(!is_there().await);
    });
}

#[test]
fn a_session_that_was_just_used_on_one_server_is_not_removed_by_another() {
    crate::sync::block_on(async {
        let servers = Servers::start().await;
        let ids = [used_before(&servers, 59).await, used_before(&servers, 59).await];
        let Servers { stores: [one, two], .. } = servers;
        one.load(ANN, &ids[0], None).await.expect("it is read");
        let turn = one.begin(ANN, &ids[1], None, Duration::ZERO).await.expect("the session");
        for id in &ids {
            let row = two.inner.index.session(ANN, id).await.expect("the session");
            assert!(row.used + 10_000 > now(), "the use is recorded");
            // However often it is used, the use is not written again at once.
            let before = one.stats().transactions;
            one.load(ANN, id, None).await.expect("it is read");
            assert_eq!(one.stats().transactions, before);
        }
        // A long turn counts as a use while it runs, and nothing else is left to record.
        let before = one.stats().transactions;
        one.inner.save_last_uses().await.expect("recorded");
        assert!(one.stats().transactions > before);
        drop(turn);
    });
}

#[test]
fn a_snapshot_that_another_server_has_removed_is_not_found() {
    crate::sync::block_on(async {
        let Servers { stores: [one, two], indexes, .. } = Servers::start().await;
        let new = || NewSession { start: Start::Snapshot(snapshot(3)), ..new_session() };
        let session = one.create(ANN, new()).await.expect("a session");
        let (row, version) = two.inner.index.head(ANN, &session.id).await.expect("its rows");
        assert_eq!(row.head, session.head.id.as_str());
        one.delete(ANN, &session.id).await.expect("deleted");
        indexes[0].lead();
        one.inner.sweep_if_leading().await.expect("a sweep");
        // The rows were read before the removal; the object is read too late.
        let found = two.inner.fetch(&session.head.id, &version).await.map(drop);
        assert_eq!(found, Err(StoreError::VERSION));
        assert_eq!(two.begin(ANN, &session.id, None, Duration::ZERO).await.map(drop), Err(StoreError::SESSION));
        until("all objects are removed", async || one.inner.objects.any().await == Ok(false)).await;
    });
}
