//! The store's options, request types and result types.

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
    /// `decode` would reject the bytes; the error says why.
    fn check(&self, encoded: &[u8]) -> Result<(), String> {
        let _ = encoded;
        Ok(())
    }

    /// Converts stored bytes to the bytes of an export file, which also contains the conversation.
    ///
    /// # Errors
    /// Same as [`Self::decode`].
    fn export(&self, stored: Bytes, conversation: &Conversation) -> Result<Bytes, String> {
        let _ = conversation;
        Ok(stored)
    }

    /// Returns an upper bound on the encoded size of a snapshot, in bytes.
    fn max_bytes(&self) -> usize;
}

/// When a turn counts as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Once it is synced to disk: it survives a crash of the process or the machine.
    Turn,
    /// Once it is written; the sync to disk follows about a second later. If the process is killed, the last second is
    /// lost; the same happens if the index cannot be written because the disk is full or fails.
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

/// The options of a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Where sessions are stored.
    pub location: Location,
    /// When a turn counts as stored.
    pub durability: Durability,
    /// Maximum bytes of snapshots cached in memory.
    pub ram_bytes: u64,
    /// Maximum bytes of stored snapshots, texts and receipts. The rest of the index is not counted; it takes a few
    /// hundred bytes per version.
    pub disk_bytes: u64,
    /// Maximum bytes of snapshots, texts and receipts per owner, counting each version once.
    pub owner_bytes: u64,
    /// Maximum number of sessions per owner.
    pub owner_sessions: usize,
    /// Number of versions per session whose snapshots are kept, including the head.
    pub keep_versions: usize,
    /// Number of versions per session that stay listed after their snapshots are gone.
    pub lineage: usize,
    /// Whether to keep the texts of new versions, so that they can be read back.
    pub keep_text: bool,
    /// How long stored responses are kept.
    pub response_ttl: Duration,
    /// How long receipts are kept.
    pub receipt_ttl: Duration,
    /// Interval between removals of expired items.
    pub sweep_every: Duration,
    /// For servers that share an index: the minimum age of an object before it may be removed because nothing points to
    /// it, and the interval between searches for such objects. It must be longer than any upload and the commit that
    /// follows.
    pub orphan_grace: Duration,
}

impl StoreOptions {
    /// Returns options with limits for a small machine.
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
    /// What the session starts from.
    pub start: Start,
    /// The client's metadata.
    pub metadata: Metadata,
    /// How long the session is kept after its last use; `None` means forever.
    pub ttl: Option<Duration>,
    /// The label of the session's first version.
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
    /// A snapshot from outside the store.
    Snapshot(Arc<Snapshot>),
    /// A snapshot, and the whole text that the model has read to reach it.
    Read(Arc<Snapshot>, AddedText),
    /// A snapshot from an uploaded file, and the file's conversation without its label and metadata.
    Uploaded(Arc<Snapshot>, Conversation),
    /// An existing version of the same owner.
    Version(VersionId),
}

/// The current description of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// The session's id.
    pub id: SessionId,
    /// The version from which its next turn starts.
    pub head: Version,
    /// The client's metadata.
    pub metadata: Metadata,
    /// Creation time in unix seconds.
    pub created: u64,
    /// Time of the last change in unix seconds.
    pub updated: u64,
    /// Expiry in unix seconds, if the session is not used before then.
    pub expires: Option<u64>,
    /// Time to live: seconds from the last use to expiry.
    pub ttl: Option<u64>,
    /// Whether a turn is running.
    pub in_use: bool,
    /// The session and version from which it was forked.
    pub forked_from: Option<(SessionId, VersionId)>,
    /// The session's tags: the client's names for versions that the session lists.
    pub tags: BTreeMap<String, VersionId>,
}

/// Which of an owner's sessions to list.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// Where to continue: the last session of the previous page, or the last one examined for it.
    pub after: Option<SessionId>,
    /// Maximum number of sessions in the page.
    pub limit: usize,
    /// Whether to list the newest sessions first instead of the oldest.
    pub newest_first: bool,
    /// Which sessions to include.
    pub filter: Filter,
}

/// Conditions that a listed session must meet; `None` accepts every session.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Metadata pairs, all of which the session has.
    pub metadata: Metadata,
    /// The label of the session's head.
    pub label: Option<String>,
    /// The name of a tag that the session has.
    pub tag: Option<String>,
    /// The session from which it was forked.
    pub forked_from: Option<String>,
    /// Created after the first and before the second of these times, in unix seconds.
    pub created: (Option<u64>, Option<u64>),
    /// Changed after the first and before the second of these times, in unix seconds.
    pub updated: (Option<u64>, Option<u64>),
}

/// A page of sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The sessions.
    pub sessions: Vec<Session>,
    /// The last session examined, if there may be more after it.
    pub next: Option<SessionId>,
}

/// A tag and the version that it names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The tag's name.
    pub name: String,
    /// The tagged version.
    pub version: Version,
}

/// Where to start reading a chain of versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChainFrom {
    /// At this version, followed by its ancestors.
    Version(VersionId),
    /// After this version: only its ancestors.
    After(VersionId),
}

/// The description of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The version's id.
    pub id: VersionId,
    /// The version from which it was made.
    pub parent: Option<VersionId>,
    /// Number of tokens in the version's text.
    pub tokens: u64,
    /// Creation time in unix milliseconds.
    pub time: u64,
    /// The client's label.
    pub label: Option<String>,
    /// What created it, such as "create", "chat" or "response".
    pub kind: String,
    /// Prompt tokens of the turn that created it.
    pub prompt_tokens: u64,
    /// Generated tokens of the turn that created it.
    pub completion_tokens: u64,
    /// Size of the version's object in bytes; 0 for an empty version.
    pub bytes: u64,
    /// Whether this session still keeps its snapshot.
    pub kept: bool,
    /// The session that created it, if known.
    pub session: Option<SessionId>,
    /// The names of the version's tags in this session.
    pub tags: Vec<String>,
}

/// What a version records about the turn that created it.
#[derive(Clone, Debug, Default)]
pub struct TurnNote {
    /// The client's label for the version.
    pub label: Option<String>,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub completion_tokens: u64,
    /// The kind of turn, such as "chat".
    pub kind: String,
    /// The text that the turn adds; without it, the version's text cannot be read back.
    pub text: Option<AddedText>,
}

/// A response to store.
#[derive(Clone, Debug)]
pub struct NewResponse {
    /// The body returned to clients.
    pub body: Vec<u8>,
    /// The snapshot at the end of the response.
    pub snapshot: Arc<Snapshot>,
    /// The version that the response continues.
    pub parent: Option<VersionId>,
    /// The text that the response adds to that version's text.
    pub text: Option<AddedText>,
}

/// The key under which the answer to a request is stored, so that a retry of the request gets the same answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiptKey(pub String);

/// A key, and a function that makes the answer from the result. The result and the receipt are stored in one
/// transaction.
pub type Receipt<T> = (ReceiptKey, Box<dyn Fn(&T) -> Vec<u8> + Send + Sync>);

/// Forks to create.
#[derive(Clone, Debug, Default)]
pub struct Fork {
    /// The version to fork from; the head by default.
    pub from: Option<VersionId>,
    /// Number of forks.
    pub n: usize,
    /// The client's metadata for each fork; by default the session's metadata.
    pub metadata: Option<Metadata>,
    /// How long each fork is kept after its last use; by default as long as the session.
    pub ttl: Option<Duration>,
}

/// Where a snapshot was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// In the memory cache, or empty.
    Memory,
    /// In the object store.
    Disk,
}

/// The statistics of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Number of sessions.
    pub sessions: u64,
    /// Number of versions whose snapshots are stored.
    pub versions: u64,
    /// Bytes of objects that something points to.
    pub disk_bytes: u64,
    /// The disk budget: the maximum bytes of objects, texts and receipts.
    pub disk_budget: u64,
    /// Bytes of garbage: objects that nothing points to and that are about to be removed.
    pub garbage_bytes: u64,
    /// Bytes of texts.
    pub text_bytes: u64,
    /// Number of snapshots cached in memory.
    pub ram_snapshots: u64,
    /// Bytes of snapshots cached in memory.
    pub ram_bytes: u64,
    /// Number of snapshots found in memory.
    pub hits_memory: u64,
    /// Number of snapshots read from the object store.
    pub hits_disk: u64,
    /// Number of turns committed.
    pub commits: u64,
    /// Number of turns and rewinds refused because another server had moved the head in the meantime.
    pub conflicts: u64,
    /// Number of sessions created by forking.
    pub forks: u64,
    /// Number of objects removed because nothing pointed to them.
    pub collected: u64,
    /// Number of versions evicted to make space.
    pub dropped: u64,
    /// Number of requests refused for lack of space or because of a quota.
    pub refused: u64,
    /// Number of index transactions. Turns that end at the same time share one.
    pub transactions: u64,
}
