//! From a version's name to its snapshot: from memory, or from its object. And the other way.

use std::sync::Arc;

use bytes::Bytes;

use super::{Inner, Store, Tier, Version, blocking, count, now, version};
use crate::session::blobs::Coming;
use crate::session::index::{Fault, Reservation, SessionRow, Short, VersionRow};
use crate::session::{Owner, SessionId, Snapshot, StoreError, VersionId};

/// A snapshot whose object is written, on its way into the index.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) row: VersionRow,
    pub(super) reservation: Option<Arc<Reservation>>,
    /// As long as this lives, the object is not taken for one that nothing points to.
    pub(super) _coming: Option<Coming>,
}

impl Store {
    /// A session's snapshot: its head, or a version that it keeps.
    ///
    /// # Errors
    /// There is no such session or version, or its object cannot be read.
    pub async fn load(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
    ) -> Result<(Version, Arc<Snapshot>, Tier), StoreError> {
        let (row, id) = self.inner.find(owner, id, version).await?;
        let (snapshot, tier) = self.inner.fetch(&id, &row).await?;
        Ok((super::version(id.as_str(), row, true)?, snapshot, tier))
    }

    /// As [`Self::load`], as the bytes of a file that leaves the store.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub async fn bytes(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
    ) -> Result<(Version, Bytes), StoreError> {
        let (row, id) = self.inner.find(owner, id, version).await?;
        let stored = match row.seed {
            Some(_) => None,
            None => Some(self.inner.object(&id, &row).await?),
        };
        let (codec, seed, name) = (Arc::clone(&self.inner.codec), row.seed.unwrap_or(0), id.clone());
        let bytes = blocking(move || {
            let stored = stored.unwrap_or_else(|| codec.encode(&Snapshot::empty(seed)).into());
            codec.export(stored).map_err(|reason| StoreError::Corrupt { version: name, reason })
        });
        let bytes = bytes.await?;
        Ok((super::version(id.as_str(), row, true)?, bytes))
    }

    /// The versions that a session knows, oldest first: those it keeps, those whose snapshots are gone, those it was
    /// rewound from, and for a fork those it was forked with.
    ///
    /// # Errors
    /// There is no such session.
    pub async fn versions(&self, owner: Owner, id: &SessionId) -> Result<Vec<Version>, StoreError> {
        self.inner.live(owner, id).await?;
        let id = id.clone();
        let rows = self.inner.read(move |tables| {
            tables.own_session(owner, id.as_str())?;
            let places = tables.lineage(id.as_str())?;
            places
                .into_iter()
                .map(|place| Ok((tables.known_version(&place.version)?, place)))
                .collect::<Result<Vec<_>, _>>()
        });
        rows.await?.into_iter().map(|(row, place)| version(&place.version, row, place.kept)).collect()
    }
}

impl Inner {
    /// The row of a session's version, the head where none is named.
    async fn find(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
    ) -> Result<(VersionRow, VersionId), StoreError> {
        let head = self.live(owner, id).await?.head;
        self.uses.note(id);
        let Some(named) = version.cloned() else {
            let id = super::version_id(&head)?;
            return Ok((self.version_row(owner, &id).await?, id));
        };
        let (id, name) = (id.clone(), named.clone());
        let row = self.read(move |tables| {
            let place = tables.place(id.as_str(), name.as_str())?;
            place.ok_or(Fault::Refused(StoreError::VERSION))?;
            tables.kept_version(owner, name.as_str())
        });
        Ok((row.await?, named))
    }

    pub(super) async fn version_row(&self, owner: Owner, id: &VersionId) -> Result<VersionRow, StoreError> {
        let id = id.clone();
        self.read(move |tables| tables.kept_version(owner, id.as_str())).await
    }

    /// The snapshot of a version that its caller may see.
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
            let same = found == tokens;
            same.then_some(snapshot).ok_or_else(|| corrupt(format!("it has {found} tokens, its index says {tokens}")))
        });
        let snapshot = Arc::new(decoded.await?);
        self.cache.insert(id, Arc::clone(&snapshot));
        count(&self.counters.hits_disk, 1);
        Ok((snapshot, Tier::Disk))
    }

    async fn object(&self, id: &VersionId, row: &VersionRow) -> Result<Bytes, StoreError> {
        if let Some(bytes) = self.blobs.get(id, row.bytes).await? {
            return Ok(bytes);
        }
        // It may have been dropped since its row was read.
        self.version_row(row.owner, id).await?;
        Err(StoreError::Corrupt { version: id.clone(), reason: "its object is not there".to_owned() })
    }

    /// Writes the object of a snapshot, where it needs one, into the room that was promised for it, or that it finds
    /// or makes.
    pub(super) async fn prepare(
        self: &Arc<Self>,
        owner: Owner,
        id: &VersionId,
        snapshot: &Arc<Snapshot>,
        room: Option<Arc<Reservation>>,
    ) -> Result<Prepared, StoreError> {
        self.ballast().await?;
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
        };
        if empty {
            return Ok(Prepared { row, reservation: None, _coming: None });
        }
        let (codec, encoded) = (Arc::clone(&self.codec), Arc::clone(snapshot));
        let bytes: Bytes = blocking(move || {
            let bytes = codec.encode(&encoded);
            // What could not be read again must not be written.
            codec.check(&bytes).map_err(|reason| StoreError::Unfit { reason })?;
            Ok(bytes.into())
        })
        .await?;
        row.bytes = bytes.len() as u64;
        let reservation = match room.filter(|room| room.bytes() >= row.bytes) {
            Some(room) => room,
            None => Arc::new(self.admit(owner, row.bytes).await?),
        };
        reservation.shrink(row.bytes);
        let coming = match self.blobs.put(id, bytes.clone()).await {
            // The disk is fuller than its budget says: then what may go goes.
            Err(StoreError::Full { .. }) if self.relieve(owner, row.bytes).await? => self.blobs.put(id, bytes).await,
            end => end,
        };
        let coming = coming.inspect_err(|_| self.suspect(id))?;
        Ok(Prepared { row, reservation: Some(reservation), _coming: Some(coming) })
    }

    async fn relieve(self: &Arc<Self>, owner: Owner, missing: u64) -> Result<bool, StoreError> {
        let _alone = self.making_room.lock().await;
        self.make_room(owner, Short::Disk { missing }).await
    }

    /// A session whose head is a version that the index could not say it took in, where it did after all: it may
    /// have reached the disk before the disk failed.
    pub(super) async fn landed(
        &self,
        owner: Owner,
        session: &SessionId,
        version: &VersionId,
        error: &StoreError,
    ) -> Option<(SessionRow, VersionRow)> {
        if !matches!(error, StoreError::Unavailable { .. } | StoreError::Full { .. }) {
            return None;
        }
        let (session, version) = (session.clone(), version.clone());
        let rows = self.read(move |tables| {
            let row = tables.own_session(owner, session.as_str())?;
            Ok((tables.known_version(&row.head)?, row))
        });
        let (head, row) = rows.await.ok()?;
        (row.head == version.as_str()).then_some((row, head))
    }

    /// After an object is written and the index did not take it in.
    pub(super) async fn abandon(&self, id: &VersionId, error: StoreError) -> StoreError {
        match &error {
            // Whether the index has it after all is known only once it is open again.
            StoreError::Unavailable { .. } | StoreError::Full { .. } => self.suspect(id),
            _ => drop(self.blobs.delete(vec![id.clone()]).await),
        }
        error
    }

    pub(super) fn remember(&self, id: &VersionId, snapshot: &Arc<Snapshot>) {
        self.cache.insert(id, Arc::clone(snapshot));
    }
}
