//! An unreachable object store or shared index: turns fail before anything is acknowledged, later ones are refused at
//! once, and all work again by themselves afterward.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::shared::{Mode, Servers, down, until};
use super::*;
use crate::session::store::Turn;

async fn commit(turn: Turn) -> Result<VersionId, StoreError> {
    let ended = turn.commit(snapshot(5), TurnNote::default(), None, VersionId::new()).await;
    ended.map(|session| session.head.id)
}

#[test]
fn an_operation_that_fails_now_and_then_is_tried_again() {
    crate::sync::block_on(async {
        let Servers { stores: [one, two], objects, .. } = Servers::start().await;
        let id = one.create(ANN, new_session()).await.expect("a session").id;
        let turn = one.begin(ANN, &id, None, Duration::ZERO).await.expect("the session");
        objects.failing.store(2, SeqCst);
        let head = commit(turn).await.expect("the turn ends");
        objects.failing.store(1, SeqCst);
        assert_eq!(two.load(ANN, &id, None).await.map(|found| found.0.id), Ok(head));
        assert_eq!((one.failure(), two.failure()), (None, None));
        let [index, object_store] = one.latencies();
        assert_eq!(index.iter().map(|latency| latency.failures).sum::<u64>(), 0);
        let puts = object_store.iter().find(|latency| latency.operation == "put").expect("its times");
        assert_eq!((puts.counts.iter().sum::<u64>(), puts.failures), (1, 0), "it is one operation");
    });
}

#[test]
fn without_the_object_store_turns_are_refused_until_it_works_again() {
    crate::sync::block_on(async {
        for mode in [Mode::Fails, Mode::Hangs] {
            let Servers { stores: [one, _], objects, .. } = Servers::start().await;
            let session = one.create(ANN, new_session()).await.expect("a session");
            let turn = one.begin(ANN, &session.id, None, Duration::ZERO).await.expect("the session");
            objects.set(mode);
            let failed = commit(turn).await.expect_err("nothing is stored");
            let StoreError::Unavailable { reason } = &failed else { panic!("{failed}") };
            assert!(reason.starts_with("the object store: "), "{reason}");
            assert_eq!(one.get(ANN, &session.id).await.map(|session| session.head), Ok(session.head));
            // The outage is now known, and nothing is computed in vain.
            for refused in [
                one.admit(ANN).await,
                one.begin(ANN, &session.id, None, Duration::ZERO).await.map(drop),
                one.begin_or_create(ANN, &session.id, (1, Metadata::new()), Duration::ZERO).await.map(drop),
                one.create(ANN, new_session()).await.map(drop),
                one.failure().map_or(Ok(()), Err),
            ] {
                let Err(StoreError::Unavailable { reason }) = refused else { panic!("{refused:?}") };
                assert!(reason.starts_with("the object store: "), "{reason}");
            }
            objects.set(Mode::Works);
            until("the probe", async || one.failure().is_none()).await;
            commit(one.begin(ANN, &session.id, None, Duration::from_secs(9)).await.expect("the session"))
                .await
                .expect("a turn");
        }
    });
}

#[test]
fn an_object_store_that_fails_is_found_before_it_is_needed() {
    crate::sync::block_on(async {
        let options = StoreOptions { sweep_every: Duration::from_millis(10), ..StoreOptions::new(Location::Memory) };
        let Servers { stores: [one, _], objects, .. } = Servers::with(options).await;
        objects.set(Mode::Fails);
        until("the probe", async || one.failure().is_some()).await;
        objects.set(Mode::Works);
        until("the probe", async || one.failure().is_none()).await;
    });
}

#[test]
fn without_the_index_turns_fail_and_leave_nothing() {
    crate::sync::block_on(async {
        let Servers { stores: [one, two], indexes, .. } = Servers::start().await;
        let session = one.create(ANN, new_session()).await.expect("a session");
        let turn = one.begin(ANN, &session.id, None, Duration::ZERO).await.expect("the session");
        indexes[0].is_down.store(true, SeqCst);
        assert_eq!(commit(turn).await, Err(down()));
        assert_eq!(one.begin(ANN, &session.id, None, Duration::ZERO).await.map(drop), Err(down()));
        assert_eq!((one.admit(ANN).await, one.failure()), (Err(down()), Some(down())));
        assert_eq!(two.get(ANN, &session.id).await.map(|session| session.head), Ok(session.head));
        indexes[0].is_down.store(false, SeqCst);
        one.inner.remove_suspects().await.expect("removed");
        let objects: Vec<_> = futures_util::StreamExt::collect(one.inner.objects.batches(9)).await;
        assert!(objects.is_empty(), "{objects:?}");
        commit(one.begin(ANN, &session.id, None, Duration::from_secs(9)).await.expect("the session"))
            .await
            .expect("a turn");
    });
}

/// A failed listing must not count as "there are objects": it is retried.
#[test]
fn whether_objects_exist_is_asked_again_after_a_failure_and_a_lasting_one_is_an_error() {
    crate::sync::block_on(async {
        let Servers { stores: [one, _], objects: flaky, .. } = Servers::start().await;
        let objects = &one.inner.objects;
        flaky.failing.store(2, SeqCst);
        assert_eq!(objects.any().await, Ok(false));
        flaky.failing.store(usize::MAX, SeqCst);
        assert!(matches!(objects.any().await, Err(StoreError::Unavailable { .. })));
        #[cfg(feature = "postgres")]
        {
            assert!(matches!(objects.exists(&VersionId::new()).await, Err(StoreError::Unavailable { .. })));
            flaky.failing.store(2, SeqCst);
            assert_eq!(objects.exists(&VersionId::new()).await, Ok(false));
        }
    });
}
