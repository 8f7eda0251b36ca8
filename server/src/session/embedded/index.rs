//! The embedded index: implements [`Index`] with a file in a folder, or in memory.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use async_trait::async_trait;

use super::ballast::Ballast;
use super::database::OpenIndex;
use super::error::IndexError;
use super::place::Place;
use super::recovery::WholeObject;
use super::tables::{ReadOnly, Tables};
use super::transaction::Write;
use super::writer::{Freed, SyncObjects, Writer};
use crate::session::blocking::blocking;
use crate::session::disk::Disk;
use crate::session::error::StoreError;
use crate::session::id::{Owner, ResponseId, SessionId, VersionId};
use crate::session::index::{
    Capacity, Commit, Create, Edit, Edited, Exempt, Fork, Forks, Head, Index, Listed, Missing, NewReceipt, NewResponse,
    ResponseRow, Rewind, SessionRow, VersionRow, Victims, operations,
};

/// Number of items removed in one transaction, so that other requests do not wait long for it.
const BATCH: usize = 500;

/// The index of one process.
pub(crate) struct EmbeddedIndex {
    index: Arc<OpenIndex>,
    writer: Arc<Writer>,
    ballast: Ballast,
    in_memory: bool,
}

impl fmt::Debug for EmbeddedIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.index.fmt(f)
    }
}

impl EmbeddedIndex {
    /// Opens the index in a folder, creating or repairing it if necessary; without a folder, creates one in memory.
    /// With `sync`, each transaction is synced to disk. `is_whole` checks objects that only the journal names. `freed`
    /// is called with the versions whose snapshots nothing points to any more, and `sync_objects` before an index that
    /// names objects is synced.
    pub(crate) fn open(
        disk: Arc<dyn Disk>,
        folder: Option<&Path>,
        sync: bool,
        is_whole: &WholeObject<'_>,
        freed: Freed,
        sync_objects: SyncObjects,
    ) -> Result<Self, StoreError> {
        let ballast = Ballast::new(Arc::clone(&disk), folder);
        let index = match folder.map(|folder| Place::new(disk, folder)) {
            None => OpenIndex::in_memory()?,
            Some(place) => {
                let open = || OpenIndex::open(place.clone(), place.lock()?, sync, is_whole);
                match open() {
                    // Opening an index that was not closed properly writes to it.
                    Err(StoreError::Full { .. }) if ballast.release() => open()?,
                    index => index?,
                }
            }
        };
        let index = Arc::new(index);
        let writer = Arc::new(Writer::start(Arc::clone(&index), sync, freed, sync_objects)?);
        Ok(Self { index, writer, ballast, in_memory: folder.is_none() })
    }

    /// Reads on a thread that may block.
    async fn read<T: Send + 'static>(
        &self,
        read: impl Fn(&Tables<ReadOnly>) -> Result<T, IndexError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let index = Arc::clone(&self.index);
        blocking(move || index.read(read)).await
    }

    /// Runs a transaction that removes something, even on a full disk, and syncs it so that the removal is durable.
    async fn run_freeing<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, IndexError> + Clone + Send + 'static,
    ) -> Result<T, StoreError> {
        match self.writer.run_to_disk(work.clone()).await {
            Err(StoreError::Full { .. }) => {
                // Holding the lock keeps other tasks from restoring the ballast before this transaction has used its
                // space.
                let _guard = self.ballast.in_use.lock().await;
                self.ballast.release();
                self.writer.run_to_disk(work).await
            }
            result => result,
        }
    }
}

#[async_trait]
impl Index for EmbeddedIndex {
    async fn session(&self, owner: Owner, id: &SessionId) -> Result<SessionRow, StoreError> {
        let id = id.clone();
        self.read(move |tables| tables.own_session(owner, id.as_str())).await
    }

    async fn head(&self, owner: Owner, id: &SessionId) -> Result<Head, StoreError> {
        let id = id.clone();
        self.read(move |tables| tables.head(owner, id.as_str())).await
    }

    async fn list(
        &self,
        owner: Owner,
        after: Option<u64>,
        newest_first: bool,
        limit: usize,
    ) -> Result<Vec<(SessionId, Head)>, StoreError> {
        self.read(move |tables| tables.list(owner, after, newest_first, limit)).await
    }

    async fn versions(&self, owner: Owner, id: &SessionId) -> Result<(SessionRow, Vec<Listed>), StoreError> {
        let id = id.clone();
        self.read(move |tables| tables.versions(owner, id.as_str())).await
    }

    async fn listed(&self, owner: Owner, id: &SessionId, version: Option<&VersionId>) -> Result<Listed, StoreError> {
        let (id, version) = (id.clone(), version.cloned());
        self.read(move |tables| tables.listed(owner, id.as_str(), version.as_ref().map(VersionId::as_str))).await
    }

    async fn version(&self, owner: Owner, id: &VersionId) -> Result<Option<VersionRow>, StoreError> {
        let id = id.clone();
        self.read(move |tables| tables.own_version(owner, id.as_str())).await
    }

    async fn chain(&self, owner: Owner, id: &str, limit: usize) -> Result<Vec<(String, VersionRow)>, StoreError> {
        let id = id.to_owned();
        self.read(move |tables| tables.chain(owner, &id, limit)).await
    }

    async fn text(&self, version: &str, bytes: usize) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let version = version.to_owned();
        self.read(move |tables| tables.text_rows(&version, bytes)).await
    }

    async fn response(&self, owner: Owner, id: &ResponseId) -> Result<ResponseRow, StoreError> {
        let id = id.clone();
        self.read(move |tables| tables.response(owner, id.as_str())).await
    }

    async fn receipt(&self, owner: Owner, key: &str) -> Result<Option<(u64, Vec<u8>)>, StoreError> {
        let key = key.to_owned();
        self.read(move |tables| tables.receipt(owner, &key)).await
    }

    async fn may_create(&self, owner: Owner, id: Option<&SessionId>, max_sessions: usize) -> Result<(), StoreError> {
        let id = id.cloned();
        self.writer.read(move |write| operations::check_create(write, owner, id.as_ref(), max_sessions).map(drop)).await
    }

    async fn create(&self, create: Create) -> Result<Head, StoreError> {
        self.writer.run(move |write| operations::create(write, &create)).await
    }

    async fn commit(&self, commit: Commit) -> Result<Head, StoreError> {
        self.writer.run(move |write| operations::commit(write, &commit)).await
    }

    async fn rewind(&self, rewind: Rewind) -> Result<Head, StoreError> {
        self.writer.run(move |write| operations::rewind(write, &rewind)).await
    }

    async fn may_fork(
        &self,
        owner: Owner,
        (session, from): (&SessionId, &VersionId),
        n: usize,
        max_sessions: usize,
    ) -> Result<(), StoreError> {
        let (session, from) = (session.clone(), from.clone());
        let check = move |write: &mut Write<'_>| {
            operations::check_fork(write, owner, (session.as_str(), from.as_str()), n, max_sessions).map(drop)
        };
        self.writer.read(check).await
    }

    async fn fork(&self, fork: Fork) -> Result<Forks, StoreError> {
        self.writer.run(move |write| operations::fork(write, &fork)).await
    }

    async fn edit(&self, owner: Owner, id: &SessionId, edit: Edit, now: u64) -> Result<Edited, StoreError> {
        let id = id.clone();
        self.writer.run(move |write| operations::edit(write, owner, id.as_str(), &edit, now)).await
    }

    async fn delete(&self, owner: Owner, id: &SessionId) -> Result<(), StoreError> {
        let id = id.clone();
        self.run_freeing(move |write| operations::delete(write, owner, id.as_str())).await
    }

    async fn record_uses(&self, uses: HashMap<SessionId, u64>) -> Result<(), StoreError> {
        self.writer.run(move |write| write.record_uses(&uses)).await
    }

    async fn put_response(&self, response: NewResponse) -> Result<(), StoreError> {
        self.writer.run(move |write| operations::store_response(write, &response)).await
    }

    async fn delete_response(&self, owner: Owner, id: &ResponseId) -> Result<(), StoreError> {
        let id = id.clone();
        let removed = self.run_freeing(move |write| {
            let row = write.tables.response(owner, id.as_str())?;
            write.remove_response(id.as_str(), &row)
        });
        removed.await
    }

    async fn put_receipt(&self, owner: Owner, receipt: NewReceipt<Vec<u8>>) -> Result<(), StoreError> {
        self.writer.run(move |write| write.put_receipt(owner, &receipt)).await
    }

    fn capacity(&self) -> &Capacity {
        &self.index.capacity
    }

    async fn can_sweep(&self, now: u64, exempt: Exempt) -> Result<bool, StoreError> {
        self.read(move |tables| Ok(tables.any_expired(now, &*exempt)? || tables.any_dead_text()?)).await
    }

    async fn expire(&self, now: u64, exempt: Exempt) -> Result<usize, StoreError> {
        let mut removed = 0;
        loop {
            let exempted = Arc::clone(&exempt);
            // Do not write to an idle index.
            if !self.read(move |tables| tables.any_expired(now, &*exempted)).await? {
                return Ok(removed);
            }
            let exempt = Arc::clone(&exempt);
            removed += self.run_freeing(move |write| write.remove_expired(now, BATCH, &*exempt)).await?;
        }
    }

    async fn prune_texts(&self) -> Result<usize, StoreError> {
        let mut removed = 0;
        while self.read(Tables::any_dead_text).await? {
            removed += self.run_freeing(|write| write.remove_dead_texts(BATCH)).await?;
        }
        Ok(removed)
    }

    async fn can_evict(&self, victims: Victims, missing: u64) -> Result<bool, StoreError> {
        self.read(move |tables| Ok(tables.droppable(&victims, missing)?.holders.is_some())).await
    }

    async fn evict(&self, victims: Victims, missing: u64, lineage: usize) -> Result<Option<usize>, StoreError> {
        let evicted = self.run_freeing(move |write| {
            let plan = write.tables.droppable(&victims, missing)?;
            tracing::debug!(missing, rows = plan.rows, possible = plan.holders.is_some(), "evicting versions");
            let Some(holders) = plan.holders else { return Ok(None) };
            write.evict(&holders, lineage)?;
            Ok(Some(holders.len()))
        });
        evicted.await
    }

    async fn garbage(&self, limit: usize) -> Result<Vec<VersionId>, StoreError> {
        let names = self.read(move |tables| tables.garbage(limit)).await?;
        Ok(names.iter().filter_map(|name| VersionId::parse(name)).collect())
    }

    async fn forget_garbage(&self, ids: Vec<VersionId>) -> Result<(), StoreError> {
        let names: Vec<String> = ids.iter().map(|id| id.as_str().to_owned()).collect();
        self.run_freeing(move |write| write.remove_garbage(&names)).await
    }

    async fn orphans(&self, ids: Vec<VersionId>) -> Result<Vec<VersionId>, StoreError> {
        let read = move |tables: &Tables<ReadOnly>| {
            let mut orphans = Vec::new();
            for id in &ids {
                if tables.is_orphan(id.as_str())? {
                    orphans.push(id.clone());
                }
            }
            Ok(orphans)
        };
        self.read(read).await
    }

    fn names_all(&self) -> bool {
        // A damaged index may have named objects that the rebuilt one does not, even some that this process has
        // written, because an index is also rebuilt when it is reopened after a failure. Repairing the damaged index
        // would need these objects.
        !self.index.damaged_is_kept()
    }

    async fn missing(&self, objects: HashSet<String>) -> Result<Missing, StoreError> {
        self.read(move |tables| tables.missing(&objects)).await
    }

    /// Checks that the folder is still there, and restores the ballast file if it was removed, once the task that
    /// needed its space has finished. Refuses if the disk has no space for the file.
    async fn ready(&self) -> Result<(), StoreError> {
        self.index.check_place()?;
        if !self.ballast.missing.load(Ordering::SeqCst) {
            return Ok(());
        }
        // Another task may have restored it while this one waited.
        let _guard = self.ballast.in_use.lock().await;
        if !self.ballast.missing.load(Ordering::SeqCst) {
            return Ok(());
        }
        let ballast = self.ballast.clone();
        blocking(move || ballast.restore()).await
    }

    fn failure(&self) -> Option<StoreError> {
        self.index.failure()
    }

    fn opened(&self) -> u64 {
        self.index.opened()
    }

    fn transactions(&self) -> u64 {
        self.writer.transactions()
    }

    async fn flush(&self) -> Result<(), StoreError> {
        // This must work on a full disk as well: an index that fails to write reverts to its state on disk.
        self.run_freeing(|_| Ok(())).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        if self.in_memory {
            return Ok(());
        }
        let flushed = self.flush().await;
        let (writer, index) = (Arc::clone(&self.writer), Arc::clone(&self.index));
        let closed = blocking(move || {
            writer.stop();
            index.close();
            Ok(())
        });
        closed.await.and(flushed)
    }
}
