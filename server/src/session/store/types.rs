//! The store's options, requests and results.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::session::conversation::Conversation;
use crate::session::id::{SessionId, VersionId};
use crate::session::patch::Metadata;
use crate::session::snapshot::Snapshot;
use crate::session::text::AddedText;

/// Converts snapshots to bytes and back.
pub trait SnapshotCodec: Send + Sync {
    /// Encodes a snapshot.
    fn encode(&self, snapshot: &Snapshot) -> Vec<u8>;

    /// Decodes a snapshot.
    ///
    /// # Errors
    /// The bytes are not a snapshot of this model.
    fn decode(&self, bytes: &[u8]) -> Result<Snapshot, String>;

    /// Checks that [`Self::decode`] will accept the output of [`Self::encode`].
    ///
    /// # Errors
    /// The reason why it will not.
    fn check(&self, encoded: &[u8]) -> Result<(), String> {
        let _ = encoded;
        Ok(())
    }

    /// Converts stored bytes to those of a file for export, which has the conversation as well.
    ///
    /// # Errors
    /// As [`Self::decode`].
    fn export(&self, stored: Bytes, conversation: &Conversation) -> Result<Bytes, String> {
        let _ = conversation;
        Ok(stored)
    }

    /// An upper bound of the bytes of a snapshot.
    fn max_bytes(&self) -> usize;
}

/// When a turn counts as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Once it is synced to disk, so that it survives a crash of the process or the machine.
    Turn,
    /// Once it is written; it is synced about a second later. A process that is killed loses its last second, as does one
    /// whose index could not be written because the disk is full or fails.
    Memory,
}

/// Where sessions are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// In a folder, which is created if necessary.
    Folder(PathBuf),
    /// Only in memory, until the process ends.
    Memory,
}

/// Options of a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Where sessions are stored.
    pub location: Location,
    /// When a turn counts as stored.
    pub durability: Durability,
    /// Bytes of snapshots cached in memory.
    pub ram_bytes: u64,
    /// Most bytes of stored snapshots. The index is not counted; it takes a few hundred bytes per version.
    pub disk_bytes: u64,
    /// Most bytes of snapshots per owner, counting each version once.
    pub owner_bytes: u64,
    /// Most sessions per owner.
    pub owner_sessions: usize,
    /// Versions per session whose snapshots are kept, including the head.
    pub keep_versions: usize,
    /// Versions per session that are still listed after their snapshots are gone.
    pub lineage: usize,
    /// Whether the texts of new versions are kept, so that they can be read back.
    pub keep_text: bool,
    /// How long a stored response is kept.
    pub response_ttl: Duration,
    /// How long a receipt is kept.
    pub receipt_ttl: Duration,
    /// Interval between removals of expired items.
    pub sweep_every: Duration,
    /// Where servers share the index: how long ago an object must have been written for it to be removed because nothing points to
    /// it, which must be longer than any upload and the commit after it; and the interval between searches for such objects.
    pub orphan_grace: Duration,
}

impl StoreOptions {
    /// Options with limits for a small machine.
    pub fn new(location: Location) -> Self {
        const GIB: u64 = 1 << 30;
        const DAY: Duration = Duration::from_hours(24);
        Self {
            location,
            durability: Durability::Turn,
            ram_bytes: GIB,
            disk_bytes: 64 * GIB,
            owner_bytes: u64::MAX,
            owner_sessions: usize::MAX,
            keep_versions: 32,
            lineage: 1000,
            keep_text: true,
            response_ttl: 30 * DAY,
            receipt_ttl: DAY,
            sweep_every: Duration::from_secs(10),
            orphan_grace: Duration::from_hours(1),
        }
    }
}

/// A session to create.
#[derive(Clone, Debug)]
pub struct NewSession {
    /// What it starts from.
    pub start: Start,
    /// The client's notes.
    pub metadata: Metadata,
    /// How long it is kept after its last use; `None`: for ever.
    pub ttl: Option<Duration>,
    /// The label of its first version.
    pub label: Option<String>,
}

/// What a session starts from.
#[derive(Clone, Debug)]
pub enum Start {
    /// An empty text.
    Empty {
        /// Seed of the sampler's random numbers.
        seed: u64,
    },
    /// A snapshot from elsewhere.
    Snapshot(Arc<Snapshot>),
    /// A snapshot, and the whole text that it has read.
    Read(Arc<Snapshot>, AddedText),
    /// A snapshot from a file, and what the file has besides it, without its label and metadata.
    Uploaded(Arc<Snapshot>, Conversation),
    /// A version of the same owner.
    Version(VersionId),
}

/// The current description of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// The version from which its next turn starts.
    pub head: Version,
    /// The client's notes.
    pub metadata: Metadata,
    /// Creation time in unix seconds.
    pub created: u64,
    /// Time of the last change in unix seconds.
    pub updated: u64,
    /// Expiry in unix seconds, unless it is used before.
    pub expires: Option<u64>,
    /// Seconds after its last use when it expires.
    pub ttl: Option<u64>,
    /// Whether a turn is running.
    pub in_use: bool,
    /// The session and version from which it was forked.
    pub forked_from: Option<(SessionId, VersionId)>,
    /// The client's names for versions that the session lists.
    pub tags: BTreeMap<String, VersionId>,
}

/// Which of an owner's sessions to list.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// The last session of the previous page, or the last that was examined for it.
    pub after: Option<SessionId>,
    /// Most sessions in the page.
    pub limit: usize,
    /// The order of creation.
    pub newest_first: bool,
    /// Only these.
    pub filter: Filter,
}

/// What a session must have to be listed; `None` allows all.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// All of these pairs.
    pub metadata: Metadata,
    /// The label of its head.
    pub label: Option<String>,
    /// A tag.
    pub tag: Option<String>,
    /// The session that it was forked from.
    pub forked_from: Option<String>,
    /// Created after this second and before that one.
    pub created: (Option<u64>, Option<u64>),
    /// Changed after this second and before that one.
    pub updated: (Option<u64>, Option<u64>),
}

/// A page of sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The sessions.
    pub sessions: Vec<Session>,
    /// The last session that was examined, if there may be more after it.
    pub next: Option<SessionId>,
}

/// A tag, and the version that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Its name.
    pub name: String,
    /// The version.
    pub version: Version,
}

/// Which part of a chain of versions to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChainFrom {
    /// This version and its ancestors.
    Version(VersionId),
    /// The ancestors of this version.
    After(VersionId),
}

/// The description of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Its id.
    pub id: VersionId,
    /// The version from which it was made.
    pub parent: Option<VersionId>,
    /// Number of tokens in its text.
    pub tokens: u64,
    /// Creation time in unix milliseconds.
    pub time: u64,
    /// The client's name for it.
    pub label: Option<String>,
    /// What created it, such as "create", "chat" or "response".
    pub kind: String,
    /// Prompt tokens of its turn.
    pub prompt_tokens: u64,
    /// Generated tokens of its turn.
    pub completion_tokens: u64,
    /// Size of its object in bytes; 0 for an empty version.
    pub bytes: u64,
    /// Whether this session still keeps its snapshot.
    pub kept: bool,
    /// The session that made it, if that is known.
    pub session: Option<SessionId>,
    /// The names of its tags in this session.
    pub tags: Vec<String>,
}

/// What a version records about the turn that created it.
#[derive(Clone, Debug, Default)]
pub struct TurnNote {
    /// The client's name for the version.
    pub label: Option<String>,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub completion_tokens: u64,
    /// The kind of turn.
    pub kind: String,
    /// What the turn adds to the text; without it, the version's text cannot be read back.
    pub text: Option<AddedText>,
}

/// A response to store.
#[derive(Clone, Debug)]
pub struct NewResponse {
    /// What is returned for it.
    pub body: Vec<u8>,
    /// The snapshot at its end.
    pub snapshot: Arc<Snapshot>,
    /// The version that it continues.
    pub parent: Option<VersionId>,
    /// What it adds to the text of that version.
    pub text: Option<AddedText>,
}

/// The key under which the answer to a request is stored, in case the same request comes again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiptKey(pub String);

/// A key and a function that makes the answer from the result. Result and receipt are stored in one transaction.
pub type Receipt<T> = (ReceiptKey, Box<dyn Fn(&T) -> Vec<u8> + Send + Sync>);

/// Forks to create.
#[derive(Clone, Debug, Default)]
pub struct Fork {
    /// The version to fork from; the head by default.
    pub from: Option<VersionId>,
    /// Number of forks.
    pub n: usize,
    /// The client's notes on each fork; by default those on the session.
    pub metadata: Option<Metadata>,
    /// How long they are kept after their last use; by default as long as the session.
    pub ttl: Option<Duration>,
}

/// Where a snapshot was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// In memory.
    Memory,
    /// In the object store.
    Disk,
}

/// Statistics of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Number of sessions.
    pub sessions: u64,
    /// Number of versions whose snapshots are stored.
    pub versions: u64,
    /// Bytes of objects that something points to.
    pub disk_bytes: u64,
    /// Most bytes of objects that something may point to.
    pub disk_budget: u64,
    /// Bytes of objects that nothing points to and that are about to be removed.
    pub garbage_bytes: u64,
    /// Bytes of texts.
    pub text_bytes: u64,
    /// Number of snapshots cached in memory.
    pub ram_snapshots: u64,
    /// Bytes of snapshots cached in memory.
    pub ram_bytes: u64,
    /// Snapshots found in memory.
    pub hits_memory: u64,
    /// Snapshots read from the object store.
    pub hits_disk: u64,
    /// Turns committed.
    pub commits: u64,
    /// Turns and moves of a head that were refused because another server had moved the head meanwhile.
    pub conflicts: u64,
    /// Sessions created by forking.
    pub forks: u64,
    /// Objects removed because nothing pointed to them.
    pub collected: u64,
    /// Versions evicted to make space.
    pub dropped: u64,
    /// Requests refused for lack of space or because of a quota.
    pub refused: u64,
    /// Transactions of the index. Turns that end at the same time share one.
    pub transactions: u64,
}
