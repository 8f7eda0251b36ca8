//! Faults: a failing disk, damaged objects, and a damaged index.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use object_store::ObjectStoreExt as _;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tidegate_server::session::{Durability, Start, Store, StoreError, StoreOptions, VersionId};

use crate::kit::{
    ANN, Faulty, NOW, Plain, agree, empty, head, in_folder, in_memory, list, new, note, open, seen, snapshot, turn,
    until,
};
use crate::sim::SimDisk;
use crate::sim_objects::SimObjects;

#[tokio::test]
async fn a_failed_write_changes_nothing() {
    for leaves in [0, 1, 100, 1_000_000] {
        let (store, objects) = seen(in_memory()).await;
        objects.leaves.store(leaves, Ordering::SeqCst);
        let id = store.create(ANN, empty()).await.expect("a session").id;
        let mut last = Arc::new(tidegate_server::session::Snapshot::empty(1));
        for number in 1..20 {
            let before = (store.get(ANN, &id).await, store.stats().disk_bytes, store.stats().ram_bytes);
            if number % 3 == 0 {
                objects.fails_in.store(0, Ordering::SeqCst);
                let turn = store.begin(ANN, &id, None, NOW).await.expect("a turn");
                let failed = turn.commit(snapshot(number), note(), None, VersionId::new()).await;
                assert!(matches!(failed, Err(StoreError::Unavailable { .. })), "{failed:?}");
                let after = (store.get(ANN, &id).await, store.stats().disk_bytes, store.stats().ram_bytes);
                assert_eq!(before, after);
            } else {
                turn(&store, ANN, &id, number).await.expect("a turn");
                last = snapshot(number);
            }
            assert_eq!(head(&store, ANN, &id).await, last);
        }
        agree(&store, &*objects, &[ANN], &[]).await;
    }
}

#[tokio::test]
async fn an_error_names_the_version_of_a_damaged_object() {
    let (store, objects) = seen(StoreOptions { ram_bytes: 0, ..in_memory() }).await;
    let session = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session");
    let version = session.head.id.to_string();
    let path = object_store::path::Path::from_iter(["objects", &version[4..6], &version]);
    let whole = objects.get(&path).await.expect("the object").bytes().await.expect("its bytes");
    let mut flipped = whole.to_vec();
    flipped[40] ^= 1;
    for damaged in [Some(flipped), Some(whole[..100].to_vec()), Some([&*whole, &*whole].concat()), None] {
        match damaged {
            Some(bytes) => drop(objects.put(&path, bytes.into()).await.expect("written")),
            None => objects.delete(&path).await.expect("removed"),
        }
        let told = store.begin(ANN, &session.id, None, NOW).await.map(drop).unwrap_err();
        assert!(matches!(&told, StoreError::Corrupt { version, .. } if *version == session.head.id), "{told}");
    }
    assert!(!store.get(ANN, &session.id).await.expect("the session").in_use);
}

fn objects(folder: &Path) -> Vec<PathBuf> {
    let folders =
        fs::read_dir(folder.join("objects")).expect("the objects").map(|entry| entry.expect("a folder").path());
    folders
        .flat_map(|folder| fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file").path()))
        .collect()
}

#[tokio::test]
async fn only_leftovers_of_a_crash_are_removed() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(in_folder(folder.path())).await;
    let id = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session").id;
    drop(store);
    let mine = objects(folder.path());
    assert_eq!(mine.len(), 1);
    let orphan = VersionId::new().to_string();
    let shard = folder.path().join("objects").join(&orphan[4..6]);
    fs::write(shard.join(&orphan), "complete, but not in the index").expect("written");
    fs::write(shard.join(format!("{orphan}#1")), "half").expect("written");
    fs::write(shard.join("notes.txt"), "not the store's").expect("written");
    let store = open(in_folder(folder.path())).await;
    let left: Vec<PathBuf> = [mine[0].clone(), shard.join("notes.txt")].into();
    until("the sweep", async || objects(folder.path()).iter().all(|path| left.contains(path))).await;
    assert_eq!(objects(folder.path()).len(), 2);
    assert_eq!(head(&store, ANN, &id).await, snapshot(1));
}

#[tokio::test]
async fn a_folder_is_released_after_the_last_removal() {
    let folder = tempfile::tempdir().expect("a folder");
    let objects = Arc::new(Faulty::default());
    let opened = || Store::open_with(Arc::clone(&objects) as _, in_folder(folder.path()), Arc::new(Plain));
    let store = opened().await.expect("the store opens");
    let id = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session").id;
    let held = objects.no_removal.lock().await;
    store.delete(ANN, &id).await.expect("deleted");
    until("a removal", async || objects.removing.load(Ordering::SeqCst) == 1).await;
    let closing = tokio::spawn(async move { store.close().await });
    // Otherwise, the next process could store a version whose object this process then removes.
    assert!(matches!(opened().await, Err(StoreError::InUse { .. })));
    drop(held);
    closing.await.expect("the task").expect("closed");
    let store = opened().await.expect("the store opens");
    agree(&store, &*objects, &[ANN], &[]).await;
}

#[tokio::test]
async fn a_damaged_index_without_a_journal_is_reported_by_name_and_nothing_is_deleted() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(in_folder(folder.path())).await;
    let mut ids = Vec::new();
    for number in 0..200 {
        ids.push(store.create(ANN, new(Start::Snapshot(snapshot(number)))).await.expect("a session").id);
    }
    store.close().await.expect("closed");
    let index = folder.path().join("index.redb");
    let whole = fs::read(&index).expect("the index");
    let mut opened = 0;
    let cuts = [0, 1, 100, 4096, 10_000, whole.len() / 2, whole.len() - 4096, whole.len() - 1];
    let damages = cuts.map(|cut| (format!("cut at {cut}"), whole[..cut].to_vec()));
    let garbage = [("zeros".to_owned(), vec![0; 50_000]), ("text".to_owned(), vec![b'x'; 50_000])];
    for (what, bytes) in damages.into_iter().chain(garbage) {
        fs::write(&index, bytes).expect("written");
        drop(fs::remove_file(folder.path().join("index.journal")));
        match Store::open(in_folder(folder.path()), Arc::new(Plain)).await {
            Err(error) => {
                assert!(error.to_string().contains("index.redb"), "{what}: {error}");
                assert!(matches!(error, StoreError::Index { .. }), "{what}: {error}");
            }
            // The missing part was not in use, so everything must still be there.
            Ok(store) => {
                opened += 1;
                for (number, id) in ids.iter().enumerate() {
                    let found = store.load(ANN, id, None).await;
                    assert_eq!(found.map(|found| found.1), Ok(snapshot(number as u64)), "{what}");
                }
                store.close().await.expect("closed");
            }
        }
        assert_eq!(objects(folder.path()).len(), 200, "{what}");
    }
    assert!(opened < 4);
    fs::remove_file(&index).expect("removed");
    drop(fs::remove_file(folder.path().join("index.journal")));
    let missing = Store::open(in_folder(folder.path()), Arc::new(Plain)).await.map(drop).unwrap_err();
    assert!(missing.to_string().contains("it is missing, but there are snapshots"), "{missing}");
    fs::write(&index, whole).expect("put back");
    let store = open(in_folder(folder.path())).await;
    assert_eq!(head(&store, ANN, &ids[199]).await, snapshot(199));
}

#[tokio::test]
async fn an_index_in_use_is_reported() {
    let folder = tempfile::tempdir().expect("a folder");
    let _store = open(in_folder(folder.path())).await;
    let error = Store::open(in_folder(folder.path()), Arc::new(Plain)).await.map(drop).unwrap_err();
    assert!(error.to_string().contains("another process has it open"), "{error}");
}

#[test]
fn a_failing_disk_fails() {
    let disk = SimDisk::default();
    disk.fail(1, Some(2));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let opened = runtime.block_on(async {
        let folder = PathBuf::from("/sessions");
        let objects = Arc::new(SimObjects { disk: disk.clone(), folder: folder.clone() });
        Store::open_on(Arc::new(disk.clone()), objects, in_folder(&folder), Arc::new(Plain)).await
    });
    assert!(opened.is_err() && disk.failed() > 0);
}

#[tokio::test]
async fn what_the_index_could_not_commit_does_not_come_back_after_a_restart() {
    let folder = PathBuf::from("/sessions");
    let open = |disk: SimDisk| {
        let objects = Arc::new(SimObjects { disk: disk.clone(), folder: folder.clone() });
        Store::open_on(Arc::new(disk), objects, in_folder(&folder), Arc::new(Plain))
    };
    let disk = SimDisk::default();
    let store = open(disk.clone()).await.expect("a store");
    let kept = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session").id;
    // When this sync fails, the journal already has the transaction.
    disk.fail_sync(&folder.join("index.redb"));
    let failed = store.create(ANN, new(Start::Snapshot(snapshot(2)))).await;
    assert!(matches!(failed, Err(StoreError::Unavailable { .. })), "{failed:?}");
    for disk in [disk.killed(), disk.cut(disk.operations(), &mut StdRng::seed_from_u64(1))] {
        let restarted = open(disk).await.expect("the store");
        let (found, _) = list(&restarted, ANN, None, usize::MAX, false).await.expect("a list");
        assert_eq!(found.iter().map(|session| &session.id).collect::<Vec<_>>(), [&kept]);
    }
}

#[tokio::test]
async fn a_turn_outlives_the_loss_of_the_version_that_it_continues() {
    let (folder, disk) = (PathBuf::from("/sessions"), SimDisk::default());
    let objects = Arc::new(SimObjects { disk: disk.clone(), folder: folder.clone() });
    let options = StoreOptions { durability: Durability::Memory, ..in_folder(&folder) };
    let store = Store::open_on(Arc::new(disk.clone()), objects, options, Arc::new(Plain)).await.expect("a store");
    let session = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session");
    store.flush().await.expect("it is on disk");
    let lost = turn(&store, ANN, &session.id, 2).await.expect("a turn").head.id;
    let running = store.begin(ANN, &session.id, None, NOW).await.expect("the session");
    assert_eq!(running.session().head.id, lost);
    disk.fail_sync(&folder.join("index.redb"));
    store.flush().await.expect_err("the disk fails");
    // The index has returned to its state on disk.
    assert_eq!(store.get(ANN, &session.id).await.expect("the session").head.id, session.head.id);
    let ended = running.commit(snapshot(3), note(), None, VersionId::new()).await.expect("the turn ends");
    assert_eq!(ended.head.parent, Some(lost));
    assert_eq!(head(&store, ANN, &session.id).await, snapshot(3));
}
