//! Limits on versions per session, bytes per owner, disk space, and memory.

use std::sync::Arc;

use tidegate_server::session::{
    Durability, Location, Owner, ResponseId, SessionId, Snapshot, Start, Store, StoreError, StoreOptions, Tier,
    VersionId,
};

use crate::kit::{
    ANN, BOB, BYTES, NOW, Plain, agree, copies, empty, ended, head, in_memory, list, new, note, open, seen, snapshot,
    turn, until,
};

async fn kept(store: &Store, id: &SessionId) -> Vec<u64> {
    let versions = store.versions(ANN, id).await.expect("versions");
    versions.iter().filter(|version| version.kept).map(|version| version.tokens).collect()
}

#[tokio::test]
async fn a_session_keeps_its_newest_versions_and_lists_some_older_ones() {
    let (store, objects) = seen(StoreOptions { keep_versions: 3, lineage: 4, ..in_memory() }).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    for number in 1..=10 {
        turn(&store, ANN, &id, number).await.expect("a turn");
    }
    assert_eq!(kept(&store, &id).await, [9, 10, 11]);
    let known = store.versions(ANN, &id).await.expect("versions");
    assert_eq!(known.iter().map(|version| version.tokens).collect::<Vec<_>>(), [5, 6, 7, 8, 9, 10, 11]);
    let gone = StoreError::NotFound { what: "version" };
    assert_eq!(store.load(ANN, &id, Some(&known[0].id)).await.unwrap_err(), gone);
    assert_eq!(store.rewind(ANN, &id, &known[0].id, None, NOW).await.unwrap_err(), gone);
    // A head is kept, no matter how old it is.
    store.rewind(ANN, &id, &known[4].id, None, NOW).await.expect("a rewind");
    let fork = store.fork(ANN, &id, copies(1), None).await.expect("a fork").remove(0);
    for number in 20..24 {
        turn(&store, ANN, &id, number).await.expect("a turn");
    }
    assert_eq!(kept(&store, &id).await, [22, 23, 24]);
    assert_eq!(head(&store, ANN, &fork.id).await, snapshot(8), "a fork's versions stay");
    agree(&store, &*objects, &[ANN], &[]).await;
}

#[tokio::test]
async fn a_turn_after_a_rewind_can_be_undone() {
    let store = open(StoreOptions { keep_versions: 3, ..in_memory() }).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    for number in 1..=4 {
        turn(&store, ANN, &id, number).await.expect("a turn");
    }
    assert_eq!(kept(&store, &id).await, [3, 4, 5]);
    let oldest = store.versions(ANN, &id).await.expect("versions").into_iter().find(|version| version.kept).unwrap().id;
    store.rewind(ANN, &id, &oldest, None, NOW).await.expect("a rewind");
    turn(&store, ANN, &id, 20).await.expect("a turn");
    assert_eq!(kept(&store, &id).await, [3, 5, 21], "the one before the head goes last");
    store.rewind(ANN, &id, &oldest, None, NOW).await.expect("the turn is undone");
}

#[tokio::test]
async fn quotas_limit_an_owner() {
    let options = StoreOptions { owner_sessions: 3, owner_bytes: 3 * BYTES, ..in_memory() };
    let (store, objects) = seen(options).await;
    let id = store.create(ANN, new(Start::Snapshot(snapshot(1)))).await.expect("a session").id;
    let quota = StoreError::Quota { quota: "sessions", bound: 3, found: 4 };
    assert_eq!(store.fork(ANN, &id, copies(3), None).await, Err(quota.clone()));
    let forks = store.fork(ANN, &id, copies(2), None).await.expect("forks");
    assert_eq!(store.create(ANN, empty()).await, Err(quota));
    // A version counts once, no matter how many sessions keep it.
    turn(&store, ANN, &id, 2).await.expect("a turn");
    turn(&store, ANN, &id, 3).await.expect("a turn");
    // The next turn evicts the only version that is not a head: the first version is the head of the forks.
    turn(&store, ANN, &forks[0].id, 4).await.expect("a turn");
    assert_eq!((kept(&store, &id).await, kept(&store, &forks[0].id).await), (vec![2, 4], vec![2, 5]));
    let full = turn(&store, ANN, &forks[1].id, 5).await;
    let bytes = StoreError::Quota { quota: "bytes of snapshots and texts", bound: 3 * BYTES, found: 4 * BYTES };
    assert_eq!(full, Err(bytes.clone()));
    assert_eq!(store.put_response(ANN, &ResponseId::new(), ended(Vec::new(), snapshot(6)), None).await, Err(bytes));
    assert_eq!(head(&store, ANN, &forks[1].id).await, snapshot(1));
    let other = store.create(BOB, new(Start::Snapshot(snapshot(9)))).await.expect("another owner has space");
    agree(&store, &*objects, &[ANN, BOB], &[]).await;
    assert!(store.stats().refused >= 4);
    drop(other);
}

#[tokio::test]
async fn a_full_disk_evicts_old_versions_of_the_least_recently_used_sessions_and_then_refuses() {
    let (store, objects) = seen(StoreOptions { disk_bytes: 5 * BYTES, ..in_memory() }).await;
    let old = store.create(ANN, empty()).await.expect("a session").id;
    let young = store.create(ANN, empty()).await.expect("a session").id;
    for (id, number) in [(&old, 1), (&old, 2), (&young, 3), (&young, 4)] {
        turn(&store, ANN, id, number).await.expect("a turn");
        tokio::time::sleep(std::time::Duration::from_millis(3)).await;
    }
    turn(&store, ANN, &young, 5).await.expect("the disk is exactly full");
    assert_eq!(store.stats().disk_bytes, 5 * BYTES);
    turn(&store, ANN, &young, 6).await.expect("an older version is evicted");
    assert_eq!(kept(&store, &old).await, [0, 3], "an empty version takes no space, a head stays");
    assert_eq!(kept(&store, &young).await, [0, 4, 5, 6, 7]);
    agree(&store, &*objects, &[ANN], &[]).await;
}

#[tokio::test]
async fn heads_are_never_evicted() {
    let (store, objects) = seen(StoreOptions { disk_bytes: 4 * BYTES, ..in_memory() }).await;
    let mut ids = Vec::new();
    for number in 0..4 {
        ids.push(store.create(ANN, new(Start::Snapshot(snapshot(number)))).await.expect("a session").id);
    }
    let puts = objects.puts.load(std::sync::atomic::Ordering::SeqCst);
    let full = store.begin(ANN, &ids[0], None, NOW).await.map(drop);
    assert!(matches!(full, Err(StoreError::Full { .. })), "refused before anything is generated: {full:?}");
    let full = store.create(BOB, new(Start::Snapshot(snapshot(9)))).await;
    assert!(matches!(full, Err(StoreError::Full { .. })), "{full:?}");
    assert_eq!(objects.puts.load(std::sync::atomic::Ordering::SeqCst), puts);
    for (number, id) in ids.iter().enumerate() {
        assert_eq!(head(&store, ANN, id).await, snapshot(number as u64));
    }
    store.delete(ANN, &ids[3]).await.expect("removed");
    turn(&store, ANN, &ids[0], 7).await.expect("deletion frees space");
    turn(&store, ANN, &ids[0], 8).await.expect("an old version can be evicted");
    agree(&store, &*objects, &[ANN, BOB], &[]).await;
    assert!(store.stats().disk_bytes <= 4 * BYTES);
}

#[tokio::test]
async fn an_owner_within_its_share_loses_nothing_to_one_that_fills_the_disk() {
    const CARL: Owner = Owner([3; 16]);
    let (store, objects) = seen(StoreOptions { disk_bytes: 12 * BYTES, ..in_memory() }).await;
    let first = store.create(ANN, new(Start::Snapshot(snapshot(0)))).await.expect("a session").id;
    for number in 1..=2 {
        turn(&store, ANN, &first, number).await.expect("a turn");
    }
    // Bob's session is used later than Ann's, so eviction in order of use alone would take hers.
    let hog = store.create(BOB, new(Start::Snapshot(snapshot(10)))).await.expect("a session").id;
    for number in 11..40 {
        turn(&store, BOB, &hog, number).await.expect("its own old versions make space");
    }
    let number_kept = async |owner, id: &SessionId| {
        store.versions(owner, id).await.expect("versions").iter().filter(|version| version.kept).count()
    };
    assert_eq!((kept(&store, &first).await, number_kept(BOB, &hog).await), (vec![1, 2, 3], 9));
    // A third owner takes its share from the owner that uses most, and no more than its share.
    let third = store.create(CARL, new(Start::Snapshot(snapshot(50)))).await.expect("a session").id;
    for number in 51..70 {
        turn(&store, CARL, &third, number).await.expect("a turn");
    }
    assert_eq!(kept(&store, &first).await, [1, 2, 3]);
    assert_eq!((number_kept(BOB, &hog).await, number_kept(CARL, &third).await), (5, 4));
    // Heads are not evicted, so an owner may fill the disk with them, but not at the expense of owners within their
    // share.
    let refused = loop {
        if let Err(error) = store.create(BOB, new(Start::Snapshot(snapshot(80)))).await {
            break error;
        }
    };
    assert!(matches!(refused, StoreError::Full { .. }), "{refused}");
    assert_eq!((kept(&store, &first).await, number_kept(CARL, &third).await), (vec![1, 2, 3], 4));
    turn(&store, ANN, &first, 90).await.expect("an old version of her own makes space");
    assert_eq!((kept(&store, &first).await, number_kept(CARL, &third).await), (vec![2, 3, 91], 4));
    agree(&store, &*objects, &[ANN, BOB, CARL], &[]).await;
}

#[tokio::test]
async fn concurrent_requests_never_exceed_the_limit() {
    let (store, objects) = seen(StoreOptions { disk_bytes: 10 * BYTES, ..in_memory() }).await;
    let all = (0..40).map(|number| {
        let store = store.clone();
        tokio::spawn(async move { store.create(ANN, new(Start::Snapshot(snapshot(number)))).await })
    });
    let mut made = 0;
    for end in futures_util::future::join_all(all).await {
        match end.expect("the task") {
            Ok(_) => made += 1,
            Err(error) => assert!(matches!(error, StoreError::Full { .. }), "{error}"),
        }
    }
    assert_eq!((made, store.stats().disk_bytes), (10, 10 * BYTES), "admission is exact");
    agree(&store, &*objects, &[ANN], &[]).await;
}

#[tokio::test]
async fn the_cache_stays_within_its_budget() {
    let one = snapshot(1).bytes() as u64;
    let store = open(StoreOptions { ram_bytes: 3 * one, ..in_memory() }).await;
    let mut ids = Vec::new();
    for number in 0..6 {
        ids.push(store.create(ANN, new(Start::Snapshot(snapshot(number)))).await.expect("a session").id);
    }
    assert_eq!((store.stats().ram_snapshots, store.stats().ram_bytes), (3, 3 * one));
    for (at, tier) in [(5, Tier::Memory), (0, Tier::Disk), (0, Tier::Memory), (3, Tier::Disk)] {
        let (_, found, from) = store.load(ANN, &ids[at], None).await.expect("a snapshot");
        assert_eq!((found, from), (snapshot(at as u64), tier), "{at}");
    }
    let stats = store.stats();
    assert_eq!((stats.hits_memory, stats.hits_disk, stats.ram_bytes), (2, 2, 3 * one));
}

#[tokio::test]
async fn options_out_of_range_are_refused() {
    let refused = Store::open(StoreOptions { keep_versions: 0, ..in_memory() }, Arc::new(Plain)).await.map(drop);
    assert_eq!(refused.unwrap_err().to_string(), "keep_versions must be at least 1, found 0");
}

/// A separate file system. `new` takes its size in KiB, and returns `None` if it cannot be mounted.
struct Disk(tempfile::TempDir);

impl Disk {
    fn new(kib: usize) -> Option<Self> {
        let folder = tempfile::tempdir().ok()?;
        let size = format!("size={kib}k");
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(folder.path());
        mount.output().ok()?.status.success().then_some(Self(folder))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(std::process::Command::new("umount").arg("-l").arg(self.0.path()).output());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_loses_nothing_and_recovers_with_space() {
    for durability in [Durability::Turn, Durability::Memory] {
        let Some(disk) = Disk::new(8000) else {
            // A CI run as root can mount, so it must not skip this test.
            let root = std::fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0);
            assert!(!(root && std::env::var_os("CI").is_some_and(|ci| ci == "true")), "no tmpfs for a full disk");
            eprintln!("not tested: no tmpfs can be mounted here, and so no disk be full");
            return;
        };
        let place = Location::Folder(disk.0.path().join("store"));
        let options = StoreOptions { durability, ..StoreOptions::new(place) };
        let large =
            |number: u64| Arc::new(Snapshot { state: vec![0.5; 20_000], read: number + 1, ..Snapshot::empty(number) });
        let store = open(options.clone()).await;
        let mut kept: Vec<(SessionId, u64)> = Vec::new();
        let mut failures = 0;
        for number in 0..150 {
            // A failure must leave everything unchanged.
            match store.create(ANN, new(Start::Snapshot(large(number)))).await {
                Ok(session) => {
                    kept.push((session.id, number));
                    if number == 30 {
                        store.flush().await.expect("flushed");
                    }
                }
                Err(error) => {
                    assert!(matches!(error, StoreError::Full { .. }), "{error}");
                    failures += 1;
                }
            }
        }
        // With `Memory`, the index falls back to its state on disk after a failed write. What it loses frees space, so
        // fewer writes fail.
        let least = if durability == Durability::Memory { 0 } else { 50 };
        assert!(failures > least && kept.len() > 35, "{failures} {}", kept.len());
        // Fills the remaining space, first with a file and then with index entries, until nothing fits at all.
        let filler = disk.0.path().join("filler");
        std::fs::write(&filler, vec![0; 8_000_000]).unwrap_err();
        if !disk.0.path().join("store/ballast").exists() {
            // A flush had released the ballast, so the filler took its space too. No store can prevent that.
            let file = std::fs::File::options().write(true).open(&filler).expect("the filler");
            let length = file.metadata().expect("a length").len();
            file.set_len(length.saturating_sub(1 << 20)).expect("a smaller filler");
        }
        let mut small = 0;
        while small < 20_000 && store.create(ANN, empty()).await.is_ok() {
            small += 1;
        }
        if durability == Durability::Memory {
            // As after a crash, what was not on disk when the index could not be written is lost, but nothing else.
            drop(store.flush().await);
            let (there, _) = list(&store, ANN, None, usize::MAX, false).await.expect("a list");
            kept.retain(|(id, _)| there.iter().any(|session| session.id == *id));
            assert!(kept.len() > 30, "{}", kept.len());
        }
        let turn = store.begin(ANN, &kept[0].0, None, NOW).await.expect("a turn starts");
        // The commit fails, unless leftovers of an earlier failure have been removed meanwhile.
        if turn.commit(large(77), note(), None, VersionId::new()).await.is_ok() {
            kept[0].1 = 77;
        }
        for (id, number) in &kept {
            assert_eq!(head(&store, ANN, id).await, large(*number), "{durability:?}");
        }
        // Deletion also works on a full disk, and frees space.
        for (id, _) in kept.drain(..20) {
            store.delete(ANN, &id).await.expect("a session can be deleted");
        }
        until("the garbage is gone", async || store.stats().garbage_bytes == 0).await;
        let made = store.create(ANN, new(Start::Snapshot(large(501)))).await.expect("there is space again");
        kept.push((made.id, 501));
        std::fs::remove_file(&filler).expect("the filler is removed");
        for (id, _) in kept.drain(..3) {
            store.delete(ANN, &id).await.expect("a session can be deleted");
        }
        let made =
            store.create(ANN, new(Start::Snapshot(large(500)))).await.expect("there is space again, without a restart");
        kept.push((made.id, 500));
        drop(store);
        let store = open(options).await;
        for (id, number) in &kept {
            assert_eq!(head(&store, ANN, id).await, large(*number), "{durability:?}");
        }
    }
}
