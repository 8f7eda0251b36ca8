//! Loads snapshots from memory or from their objects, and writes their objects.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use super::inner::{Inner, Store, count, now, version, version_id};
use super::outcome::is_unknown;
use super::types::{Tier, Version};
use crate::session::blocking::blocking;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{Listed, NewVersion, Reservation, Shortfall, VersionRow};
use crate::session::objects::Upload;
use crate::session::snapshot::Snapshot;

/// A version whose object is written but not yet in the index.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) version: NewVersion,
    /// Keeps the object from being removed as an orphan.
    pub(super) upload: Option<Upload>,
}

impl Store {
    /// Loads a session's head, or another version that it keeps.
    ///
    /// # Errors
    /// The session or version does not exist, or its object cannot be read.
    pub async fn load(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
    ) -> Result<(Version, Arc<Snapshot>, Tier), StoreError> {
        let (row, id) = self.inner.find(owner, id, version).await?;
        let (snapshot, tier) = self.inner.fetch(&id, &row).await?;
        Ok((super::inner::version(id.as_str(), row, true)?, snapshot, tier))
    }

    /// Returns all versions that a session lists, in the order in which it got them: versions that it keeps, versions
    /// whose snapshots are gone, versions from which it was rewound, in a fork those inherited, and versions that it
    /// adopted.
    ///
    /// # Errors
    /// The session does not exist.
    pub async fn versions(&self, owner: Owner, id: &SessionId) -> Result<Vec<Version>, StoreError> {
        self.inner.live(owner, id).await?;
        let (session, listed) = self.inner.index.versions(owner, id).await?;
        let mut tags: HashMap<&str, Vec<String>> = HashMap::new();
        for (name, version) in &session.tags {
            tags.entry(version).or_default().push(name.clone());
        }
        let listed = listed.into_iter().map(|Listed { id, row, kept }| {
            let tags = tags.remove(&*id).unwrap_or_default();
            Ok(Version { tags, ..version(&id, row, kept)? })
        });
        listed.collect()
    }
}

impl Inner {
    /// Returns the row and the id of a version that a session keeps; of the head if `version` is `None`.
    pub(super) async fn find(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
    ) -> Result<(VersionRow, VersionId), StoreError> {
        self.use_session(owner, id).await?;
        let Listed { id, row, kept } = self.index.listed(owner, id, version).await?;
        if kept { Ok((row, version_id(&id)?)) } else { Err(StoreError::VERSION) }
    }

    /// Returns the row of an owner's version whose snapshot is kept.
    pub(super) async fn version_row(&self, owner: Owner, id: &VersionId) -> Result<VersionRow, StoreError> {
        let row = self.index.version(owner, id).await?;
        row.filter(|row| row.kept_by > 0).ok_or(StoreError::VERSION)
    }

    /// Fetches a snapshot. The caller has checked that the requester may see it.
    pub(super) async fn fetch(&self, id: &VersionId, row: &VersionRow) -> Result<(Arc<Snapshot>, Tier), StoreError> {
        if let Some(seed) = row.seed {
            return Ok((Arc::new(Snapshot::empty(seed)), Tier::Memory));
        }
        if let Some(snapshot) = self.cache.get(id) {
            count(&self.counters.hits_memory, 1);
            return Ok((snapshot, Tier::Memory));
        }
        let (bytes, codec) = (self.object(id, row).await?, Arc::clone(&self.codec));
        let (version, tokens) = (id.clone(), row.tokens);
        let decoded = blocking(move || {
            let corrupt = |reason| StoreError::Corrupt { version: version.clone(), reason };
            let snapshot = codec.decode(&bytes).map_err(corrupt)?;
            let found = snapshot.tokens();
            if found != tokens {
                return Err(corrupt(format!("it has {found} tokens, but the index says {tokens}")));
            }
            Ok(snapshot)
        });
        let snapshot = Arc::new(decoded.await?);
        self.cache.insert(id, Arc::clone(&snapshot));
        count(&self.counters.hits_disk, 1);
        Ok((snapshot, Tier::Disk))
    }

    pub(super) async fn object(&self, id: &VersionId, row: &VersionRow) -> Result<Bytes, StoreError> {
        if let Some(bytes) = self.objects.get(id, row.bytes).await? {
            return Ok(bytes);
        }
        // The version may have been evicted since its row was read.
        self.version_row(row.owner, id).await?;
        Err(StoreError::Corrupt { version: id.clone(), reason: "its object is missing".to_owned() })
    }

    /// Writes the object of a snapshot, unless the snapshot is empty. Uses the `reserved` space if it suffices.
    pub(super) async fn prepare(
        self: &Arc<Self>,
        owner: Owner,
        id: &VersionId,
        snapshot: &Arc<Snapshot>,
        reserved: Option<Arc<Reservation>>,
    ) -> Result<Prepared, StoreError> {
        self.repeated(|| self.index.ready()).await?;
        let seed = snapshot.sampler.seed;
        let empty = **snapshot == Snapshot::empty(seed);
        let mut row = VersionRow {
            owner,
            parent: None,
            tokens: snapshot.tokens(),
            time: now(),
            label: None,
            kind: String::new(),
            prompt_tokens: 0,
            completion_tokens: 0,
            bytes: 0,
            seed: empty.then_some(seed),
            kept_by: 0,
            known_by: 0,
            origin: Vec::new(),
            session: None,
        };
        if empty {
            let version = NewVersion { id: id.clone(), row, text: None, reserved: Vec::new() };
            return Ok(Prepared { version, upload: None });
        }
        let bytes = self.encode(snapshot).await?;
        row.bytes = bytes.len() as u64;
        let reservation = match reserved.filter(|reserved| reserved.bytes() >= row.bytes) {
            Some(reserved) => reserved,
            None => Arc::new(self.admit(owner, row.bytes).await?),
        };
        reservation.shrink(row.bytes);
        let upload = match self.objects.put(id, bytes.clone()).await {
            // The disk has less space than its budget assumes, so evict versions.
            Err(StoreError::Full { .. }) if self.evict_for_full_disk(owner, row.bytes).await? => {
                self.objects.put(id, bytes).await
            }
            result => result,
        };
        let upload = upload.inspect_err(|_| self.suspect(id))?;
        let version = NewVersion { id: id.clone(), row, text: None, reserved: vec![reservation] };
        Ok(Prepared { version, upload: Some(upload) })
    }

    /// Encodes a snapshot as the bytes of its object.
    pub(super) async fn encode(&self, snapshot: &Arc<Snapshot>) -> Result<Bytes, StoreError> {
        let (codec, snapshot) = (Arc::clone(&self.codec), Arc::clone(snapshot));
        let encoded = blocking(move || {
            let bytes = codec.encode(&snapshot);
            // Never store what could not be read back.
            codec.check(&bytes).map_err(|reason| StoreError::Unstorable { reason })?;
            Ok(bytes.into())
        });
        encoded.await
    }

    async fn evict_for_full_disk(self: &Arc<Self>, owner: Owner, missing: u64) -> Result<bool, StoreError> {
        let _guard = self.evicting.lock().await;
        // Space for the object is already reserved.
        self.evict_versions(owner, 0, Shortfall::Disk { missing }).await
    }

    /// Cleans up after an object was written but not added to the index, and returns the error.
    pub(super) async fn abandon(&self, id: &VersionId, error: StoreError) -> StoreError {
        // Whether the index contains the object is known only once the index is open again. In a shared index, an
        // attempt that seemed to fail may still add the object, unless the index has said that it is an orphan.
        if is_unknown(&error) || self.index.is_shared() {
            self.suspect(id);
        } else {
            drop(self.objects.delete(vec![id.clone()]).await);
        }
        error
    }

    pub(super) fn remember(&self, id: &VersionId, snapshot: &Arc<Snapshot>) {
        self.cache.insert(id, Arc::clone(snapshot));
    }
}
