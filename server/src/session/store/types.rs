//! What the store is asked for and what it answers with.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::session::{SessionId, Snapshot, VersionId};

/// What a client writes to a session, for itself.
pub type Metadata = BTreeMap<String, String>;

/// Snapshots as bytes and back.
pub trait SnapshotCodec: Send + Sync {
    /// The bytes of a snapshot.
    fn encode(&self, snapshot: &Snapshot) -> Vec<u8>;

    /// The snapshot that these bytes are.
    ///
    /// # Errors
    /// The bytes are no snapshot, or one of another model.
    fn decode(&self, bytes: &[u8]) -> Result<Snapshot, String>;

    /// Whether [`Self::decode`] will read what [`Self::encode`] has just made.
    ///
    /// # Errors
    /// Why it will not.
    fn check(&self, encoded: &[u8]) -> Result<(), String> {
        let _ = encoded;
        Ok(())
    }

    /// Bytes that the store has, as those that leave it.
    ///
    /// # Errors
    /// As [`Self::decode`].
    fn export(&self, stored: Bytes) -> Result<Bytes, String> {
        Ok(stored)
    }

    /// Bytes that no snapshot has more of.
    fn most_bytes(&self) -> usize;
}

/// When a turn counts as kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Once it is on disk: it outlives the process and the machine's power.
    Turn,
    /// Once it is written; about a second later it is on disk. A process that is killed loses its last second, and so
    /// does one whose index could not be written since the disk is full or fails.
    Memory,
}

/// Where sessions are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a folder, which is made where there is none.
    Folder(PathBuf),
    /// Nowhere: they go with the process.
    Memory,
}

/// How the store keeps things, and how much of them.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Where.
    pub place: Place,
    /// When a turn counts as kept.
    pub durability: Durability,
    /// Bytes of snapshots kept in memory as well.
    pub ram_bytes: u64,
    /// Bytes of snapshots that there may be; the index, some hundred bytes a version, is not counted.
    pub disk_bytes: u64,
    /// Bytes of snapshots that an owner may have, each version counted once.
    pub owner_bytes: u64,
    /// Sessions that an owner may have.
    pub owner_sessions: usize,
    /// Versions whose snapshots a session keeps, its head included.
    pub keep_versions: usize,
    /// Versions that a session remembers after their snapshots are gone.
    pub lineage: usize,
    /// How long a stored response is kept.
    pub response_ttl: Duration,
    /// How long the answer to a request is kept, for the same request made again.
    pub receipt_ttl: Duration,
    /// How often what has ended is removed.
    pub sweep_every: Duration,
}

impl StoreOptions {
    /// A store at a place, with bounds for a small machine.
    pub fn new(place: Place) -> Self {
        const GIB: u64 = 1 << 30;
        const DAY: Duration = Duration::from_hours(24);
        Self {
            place,
            durability: Durability::Turn,
            ram_bytes: GIB,
            disk_bytes: 64 * GIB,
            owner_bytes: u64::MAX,
            owner_sessions: usize::MAX,
            keep_versions: 32,
            lineage: 1000,
            response_ttl: 30 * DAY,
            receipt_ttl: DAY,
            sweep_every: Duration::from_secs(10),
        }
    }
}

/// A session to be made.
#[derive(Clone, Debug)]
pub struct NewSession {
    /// What it begins with.
    pub start: Start,
    /// What the client writes to it.
    pub metadata: Metadata,
    /// How long it is kept after its last use.
    pub ttl: Option<Duration>,
    /// The label of its first version.
    pub label: Option<String>,
}

/// What a session begins with.
#[derive(Clone, Debug)]
pub enum Start {
    /// No text, and random numbers from a seed.
    Empty {
        /// The seed.
        seed: u64,
    },
    /// A snapshot from elsewhere.
    Snapshot(Arc<Snapshot>),
    /// A version that the same owner has.
    Version(VersionId),
}

/// What to change of a session; what is `None` stays.
#[derive(Clone, Debug, Default)]
pub struct Patch {
    /// What the client writes to it, all of it.
    pub metadata: Option<Metadata>,
    /// How long it is kept after its last use; `Some(None)`: for ever.
    pub ttl: Option<Option<Duration>>,
}

/// A session as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Its name.
    pub id: SessionId,
    /// The version that its next turn starts from.
    pub head: Version,
    /// What the client wrote to it.
    pub metadata: Metadata,
    /// When it was made, in unix seconds.
    pub created: u64,
    /// When it was changed last, in unix seconds.
    pub updated: u64,
    /// When it goes unless it is used before, in unix seconds.
    pub expires: Option<u64>,
    /// Seconds that it is kept after its last use.
    pub ttl: Option<u64>,
    /// Whether a turn is running.
    pub in_use: bool,
    /// The session and version that it was forked from.
    pub forked_from: Option<(SessionId, VersionId)>,
}

/// A version: what is told of one snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Its name.
    pub id: VersionId,
    /// The version that it grew from.
    pub parent: Option<VersionId>,
    /// Tokens of its text.
    pub tokens: u64,
    /// When it was made, in unix milliseconds.
    pub time: u64,
    /// What the client called it.
    pub label: Option<String>,
    /// What made it.
    pub kind: String,
    /// Tokens that its turn took in.
    pub prompt_tokens: u64,
    /// Tokens that its turn generated.
    pub completion_tokens: u64,
    /// Bytes of its object; an empty version has none.
    pub bytes: u64,
    /// Whether its snapshot is still there, for this session.
    pub kept: bool,
}

/// What is told of a turn.
#[derive(Clone, Debug, Default)]
pub struct TurnNote {
    /// What the client calls the version.
    pub label: Option<String>,
    /// Tokens taken in.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// What kind of turn it was.
    pub kind: String,
}

/// The name under which an answer is kept for the same request made again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiptKey(pub String);

/// A receipt whose answer tells of what is made: it is written down with it.
pub type Receipt<T> = (ReceiptKey, Box<dyn Fn(&T) -> Vec<u8> + Send>);

/// Forks to be made.
#[derive(Clone, Debug, Default)]
pub struct Fork {
    /// The version to go on from; the head where none is named.
    pub from: Option<VersionId>,
    /// How many.
    pub n: usize,
    /// What the client writes to each of them; what it wrote to the session where there is none.
    pub metadata: Option<Metadata>,
    /// How long they are kept after their last use; as long as the session where there is none.
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

/// The store in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Sessions.
    pub sessions: u64,
    /// Versions whose snapshots are kept.
    pub versions: u64,
    /// Bytes of objects that something points to.
    pub disk_bytes: u64,
    /// Bytes of objects that nothing points to and that are about to go.
    pub garbage_bytes: u64,
    /// Snapshots in memory.
    pub ram_snapshots: u64,
    /// Their bytes.
    pub ram_bytes: u64,
    /// Snapshots found in memory.
    pub hits_memory: u64,
    /// Snapshots read from the object store.
    pub hits_disk: u64,
    /// Turns committed.
    pub commits: u64,
    /// Sessions made by forking.
    pub forks: u64,
    /// Objects removed since nothing pointed to them.
    pub collected: u64,
    /// Versions dropped to make room.
    pub dropped: u64,
    /// Refusals for want of room, or by a quota.
    pub refused: u64,
    /// Transactions of the index; several turns that end together share one.
    pub transactions: u64,
}
