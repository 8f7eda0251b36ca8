//! Sessions and their owners: creating, reading, changing, forking, rewinding and removing sessions.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_server::session::{
    Durability, Fork, Metadata, Owner, Patch, ReceiptKey, Recent, ResponseId, Session, SessionId, Snapshot,
    SnapshotCodec, Start, Store, StoreError, StoreOptions, Tier, VersionId,
};

use crate::kit::{
    ANN, BOB, BYTES, NOW, Plain, SOON, agree, copies, empty, ended, head, in_folder, in_memory, list, new, note, open,
    seen, words,
};
use crate::kit::{snapshot, turn, until};

fn names(sessions: &[Session]) -> Vec<SessionId> {
    sessions.iter().map(|session| session.id.clone()).collect()
}

#[tokio::test]
async fn a_turn_moves_the_head_and_its_snapshot_can_be_loaded() {
    let folder = tempfile::tempdir().expect("a folder");
    for options in [in_memory(), in_folder(folder.path())] {
        let store = open(StoreOptions { ram_bytes: 0, ..options }).await;
        let made = store.create(ANN, empty()).await.expect("a session");
        assert_eq!((made.head.tokens, made.head.bytes, made.in_use), (0, 0, false));
        let turn = store.begin(ANN, &made.id, Some(made.head.id.clone()), NOW).await.expect("a turn");
        assert_eq!(turn.head(), &Arc::new(Snapshot::empty(1)));
        assert!(store.get(ANN, &made.id).await.expect("the session").in_use);
        let version = VersionId::new();
        let receipt = Some((ReceiptKey("k".to_owned()), b"answer".to_vec()));
        let after = turn.commit(snapshot(7), note(), receipt, version.clone()).await.expect("a commit");
        assert_eq!(store.get(ANN, &made.id).await, Ok(after.clone()));
        assert_eq!((&after.head.id, after.head.parent.as_ref()), (&version, Some(&made.head.id)));
        assert_eq!((after.head.tokens, after.head.bytes, after.head.kind.as_str()), (8, BYTES, "turn"));
        assert!(!after.in_use && after.head.kept);
        let (_, found, tier) = store.load(ANN, &made.id, None).await.expect("the snapshot");
        assert_eq!((found, tier), (snapshot(7), Tier::Disk));
        let (_, bytes) = store.bytes(ANN, &made.id, None, words()).await.expect("the bytes");
        assert_eq!(bytes, Plain.encode(&snapshot(7)));
        let (_, bytes) =
            store.bytes(ANN, &made.id, Some(&made.head.id), words()).await.expect("the bytes of an empty version");
        assert_eq!(bytes, Plain.encode(&Snapshot::empty(1)));
        assert_eq!(store.receipt(ANN, "k").await, Ok(Some(b"answer".to_vec())));
        assert_eq!(store.receipt(BOB, "k").await, Ok(None));
        // A turn that is dropped without a commit changes nothing.
        drop(store.begin(ANN, &made.id, None, NOW).await.expect("a turn"));
        assert_eq!(store.get(ANN, &made.id).await, Ok(after.clone()));
        let stale = store.begin(ANN, &made.id, Some(made.head.id.clone()), NOW).await.map(drop);
        assert_eq!(stale, Err(StoreError::Stale { head: version }));
    }
}

#[tokio::test]
async fn the_last_tokens_of_a_text_are_known_while_its_state_is_cached() {
    for (ram_bytes, known) in [(1 << 30, vec![5, 6]), (0, vec![])] {
        let store = open(StoreOptions { ram_bytes, ..in_memory() }).await;
        let made = store.create(ANN, empty()).await.expect("a session");
        let turn = store.begin(ANN, &made.id, None, NOW).await.expect("a turn");
        let after = Snapshot { recent: Recent(vec![5, 6]), ..(*snapshot(7)).clone() };
        turn.commit(Arc::new(after), note(), None, VersionId::new()).await.expect("a commit");
        let next = store.begin(ANN, &made.id, None, NOW).await.expect("a turn");
        assert_eq!(next.head().recent.0, known);
    }
}

#[tokio::test]
async fn a_session_can_start_from_a_snapshot_or_a_version() {
    let (store, objects) = seen(in_memory()).await;
    let first = store.create(ANN, new(Start::Snapshot(snapshot(3)))).await.expect("a session");
    let second = store.create(ANN, new(Start::Version(first.head.id.clone()))).await.expect("a session");
    assert_eq!(first.head, second.head);
    assert_eq!(objects.puts.load(Ordering::SeqCst), 1);
    store.delete(ANN, &first.id).await.expect("removed");
    assert_eq!(head(&store, ANN, &second.id).await, snapshot(3));
    agree(&store, &*objects, &[ANN], &[]).await;
    let other = store.create(BOB, new(Start::Version(second.head.id.clone()))).await;
    assert_eq!(other, store.create(ANN, new(Start::Version(VersionId::new()))).await);
    assert_eq!(other, Err(StoreError::NotFound { what: "version" }));
    store.delete(ANN, &second.id).await.expect("removed");
    agree(&store, &*objects, &[ANN], &[]).await;
    assert_eq!((store.stats().versions, store.stats().ram_snapshots), (0, 0));
}

#[tokio::test]
async fn forks_share_versions_and_write_no_objects() {
    let (store, objects) = seen(in_memory()).await;
    let metadata = Metadata::from([("a".to_owned(), "b".to_owned())]);
    let made = store.create(ANN, tidegate_server::session::NewSession { metadata: metadata.clone(), ..empty() }).await;
    let id = made.expect("a session").id;
    for number in 1..=3 {
        turn(&store, ANN, &id, number).await.expect("a turn");
    }
    let lineage = store.versions(ANN, &id).await.expect("versions");
    let (puts, gets) = (objects.puts.load(Ordering::SeqCst), objects.gets.load(Ordering::SeqCst));
    let running = store.begin(ANN, &id, None, NOW).await.expect("a turn");
    let transactions = store.stats().transactions;
    let forks = store.fork(ANN, &id, copies(64), None).await.expect("forking during a turn works");
    assert_eq!(store.stats().transactions, transactions + 1);
    assert_eq!((objects.puts.load(Ordering::SeqCst), objects.gets.load(Ordering::SeqCst)), (puts, gets));
    running.commit(snapshot(4), note(), None, VersionId::new()).await.expect("a commit");
    assert_eq!(forks.len(), 64);
    for fork in &forks {
        assert_eq!((&fork.head, &fork.metadata), (&lineage[3], &metadata));
        assert_eq!(fork.forked_from, Some((id.clone(), lineage[3].id.clone())));
        assert_eq!(store.versions(ANN, &fork.id).await.as_ref(), Ok(&lineage));
    }
    turn(&store, ANN, &forks[0].id, 9).await.expect("a turn");
    assert_eq!(head(&store, ANN, &forks[1].id).await, snapshot(3));
    assert_eq!(head(&store, ANN, &id).await, snapshot(4));
    let early = store
        .fork(ANN, &id, Fork { from: Some(lineage[1].id.clone()), metadata: Some(Metadata::new()), ..copies(1) }, None)
        .await;
    let early = early.expect("a fork from an old version").remove(0);
    assert_eq!((early.head.tokens, early.metadata.len()), (2, 0));
    assert_eq!(store.versions(ANN, &early.id).await.expect("versions"), lineage[..2]);
    store.rewind(ANN, &early.id, &lineage[0].id, None, NOW).await.expect("a fork can be rewound past its beginning");
    let missing = store.fork(ANN, &early.id, Fork { from: Some(lineage[3].id.clone()), ..copies(1) }, None).await;
    assert_eq!(missing, Err(StoreError::NotFound { what: "version" }));
    agree(&store, &*objects, &[ANN], &[]).await;
    store.delete(ANN, &id).await.expect("removed");
    for fork in forks {
        store.delete(ANN, &fork.id).await.expect("removed");
    }
    agree(&store, &*objects, &[ANN], &[]).await;
    assert_eq!((store.stats().sessions, store.stats().disk_bytes), (1, BYTES));
}

#[tokio::test]
async fn a_rewind_moves_the_head_and_keeps_all_versions() {
    let (store, objects) = seen(in_memory()).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    for number in 1..=3 {
        turn(&store, ANN, &id, number).await.expect("a turn");
    }
    let before = store.versions(ANN, &id).await.expect("versions");
    let stale = store.rewind(ANN, &id, &before[1].id, Some(before[0].id.clone()), NOW).await;
    assert_eq!(stale, Err(StoreError::Stale { head: before[3].id.clone() }));
    let running = store.begin(ANN, &id, None, NOW).await.expect("a turn");
    assert!(matches!(store.rewind(ANN, &id, &before[1].id, None, NOW).await, Err(StoreError::Busy { .. })));
    drop(running);
    let back = store.rewind(ANN, &id, &before[1].id, Some(before[3].id.clone()), NOW).await.expect("a rewind");
    assert_eq!(back.head, before[1]);
    assert_eq!(store.versions(ANN, &id).await.as_ref(), Ok(&before));
    turn(&store, ANN, &id, 9).await.expect("a turn");
    let after = store.versions(ANN, &id).await.expect("versions");
    assert_eq!((&after[..4], after[4].parent.as_ref()), (&before[..], Some(&before[1].id)));
    store.rewind(ANN, &id, &before[3].id, None, NOW).await.expect("a rewind can go forward");
    assert_eq!(head(&store, ANN, &id).await, snapshot(3));
    agree(&store, &*objects, &[ANN], &[]).await;
}

#[tokio::test]
async fn other_owners_sessions_look_like_missing_ones() {
    let store = open(in_memory()).await;
    let id = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session").id;
    let version = store.get(ANN, &id).await.expect("the session").head.id;
    let response = ResponseId::new();
    store.put_response(ANN, &response, ended(b"{}".to_vec(), snapshot(2)), None).await.expect("a response");
    let guessed = SessionId::new();
    let errors = async |owner: Owner, id: &SessionId, version: &VersionId, response: &ResponseId| -> Vec<String> {
        let wait = NOW;
        let errors: Vec<StoreError> = vec![
            store.get(owner, id).await.map(drop).unwrap_err(),
            store.update(owner, id, Patch::default()).await.map(drop).unwrap_err(),
            store.delete(owner, id).await.unwrap_err(),
            store.versions(owner, id).await.map(drop).unwrap_err(),
            store.fork(owner, id, copies(1), None).await.map(drop).unwrap_err(),
            store.rewind(owner, id, version, None, wait).await.map(drop).unwrap_err(),
            store.load(owner, id, Some(version)).await.map(drop).unwrap_err(),
            store.bytes(owner, id, None, words()).await.map(drop).unwrap_err(),
            store.begin(owner, id, None, wait).await.map(drop).unwrap_err(),
            list(&store, owner, Some(id.clone()), 5, false).await.map(drop).unwrap_err(),
            store.create(owner, new(Start::Version(version.clone()))).await.map(drop).unwrap_err(),
            store.response(owner, response).await.map(drop).unwrap_err(),
            store.response_snapshot(owner, response).await.map(drop).unwrap_err(),
            store.delete_response(owner, response).await.unwrap_err(),
        ];
        errors.iter().map(ToString::to_string).collect()
    };
    let missing = errors(ANN, &guessed, &VersionId::new(), &ResponseId::new()).await;
    let foreign = errors(BOB, &id, &version, &response).await;
    let held = store.begin(ANN, &id, None, NOW).await.expect("a turn");
    assert_eq!(missing, foreign);
    assert_eq!(missing, errors(BOB, &id, &version, &response).await, "others cannot see that it is in use");
    assert!(missing.iter().all(|error| error.starts_with("no ") && error.ends_with(" has this id")), "{missing:?}");
    drop(held);
    // A version of another session of the same owner does not belong to this session either.
    let mine = store.create(ANN, empty()).await.expect("a session").id;
    assert_eq!(store.load(ANN, &mine, Some(&version)).await.unwrap_err(), StoreError::NotFound { what: "version" });
    assert_eq!(list(&store, BOB, None, 5, false).await, Ok((Vec::new(), false)));
}

#[tokio::test]
async fn sessions_are_listed_in_order_of_creation() {
    let store = open(in_memory()).await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(store.create(ANN, empty()).await.expect("a session").id);
        store.create(BOB, empty()).await.expect("a session");
    }
    let mut pages = Vec::new();
    let mut after = None;
    loop {
        let (page, more) = list(&store, ANN, after, 2, false).await.expect("a page");
        after = page.last().map(|session| session.id.clone());
        pages.extend(names(&page));
        if !more {
            break;
        }
    }
    assert_eq!(pages, made);
    let (page, more) = list(&store, ANN, None, 2, true).await.expect("a page");
    assert_eq!((names(&page), more), (vec![made[4].clone(), made[3].clone()], true));
    let (page, more) = list(&store, ANN, Some(made[3].clone()), 3, true).await.expect("a page");
    assert_eq!((names(&page), more), (vec![made[2].clone(), made[1].clone(), made[0].clone()], false));
    let (page, _) = list(&store, ANN, Some(made[0].clone()), 3, true).await.expect("a page");
    assert!(page.is_empty());
}

#[tokio::test]
async fn a_session_expires_unless_it_is_used() {
    let every = Duration::from_millis(50);
    let (store, objects) = seen(StoreOptions { sweep_every: every, ..in_memory() }).await;
    // This is much longer than the pauses below, so that `used` does not expire on a busy machine.
    let short = Some(Duration::from_secs(4));
    let start = || tidegate_server::session::NewSession { ttl: short, ..new(Start::Snapshot(snapshot(1))) };
    let used = store.create(ANN, start()).await.expect("a session");
    let left = store.create(ANN, start()).await.expect("a session");
    let patched = store.create(ANN, start()).await.expect("a session").id;
    let held = store.create(ANN, start()).await.expect("a session").id;
    let turn = store.begin(ANN, &held, None, NOW).await.expect("a turn");
    assert_eq!(left.expires.map(|expires| expires >= left.created), Some(true));
    let metadata = Some(Metadata::from([("k".to_owned(), "v".to_owned())]));
    let update =
        store.update(ANN, &patched, Patch { metadata, ttl: Some(None), ..Patch::default() }).await.expect("updated");
    assert_eq!((update.expires, update.metadata.len()), (None, 1));
    for _ in 0..24 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        head(&store, ANN, &used.id).await;
    }
    assert_eq!(store.get(ANN, &left.id).await, Err(StoreError::NotFound { what: "session" }));
    until("the sweep", async || store.stats().sessions == 3).await;
    assert!(store.get(ANN, &used.id).await.is_ok() && store.get(ANN, &patched).await.is_ok());
    turn.commit(snapshot(2), note(), None, VersionId::new()).await.expect("a running turn prevents expiry");
    agree(&store, &*objects, &[ANN], &[]).await;
    until("the sweep", async || store.stats().sessions == 1).await;
    agree(&store, &*objects, &[ANN], &[]).await;
}

#[tokio::test]
async fn a_response_keeps_its_snapshot_until_it_expires() {
    let every = Duration::from_millis(50);
    let ttl = Duration::from_secs(4);
    let options = StoreOptions { sweep_every: every, response_ttl: ttl, receipt_ttl: ttl, ..in_memory() };
    let (store, objects) = seen(options).await;
    let (kept, removed) = (ResponseId::new(), ResponseId::new());
    for id in [&kept, &removed] {
        store.put_response(ANN, id, ended(b"body".to_vec(), snapshot(5)), None).await.expect("a response");
    }
    store.put_receipt(ANN, "once", b"answer".to_vec()).await.expect("a receipt");
    assert_eq!(store.receipt(ANN, "once").await, Ok(Some(b"answer".to_vec())));
    let (body, version) = store.response(ANN, &kept).await.expect("the response");
    assert_eq!(body, b"body");
    assert_eq!(store.response_snapshot(ANN, &kept).await.expect("its snapshot").0, snapshot(5));
    store.delete_response(ANN, &removed).await.expect("removed");
    agree(&store, &*objects, &[ANN], std::slice::from_ref(&version)).await;
    let session = store.create(ANN, new(Start::Version(version))).await.expect("a session can start from it");
    tokio::time::sleep(ttl).await;
    assert_eq!(store.response(ANN, &kept).await, Err(StoreError::NotFound { what: "response" }));
    assert_eq!(store.receipt(ANN, "once").await, Ok(None));
    assert_eq!(head(&store, ANN, &session.id).await, snapshot(5));
    agree(&store, &*objects, &[ANN], &[]).await;
}

#[tokio::test]
async fn stored_sessions_survive_dropping_the_store() {
    for durability in [Durability::Turn, Durability::Memory] {
        let folder = tempfile::tempdir().expect("a folder");
        let options = StoreOptions { durability, ..in_folder(folder.path()) };
        let mut known: Vec<(Session, u64)> = Vec::new();
        for round in 0..4 {
            let store: Store = open(options.clone()).await;
            for (session, number) in &mut known {
                assert_eq!(store.get(ANN, &session.id).await.as_ref(), Ok(&*session), "{durability:?}");
                assert_eq!(head(&store, ANN, &session.id).await, snapshot(*number));
                *number += 10;
                *session = turn(&store, ANN, &session.id, *number).await.expect("a turn");
            }
            let made = store.create(ANN, empty()).await.expect("a session");
            known.push((turn(&store, ANN, &made.id, round).await.expect("a turn"), round));
            assert_eq!(store.stats().sessions, known.len() as u64);
        }
    }
}

#[tokio::test]
async fn a_second_turn_waits_for_the_first() {
    let store = open(in_memory()).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let first = store.begin(ANN, &id, None, NOW).await.expect("a turn");
    assert!(matches!(store.begin(ANN, &id, None, NOW).await, Err(StoreError::Busy { .. })));
    let waiting = tokio::spawn({
        let (store, id) = (store.clone(), id.clone());
        async move { store.begin(ANN, &id, None, SOON).await.map(|turn| turn.session().head.tokens) }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    first.commit(snapshot(4), note(), None, VersionId::new()).await.expect("a commit");
    assert_eq!(waiting.await.expect("the task"), Ok(5), "it starts from the first turn's result");
}

#[tokio::test]
async fn opening_reads_no_object() {
    let folder = tempfile::tempdir().expect("a folder");
    let (store, objects) = seen(in_folder(folder.path())).await;
    for number in 0..50 {
        store.create(ANN, new(Start::Snapshot(snapshot(number)))).await.expect("a session");
    }
    drop(store);
    let shared = Arc::clone(&objects) as Arc<dyn object_store::ObjectStore>;
    let store = Store::open_with(shared, in_folder(folder.path()), Arc::new(Plain)).await.expect("the store opens");
    let (sessions, _) = list(&store, ANN, None, 100, false).await.expect("a list");
    assert_eq!((sessions.len(), store.stats().disk_bytes), (50, 50 * BYTES));
    assert_eq!(objects.gets.load(Ordering::SeqCst), 0);
    agree(&store, &*objects, &[ANN], &[]).await;
}

/// Measures the store's operations: `cargo test --test store -- --ignored --nocapture measure`.
#[tokio::test]
#[ignore = "a measurement"]
async fn measure_operations() {
    let state = Arc::new(Snapshot { state: vec![0.5; 300_000], read: 9, ..Snapshot::empty(1) });
    for durability in [Durability::Turn, Durability::Memory] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        let options = StoreOptions { durability, ram_bytes: 0, ..in_folder(folder.path()) };
        let store = open(options.clone()).await;
        let id = store.create(ANN, new(Start::Snapshot(Arc::clone(&state)))).await.expect("a session").id;
        let report = |what: &str, mut times: Vec<Duration>| {
            times.sort();
            println!(
                "{durability:?} {what}: median {:?}, p99 {:?}",
                times[times.len() / 2],
                times[times.len() * 99 / 100]
            );
        };
        let (mut commits, mut small, mut loads, mut forks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for number in 0..100 {
            let turn = store.begin(ANN, &id, None, SOON).await.expect("a turn");
            let started = std::time::Instant::now();
            turn.commit(Arc::clone(&state), note(), None, VersionId::new()).await.expect("a commit");
            commits.push(started.elapsed());
            let started = std::time::Instant::now();
            store.load(ANN, &id, None).await.expect("a snapshot");
            loads.push(started.elapsed());
            let started = std::time::Instant::now();
            store.fork(ANN, &id, copies(64), None).await.expect("forks");
            forks.push(started.elapsed());
            let little = store.create(ANN, empty()).await.expect("a session").id;
            let turn = store.begin(ANN, &little, None, SOON).await.expect("a turn");
            let started = std::time::Instant::now();
            turn.commit(snapshot(number), note(), None, VersionId::new()).await.expect("a commit");
            small.push(started.elapsed());
        }
        report("commit of 1.2 MB", commits);
        report("commit of 424 bytes", small);
        report("load of 1.2 MB from disk", loads);
        report("fork into 64", forks);
        println!("{:?}", store.stats());
        drop(store);
        tokio::time::sleep(Duration::from_millis(300)).await;
        let started = std::time::Instant::now();
        open(options).await;
        println!("open: {:?}", started.elapsed());
    }
}
