//! Moves sessions between a folder and the storage of several servers, and verifies them. The tests need a PostgreSQL
//! server, named by `TIDEGATE_TEST_POSTGRES`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore as _, ObjectStoreExt as _};
use tempfile::TempDir;
use tidegate_model::StateLayout;

use super::cluster::Cluster;
use super::transfer::{export, import};
use crate::session::disk::SystemDisk;
use crate::session::embedded::EmbeddedIndex;
use crate::session::format::{Codec, Fingerprint};
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{Index, Limits};
use crate::session::patch::Metadata;
use crate::session::postgres::tests::Schema;
use crate::session::postgres::{PostgresIndex, PostgresOptions};
use crate::session::snapshot::Snapshot;
use crate::session::store::{Fork, Location, NewSession, Start, Store, StoreOptions, TurnNote};
use crate::session::tag::TagName;
use crate::session::text::AddedText;

const ANN: Owner = Owner([1; 16]);
const BOB: Owner = Owner([2; 16]);

fn codec() -> Arc<Codec> {
    let part = |digit: &str| digit.repeat(64);
    let fingerprint = Fingerprint { architecture: part("a"), weights: part("b"), tokenizer: part("c") };
    let layout = StateLayout { layers: 1, heads: 1, head: 10, taps: 0, channels: 0, cross: 0 };
    Arc::new(Codec { fingerprint, layout, vocab_size: 50, greatest: Vec::new(), sources: 0, keys: None })
}

fn state(read: u64) -> Arc<Snapshot> {
    Arc::new(Snapshot { state: vec![read as f32; 10], read, ..Snapshot::empty(1) })
}

/// Returns what a turn adds to a text, of which `kept` tokens remain.
fn text(kept: u64, total: u64) -> AddedText {
    AddedText { kept, tokens: vec![7; (total - kept) as usize], messages: Vec::new() }
}

fn new(read: u64) -> NewSession {
    let metadata: Metadata = [("read".to_owned(), read.to_string())].into();
    let label = Some("first".to_owned());
    NewSession { start: Start::Read(state(read), text(0, read)), metadata, ttl: None, label }
}

/// Runs a turn of three tokens.
async fn turn(store: &Store, owner: Owner, id: &SessionId) -> VersionId {
    let turn = store.begin(owner, id, None, Duration::from_secs(9)).await.expect("the session");
    let (read, version) = (turn.head().read, VersionId::new());
    let note =
        TurnNote { label: Some(format!("after {read}")), text: Some(text(read, read + 3)), ..TurnNote::default() };
    turn.commit(state(read + 3), note, None, version.clone()).await.expect("the turn ends");
    version
}

/// Creates three sessions in a folder: one of Ann with several turns, of which not all snapshots are kept, one of Bob,
/// and a fork of the first.
async fn fill(folder: &Path) -> Vec<(Owner, SessionId)> {
    let options = StoreOptions { keep_versions: 2, ..StoreOptions::new(Location::Folder(folder.to_owned())) };
    let store = Store::open(options, codec()).await.expect("a store");
    let ann = store.create(ANN, new(3)).await.expect("a session").id;
    let bob = store.create(BOB, new(4)).await.expect("a session").id;
    for _ in 0..3 {
        turn(&store, ANN, &ann).await;
    }
    let best = TagName::parse("best").expect("a name");
    store.tag(ANN, &ann, best, None).await.expect("tagged");
    let fork = Fork { n: 1, ..Fork::default() };
    let fork = store.fork(ANN, &ann, fork, None).await.expect("a fork").remove(0).id;
    turn(&store, ANN, &ann).await;
    store.close().await.expect("closed");
    vec![(ANN, ann), (BOB, bob), (ANN, fork)]
}

/// Returns the content of each file below a folder.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for part in ["sessions", "snapshots", "texts"] {
        for file in fs::read_dir(folder.join(part)).expect("a folder") {
            let path = file.expect("a file").path();
            files.insert(path.strip_prefix(folder).expect("below").display().to_string(), fs::read(&path).expect("it"));
        }
    }
    files
}

/// Opens the index in a folder.
fn embedded(folder: &Path) -> EmbeddedIndex {
    let disk = Arc::new(SystemDisk);
    EmbeddedIndex::open(disk, Some(folder), true, &|_, _| true, Box::new(|_| {}), Box::new(|| Ok(())))
        .expect("an index")
}

#[tokio::test]
async fn an_imported_object_is_no_garbage_any_more() {
    let [folder, files] = [TempDir::new(), TempDir::new()].map(|folder| folder.expect("a folder"));
    let sessions = fill(folder.path()).await;
    export(folder.path(), files.path()).expect("exported");
    let index = embedded(folder.path());
    for (owner, id) in &sessions {
        index.delete(*owner, id).await.expect("deleted");
    }
    assert!(!index.garbage(99).await.expect("the index is read").is_empty());
    index.close().await.expect("closed");
    drop(index);
    let moved = import(Arc::new(SystemDisk), folder.path(), files.path()).await.expect("imported");
    assert_eq!((moved.sessions, moved.skipped), (3, Vec::new()));
    let index = embedded(folder.path());
    let kept = |id: &VersionId| files.path().join("snapshots").join(format!("{id}.tidegate")).exists();
    assert!(!index.garbage(99).await.expect("the index is read").iter().any(kept));
    index.close().await.expect("closed");
}

/// What several servers share, still without sessions, and an export of three sessions.
struct Shared {
    schema: Schema,
    objects: Arc<InMemory>,
    cluster: Cluster,
    files: TempDir,
    sessions: Vec<(Owner, SessionId)>,
}

impl Shared {
    /// Returns `None` if there is no database to test with.
    async fn new() -> Option<Self> {
        let schema = Schema::new()?;
        let (objects, model) = (Arc::new(InMemory::new()), schema.name.trim_start_matches("tidegate_").to_owned());
        let shared = Arc::clone(&objects);
        let cluster = Cluster::open(schema.url.clone(), shared, &model).await.expect("the database is used");
        let [folder, files] = [TempDir::new(), TempDir::new()].map(|folder| folder.expect("a folder"));
        let sessions = fill(folder.path()).await;
        let moved = export(folder.path(), files.path()).expect("exported");
        assert_eq!((moved.sessions, moved.skipped), (3, Vec::new()));
        Some(Self { schema, objects, cluster, files, sessions })
    }

    /// Opens the index of one server.
    async fn index(&self) -> Arc<dyn Index> {
        let limits = Limits { disk: u64::MAX, owner: u64::MAX };
        let model = self.schema.name.trim_start_matches("tidegate_");
        let options = PostgresOptions::new(self.schema.url.clone(), model, limits);
        Arc::new(PostgresIndex::open(options, Box::new(|_| {})).await.expect("an index"))
    }

    async fn server(&self) -> Store {
        let (url, model) = (self.schema.url.clone(), self.schema.name.trim_start_matches("tidegate_"));
        let options = StoreOptions::new(Location::Memory);
        Store::open_shared(Arc::clone(&self.objects) as _, (url, model), options, codec()).await.expect("a store")
    }

    async fn import(&self) -> (usize, Vec<String>) {
        let moved = self.cluster.import(self.files.path(), &|_, _| {}).await.expect("imported");
        (moved.sessions, moved.skipped)
    }

    async fn problems(&self) -> Vec<String> {
        self.cluster.verify(&|_, _| {}).await.expect("a report").problems
    }

    fn object(version: &VersionId) -> ObjectPath {
        ObjectPath::from_iter(["objects", &version.as_str()[4..6], version.as_str()])
    }

    async fn end(self) {
        self.cluster.close().await.expect("closed");
    }
}

#[tokio::test]
async fn sessions_are_the_same_after_a_way_through_several_servers() {
    let Some(shared) = Shared::new().await else { return };
    assert_eq!(shared.import().await, (3, Vec::new()));
    let report = shared.cluster.verify(&|_, _| {}).await.expect("a report");
    assert_eq!((report.problems, report.notes), (Vec::new(), Vec::new()));
    let [back, folder, again] =
        [TempDir::new(), TempDir::new(), TempDir::new()].map(|folder| folder.expect("a folder"));
    let moved = shared.cluster.export(back.path(), &|_, _| {}).await.expect("exported");
    assert_eq!((moved.sessions, moved.snapshots, moved.skipped), (3, report.snapshots, Vec::new()));
    assert_eq!(files(back.path()), files(shared.files.path()));
    import(Arc::new(SystemDisk), folder.path(), back.path()).await.expect("imported");
    export(folder.path(), again.path()).expect("exported");
    assert_eq!(files(again.path()), files(shared.files.path()));

    // The sessions can be continued, and their texts can be read.
    let server = shared.server().await;
    for (owner, id) in &shared.sessions {
        turn(&server, *owner, id).await;
        let total = server.text(*owner, id, None, (None, None)).await.expect("a text").1.total;
        assert_eq!(total, server.get(*owner, id).await.expect("the session").head.tokens);
    }
    assert_eq!(shared.problems().await, Vec::<String>::new());
    server.close().await.expect("closed");
    shared.end().await;
}

#[tokio::test]
async fn importing_again_adds_only_what_is_missing() {
    let Some(shared) = Shared::new().await else { return };
    assert_eq!(shared.import().await, (3, Vec::new()));
    let (sessions, skipped) = shared.import().await;
    assert_eq!((sessions, skipped.len()), (0, 3));
    assert!(skipped.iter().all(|line| line.ends_with("the session exists already")), "{skipped:?}");
    // The fork's text begins with the text of a session that is gone; that text is still there.
    let (index, (owner, id)) = (shared.index().await, &shared.sessions[0]);
    index.delete(*owner, id).await.expect("deleted");
    let garbage = index.garbage(99).await.expect("the index is read");
    let gone: BTreeSet<&str> = garbage.iter().map(VersionId::as_str).collect();
    let (sessions, skipped) = shared.import().await;
    let waits = skipped.iter().filter(|line| line.contains("is being removed"));
    assert_eq!((sessions, waits.count(), skipped.len(), gone.is_empty()), (0, 1, 3, false), "{skipped:?}");
    index.forget_garbage(garbage.clone()).await.expect("forgotten");
    for id in &garbage {
        shared.objects.delete(&Shared::object(id)).await.expect("removed");
    }
    let (sessions, skipped) = shared.import().await;
    assert_eq!((sessions, skipped.len()), (1, 2), "{skipped:?}");
    assert_eq!(shared.problems().await, Vec::<String>::new());
    index.close().await.expect("closed");
    shared.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_are_imported_and_exported_while_a_server_takes_turns() {
    let Some(shared) = Shared::new().await else { return };
    let server = shared.server().await;
    let own = server.create(ANN, new(5)).await.expect("a session").id;
    let (stop, mut stopped) = tokio::sync::watch::channel(false);
    let turns = tokio::spawn({
        let (server, own) = (server.clone(), own.clone());
        async move {
            let mut turns = 0;
            while !*stopped.borrow_and_update() {
                turn(&server, ANN, &own).await;
                turns += 1;
            }
            turns
        }
    });
    assert_eq!(shared.import().await, (3, Vec::new()));
    let back = TempDir::new().expect("a folder");
    let moved = shared.cluster.export(back.path(), &|_, _| {}).await.expect("exported");
    assert_eq!((moved.sessions, moved.skipped), (4, Vec::new()));
    stop.send(true).expect("it is awaited");
    let turns = turns.await.expect("the turns end");
    assert_eq!(server.get(ANN, &own).await.expect("the session").head.tokens, 5 + 3 * turns);
    assert_eq!(shared.problems().await, Vec::<String>::new());
    server.close().await.expect("closed");
    shared.end().await;
}

#[tokio::test]
async fn verifying_lists_damaged_missing_and_unneeded_objects() {
    let Some(shared) = Shared::new().await else { return };
    shared.import().await;
    let server = shared.server().await;
    let mut heads = Vec::new();
    for (owner, id) in &shared.sessions[..2] {
        heads.push(server.get(*owner, id).await.expect("the session").head.id);
    }
    server.close().await.expect("closed");
    let damaged = Shared::object(&heads[0]);
    let mut bytes = shared.objects.get(&damaged).await.expect("it").bytes().await.expect("its bytes").to_vec();
    bytes[100] ^= 1;
    shared.objects.put(&damaged, bytes.into()).await.expect("written");
    shared.objects.delete(&Shared::object(&heads[1])).await.expect("removed");
    let stray = VersionId::new();
    shared.objects.put(&Shared::object(&stray), "left behind".into()).await.expect("written");

    let report = shared.cluster.verify(&|_, _| {}).await.expect("a report");
    let found = |session: usize, what: &str| {
        let (session, head) = (shared.sessions[session].1.as_str(), heads[session].as_str());
        let line = |line: &&String| [session, head, what].iter().all(|part| line.contains(part));
        report.problems.iter().filter(line).count()
    };
    assert_eq!((found(0, "is damaged"), found(1, "is missing"), report.problems.len()), (1, 1, 2), "{report:?}");
    assert!(matches!(&report.notes[..], [note] if note.contains(stray.as_str())), "{report:?}");
    // What can be read is exported.
    let back = TempDir::new().expect("a folder");
    let moved = shared.cluster.export(back.path(), &|_, _| {}).await.expect("exported");
    assert_eq!(moved.sessions, 1, "{:?}", moved.skipped);
    shared.end().await;
}

#[tokio::test]
async fn an_object_that_a_sweep_has_claimed_delays_an_import_and_does_not_prevent_it() {
    let Some(shared) = Shared::new().await else { return };
    // Simulate an earlier import that wrote the objects and was interrupted.
    let names = fs::read_dir(shared.files.path().join("snapshots")).expect("a folder");
    let names = names.map(|file| file.expect("a file").file_name().to_string_lossy().replace(".tidegate", ""));
    let ids: Vec<VersionId> = names.map(|name| VersionId::parse(&name).expect("an id")).collect();
    let index = shared.index().await;
    assert_eq!(index.orphans(ids.clone()).await.expect("claimed").len(), ids.len());
    let (sessions, skipped) = shared.import().await;
    assert_eq!((sessions, skipped.len()), (0, 3));
    assert!(skipped.iter().all(|line| line.contains("is being removed")), "{skipped:?}");
    assert!(shared.objects.list(None).next().await.is_none(), "nothing is written for them");
    // An hour later, another sweep claims them again.
    let hour_ago = "UPDATE versions SET time = time - 3600000 WHERE owner = ''";
    shared.schema.execute(hour_ago).await;
    assert_eq!(index.orphans(ids.clone()).await.expect("claimed").len(), ids.len());
    assert_eq!(shared.import().await.0, 0);
    // An hour later, whichever sweep has claimed them has removed them.
    shared.schema.execute(hour_ago).await;
    assert_eq!(shared.import().await, (3, Vec::new()));
    assert_eq!(shared.problems().await, Vec::<String>::new());
    assert_eq!(index.orphans(ids).await, Ok(Vec::new()));
    index.close().await.expect("closed");
    shared.end().await;
}
