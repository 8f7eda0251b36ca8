//! STUB, replaced by the store.
#![allow(missing_docs, clippy::all, clippy::pedantic, unused)]
use super::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
pub type Metadata = BTreeMap<String, String>;
pub type Bytes = axum::body::Bytes;
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    Memory,
    Disk,
}
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    pub id: VersionId,
    pub parent: Option<VersionId>,
    pub tokens: u64,
    pub time: u64,
    pub label: Option<String>,
    pub kind: String,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub bytes: u64,
    pub kept: bool,
}
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    pub id: SessionId,
    pub head: Version,
    pub metadata: Metadata,
    pub created: u64,
    pub updated: u64,
    pub expires: Option<u64>,
    pub ttl: Option<u64>,
    pub in_use: bool,
    pub forked_from: Option<(SessionId, VersionId)>,
}
pub enum Start {
    Empty { seed: u64 },
    Snapshot(Arc<Snapshot>),
    Version(VersionId),
}
pub struct NewSession {
    pub start: Start,
    pub metadata: Metadata,
    pub ttl: Option<Duration>,
    pub label: Option<String>,
}
#[derive(Default)]
pub struct Patch {
    pub metadata: Option<Metadata>,
    pub ttl: Option<Option<Duration>>,
}
pub struct TurnNote {
    pub label: Option<String>,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub kind: String,
}
#[derive(Clone, Debug)]
pub struct ReceiptKey(pub String);
pub struct Turn;
impl Turn {
    pub fn session(&self) -> &Session {
        todo!()
    }
    pub fn head(&self) -> &Arc<Snapshot> {
        todo!()
    }
    pub fn tier(&self) -> Tier {
        todo!()
    }
    pub fn owner(&self) -> Owner {
        todo!()
    }
    pub async fn commit(
        self,
        snapshot: Arc<Snapshot>,
        note: TurnNote,
        receipt: Option<(ReceiptKey, Vec<u8>)>,
        version: VersionId,
    ) -> Result<Session, StoreError> {
        todo!()
    }
}
#[derive(Clone)]
pub struct Store;
impl Store {
    pub async fn create(&self, owner: Owner, new: NewSession) -> Result<Session, StoreError> {
        todo!()
    }
    pub async fn get(&self, owner: Owner, id: &SessionId) -> Result<Session, StoreError> {
        todo!()
    }
    pub async fn list(
        &self,
        owner: Owner,
        after: Option<SessionId>,
        limit: usize,
        newest_first: bool,
    ) -> Result<(Vec<Session>, bool), StoreError> {
        todo!()
    }
    pub async fn update(&self, owner: Owner, id: &SessionId, patch: Patch) -> Result<Session, StoreError> {
        todo!()
    }
    pub async fn delete(&self, owner: Owner, id: &SessionId) -> Result<(), StoreError> {
        todo!()
    }
    pub async fn versions(&self, owner: Owner, id: &SessionId) -> Result<Vec<Version>, StoreError> {
        todo!()
    }
    pub async fn fork(
        &self,
        owner: Owner,
        id: &SessionId,
        from: Option<VersionId>,
        n: usize,
        metadata: Option<Metadata>,
        ttl: Option<Duration>,
    ) -> Result<Vec<Session>, StoreError> {
        todo!()
    }
    pub async fn rewind(
        &self,
        owner: Owner,
        id: &SessionId,
        to: &VersionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<Session, StoreError> {
        todo!()
    }
    pub async fn load(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
    ) -> Result<(Version, Arc<Snapshot>, Tier), StoreError> {
        todo!()
    }
    pub async fn bytes(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
    ) -> Result<(Version, Bytes), StoreError> {
        todo!()
    }
    pub async fn begin(
        &self,
        owner: Owner,
        id: &SessionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<Turn, StoreError> {
        todo!()
    }
    pub async fn receipt(&self, owner: Owner, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        todo!()
    }
    pub async fn put_receipt(&self, owner: Owner, key: ReceiptKey, receipt: Vec<u8>) -> Result<(), StoreError> {
        todo!()
    }
    pub async fn put_response(
        &self,
        owner: Owner,
        id: &ResponseId,
        body: Vec<u8>,
        snapshot: Arc<Snapshot>,
        parent: Option<VersionId>,
    ) -> Result<(), StoreError> {
        todo!()
    }
    pub async fn response(&self, owner: Owner, id: &ResponseId) -> Result<(Vec<u8>, VersionId), StoreError> {
        todo!()
    }
    pub async fn response_snapshot(&self, owner: Owner, id: &ResponseId) -> Result<(Arc<Snapshot>, Tier), StoreError> {
        todo!()
    }
    pub async fn delete_response(&self, owner: Owner, id: &ResponseId) -> Result<(), StoreError> {
        todo!()
    }
    pub async fn close(&self) {
        todo!()
    }
}
