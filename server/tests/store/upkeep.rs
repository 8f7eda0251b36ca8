//! Folders that are refused because they are in use or of a later version, and maintenance that was interrupted.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use redb::{ReadableTable as _, TableDefinition, TableHandle as _};
use tidegate_server::session::maintenance::{backup, check, export, import, repair, restore};
use tidegate_server::session::{Owner, SessionId, Store, StoreError};

use crate::kit::{ANN, BOB, in_folder, list};
use crate::maintenance::{codec, fill, object, open, state, turn, view};
use crate::sim::SimDisk;
use crate::sim_objects::SimObjects;

const VERSIONS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("versions");
const TOTALS: TableDefinition<'_, &str, u64> = TableDefinition::new("totals");

/// Changes the index directly, not through a store.
fn change(folder: &Path, work: impl FnOnce(&redb::WriteTransaction)) {
    let index = redb::Database::open(folder.join("index.redb")).expect("the index");
    let transaction = index.begin_write().expect("a transaction");
    work(&transaction);
    transaction.commit().expect("committed");
}

async fn refusal(folder: &Path) -> String {
    Store::open(in_folder(folder), codec()).await.map(drop).expect_err("refused").to_string()
}

#[tokio::test]
async fn a_journal_of_a_later_version_is_refused_and_left_as_it_is() {
    let folder = tempfile::tempdir().expect("a folder");
    fill(folder.path()).await;
    let path = folder.path().join("index.journal");
    let mut bytes = fs::read(&path).expect("the journal");
    bytes[8] = 2;
    fs::write(&path, &bytes).expect("written");
    let copy = tempfile::tempdir().expect("a folder");
    let told = [
        refusal(folder.path()).await,
        check(folder.path()).expect_err("refused").to_string(),
        repair(folder.path()).await.expect_err("refused").to_string(),
        backup(folder.path(), copy.path()).expect_err("refused").to_string(),
    ];
    // Without the index file, the index must not be rebuilt from a journal that cannot be read.
    fs::remove_file(folder.path().join("index.redb")).expect("removed");
    for told in told.into_iter().chain([refusal(folder.path()).await]) {
        assert!(told.contains("index.journal") && told.contains("version 2") && told.contains("version 1"), "{told}");
    }
    assert_eq!(fs::read(&path).expect("the journal"), bytes);
}

#[tokio::test]
async fn an_index_of_a_later_version_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    fill(folder.path()).await;
    change(folder.path(), |transaction| {
        let mut totals = transaction.open_table(TOTALS).expect("the totals");
        totals.insert("format version", 7).expect("written");
    });
    for told in [refusal(folder.path()).await, check(folder.path()).expect_err("refused").to_string()] {
        assert!(told.contains("index.redb") && told.contains("version 7") && told.contains("version 1"), "{told}");
    }
    // A later file format of redb is refused too. Both commit slots contain its version.
    let path = folder.path().join("index.redb");
    let mut bytes = fs::read(&path).expect("the index");
    (bytes[64], bytes[192]) = (4, 4);
    fs::write(&path, &bytes).expect("written");
    let told = refusal(folder.path()).await;
    assert!(told.contains("version 4") && told.contains("version 3"), "{told}");
    assert_eq!(fs::read(&path).expect("the index"), bytes);
}

#[tokio::test]
async fn an_index_of_an_earlier_version_is_checked() {
    let folder = tempfile::tempdir().expect("a folder");
    let sessions = fill(folder.path()).await;
    fs::remove_file(folder.path().join("index.journal")).expect("removed");
    change(folder.path(), |transaction| {
        for table in ["droppable_by", "receipt_bytes", "texts", "text_refs", "dead_texts", "text_bytes"] {
            let tables: Vec<_> = transaction.list_tables().expect("tables").collect();
            transaction.delete_table(tables.into_iter().find(|it| it.name() == table).expect("it")).expect("deleted");
        }
        let mut totals = transaction.open_table(TOTALS).expect("the totals");
        for name in ["journal sequence", "journal digest", "format version"] {
            totals.remove(name).expect("removed");
        }
    });
    let before = fs::read(folder.path().join("index.redb")).expect("the index");
    let report = check(folder.path()).expect("a report");
    assert_eq!((report.sessions, report.snapshots, report.problems), (3, 4, vec![]));
    let notes = report.notes.join("\n");
    assert!(notes.contains("without a journal") && notes.contains("a converted copy was checked"), "{notes}");
    assert_eq!(fs::read(folder.path().join("index.redb")).expect("the index"), before);
    let store = open(folder.path()).await;
    let lost = store.get(BOB, &sessions[1].1).await.expect("the session").head.id;
    let refused = store.text(BOB, &sessions[1].1, None, (None, None)).await.expect_err("no text");
    assert!(matches!(refused, StoreError::TextNotKept { .. }), "{refused}");
    store.close().await.expect("closed");
    fs::remove_file(object(folder.path(), &lost)).expect("removed");
    fs::write(folder.path().join("index.redb"), before).expect("written");
    fs::remove_file(folder.path().join("index.journal")).expect("removed");
    let problems = check(folder.path()).expect("a report").problems;
    assert!(problems.len() == 1 && problems[0].contains(lost.as_str()), "{problems:?}");
}

#[tokio::test]
async fn a_used_folder_whose_index_is_gone_is_protected() {
    let (folder, files, copy) = (tempfile::tempdir(), tempfile::tempdir(), tempfile::tempdir());
    let [folder, files, copy] = [&folder, &files, &copy].map(|it| it.as_ref().expect("a folder").path());
    fill(folder).await;
    export(folder, files).expect("exported");
    backup(folder, copy).expect("a backup");
    let _store = open(folder).await;
    for removed in ["index.redb", "index.journal"] {
        fs::remove_file(folder.join(removed)).expect("removed");
        let told = [
            check(folder).expect_err("refused").to_string(),
            repair(folder).await.expect_err("refused").to_string(),
            import(Arc::new(tidegate_server::session::SystemDisk), folder, files)
                .await
                .expect_err("refused")
                .to_string(),
            restore(copy, folder).expect_err("refused").to_string(),
        ];
        for told in told {
            assert!(told.contains("another process has it open"), "{told}");
        }
        assert!(!folder.join(removed).exists(), "nothing is written");
    }
}

#[tokio::test]
async fn a_session_is_not_rewound_to_a_version_without_a_row() {
    let folder = tempfile::tempdir().expect("a folder");
    let sessions = fill(folder.path()).await;
    let (owner, id) = &sessions[0];
    let store = open(folder.path()).await;
    let (bad, lost) = (turn(&store, *owner, id, 5).await, turn(&store, *owner, id, 6).await);
    let (other, headless) = (sessions[1].1.clone(), turn(&store, BOB, &sessions[1].1, 7).await);
    store.close().await.expect("closed");
    change(folder.path(), |transaction| {
        let mut versions = transaction.open_table(VERSIONS).expect("the versions");
        for version in [&bad, &headless] {
            assert!(versions.remove(version.as_str()).expect("removed").is_some());
        }
        assert!(versions.get(lost.as_str()).expect("read").is_some());
    });
    fs::remove_file(folder.path().join("index.journal")).expect("removed");
    fs::remove_file(object(folder.path(), &lost)).expect("removed");
    let report = repair(folder.path()).await.expect("repaired");
    let store = open(folder.path()).await;
    // The version before the lost one has a snapshot but no row, so the session is rewound past it.
    assert_eq!(store.load(*owner, id, None).await.expect("rewound").1, state(4), "{:?}", report.repaired);
    // A head without a row cannot be read either.
    assert_eq!(store.load(BOB, &other, None).await.expect("rewound").1, state(2), "{:?}", report.repaired);
}

#[tokio::test]
async fn an_interrupted_restore_is_completed_by_the_next() {
    let (from, copy, to) = (tempfile::tempdir(), tempfile::tempdir(), tempfile::tempdir());
    let [from, copy, to] = [&from, &copy, &to].map(|it| it.as_ref().expect("a folder").path());
    let sessions = fill(from).await;
    backup(from, copy).expect("a backup");
    // A folder in its place prevents the index from being written.
    fs::create_dir(to.join("index.new")).expect("a folder in the way");
    restore(copy, to).expect_err("interrupted");
    assert!(to.join("index.journal").exists() && !to.join("index.redb").exists());
    fs::remove_dir(to.join("index.new")).expect("removed");
    let restored = restore(copy, to).expect("completed");
    assert_eq!((restored.sessions, restored.snapshots, restored.copied), (3, 4, 0));
    restore(copy, to).expect("it is the same store still");
    assert_eq!(view(to, &sessions).await, view(from, &sessions).await);
    let store = open(to).await;
    let made = turn(&store, ANN, &sessions[0].1, 9).await;
    store.close().await.expect("closed");
    let refused = restore(copy, to).expect_err("the store has been used").to_string();
    assert!(refused.contains("it exists"), "{refused}");
    assert_eq!(open(to).await.get(ANN, &sessions[0].1).await.expect("the session").head.id, made);
}

async fn on(disk: &SimDisk) -> Store {
    let folder = PathBuf::from("/sessions");
    let objects = Arc::new(SimObjects { disk: disk.clone(), folder: folder.clone() });
    Store::open_on(Arc::new(disk.clone()), objects, in_folder(&folder), codec()).await.expect("the store opens")
}

/// Returns a description of each session of a store: everything that clients see of it.
async fn described(store: &Store) -> Vec<String> {
    let mut seen = Vec::new();
    for owner in [ANN, BOB] {
        for session in list(store, owner, None, usize::MAX, false).await.expect("a list").0 {
            let versions = store.versions(owner, &session.id).await.expect("its versions");
            for version in versions.iter().filter(|version| version.kept) {
                store.load(owner, &session.id, Some(&version.id)).await.expect("its snapshot");
            }
            seen.push(format!("{session:?} {versions:?}"));
        }
    }
    seen.sort();
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_syncs_in_batches_and_can_be_repeated_after_a_power_cut() {
    let (from, files) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let store = open(from.path()).await;
    let mut made: Vec<(Owner, SessionId)> = Vec::new();
    for number in 0..40 {
        made.push((ANN, crate::maintenance::create(&store, ANN, number).await));
    }
    store.close().await.expect("closed");
    export(from.path(), files.path()).expect("exported");
    let disk = SimDisk::default();
    let folder = Path::new("/sessions");
    let moved = import(Arc::new(disk.clone()), folder, files.path()).await.expect("imported");
    assert_eq!((moved.sessions, moved.snapshots), (40, 40));
    // At most one sync for each object and for each of their folders, and a few for the index.
    assert!(disk.syncs() < 2 * 40 + 40, "{} syncs", disk.syncs());
    let operations = disk.operations();
    let whole = described(&on(&disk).await).await;
    assert_eq!(whole.len(), 40);
    let mut random = StdRng::seed_from_u64(5);
    for round in 0..12 {
        let cut = disk.cut(operations * (round + 1) / 12, &mut random);
        let store = on(&cut).await;
        let there = described(&store).await;
        assert!(there.iter().all(|session| whole.contains(session)), "only whole sessions");
        store.close().await.expect("closed");
        drop(store);
        let again = import(Arc::new(cut.clone()), folder, files.path()).await.expect("imported");
        assert_eq!(again.sessions + there.len(), 40, "round {round}");
        assert_eq!(described(&on(&cut).await).await, whole, "round {round}");
    }
}

#[tokio::test]
async fn texts_that_are_damaged_or_counted_wrongly_are_found_and_repaired() {
    let folder = tempfile::tempdir().expect("a folder");
    let sessions = fill(folder.path()).await;
    let store = open(folder.path()).await;
    let versions = store.versions(ANN, &sessions[0].1).await.expect("versions");
    store.close().await.expect("closed");
    let lines = || view(folder.path(), &sessions);
    let before = lines().await;
    // Gives the middle version a wrong count.
    let refs: TableDefinition<&str, (&[u8; 16], u64, u64)> = TableDefinition::new("text_refs");
    let texts: TableDefinition<&str, &[u8]> = TableDefinition::new("texts");
    change(folder.path(), |transaction| {
        let mut refs = transaction.open_table(refs).expect("the references");
        refs.insert(versions[1].id.as_str(), (&ANN.0, 9, 140)).expect("written");
    });
    fs::remove_file(folder.path().join("index.journal")).expect("removed");
    drop(lines().await);
    let problems = check(folder.path()).expect("a report").problems;
    assert!(problems.len() == 1 && problems[0].contains("counted wrongly"), "{problems:?}");
    assert_eq!(repair(folder.path()).await.expect("repaired").problems, [""; 0]);
    assert_eq!(lines().await, before);
    // If a row cannot be read, the texts that continue it are lost too.
    change(folder.path(), |transaction| {
        let mut texts = transaction.open_table(texts).expect("the texts");
        texts.insert(versions[1].id.as_str(), &[9_u8][..]).expect("written");
    });
    fs::remove_file(folder.path().join("index.journal")).expect("removed");
    drop(open(folder.path()).await);
    let problems = check(folder.path()).expect("a report").problems.join("\n");
    assert!(problems.contains("its text cannot be read"), "{problems}");
    assert_eq!(repair(folder.path()).await.expect("repaired").problems, [""; 0]);
    let store = open(folder.path()).await;
    for version in &versions[1..] {
        let refused = store.text(ANN, &sessions[0].1, Some(&version.id), (None, None)).await.expect_err("no text");
        assert!(matches!(refused, StoreError::TextNotKept { .. }), "{refused}");
    }
    let first = store.text(ANN, &sessions[0].1, Some(&versions[0].id), (None, None)).await.expect("its text").1;
    assert_eq!(first.tokens, [1, 1]);
}
