//! Checks, repairs, backups and moves of a store's folder, with snapshot files in the real format.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidegate_model::StateLayout;
use tidegate_server::session::maintenance::{backup, check, export, import, repair, restore};
use tidegate_server::session::{
    AddedText, Codec, Fingerprint, Metadata, NewSession, Owner, SessionId, Snapshot, Start, Store, SystemDisk, TagName,
    TurnNote, VersionId,
};

use crate::kit::{ANN, BOB, NOW, added, copies, in_folder, note};

pub(crate) fn codec() -> Arc<Codec> {
    let part = |digit: &str| digit.repeat(64);
    let fingerprint = Fingerprint { architecture: part("a"), weights: part("b"), tokenizer: part("c") };
    let layout = StateLayout { layers: 1, heads: 1, head: 10, taps: 0, channels: 0, cross: 0 };
    Arc::new(Codec { fingerprint, layout, vocab_size: 50, greatest: Vec::new(), sources: 0, keys: None })
}

pub(crate) fn state(number: u64) -> Arc<Snapshot> {
    Arc::new(Snapshot { state: vec![number as f32; 10], read: number + 1, ..Snapshot::empty(1) })
}

pub(crate) async fn open(folder: &Path) -> Store {
    Store::open(in_folder(folder), codec()).await.expect("the store opens")
}

/// Returns what to add to a text of `total` tokens, so that it becomes as long as the text of `state(number)`.
fn text_to(total: u64, number: u64) -> AddedText {
    let kept = total.saturating_sub(1).min(number);
    AddedText { kept, tokens: vec![number as u32; (number + 1 - kept) as usize], ..added(total, number) }
}

pub(crate) async fn create(store: &Store, owner: Owner, number: u64) -> SessionId {
    let metadata: Metadata = [("number".to_owned(), number.to_string())].into();
    let new = NewSession {
        start: Start::Read(state(number), text_to(0, number)),
        metadata,
        ttl: None,
        label: Some("first".to_owned()),
    };
    store.create(owner, new).await.expect("a session").id
}

pub(crate) async fn turn(store: &Store, owner: Owner, id: &SessionId, number: u64) -> VersionId {
    let total = store.text(owner, id, None, (None, Some(0))).await.map_or(0, |(_, part)| part.total);
    let turn = store.begin(owner, id, None, NOW).await.expect("a turn");
    let text = Some(text_to(total, number));
    let note = TurnNote { label: Some(format!("turn {number}")), text, ..note() };
    turn.commit(state(number), note, None, VersionId::new()).await.expect("committed").head.id
}

/// Creates three sessions: one of Ann with two turns, one of Bob, and a fork of Ann's.
pub(crate) async fn fill(folder: &Path) -> Vec<(Owner, SessionId)> {
    let store = open(folder).await;
    let (ann, bob) = (create(&store, ANN, 1).await, create(&store, BOB, 2).await);
    turn(&store, ANN, &ann, 3).await;
    turn(&store, ANN, &ann, 4).await;
    let best = TagName::parse("best").expect("a name");
    store.tag(ANN, &ann, best, None).await.expect("tagged");
    let fork = store.fork(ANN, &ann, copies(1), None).await.expect("a fork").remove(0).id;
    store.close().await.expect("closed");
    vec![(ANN, ann), (BOB, bob), (ANN, fork)]
}

/// Returns everything that clients see of the sessions.
pub(crate) async fn view(folder: &Path, sessions: &[(Owner, SessionId)]) -> Vec<String> {
    let store = open(folder).await;
    let mut seen = Vec::new();
    for (owner, id) in sessions {
        let session = store.get(*owner, id).await.expect("the session");
        let versions = store.versions(*owner, id).await.expect("its versions");
        let head = store.load(*owner, id, None).await.expect("its head").1;
        let mut texts = Vec::new();
        for version in &versions {
            texts.push(store.text(*owner, id, Some(&version.id), (None, None)).await.map(|(_, part)| part.tokens));
        }
        seen.push(format!("{session:?} {versions:?} {head:?} {texts:?}"));
    }
    store.close().await.expect("closed");
    seen
}

pub(crate) fn object(folder: &Path, version: &VersionId) -> PathBuf {
    folder.join("objects").join(&version.as_str()[4..6]).join(version.as_str())
}

#[tokio::test]
async fn a_whole_store_has_no_problems_and_a_check_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    fill(folder.path()).await;
    let bytes = || ["index.redb", "index.journal"].map(|name| fs::read(folder.path().join(name)).expect("a file"));
    let before = bytes();
    let report = check(folder.path()).expect("a report");
    assert_eq!((report.sessions, report.snapshots, report.problems), (3, 4, vec![]));
    assert_eq!(bytes(), before);
}

#[tokio::test]
async fn a_used_store_is_not_checked() {
    let folder = tempfile::tempdir().expect("a folder");
    let _store = open(folder.path()).await;
    let refused = check(folder.path()).expect_err("a server uses it").to_string();
    assert!(refused.contains("another process has it open"), "{refused}");
}

#[tokio::test]
async fn damage_is_listed_by_name_and_repaired() {
    let folder = tempfile::tempdir().expect("a folder");
    let sessions = fill(folder.path()).await;
    let store = open(folder.path()).await;
    let lost = turn(&store, ANN, &sessions[0].1, 5).await;
    let only = store.get(BOB, &sessions[1].1).await.expect("the session").head.id;
    store.close().await.expect("closed");
    fs::remove_file(object(folder.path(), &lost)).expect("removed");
    let path = object(folder.path(), &only);
    let mut bytes = fs::read(&path).expect("the snapshot");
    bytes[100] ^= 1;
    fs::write(&path, bytes).expect("written");
    fs::write(folder.path().join("index.redb"), b"not an index").expect("written");

    let problems = check(folder.path()).expect("a report").problems;
    let listed = |words: &[&str]| problems.iter().any(|line| words.iter().all(|word| line.contains(word)));
    assert!(listed(&["index.redb"]), "{problems:?}");
    assert!(listed(&[sessions[0].1.as_str(), lost.as_str(), "is missing"]), "{problems:?}");
    assert!(listed(&[sessions[1].1.as_str(), only.as_str(), "digest"]), "{problems:?}");

    let report = repair(folder.path()).await.expect("repaired");
    let repaired = report.repaired.join("\n");
    assert!(repaired.contains("index.redb") && repaired.contains("rewound from version"), "{repaired}");
    // A version that is lost stays listed.
    assert_eq!(report.problems.len(), 2, "{:?}", report.problems);
    let store = open(folder.path()).await;
    assert_eq!(store.load(ANN, &sessions[0].1, None).await.expect("rewound").1, state(4));
    assert_eq!(store.load(ANN, &sessions[2].1, None).await.expect("untouched").1, state(4));
    assert!(store.load(BOB, &sessions[1].1, None).await.is_err());
}

#[tokio::test]
async fn a_version_that_cannot_be_read_does_not_keep_texts_from_being_repaired() {
    let folder = tempfile::tempdir().expect("a folder");
    let sessions = fill(folder.path()).await;
    let store = open(folder.path()).await;
    let older = store.versions(ANN, &sessions[0].1).await.expect("versions")[1].id.clone();
    let other = store.get(BOB, &sessions[1].1).await.expect("the session").head.id;
    store.close().await.expect("closed");
    let index = redb::Database::open(folder.path().join("index.redb")).expect("the index");
    let transaction = index.begin_write().expect("a transaction");
    for (table, version) in [("versions", &older), ("texts", &other)] {
        let table = redb::TableDefinition::<&str, &[u8]>::new(table);
        transaction.open_table(table).expect("it").insert(version.as_str(), &b"damaged"[..]).expect("overwritten");
    }
    transaction.commit().expect("committed");
    drop(index);
    fs::remove_file(folder.path().join("index.journal")).expect("removed");

    let problems = check(folder.path()).expect("a report").problems.join("\n");
    assert!(problems.contains(&format!("version {older}: its row cannot be read")), "{problems}");
    assert!(problems.contains(&format!("version {other}: its text cannot be read")), "{problems}");
    assert!(!problems.contains(&format!("version {older}: the references")), "{problems}");
    let report = repair(folder.path()).await.expect("repaired");
    assert!(!report.problems.iter().any(|problem| problem.contains("text")), "{:?}", report.problems);
    let store = open(folder.path()).await;
    assert!(store.text(ANN, &sessions[0].1, None, (None, None)).await.is_ok());
    assert!(store.text(BOB, &sessions[1].1, None, (None, None)).await.is_err());
}

#[tokio::test]
async fn exported_sessions_are_the_same_where_they_are_imported() {
    let (from, files, to) = (tempfile::tempdir(), tempfile::tempdir(), tempfile::tempdir());
    let [from, files, to] = [&from, &files, &to].map(|folder| folder.as_ref().expect("a folder").path());
    let sessions = fill(from).await;
    let moved = export(from, files).expect("exported");
    assert_eq!((moved.sessions, moved.snapshots, moved.skipped), (3, 4, vec![]));
    let moved = import(Arc::new(SystemDisk), to, files).await.expect("imported");
    assert_eq!((moved.sessions, moved.skipped), (3, vec![]));
    assert_eq!(view(to, &sessions).await, view(from, &sessions).await);
    assert_eq!(check(to).expect("a report").problems, Vec::<String>::new());
    let again = import(Arc::new(SystemDisk), to, files).await.expect("imported");
    assert_eq!((again.sessions, again.skipped.len()), (0, 3), "{:?}", again.skipped);

    let snapshot = fs::read_dir(files.join("snapshots")).expect("files").next().expect("one").expect("one").path();
    fs::write(&snapshot, b"something else").expect("written");
    let other = tempfile::tempdir().expect("a folder");
    let moved = import(Arc::new(SystemDisk), other.path(), files).await.expect("imported");
    assert!(!moved.skipped.is_empty() && moved.sessions < 3, "{moved:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_store_can_be_backed_up_and_restored() {
    let (from, copy) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let copy = copy.path().join("backup");
    let sessions = fill(from.path()).await;
    let store = open(from.path()).await;
    let made = backup(from.path(), &copy).expect("a backup");
    assert_eq!((made.sessions, made.snapshots, made.copied, made.missing.len()), (3, 4, 4, 0));

    turn(&store, BOB, &sessions[1].1, 6).await;
    let made = backup(from.path(), &copy).expect("a backup");
    assert_eq!((made.snapshots, made.copied), (5, 1), "only what is new");

    store.delete(BOB, &sessions[1].1).await.expect("deleted");
    crate::kit::until("the objects are removed", async || store.stats().garbage_bytes == 0).await;
    let made = backup(from.path(), &copy).expect("a backup");
    assert_eq!((made.sessions, made.snapshots, made.copied, made.removed), (2, 3, 0, 2));
    store.close().await.expect("closed");

    let to = tempfile::tempdir().expect("a folder");
    let restored = restore(&copy, to.path()).expect("restored");
    assert_eq!((restored.sessions, restored.snapshots), (2, 3));
    let left = [sessions[0].clone(), sessions[2].clone()];
    assert_eq!(view(to.path(), &left).await, view(from.path(), &left).await);
    assert!(restore(&copy, to.path()).is_err(), "the folder is not empty");
    let mode = |path: &Path| fs::metadata(path).expect("a file").mode() & 0o777;
    assert_eq!((mode(&copy), mode(&copy.join("index.journal"))), (0o700, 0o600));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_under_load_has_every_turn_acknowledged_before_it() {
    let (from, copies) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let options = tidegate_server::session::StoreOptions { keep_versions: 2, ..in_folder(from.path()) };
    let store = Store::open(options, codec()).await.expect("it opens");
    let mut ids = Vec::new();
    for number in 0..4 {
        ids.push(create(&store, ANN, number).await);
    }
    let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let load = {
        let (store, ids, over) = (store.clone(), ids.clone(), Arc::clone(&over));
        tokio::spawn(async move {
            let mut number = 10;
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                for id in &ids {
                    turn(&store, ANN, id, number).await;
                    number += 1;
                }
            }
        })
    };
    for round in 0..4 {
        let mut least = Vec::new();
        for id in &ids {
            least.push(store.get(ANN, id).await.expect("the session").head.tokens);
        }
        let (source, to) = (from.path().to_owned(), copies.path().join("backup"));
        let made = tokio::task::spawn_blocking(move || backup(&source, &to)).await.expect("it ends").expect("a backup");
        assert_eq!((made.sessions, made.missing.len()), (4, 0), "round {round}");
        let to = copies.path().join(format!("restored-{round}"));
        restore(&copies.path().join("backup"), &to).expect("restored");
        let restored = open(&to).await;
        for (id, least) in ids.iter().zip(least) {
            let (head, snapshot, _) = restored.load(ANN, id, None).await.expect("its head");
            assert!(head.tokens >= least, "round {round}: {} of {least}", head.tokens);
            assert_eq!(snapshot, state(head.tokens - 1));
        }
    }
    over.store(true, std::sync::atomic::Ordering::SeqCst);
    load.await.expect("the load ends");
}
