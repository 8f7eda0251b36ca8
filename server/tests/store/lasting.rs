//! What must hold across crashes, changed secrets and repeated requests: deleted data stays deleted, and stored data
//! stays readable.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redb::{ReadableTable as _, TableDefinition};
use tidegate_model::StateLayout;
use tidegate_server::session::{
    Codec, Durability, Fingerprint, FormatError, Keys, ReceiptKey, ResponseId, Session, Snapshot, Start, Store,
    StoreError, StoreOptions, VersionId,
};

use crate::kit::{
    ANN, BYTES, NOW, copies, empty, ended, head, in_folder, in_memory, new, note, open, seen, snapshot, turn, words,
};

/// Copies to another folder what a process that is killed now would leave behind.
fn killed(folder: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    fs::copy(folder.join("index.redb"), copy.path().join("index.redb")).expect("the index");
    for shard in fs::read_dir(folder.join("objects")).expect("objects") {
        let shard = shard.expect("a shard").path();
        let to = copy.path().join("objects").join(shard.file_name().expect("a name"));
        fs::create_dir_all(&to).expect("a shard");
        for object in fs::read_dir(&shard).expect("a shard") {
            let object = object.expect("an object");
            // An object that is removed during the copy was not needed.
            drop(fs::copy(object.path(), to.join(object.file_name())));
        }
    }
    copy
}

#[tokio::test]
async fn deleted_sessions_stay_deleted_however_the_process_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let rare = Duration::from_hours(1);
    let options = StoreOptions { durability: Durability::Memory, sweep_every: rare, ..in_folder(folder.path()) };
    let store = open(options).await;
    let mut ids = Vec::new();
    for number in 0..3 {
        ids.push(store.create(ANN, new(Start::Snapshot(snapshot(number)))).await.expect("a session").id);
    }
    store.flush().await.expect("all is on disk");
    store.delete(ANN, &ids[0]).await.expect("deleted");
    let after = killed(folder.path());
    let again = open(in_folder(after.path())).await;
    assert_eq!(again.get(ANN, &ids[0]).await, Err(StoreError::NotFound { what: "session" }));
    assert_eq!(head(&again, ANN, &ids[2]).await, snapshot(2));
}

#[tokio::test]
async fn a_closed_store_refuses_and_its_index_needs_no_repair() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(in_folder(folder.path())).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let before = killed(folder.path());
    store.close().await.expect("closed");
    assert!(matches!(store.get(ANN, &id).await, Err(StoreError::Unavailable { .. })));
    assert!(matches!(store.create(ANN, empty()).await, Err(StoreError::Unavailable { .. })));
    for folder in [folder.path(), before.path()] {
        let mut index = redb::Builder::new();
        index.set_repair_callback(|_| panic!("the index was repaired"));
        index.open(folder.join("index.redb")).expect("it opens");
        let store = open(in_folder(folder)).await;
        assert_eq!(store.get(ANN, &id).await.map(|session| session.id), Ok(id.clone()));
    }
}

/// Measures how long a store takes to open after a kill, by size of the index.
#[tokio::test]
#[ignore = "a measurement"]
async fn measure_opening_after_a_kill() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let store = open(in_folder(folder.path())).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    for _ in 0..300 {
        store.fork(ANN, &id, copies(1000), None).await.expect("forks");
    }
    let mut times = Vec::new();
    for number in 0..50 {
        let started = Instant::now();
        turn(&store, ANN, &id, number).await.expect("a turn");
        times.push(started.elapsed());
    }
    times.sort();
    let after = killed(folder.path());
    let bytes = fs::metadata(after.path().join("index.redb")).expect("the index").len();
    let started = Instant::now();
    let again = open(in_folder(after.path())).await;
    println!("{} sessions, index of {bytes} bytes: open {:?}", again.stats().sessions, started.elapsed());
    println!("a turn: median {:?}", times[25]);
    let started = Instant::now();
    store.close().await.expect("closed");
    println!("close {:?}", started.elapsed());
}

#[tokio::test]
async fn an_unreadable_row_affects_only_its_own_session() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(in_folder(folder.path())).await;
    let bad = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session");
    let good = store.create(ANN, new(Start::Snapshot(snapshot(2)))).await.expect("a session").id;
    store.close().await.expect("closed");
    let index = redb::Database::open(folder.path().join("index.redb")).expect("the index");
    let transaction = index.begin_write().expect("a transaction");
    {
        let mut versions =
            transaction.open_table(TableDefinition::<&str, &[u8]>::new("versions")).expect("the versions");
        assert!(versions.get(bad.head.id.to_string().as_str()).expect("read").is_some());
        versions.insert(bad.head.id.to_string().as_str(), &b"not a row"[..]).expect("written");
    }
    transaction.commit().expect("committed");
    drop(index);
    let store = open(in_folder(folder.path())).await;
    for _ in 0..10 {
        let made = futures_util::future::join_all((0..20).map(|_| store.create(ANN, empty())));
        let (deleted, made) = tokio::join!(store.delete(ANN, &bad.id), made);
        assert!(deleted.is_err());
        assert!(made.iter().all(Result::is_ok), "{made:?}");
    }
    assert_eq!(store.stats().sessions, 202);
    turn(&store, ANN, &good, 3).await.expect("a turn");
}

fn codec(secret: Option<&[u8]>) -> Arc<Codec> {
    let part = |digit: &str| digit.repeat(64);
    let fingerprint = Fingerprint { architecture: part("a"), weights: part("b"), tokenizer: part("c") };
    let layout = StateLayout { layers: 1, heads: 1, head: 10, taps: 0, channels: 0, cross: 0 };
    let keys = secret.map(|secret| Keys::new(secret).expect("keys"));
    Arc::new(Codec { fingerprint, layout, vocab_size: 50, greatest: Vec::new(), sources: 0, keys })
}

fn state(number: f32) -> Arc<Snapshot> {
    Arc::new(Snapshot { state: vec![number; 10], read: 3, ..Snapshot::empty(1) })
}

#[tokio::test]
async fn exports_are_signed_with_the_current_secret_whichever_stored_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = || StoreOptions { ram_bytes: 0, ..in_folder(folder.path()) };
    let secrets: [Option<&[u8]>; 4] = [None, Some(&[1; 32]), Some(&[2; 32]), None];
    let mut ids = Vec::new();
    for (number, secret) in secrets.into_iter().enumerate() {
        let store = Store::open(options(), codec(secret)).await.expect("it opens");
        let made = store.create(ANN, new(Start::Snapshot(state(number as f32)))).await.expect("a session");
        ids.push(made.id);
        for (number, id) in ids.iter().enumerate() {
            assert_eq!(head(&store, ANN, id).await, state(number as f32));
            let (_, bytes) = store.bytes(ANN, id, None, words()).await.expect("bytes");
            assert_eq!(codec(secret).decode(&bytes).map(Arc::new), Ok(state(number as f32)));
            assert!(codec(Some(&[3; 32])).decode(&bytes).is_err(), "the signature of another secret");
        }
        store.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_snapshot_that_could_not_be_read_back_is_not_stored() {
    let store = Store::open(in_memory(), codec(None)).await.expect("it opens");
    let session = store.create(ANN, new(Start::Snapshot(state(1.0)))).await.expect("a session");
    let far = Snapshot { read: (1 << 53) + 1, ..(*state(1.0)).clone() };
    let pending = Snapshot { pending: vec![50], ..(*state(1.0)).clone() };
    for unfit in [state(f32::NAN), state(f32::INFINITY), Arc::new(far), Arc::new(pending)] {
        let turn = store.begin(ANN, &session.id, None, NOW).await.expect("a turn");
        let refused = turn.commit(unfit, note(), None, VersionId::new()).await;
        assert!(matches!(refused, Err(StoreError::Unstorable { .. })), "{refused:?}");
        assert_eq!(store.get(ANN, &session.id).await.as_ref(), Ok(&session));
    }
    let close = Snapshot { read: (1 << 52) + 1, ..(*state(1.0)).clone() };
    let file = codec(None).encode(&close);
    assert!(codec(None).decode(&file).is_ok() && codec(None).import(&file).is_err());
}

#[test]
fn an_impossible_key_maximum_is_refused() {
    // The last number of each head is a key maximum, which `greatest` bounds.
    let layout = StateLayout { layers: 2, heads: 1, head: 5, taps: 0, channels: 0, cross: 0 };
    let snapshot = Snapshot { state: (0..10).map(|number| number as f32).collect(), ..(*state(0.0)).clone() };
    for (greatest, at) in [(vec![4.0, 9.0], None), (vec![3.9, 9.0], Some(4)), (vec![4.0, 8.9], Some(9)), (vec![], None)]
    {
        let codec = Codec { layout, greatest, ..(*codec(None)).clone() };
        match (codec.import(&codec.encode(&snapshot)), at) {
            (Ok((read, _)), None) => assert_eq!(read.state, snapshot.state),
            (Err(FormatError::Maximum { at, .. }), Some(expected)) => assert_eq!(at, expected),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_receipt_is_stored_together_with_its_result() {
    let (store, _objects) = seen(StoreOptions { owner_sessions: 4, ..in_memory() }).await;
    let key = |name: &str| ReceiptKey(name.to_owned());
    let one = |session: &Session| session.id.to_string().into_bytes();
    let made = store.create_once(ANN, empty(), Some((key("a"), Box::new(one)))).await.expect("a session");
    assert_eq!(store.receipt(ANN, "a").await, Ok(Some(one(&made))));
    let all = |sessions: &[Session]| format!("{:?}", sessions.iter().map(|made| &made.id).collect::<Vec<_>>()).into();
    let forks = store.fork(ANN, &made.id, copies(2), Some((key("b"), Box::new(all)))).await.expect("forks");
    assert_eq!(store.receipt(ANN, "b").await, Ok(Some(all(&forks))));
    store.fork(ANN, &made.id, copies(2), Some((key("c"), Box::new(all)))).await.unwrap_err();
    assert_eq!(store.receipt(ANN, "c").await, Ok(None), "a failed request has no receipt");
    let answer = Some((key("d"), b"body".to_vec()));
    store.put_response(ANN, &ResponseId::new(), ended(vec![1], snapshot(1)), answer).await.expect("a response");
    assert_eq!(store.receipt(ANN, "d").await, Ok(Some(b"body".to_vec())));
}

#[tokio::test]
async fn the_number_of_forks_of_a_long_session_is_limited() {
    let store = open(StoreOptions { keep_versions: 2, lineage: 100, ..in_memory() }).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    for number in 0..49 {
        turn(&store, ANN, &id, number).await.expect("a turn");
    }
    let refused = store.fork(ANN, &id, copies(401), None).await.unwrap_err();
    assert_eq!(refused.to_string(), "n must be at most 400 for a session of 50 versions, found 401");
    assert_eq!(store.fork(ANN, &id, copies(400), None).await.map(|made| made.len()), Ok(400));
}

#[tokio::test]
async fn old_responses_are_evicted_after_old_versions() {
    let (store, _objects) = seen(StoreOptions { disk_bytes: 5 * BYTES, ..in_memory() }).await;
    let ids = [ResponseId::new(), ResponseId::new()];
    for (number, id) in (1..).zip(&ids) {
        store.put_response(ANN, id, ended(vec![1], snapshot(number)), None).await.expect("a response");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let session = store.create(ANN, new(Start::Snapshot(snapshot(3)))).await.expect("a session").id;
    for number in 4..=7 {
        turn(&store, ANN, &session, number).await.expect("a turn");
        assert!(store.response(ANN, &ids[0]).await.is_ok(), "versions are evicted first");
    }
    for number in 8..=10 {
        store.create(ANN, new(Start::Snapshot(snapshot(number)))).await.expect("a session");
    }
    assert!(store.response(ANN, &ids[0]).await.is_err(), "the oldest response is evicted");
    store.admit(ANN).await.expect("another can be evicted");
    store.create(ANN, new(Start::Snapshot(snapshot(11)))).await.expect("a session");
    assert!(store.response(ANN, &ids[1]).await.is_err());
    assert_eq!(head(&store, ANN, &session).await, snapshot(7));
    assert!(matches!(store.admit(ANN).await, Err(StoreError::Full { .. })), "only heads are left");
}

#[tokio::test]
async fn space_for_a_turn_is_reserved_when_it_begins() {
    let (store, _objects) = seen(StoreOptions { disk_bytes: BYTES, ..in_memory() }).await;
    let first = store.create(ANN, empty()).await.expect("a session").id;
    let second = store.create(ANN, empty()).await.expect("a session").id;
    let reserving = store.begin(ANN, &first, None, NOW).await.expect("there is space for one");
    assert!(matches!(store.begin(ANN, &second, None, NOW).await.map(drop), Err(StoreError::Full { .. })));
    drop(reserving);
    turn(&store, ANN, &second, 1).await.expect("the space is released with the turn");
}

#[tokio::test]
async fn receipts_count_towards_the_owners_budget_and_the_disks() {
    const BUDGET: u64 = 100_000;
    for options in
        [StoreOptions { owner_bytes: BUDGET, ..in_memory() }, StoreOptions { disk_bytes: BUDGET, ..in_memory() }]
    {
        let store = open(options).await;
        let mut stored = 0;
        let refused = loop {
            match store.put_receipt(ANN, &format!("key {stored}"), vec![b'x'; 10_000]).await {
                Ok(()) => stored += 1,
                Err(error) => break error,
            }
            assert!(stored < 10, "receipts of more than the budget");
        };
        assert!(matches!(refused, StoreError::Quota { .. } | StoreError::Full { .. }), "{refused}");
        assert_eq!(stored, 9);
        // A turn needs space for its receipt as well, and changes nothing without it.
        let id = store.create(ANN, empty()).await.expect("a session").id;
        let turn = store.begin(ANN, &id, None, NOW).await.expect("there is space for a snapshot");
        let receipt = Some((ReceiptKey("turn".to_owned()), vec![b'x'; 10_000]));
        let refused = turn.commit(snapshot(1), note(), receipt, VersionId::new()).await;
        assert!(matches!(refused, Err(StoreError::Quota { .. } | StoreError::Full { .. })), "{refused:?}");
        assert_eq!(store.get(ANN, &id).await.expect("the session").head.tokens, 0, "nothing has changed");
    }
}
