//! Concurrency: turns on one session run one at a time, and turns on different sessions run in parallel.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate_server::session::{Durability, StoreOptions, VersionId};

use crate::kit::{ANN, SOON, agree, empty, head, in_folder, in_memory, note, open, seen, snapshot, turn};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn turns_run_one_at_a_time_and_each_starts_from_the_previous_result() {
    let (store, objects) = seen(in_memory()).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let (inside, told) = (Arc::new(AtomicUsize::new(0)), Arc::new(std::sync::Mutex::new(Vec::new())));
    let first = store.begin(ANN, &id, None, SOON).await.expect("a turn");
    let mut tasks = Vec::new();
    for number in 0..64u64 {
        let (store, id, inside, told) = (store.clone(), id.clone(), Arc::clone(&inside), Arc::clone(&told));
        tasks.push(tokio::spawn(async move {
            let turn = store.begin(ANN, &id, None, SOON).await.expect("the lease is granted");
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two turns run at once");
            told.lock().expect("a list").push((number, turn.session().head.tokens));
            tokio::task::yield_now().await;
            inside.fetch_sub(1, Ordering::SeqCst);
            if number % 4 != 3 {
                turn.commit(snapshot(100 + number), note(), None, VersionId::new()).await.expect("a commit");
            }
        }));
    }
    drop(first);
    for task in tasks {
        task.await.expect("a task");
    }
    let told = told.lock().expect("a list").clone();
    assert_eq!(told.len(), 64);
    for pair in told.windows(2) {
        let expected = if pair[0].0 % 4 == 3 { pair[0].1 } else { 101 + pair[0].0 };
        assert_eq!(pair[1].1, expected, "{pair:?}");
    }
    assert!(!store.get(ANN, &id).await.expect("the session").in_use);
    agree(&store, &*objects, &[ANN], &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_that_end_together_share_a_transaction() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(StoreOptions { durability: Durability::Turn, ..in_folder(folder.path()) }).await;
    let mut ids = Vec::new();
    for _ in 0..32 {
        ids.push(store.create(ANN, empty()).await.expect("a session").id);
    }
    let before = store.stats();
    let turns = ids.iter().enumerate().map(|(number, id)| {
        let (store, id) = (store.clone(), id.clone());
        tokio::spawn(async move {
            for round in 0..5 {
                turn(&store, ANN, &id, number as u64 * 10 + round).await.expect("a turn");
            }
        })
    });
    for end in futures_util::future::join_all(turns).await {
        end.expect("a task");
    }
    let after = store.stats();
    assert_eq!(after.commits - before.commits, 160);
    assert!(after.transactions - before.transactions < 120, "{before:?} {after:?}");
    for (number, id) in ids.iter().enumerate() {
        assert_eq!(head(&store, ANN, id).await, snapshot(number as u64 * 10 + 4));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_commit_completes_without_its_caller_and_fails_if_the_session_was_deleted() {
    let (store, objects) = seen(in_memory()).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    for number in 1..40 {
        let turn = store.begin(ANN, &id, None, SOON).await.expect("a turn");
        let commit = tokio::spawn(turn.commit(snapshot(number), note(), None, VersionId::new()));
        for _ in 0..number % 5 {
            tokio::task::yield_now().await;
        }
        commit.abort();
        drop(commit.await);
    }
    drop(store.begin(ANN, &id, None, SOON).await.expect("the last turn has ended"));
    agree(&store, &*objects, &[ANN], &[]).await;
    let turn = store.begin(ANN, &id, None, SOON).await.expect("a turn");
    store.delete(ANN, &id).await.expect("removed");
    let end = turn.commit(snapshot(99), note(), None, VersionId::new()).await;
    assert_eq!(end.unwrap_err().to_string(), "no session has this id");
    agree(&store, &*objects, &[ANN], &[]).await;
    assert_eq!(store.stats().versions, 0);
}
