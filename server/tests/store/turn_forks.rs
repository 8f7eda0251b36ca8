//! Turns that leave forks. The forks are stored in the same transaction as the new version, or not at all.

use std::sync::atomic::Ordering;

use tidegate_server::session::{ReceiptKey, SessionId, StoreError, StoreOptions, TurnFork, VersionId};

use crate::kit::{ANN, BYTES, NOW, agree, empty, head, in_memory, note, seen, snapshot, turn};

fn fork(number: u64) -> TurnFork {
    TurnFork { id: SessionId::new(), version: VersionId::new(), snapshot: snapshot(number), note: note() }
}

#[tokio::test]
async fn a_turn_commits_its_forks_in_the_same_transaction() {
    let (store, objects) = seen(StoreOptions { keep_versions: 3, ..in_memory() }).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    for number in 1..6 {
        turn(&store, ANN, &id, number).await.expect("a turn");
    }
    let before = store.get(ANN, &id).await.expect("the session");
    let mut begun = store.begin(ANN, &id, None, NOW).await.expect("a turn");
    begun.reserve_forks(2).await.expect("space");
    let forks = [fork(7), fork(8)];
    begun.leave_forks(forks.to_vec());
    let receipt = Some((ReceiptKey("k".to_owned()), b"answer".to_vec()));
    begun.commit(snapshot(6), note(), receipt, VersionId::new()).await.expect("a commit");
    assert_eq!(head(&store, ANN, &id).await, snapshot(6));
    for (fork, number) in forks.iter().zip([7, 8]) {
        let made = store.get(ANN, &fork.id).await.expect("the fork");
        assert_eq!((&made.head.id, &made.head.parent), (&fork.version, &Some(before.head.id.clone())));
        assert_eq!(made.forked_from, Some((id.clone(), before.head.id.clone())));
        assert_eq!(head(&store, ANN, &fork.id).await, snapshot(number));
        let kept: Vec<_> = store.versions(ANN, &fork.id).await.expect("versions");
        let kept: Vec<_> = kept.into_iter().filter(|version| version.kept).map(|version| version.id).collect();
        assert_eq!(kept.len(), 3, "as many as any session keeps");
        assert!(kept.contains(&before.head.id) && kept.contains(&fork.version));
        // The fork is a session like any other.
        turn(&store, ANN, &fork.id, number + 10).await.expect("a turn");
    }
    agree(&store, &*objects, &[ANN], &[]).await;
    for fork in &forks {
        store.delete(ANN, &fork.id).await.expect("removed");
    }
    agree(&store, &*objects, &[ANN], &[]).await;
    assert_eq!(head(&store, ANN, &id).await, snapshot(6));
}

#[tokio::test]
async fn a_turn_whose_forks_cannot_be_written_changes_nothing() {
    for failing in 0..3 {
        let (store, objects) = seen(in_memory()).await;
        let id = store.create(ANN, empty()).await.expect("a session").id;
        turn(&store, ANN, &id, 1).await.expect("a turn");
        let before = (store.get(ANN, &id).await, store.stats().disk_bytes, store.stats().sessions);
        let mut begun = store.begin(ANN, &id, None, NOW).await.expect("a turn");
        begun.reserve_forks(2).await.expect("space");
        begun.leave_forks(vec![fork(7), fork(8)]);
        objects.fails_in.store(failing, Ordering::SeqCst);
        let receipt = Some((ReceiptKey("k".to_owned()), b"answer".to_vec()));
        let failed = begun.commit(snapshot(6), note(), receipt, VersionId::new()).await;
        assert!(matches!(failed, Err(StoreError::Unavailable { .. })), "{failed:?}");
        assert_eq!((store.get(ANN, &id).await, store.stats().disk_bytes, store.stats().sessions), before);
        assert_eq!(store.receipt(ANN, "k").await, Ok(None));
        turn(&store, ANN, &id, 2).await.expect("the space is free again");
        crate::kit::until("no orphans", async || {
            use futures_util::StreamExt as _;
            object_store::ObjectStore::list(&*objects, None).count().await == 2
        })
        .await;
        agree(&store, &*objects, &[ANN], &[]).await;
    }
}

#[tokio::test]
async fn forks_that_are_not_allowed_are_refused_before_the_turn_runs() {
    let (store, _) = seen(StoreOptions { owner_sessions: 3, ..in_memory() }).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let mut begun = store.begin(ANN, &id, None, NOW).await.expect("a turn");
    begun.reserve_forks(2).await.expect("two more sessions");
    let refused = begun.reserve_forks(3).await;
    assert!(matches!(refused, Err(StoreError::Quota { quota: "sessions", bound: 3, found: 4 })), "{refused:?}");
    // The commit also counts sessions that were created since the reservation.
    begun.leave_forks(vec![fork(7), fork(8)]);
    store.create(ANN, empty()).await.expect("another session");
    let late = begun.commit(snapshot(6), note(), None, VersionId::new()).await;
    assert!(matches!(late, Err(StoreError::Quota { quota: "sessions", .. })), "{late:?}");
    assert_eq!(store.stats().versions, 2, "nothing was committed");

    let (store, _) = seen(StoreOptions { owner_bytes: 3 * BYTES, ..in_memory() }).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let mut begun = store.begin(ANN, &id, None, NOW).await.expect("a turn");
    begun.reserve_forks(2).await.expect("space for three versions");
    drop(begun);
    let mut begun = store.begin(ANN, &id, None, NOW).await.expect("a turn");
    let refused = begun.reserve_forks(3).await;
    assert!(matches!(refused, Err(StoreError::Quota { quota: "bytes of snapshots and texts", .. })), "{refused:?}");
}
