//! Damage to the index and its journal. No session of any owner is lost as long as one of the two is intact.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use tidegate_server::session::{Owner, SessionId, Start, Store, StoreError, StoreOptions};

use crate::kit::{ANN, BOB, Plain, copies, empty, head, in_folder, list, new, note, open, snapshot, turn, until};

const PAGE: usize = 4096;
const SESSIONS: u64 = 60;

/// Sessions of two owners, each with the number of its head's snapshot.
type World = Vec<(Owner, SessionId, u64)>;

async fn fill(folder: &Path) -> World {
    let store = open(in_folder(folder)).await;
    let mut world = World::new();
    for number in 0..SESSIONS {
        let owner = if number % 2 == 0 { ANN } else { BOB };
        let id = store.create(owner, new(Start::Snapshot(snapshot(number)))).await.expect("a session").id;
        world.push((owner, id, number));
    }
    for (owner, id, number) in world.iter_mut().take(10) {
        *number += 1000;
        turn(&store, *owner, id, *number).await.expect("a turn");
    }
    for fork in store.fork(ANN, &world[0].1, copies(20), None).await.expect("forks") {
        world.push((ANN, fork.id, world[0].2));
    }
    let (owner, id, _) = world.remove(30);
    store.delete(owner, &id).await.expect("deleted");
    store.close().await.expect("closed");
    world
}

/// Runs one more turn on each of the first 20 sessions.
async fn more_turns(folder: &Path, world: &mut World) {
    let store = open(in_folder(folder)).await;
    for (at, (owner, id, number)) in world.iter_mut().enumerate().take(20) {
        *number = 5000 + at as u64;
        turn(&store, *owner, id, *number).await.expect("a turn");
    }
    store.close().await.expect("closed");
}

/// Copies the index and its journal. A symbolic link shares the objects.
fn copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().expect("a folder");
    for file in ["index.redb", "index.journal"] {
        fs::copy(from.join(file), to.path().join(file)).expect("copied");
    }
    std::os::unix::fs::symlink(from.join("objects"), to.path().join("objects")).expect("a link");
    to
}

/// Checks that every session has its snapshot, and that the store accepts changes.
async fn whole(store: &Store, world: &World, what: &str) {
    assert_eq!(store.stats().sessions, world.len() as u64, "{what}");
    for (owner, id, number) in world {
        let found = store.load(*owner, id, None).await.map(|found| found.1);
        assert_eq!(found, Ok(snapshot(*number)), "{what}: {id}");
    }
    let made = store.create(BOB, empty()).await.expect("a session");
    store.delete(BOB, &made.id).await.expect("deleted");
    assert_eq!(store.failure(), None, "{what}");
}

/// Returns damaged copies of a file: with zeroed pages, flipped bits, or a missing end.
fn damages(whole: &[u8]) -> Vec<(String, Vec<u8>)> {
    let pages = whole.len() / PAGE;
    let mut damages = Vec::new();
    for page in (0..pages).filter(|page| *page < 40 || page % 41 == 0) {
        let at = page * PAGE;
        let mut zeroed = whole.to_vec();
        zeroed[at..at + PAGE].fill(0);
        if zeroed != whole {
            damages.push((format!("page {page} zeroed"), zeroed));
        }
        let mut flipped = whole.to_vec();
        flipped[at + (page * 131) % PAGE] ^= 0x10;
        damages.push((format!("a bit of page {page} flipped"), flipped));
    }
    for cut in [0, 1, 100, PAGE, 10 * PAGE + 7, whole.len() / 2, whole.len() - PAGE, whole.len() - 1] {
        damages.push((format!("cut at {cut}"), whole[..cut].to_vec()));
    }
    damages.push(("zeros".to_owned(), vec![0; 50_000]));
    damages.push(("text".to_owned(), vec![b'x'; 50_000]));
    damages
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_page_of_the_index_costs_no_session() {
    let folder = tempfile::tempdir().expect("a folder");
    let world = fill(folder.path()).await;
    let index = fs::read(folder.path().join("index.redb")).expect("the index");
    let mut rebuilt = 0;
    for (what, bytes) in damages(&index) {
        let copy = copy(folder.path());
        fs::write(copy.path().join("index.redb"), bytes).expect("written");
        let store = open(in_folder(copy.path())).await;
        whole(&store, &world, &what).await;
        rebuilt += usize::from(copy.path().join("index.redb.damaged-1").exists());
        store.close().await.expect("closed");
    }
    assert!(rebuilt > 10, "{rebuilt} damages were noticed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_journal_costs_nothing_and_is_rewritten() {
    let folder = tempfile::tempdir().expect("a folder");
    let world = fill(folder.path()).await;
    let journal = fs::read(folder.path().join("index.journal")).expect("the journal");
    let mut damages: Vec<Option<Vec<u8>>> = vec![None];
    for at in (0..journal.len()).step_by(journal.len() / 12) {
        damages.push(Some(journal[..at].to_vec()));
        let mut flipped = journal.clone();
        flipped[at] ^= 1;
        damages.push(Some(flipped));
    }
    for (number, bytes) in damages.into_iter().enumerate() {
        let copy = copy(folder.path());
        let path = copy.path().join("index.journal");
        match bytes {
            Some(bytes) => fs::write(&path, bytes).expect("written"),
            None => fs::remove_file(&path).expect("removed"),
        }
        let store = open(in_folder(copy.path())).await;
        whole(&store, &world, &format!("damage {number}")).await;
        store.close().await.expect("closed");
        // The journal has been rewritten, so the store can be rebuilt without the index.
        fs::remove_file(copy.path().join("index.redb")).expect("removed");
        let store = open(in_folder(copy.path())).await;
        whole(&store, &world, &format!("damage {number}, rebuilt")).await;
        store.close().await.expect("closed");
    }
}

#[tokio::test]
async fn an_index_without_a_journal_gets_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let world = fill(folder.path()).await;
    // Makes the folder look as an earlier version of the server leaves it.
    fs::remove_file(folder.path().join("index.journal")).expect("removed");
    let index = redb::Database::open(folder.path().join("index.redb")).expect("the index");
    let transaction = index.begin_write().expect("a transaction");
    {
        let mut totals = transaction.open_table(redb::TableDefinition::<&str, u64>::new("totals")).expect("the totals");
        for name in ["journal sequence", "journal digest"] {
            assert!(totals.remove(name).expect("removed").is_some());
        }
    }
    transaction.commit().expect("committed");
    drop(index);
    let store = open(in_folder(folder.path())).await;
    whole(&store, &world, "an old folder").await;
    store.close().await.expect("closed");
    fs::remove_file(folder.path().join("index.redb")).expect("removed");
    whole(&open(in_folder(folder.path())).await, &world, "rebuilt").await;
}

#[tokio::test]
async fn an_index_that_is_older_than_its_journal_is_completed() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = fill(folder.path()).await;
    let old = fs::read(folder.path().join("index.redb")).expect("the index");
    more_turns(folder.path(), &mut world).await;
    fs::write(folder.path().join("index.redb"), old).expect("written");
    whole(&open(in_folder(folder.path())).await, &world, "an old index").await;
}

#[tokio::test]
async fn a_journal_that_is_older_than_its_index_is_rewritten() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = fill(folder.path()).await;
    let old = fs::read(folder.path().join("index.journal")).expect("the journal");
    more_turns(folder.path(), &mut world).await;
    fs::write(folder.path().join("index.journal"), old).expect("written");
    let store = open(in_folder(folder.path())).await;
    whole(&store, &world, "an old journal").await;
    store.close().await.expect("closed");
    fs::remove_file(folder.path().join("index.redb")).expect("removed");
    whole(&open(in_folder(folder.path())).await, &world, "rebuilt").await;
}

#[tokio::test]
async fn an_index_that_is_older_than_a_rewritten_journal_is_rebuilt() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut world = fill(folder.path()).await;
    let old = fs::read(folder.path().join("index.redb")).expect("the index");
    more_turns(folder.path(), &mut world).await;
    // The new journal begins after the old index's last transaction.
    fs::remove_file(folder.path().join("index.journal")).expect("removed");
    open(in_folder(folder.path())).await.close().await.expect("closed");
    fs::write(folder.path().join("index.redb"), old).expect("written");
    whole(&open(in_folder(folder.path())).await, &world, "an index older than its journal").await;
}

#[tokio::test]
async fn a_snapshot_that_a_later_transaction_dropped_is_not_needed() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = || StoreOptions { keep_versions: 2, ..in_folder(folder.path()) };
    let store = open(options()).await;
    let id = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session").id;
    store.close().await.expect("closed");
    let old = fs::read(folder.path().join("index.redb")).expect("the index");
    let store = open(options()).await;
    let dropped = turn(&store, ANN, &id, 2).await.expect("a turn").head.id.to_string();
    for number in 3..7 {
        turn(&store, ANN, &id, number).await.expect("a turn");
    }
    store.close().await.expect("closed");
    // The sweep may have removed this object already.
    let _ = fs::remove_file(folder.path().join("objects").join(&dropped[4..6]).join(&dropped));
    fs::write(folder.path().join("index.redb"), old).expect("written");
    assert_eq!(head(&open(options()).await, ANN, &id).await, snapshot(6));
}

#[tokio::test]
async fn transactions_whose_objects_did_not_reach_the_disk_are_undone() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(in_folder(folder.path())).await;
    let id = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session").id;
    turn(&store, ANN, &id, 2).await.expect("a turn");
    store.close().await.expect("closed");
    let old = fs::read(folder.path().join("index.redb")).expect("the index");
    let store = open(in_folder(folder.path())).await;
    turn(&store, ANN, &id, 3).await.expect("a turn");
    let lost = turn(&store, ANN, &id, 4).await.expect("a turn").head.id.to_string();
    turn(&store, ANN, &id, 5).await.expect("a turn");
    store.close().await.expect("closed");
    fs::write(folder.path().join("index.redb"), old).expect("written");
    fs::write(folder.path().join("objects").join(&lost[4..6]).join(&lost), b"").expect("emptied");
    for _ in 0..2 {
        let store = open(in_folder(folder.path())).await;
        assert_eq!(head(&store, ANN, &id).await, snapshot(3));
        store.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_journal_of_many_turns_is_rewritten_and_stays_small() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(in_folder(folder.path())).await;
    let metadata = |number: u64| [("note".to_owned(), format!("{number}{}", "0".repeat(400_000)))].into();
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let (mut last, mut largest) = (0, 0);
    for number in 0..60 {
        let patch = tidegate_server::session::Patch { metadata: Some(metadata(number)), ..Default::default() };
        store.update(ANN, &id, patch).await.expect("updated");
        last = fs::metadata(folder.path().join("index.journal")).expect("the journal").len();
        largest = largest.max(last);
    }
    assert!(largest > last && largest < 20 << 20, "{largest} bytes at most, {last} now");
    store.close().await.expect("closed");
    fs::remove_file(folder.path().join("index.redb")).expect("removed");
    let store = open(in_folder(folder.path())).await;
    assert_eq!(store.get(ANN, &id).await.expect("the session").metadata, metadata(59));
}

#[tokio::test]
async fn a_folder_that_is_gone_is_noticed_and_nothing_is_acknowledged() {
    let parent = tempfile::tempdir().expect("a folder");
    let (folder, moved) = (parent.path().join("store"), parent.path().join("moved"));
    let options = StoreOptions { sweep_every: std::time::Duration::from_millis(20), ..in_folder(&folder) };
    let store = open(options).await;
    let id = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session").id;
    let begun = store.begin(ANN, &id, None, crate::kit::NOW).await.expect("a turn");
    fs::rename(&folder, &moved).expect("moved");
    let refused = begun.commit(snapshot(2), note(), None, tidegate_server::session::VersionId::new()).await;
    assert!(matches!(refused, Err(StoreError::Unavailable { .. })), "{refused:?}");
    let failure = store.failure().expect("a failure").to_string();
    assert!(failure.contains("it was removed, replaced or unmounted"), "{failure}");
    assert!(store.create(ANN, empty()).await.is_err());
    assert!(!folder.exists(), "nothing is written where the folder was");
    fs::rename(&moved, &folder).expect("moved back");
    until("the store works again", async || store.failure().is_none()).await;
    turn(&store, ANN, &id, 3).await.expect("a turn");
    assert_eq!(head(&store, ANN, &id).await, snapshot(3));
}

#[tokio::test]
async fn a_bad_row_does_not_stop_expiry() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(in_folder(folder.path())).await;
    let short = |number| tidegate_server::session::NewSession {
        ttl: Some(std::time::Duration::from_secs(1)),
        ..new(Start::Snapshot(snapshot(number)))
    };
    let bad = store.create(ANN, short(1)).await.expect("a session");
    store.create(ANN, short(2)).await.expect("a session");
    let kept = store.create(ANN, new(Start::Snapshot(snapshot(3)))).await.expect("a session").id;
    store.close().await.expect("closed");
    let index = redb::Database::open(folder.path().join("index.redb")).expect("the index");
    let transaction = index.begin_write().expect("a transaction");
    transaction
        .open_table(redb::TableDefinition::<&str, &[u8]>::new("versions"))
        .expect("the versions")
        .insert(bad.head.id.as_str(), &b"not a row"[..])
        .expect("written");
    transaction.commit().expect("committed");
    drop(index);
    let options = StoreOptions { sweep_every: std::time::Duration::from_millis(20), ..in_folder(folder.path()) };
    let store = Store::open(options, Arc::new(Plain)).await.expect("it opens");
    until("the other session expires", async || store.stats().sessions == 2).await;
    let (listed, _) = list(&store, ANN, None, 10, false).await.expect("a list");
    assert_eq!(listed.into_iter().map(|session| session.id).collect::<Vec<_>>(), [kept]);
}
