//! Two servers that use the same sessions: leases, turns that one server loses to the other, and commits whose answer
//! is lost.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::shared::{Servers, down, until};
use super::*;

const LONG: Duration = Duration::from_secs(20);

async fn commit(turn: crate::session::store::Turn, read: u64) -> Result<VersionId, StoreError> {
    let ended = turn.commit(snapshot(read), TurnNote::default(), None, VersionId::new()).await;
    ended.map(|session| session.head.id)
}

#[test]
fn a_session_in_use_on_one_server_is_in_use_on_the_other() {
    crate::sync::block_on(async {
        let Servers { stores: [one, two], indexes, .. } = Servers::start().await;
        let id = one.create(ANN, new_session()).await.expect("a session").id;
        let turn = one.begin(ANN, &id, None, Duration::ZERO).await.expect("the session");
        assert!(matches!(two.begin(ANN, &id, None, Duration::ZERO).await, Err(StoreError::Busy { .. })));
        assert!(matches!(
            two.rewind(ANN, &id, &VersionId::new(), None, Duration::ZERO).await,
            Err(StoreError::Busy { .. })
        ));
        let (waiting, ended) = tokio::join!(two.begin(ANN, &id, None, LONG), commit(turn, 1));
        let head = ended.expect("the turn ends");
        assert_eq!(waiting.as_ref().map(|turn| &turn.session().head.id).ok(), Some(&head), "it reads the new head");
        drop(waiting);
        // The next request of the same server also gets the lease, after it was released.
        for read in 2..5 {
            commit(two.begin(ANN, &id, None, LONG).await.expect("the session"), read).await.expect("the turn ends");
        }
        two.close().await.expect("closed");
        assert!(!indexes[0].is_leased(&id), "closing waits until the lease is given back");
    });
}

#[test]
fn a_request_that_goes_away_while_it_waits_leaves_no_lease() {
    crate::sync::block_on(async {
        let Servers { stores: [one, two], indexes, .. } = Servers::start().await;
        let id = one.create(ANN, new_session()).await.expect("a session").id;
        let turn = one.begin(ANN, &id, None, Duration::ZERO).await.expect("the session");
        let waiting = tokio::time::timeout(Duration::from_millis(20), two.begin(ANN, &id, None, LONG));
        assert!(waiting.await.is_err());
        drop(turn);
        until("the lease is free", async || !indexes[0].is_leased(&id)).await;
        drop(two.begin(ANN, &id, None, Duration::ZERO).await.expect("the session"));
    });
}

#[test]
fn a_lease_is_given_back_even_if_the_last_use_cannot_be_recorded() {
    crate::sync::block_on(async {
        let Servers { stores: [one, two], indexes, .. } = Servers::start().await;
        let expires = NewSession { ttl: Some(LONG), ..new_session() };
        let id = one.create(ANN, expires).await.expect("a session").id;
        *indexes[0].hanging.lock().expect("its name") = "record_uses";
        drop(one.begin(ANN, &id, None, Duration::ZERO).await.expect("the session"));
        until("the lease is free", async || !indexes[0].is_leased(&id)).await;
        drop(two.begin(ANN, &id, None, Duration::ZERO).await.expect("the session"));
    });
}

#[test]
fn a_turn_whose_lease_was_lost_is_refused_if_the_other_server_was_faster() {
    crate::sync::block_on(async {
        let Servers { stores: [one, two], indexes, .. } = Servers::start().await;
        let id = one.create(ANN, new_session()).await.expect("a session").id;
        let paused = one.begin(ANN, &id, None, Duration::ZERO).await.expect("the session");
        indexes[0].steal(&id);
        let head = commit(two.begin(ANN, &id, None, LONG).await.expect("the session"), 2).await.expect("the turn ends");
        assert_eq!(commit(paused, 1).await, Err(StoreError::Conflict { head: head.clone() }));
        assert_eq!((one.stats().conflicts, two.stats().conflicts), (1, 0));
        assert_eq!(one.load(ANN, &id, None).await.map(|found| found.0.id), Ok(head));
        until("its snapshot is removed", async || one.inner.suspects.lock().expect("suspects").is_empty()).await;
        let objects: Vec<_> = futures_util::StreamExt::collect(one.inner.objects.batches(9)).await;
        assert_eq!(objects.len(), 1);
        assert_eq!(objects[0].as_ref().map(Vec::len), Ok(1));
    });
}

#[test]
fn a_slot_that_both_servers_find_empty_is_created_by_one() {
    crate::sync::block_on(async {
        let Servers { stores: [one, two], indexes, .. } = Servers::start().await;
        let id = SessionId::named(ANN, "slot", "0");
        let begin = |store: Store| {
            let id = id.clone();
            async move { store.begin_or_create(ANN, &id, (1, Metadata::new()), LONG).await.expect("the slot") }
        };
        let paused = begin(one.clone()).await;
        indexes[0].steal(&id);
        let head = commit(begin(two.clone()).await, 2).await.expect("the turn ends");
        assert_eq!(commit(paused, 1).await, Err(StoreError::Conflict { head: head.clone() }));
        assert_eq!(two.get(ANN, &id).await.map(|session| session.head.id), Ok(head));
    });
}

#[test]
fn a_commit_whose_answer_is_lost_is_carried_out_once() {
    crate::sync::block_on(async {
        let Servers { stores: [one, two], indexes, .. } = Servers::start().await;
        let id = one.create(ANN, new_session()).await.expect("a session").id;
        for is_overtaken in [false, true] {
            let before = one.versions(ANN, &id).await.expect("its versions").len();
            let turn = one.begin(ANN, &id, None, LONG).await.expect("the session");
            indexes[0].breaks.store(true, SeqCst);
            let ended = tokio::spawn(commit(turn, 1));
            until("the answer is lost", async || indexes[0].is_down.load(SeqCst)).await;
            if is_overtaken {
                indexes[0].steal(&id);
                commit(two.begin(ANN, &id, None, LONG).await.expect("the session"), 2).await.expect("a turn");
            }
            indexes[0].is_down.store(false, SeqCst);
            let version = ended.await.expect("a task").expect("the turn has ended");
            let versions = one.versions(ANN, &id).await.expect("its versions");
            assert_eq!(versions.len(), before + 1 + usize::from(is_overtaken));
            assert_eq!(versions.iter().filter(|known| known.id == version).count(), 1);
            one.load(ANN, &id, Some(&version)).await.expect("its snapshot is there");
        }
        assert_eq!(one.stats().conflicts, 0);
    });
}

#[test]
fn what_is_created_while_the_answer_is_lost_is_found() {
    crate::sync::block_on(async {
        let Servers { stores: [one, _], .. } = Servers::start().await;
        let session = one.create(ANN, new_session()).await.expect("a session");
        let lost = StoreError::Unavailable { reason: "it is down".to_owned() };
        let found = one.inner.find_created(ANN, &session.id, Some(&session.head.id), &lost).await;
        assert_eq!(found.map(|(row, _)| row.head), Some(session.head.id.to_string()));
        assert_eq!(one.inner.find_created(ANN, &session.id, Some(&VersionId::new()), &lost).await, None);
        assert_eq!(one.inner.find_created(ANN, &SessionId::new(), None, &lost).await, None);
        assert_eq!(one.inner.find_created(ANN, &session.id, None, &StoreError::Answered).await, None);
    });
}

#[test]
fn a_retry_is_not_refused_for_good_while_nobody_knows_that_it_is_one() {
    crate::sync::block_on(async {
        let Servers { stores: [one, _], indexes, .. } = Servers::start().await;
        let stale = StoreError::Stale { head: VersionId::new() };
        indexes[0].is_down.store(true, SeqCst);
        assert_eq!(one.unless_answered(ANN, Some("key"), stale.clone()).await, down());
        assert_eq!(one.unless_answered(ANN, None, stale.clone()).await, stale);
        indexes[0].is_down.store(false, SeqCst);
        assert_eq!(one.unless_answered(ANN, Some("key"), stale.clone()).await, stale);
    });
}

/// An attempt to commit may still be on its way to the index when the client hears that the turn is refused.
#[test]
fn a_turn_that_was_refused_is_not_stored_later() {
    crate::sync::block_on(async {
        let Servers { stores: [one, two], indexes, .. } = Servers::start().await;
        let session = one.create(ANN, new_session()).await.expect("a session");
        let (id, first, version) = (session.id, session.head.id, VersionId::new());
        let paused = one.begin(ANN, &id, None, Duration::ZERO).await.expect("the session");
        indexes[0].steal(&id);
        commit(two.begin(ANN, &id, None, LONG).await.expect("the session"), 2).await.expect("the turn ends");
        let refused = paused.commit(snapshot(1), TurnNote::default(), None, version.clone()).await;
        assert!(matches!(refused, Err(StoreError::Conflict { .. })), "{refused:?}");
        two.rewind(ANN, &id, &first, None, LONG).await.expect("the first version is kept");
        let row = VersionRow { parent: Some(first.to_string()), ..empty_version() };
        let late = Commit {
            owner: ANN,
            session: id.clone(),
            expected: first.clone(),
            version: NewVersion { id: version, row, text: None, reserved: Vec::new() },
            forks: Vec::new(),
            max_sessions: 9,
            bounds: one.inner.bounds(),
            now: now(),
            receipt: None,
        };
        let late = one.inner.index.commit(late).await;
        assert!(matches!(late, Err(StoreError::Unavailable { .. })), "{late:?}");
        assert_eq!(one.get(ANN, &id).await.expect("the session").head.id, first);
    });
}
