//! Requests that another server sharing the index has overtaken, and objects that nothing seems to need.

mod outages;
mod servers;
mod shared;
mod sweeps;

use std::sync::Arc;
use std::time::Duration;

use super::inner::{Store, now, version_id};
use super::types::{
    Fork, Location, NewResponse, NewSession, Receipt, ReceiptKey, SnapshotCodec, Start, StoreOptions, TurnNote,
};
use crate::session::error::StoreError;
use crate::session::id::{Owner, ResponseId, SessionId, VersionId};
use crate::session::index::{Commit, NewVersion, VersionRow};
use crate::session::patch::Metadata;
use crate::session::snapshot::Snapshot;

const ANN: Owner = Owner([1; 16]);

/// A codec that stores only the number of tokens.
struct Tokens;

impl SnapshotCodec for Tokens {
    fn encode(&self, snapshot: &Snapshot) -> Vec<u8> {
        snapshot.read.to_le_bytes().to_vec()
    }

    fn decode(&self, bytes: &[u8]) -> Result<Snapshot, String> {
        let read = bytes.try_into().map(u64::from_le_bytes).map_err(|_| "it has another length")?;
        Ok(Snapshot { read, ..Snapshot::empty(0) })
    }

    fn max_bytes(&self) -> usize {
        8
    }
}

async fn open(location: Location) -> Store {
    Store::open(StoreOptions::new(location), Arc::new(Tokens)).await.expect("a store")
}

fn new_session() -> NewSession {
    NewSession { start: Start::Empty { seed: 1 }, metadata: Metadata::new(), ttl: None, label: None }
}

fn snapshot(read: u64) -> Arc<Snapshot> {
    Arc::new(Snapshot { read, ..Snapshot::empty(0) })
}

/// The row of an empty version.
fn empty_version() -> VersionRow {
    VersionRow {
        owner: ANN,
        parent: None,
        tokens: 0,
        time: 0,
        label: None,
        kind: String::new(),
        prompt_tokens: 0,
        completion_tokens: 0,
        bytes: 0,
        seed: Some(1),
        kept_by: 0,
        known_by: 0,
        origin: Vec::new(),
        session: None,
    }
}

/// Commits a turn of the session as another server does, which does not know about the lease.
async fn turn_elsewhere(store: &Store, session: &SessionId) -> VersionId {
    let (row, head) = store.inner.index.head(ANN, session).await.expect("the session");
    let id = VersionId::new();
    let version = VersionRow { parent: Some(row.head.clone()), kept_by: 0, known_by: 0, ..head };
    let commit = Commit {
        owner: ANN,
        session: session.clone(),
        expected: version_id(&row.head).expect("an id"),
        version: NewVersion { id: id.clone(), row: version, text: None, reserved: Vec::new() },
        forks: Vec::new(),
        max_sessions: 9,
        bounds: store.inner.bounds(),
        now: now(),
        receipt: None,
    };
    store.inner.index.commit(commit).await.expect("the turn ends");
    id
}

fn receipt(key: &str) -> (ReceiptKey, Vec<u8>) {
    (ReceiptKey(key.to_owned()), b"answer".to_vec())
}

fn promise<T: ?Sized>(key: &str) -> Receipt<T> {
    (ReceiptKey(key.to_owned()), Box::new(|_| b"answer".to_vec()))
}

#[test]
fn a_turn_that_another_server_has_overtaken_is_refused_and_stores_nothing() {
    crate::sync::block_on(async {
        let store = open(Location::Memory).await;
        let id = store.create(ANN, new_session()).await.expect("a session").id;
        for named in [false, true] {
            let if_match = store.get(ANN, &id).await.expect("the session").head.id;
            let turn =
                store.begin(ANN, &id, Some(if_match).filter(|_| named), Duration::ZERO).await.expect("the session");
            let head = turn_elsewhere(&store, &id).await;
            let ended = turn.commit(snapshot(9), TurnNote::default(), Some(receipt("turn")), VersionId::new()).await;
            // A client that named no version gets a conflict; one that named a version learns that the head is stale.
            let expected = if named {
                StoreError::Stale { head: head.clone() }
            } else {
                StoreError::Conflict { head: head.clone() }
            };
            assert_eq!(ended, Err(expected));
            assert_eq!(store.get(ANN, &id).await.expect("the session").head.id, head);
            assert_eq!(store.inner.objects.any().await, Ok(false), "the snapshot is removed");
            assert_eq!(store.receipt(ANN, "turn").await, Ok(None));
        }
        // When the request is sent again, the turn continues from the session's current head.
        let head = store.get(ANN, &id).await.expect("the session").head.id;
        let turn = store.begin(ANN, &id, None, Duration::ZERO).await.expect("the session");
        let ended = turn.commit(snapshot(9), TurnNote::default(), Some(receipt("turn")), VersionId::new()).await;
        assert_eq!(ended.expect("the turn ends").head.parent, Some(head));
    });
}

#[test]
fn a_request_that_another_server_has_answered_is_refused_and_stores_nothing() {
    crate::sync::block_on(async {
        let store = open(Location::Memory).await;
        let session = store.create_once(ANN, new_session(), Some(promise("key"))).await.expect("a session");
        let again = store.create_once(ANN, new_session(), Some(promise("key"))).await;
        assert_eq!(again, Err(StoreError::Answered));
        let uploaded = NewSession { start: Start::Snapshot(snapshot(9)), ..new_session() };
        assert_eq!(store.create_once(ANN, uploaded, Some(promise("key"))).await, Err(StoreError::Answered));
        let fork = Fork { n: 1, ..Fork::default() };
        assert_eq!(store.fork(ANN, &session.id, fork, Some(promise("key"))).await, Err(StoreError::Answered));
        let turn = store.begin(ANN, &session.id, None, Duration::ZERO).await.expect("the session");
        let ended = turn.commit(snapshot(9), TurnNote::default(), Some(receipt("key")), VersionId::new()).await;
        assert_eq!(ended, Err(StoreError::Answered));
        let response = NewResponse { body: Vec::new(), snapshot: snapshot(9), parent: None, text: None };
        let stored = store.put_response(ANN, &ResponseId::new(), response, Some(receipt("key"))).await;
        assert_eq!(stored, Err(StoreError::Answered));
        assert_eq!(store.get(ANN, &session.id).await.expect("the session").head, session.head);
        assert_eq!(store.stats().sessions, 1);
        assert_eq!(store.inner.objects.any().await, Ok(false), "the snapshots are removed");
    });
}

#[test]
fn no_suspect_is_removed_while_a_damaged_index_is_kept() {
    crate::sync::block_on(async {
        let folder = tempfile::TempDir::new().expect("a folder");
        let store = open(Location::Folder(folder.path().to_owned())).await;
        let (inner, id) = (&store.inner, VersionId::new());
        let damaged = folder.path().join("index.redb.damaged-1");
        std::fs::write(&damaged, "an index that may name the object").expect("a file");
        drop(inner.objects.put(&id, vec![1; 8].into()).await.expect("it is written"));
        inner.suspect(&id);
        inner.remove_suspects().await.expect("the index is read");
        assert_eq!(inner.objects.any().await, Ok(true), "the object is still there");
        std::fs::remove_file(damaged).expect("it is removed");
        inner.remove_suspects().await.expect("the index is read");
        assert_eq!(inner.objects.any().await, Ok(false), "nothing needs the object");
    });
}
