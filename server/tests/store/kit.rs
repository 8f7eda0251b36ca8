//! Helpers for the store's tests: a small codec, snapshots, an object store that fails on demand, and a check that
//! objects and index agree.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt as _,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tidegate_server::session::{
    AddedMessage, AddedText, Content, Fork, Listing, Location, Metadata, NewResponse, NewSession, Owner, Role, Session,
    SessionId, Snapshot, SnapshotCodec, Start, Store, StoreError, StoreOptions, TurnNote, VersionId,
};

use tidegate_server::text::Vocabulary;

pub(crate) const ANN: Owner = Owner([1; 16]);
pub(crate) const BOB: Owner = Owner([2; 16]);
pub(crate) const SOON: Duration = Duration::from_secs(20);
pub(crate) const NOW: Duration = Duration::ZERO;

/// Length of every state, and size of its object in bytes.
const FLOATS: usize = 100;
pub(crate) const BYTES: u64 = 8 + 8 + 4 * FLOATS as u64 + 8;

/// A codec that writes the number of tokens, the seed, the state, and a checksum.
pub(crate) struct Plain;

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)))
}

impl SnapshotCodec for Plain {
    fn encode(&self, snapshot: &Snapshot) -> Vec<u8> {
        let mut bytes = [snapshot.read.to_le_bytes(), snapshot.sampler.seed.to_le_bytes()].concat();
        bytes.extend(snapshot.state.iter().flat_map(|number| number.to_le_bytes()));
        bytes.extend(sum(&bytes).to_le_bytes());
        bytes
    }

    fn decode(&self, bytes: &[u8]) -> std::result::Result<Snapshot, String> {
        let (body, digest) = bytes.split_last_chunk().ok_or("too short")?;
        if u64::from_le_bytes(*digest) != sum(body) {
            return Err("wrong checksum".to_owned());
        }
        let number = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().expect("eight bytes"));
        let mut snapshot = Snapshot { read: number(0), ..Snapshot::empty(number(8)) };
        let numbers = body[16..].chunks_exact(4);
        snapshot.state = numbers.map(|number| f32::from_le_bytes(number.try_into().expect("four bytes"))).collect();
        Ok(snapshot)
    }

    fn max_bytes(&self) -> usize {
        BYTES as usize
    }
}

/// Returns a snapshot that differs for each number.
pub(crate) fn snapshot(number: u64) -> Arc<Snapshot> {
    let state = vec![number as f32; FLOATS];
    Arc::new(Snapshot { state, read: number + 1, ..Snapshot::empty(number) })
}

pub(crate) fn in_memory() -> StoreOptions {
    StoreOptions::new(Location::Memory)
}

pub(crate) fn in_folder(folder: &FilePath) -> StoreOptions {
    StoreOptions::new(Location::Folder(folder.to_owned()))
}

pub(crate) async fn open(options: StoreOptions) -> Store {
    Store::open(options, Arc::new(Plain)).await.expect("the store opens")
}

/// Opens a store whose objects the test can inspect.
pub(crate) async fn seen(options: StoreOptions) -> (Store, Arc<Faulty>) {
    let objects = Arc::new(Faulty::default());
    let store = Store::open_with(Arc::clone(&objects) as Arc<dyn ObjectStore>, options, Arc::new(Plain)).await;
    (store.expect("the store opens"), objects)
}

pub(crate) fn empty() -> NewSession {
    new(Start::Empty { seed: 1 })
}

pub(crate) fn new(start: Start) -> NewSession {
    NewSession { start, metadata: Metadata::new(), ttl: None, label: None }
}

/// Returns a request for `n` forks of a session's head.
pub(crate) fn copies(n: usize) -> Fork {
    Fork { n, ..Fork::default() }
}

pub(crate) fn note() -> TurnNote {
    TurnNote { label: None, prompt_tokens: 3, completion_tokens: 5, kind: "turn".to_owned(), text: None }
}

/// Returns a vocabulary in which every token is a letter.
pub(crate) fn words() -> Arc<Vocabulary> {
    Arc::new(Vocabulary::new((0..100).map(|id| Box::from([b'a' + id % 26])).collect()))
}

/// Returns what a turn adds to a text of `total` tokens: it removes the last token and adds two.
pub(crate) fn added(total: u64, number: u64) -> AddedText {
    let content = Content::Tokens(0, 2);
    let message = AddedMessage { role: Role::Assistant, continues: false, content, more: None };
    AddedText { kept: total.saturating_sub(1), tokens: vec![number as u32; 2], messages: vec![message] }
}

/// Returns the tokens of a text after such a turn.
pub(crate) fn extended(text: &[u32], number: u64) -> Vec<u32> {
    [&text[..text.len().saturating_sub(1)], &[number as u32; 2]].concat()
}

/// Returns the text of a version that [`speak`] or [`told`] has made, given the parents and numbers of all versions.
pub(crate) fn text_of(
    parents: &BTreeMap<VersionId, VersionId>,
    number: &dyn Fn(&VersionId) -> u64,
    version: &VersionId,
) -> Vec<u32> {
    let before = parents.get(version).map(|parent| text_of(parents, number, parent)).unwrap_or_default();
    extended(&before, number(version))
}

/// Returns the start of a new session that has read a text.
pub(crate) fn told(number: u64) -> Start {
    Start::Read(snapshot(number), added(0, number))
}

/// Returns the text of a version or, by default, of the head.
pub(crate) async fn tokens(store: &Store, owner: Owner, id: &SessionId, version: Option<&VersionId>) -> Vec<u32> {
    store.text(owner, id, version, (None, None)).await.expect("its text").1.tokens
}

/// Returns the note of a turn that adds to the text.
pub(crate) async fn saying(
    store: &Store,
    owner: Owner,
    id: &SessionId,
    number: u64,
) -> std::result::Result<TurnNote, StoreError> {
    let total = store.text(owner, id, None, (None, Some(0))).await?.1.total;
    Ok(TurnNote { text: Some(added(total, number)), ..note() })
}

/// Runs one turn from the head to `snapshot(number)` that adds to the text.
pub(crate) async fn speak(
    store: &Store,
    owner: Owner,
    id: &SessionId,
    number: u64,
) -> std::result::Result<Session, StoreError> {
    let note = saying(store, owner, id, number).await?;
    let mut turn = store.begin(owner, id, None, SOON).await?;
    turn.reserve_text(2, 1 << 21, 64).await?;
    turn.commit(snapshot(number), note, None, VersionId::new()).await
}

/// Returns a response that ends with a snapshot and has no text.
pub(crate) fn ended(body: Vec<u8>, snapshot: Arc<Snapshot>) -> NewResponse {
    NewResponse { body, snapshot, parent: None, text: None }
}

/// Runs one turn from the head to `snapshot(number)`.
pub(crate) async fn turn(
    store: &Store,
    owner: Owner,
    id: &SessionId,
    number: u64,
) -> std::result::Result<Session, StoreError> {
    let turn = store.begin(owner, id, None, SOON).await?;
    turn.commit(snapshot(number), note(), None, VersionId::new()).await
}

/// Returns the snapshot of a session's head.
pub(crate) async fn head(store: &Store, owner: Owner, id: &SessionId) -> Arc<Snapshot> {
    store.load(owner, id, None).await.expect("the head can be loaded").1
}

/// Returns a page of an owner's sessions, and whether there are more.
pub(crate) async fn list(
    store: &Store,
    owner: Owner,
    after: Option<SessionId>,
    limit: usize,
    newest_first: bool,
) -> std::result::Result<(Vec<Session>, bool), StoreError> {
    let page = store.list(owner, Listing { after, limit, newest_first, ..Listing::default() }).await?;
    Ok((page.sessions, page.next.is_some()))
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..1000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("timed out waiting for {what}");
}

/// Checks that the objects are exactly those of the owners' sessions and of `others`, and that the totals agree.
pub(crate) async fn agree(store: &Store, objects: &dyn ObjectStore, owners: &[Owner], others: &[VersionId]) {
    until("no garbage", async || store.stats().garbage_bytes == 0).await;
    let mut wanted: BTreeSet<String> = others.iter().map(ToString::to_string).collect();
    let mut versions = wanted.clone();
    for owner in owners {
        let (sessions, more) = list(store, *owner, None, usize::MAX, false).await.expect("a list");
        assert!(!more);
        for session in sessions {
            let known = store.versions(*owner, &session.id).await.expect("versions");
            assert!(known.iter().any(|version| version.kept && version.id == session.head.id), "the head is kept");
            for version in known.into_iter().filter(|version| version.kept) {
                versions.insert(version.id.to_string());
                if version.bytes > 0 {
                    wanted.insert(version.id.to_string());
                }
            }
        }
    }
    let found: Vec<ObjectMeta> = objects.list(None).map(|object| object.expect("an object")).collect().await;
    let names: BTreeSet<String> =
        found.iter().map(|object| object.location.filename().expect("a name").to_owned()).collect();
    assert_eq!(names, wanted, "objects and references");
    assert_eq!(store.stats().disk_bytes, found.iter().map(|object| object.size).sum::<u64>());
    assert_eq!(store.stats().versions, versions.len() as u64);
}

/// An object store in memory that counts writes and reads, and fails on demand.
#[derive(Debug)]
pub(crate) struct Faulty {
    objects: InMemory,
    /// Number of objects written.
    pub(crate) puts: AtomicUsize,
    /// Number of objects read.
    pub(crate) gets: AtomicUsize,
    /// Number of writes before the one that fails; negative if none does.
    pub(crate) fails_in: AtomicI64,
    /// Number of bytes that a failing write leaves behind as the object.
    pub(crate) leaves: AtomicUsize,
    /// Number of objects whose removal has begun.
    pub(crate) removing: Arc<AtomicUsize>,
    /// No removal proceeds while a test holds this lock.
    pub(crate) no_removal: Arc<tokio::sync::Mutex<()>>,
}

impl Default for Faulty {
    fn default() -> Self {
        let (puts, gets, leaves, removing, no_removal) = Default::default();
        Self { objects: InMemory::new(), puts, gets, fails_in: AtomicI64::new(-1), leaves, removing, no_removal }
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("faulty object store")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.puts.fetch_add(1, Ordering::SeqCst);
        if self.fails_in.fetch_sub(1, Ordering::SeqCst) == 0 {
            let leaves = self.leaves.load(Ordering::SeqCst);
            if leaves > 0 {
                let all = bytes::Bytes::from(payload);
                self.objects.put(location, all.slice(..leaves.min(all.len())).into()).await?;
            }
            let source = std::io::Error::other("injected").into();
            return Err(object_store::Error::Generic { store: "faulty", source });
        }
        self.objects.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.objects.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.gets.fetch_add(1, Ordering::SeqCst);
        self.objects.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let (removing, no_removal) = (Arc::clone(&self.removing), Arc::clone(&self.no_removal));
        let allowed = locations.then(move |location| {
            removing.fetch_add(1, Ordering::SeqCst);
            let no_removal = Arc::clone(&no_removal);
            async move {
                drop(no_removal.lock().await);
                location
            }
        });
        self.objects.delete_stream(allowed.boxed())
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.objects.copy_opts(from, to, options).await
    }
}
