//! Moves and verifies the sessions of several servers, which may use them meanwhile: an index in PostgreSQL, and an
//! object store.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use object_store::ObjectStore;

use super::check::{Report, unnamed_notes};
use super::session_file::Files;
use super::transfer::Moved;
use crate::session::error::StoreError;
use crate::session::format::check_digest;
use crate::session::id::VersionId;
use crate::session::index::{Index as _, Limits, Transfer};
use crate::session::objects::Objects;
use crate::session::postgres::{PostgresIndex, PostgresOptions, PostgresUrl};

/// Number of sessions read at once.
const SESSIONS: usize = 16;

/// Number of version or object names read at once.
const NAMES: usize = 1000;

/// Number of objects or sessions processed concurrently.
const AT_ONCE: usize = 8;

/// Maximum number of times a session is read, if its versions are evicted meanwhile.
const READS: usize = 20;

/// Called with the amount of work done and the total.
pub type Progress<'p> = &'p (dyn Fn(u64, u64) + Send + Sync);

/// The sessions of one model, shared by several servers.
#[derive(Debug)]
pub struct Cluster {
    index: PostgresIndex,
    objects: Objects,
}

/// Lists the models whose sessions are in this database.
///
/// # Errors
/// The database cannot be read.
pub async fn models(url: &PostgresUrl) -> Result<Vec<String>, StoreError> {
    crate::session::postgres::models(url).await
}

/// What is wrong with an object.
enum Bad {
    Missing,
    Damaged(String),
}

impl Cluster {
    /// Opens the sessions of a model, whose objects are in `objects`.
    ///
    /// # Errors
    /// The database cannot be used.
    pub async fn open(url: PostgresUrl, objects: Arc<dyn ObjectStore>, model: &str) -> Result<Self, StoreError> {
        // The servers enforce the budgets and evict what exceeds them.
        let limits = Limits { disk: u64::MAX, owner: u64::MAX };
        let index = PostgresIndex::open(PostgresOptions::patient(url, model, limits), Box::new(|_| {})).await?;
        Ok(Self { index, objects: Objects::remote(objects) })
    }

    /// Closes the index.
    ///
    /// # Errors
    /// The database cannot be used.
    pub async fn close(&self) -> Result<(), StoreError> {
        self.index.close().await
    }

    /// Writes every session to `to`, each as of one point in time. Does not read again what an earlier export has
    /// already written there.
    ///
    /// # Errors
    /// The database or the object store cannot be read, or a file cannot be written.
    pub async fn export(&self, to: &Path, progress: Progress<'_>) -> Result<Moved, StoreError> {
        let files = Files::new(to);
        files.create()?;
        let (moved, written) = (Mutex::new(Moved::default()), Mutex::new(HashSet::new()));
        let (mut after, mut done) = (String::new(), 0);
        let total = self.index.capacity().totals(|totals| totals.sessions);
        loop {
            let ids = self.index.session_ids(&after, SESSIONS).await?;
            let Some(last) = ids.last() else { break };
            after.clone_from(last);
            done += ids.len() as u64;
            let sessions = self.index.export(&ids).await?;
            let each = sessions.into_iter().map(|session| self.export_session(session, &files, &written, &moved));
            stream::iter(each).buffer_unordered(AT_ONCE).try_for_each(|()| std::future::ready(Ok(()))).await?;
            progress(done, total.max(done));
        }
        files.sync()?;
        Ok(moved.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Writes a session. `written` has the snapshots that already have a file.
    async fn export_session(
        &self,
        mut session: Transfer,
        files: &Files,
        written: &Mutex<HashSet<String>>,
        moved: &Mutex<Moved>,
    ) -> Result<(), StoreError> {
        let lock = || moved.lock().unwrap_or_else(PoisonError::into_inner);
        let written = || written.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bad = BTreeMap::new();
        for read in 0..READS {
            bad.clear();
            let objects: Vec<(String, u64)> = session.objects().map(|(id, bytes)| (id.to_owned(), bytes)).collect();
            for (id, bytes) in objects {
                if written().contains(&id) {
                    continue;
                }
                if !files.has_snapshot(&id, bytes) {
                    match self.object(&id, bytes).await? {
                        Ok(found) => files.write_snapshot(&id, &found)?,
                        Err(found) => {
                            bad.insert(id, found);
                            continue;
                        }
                    }
                }
                if written().insert(id) {
                    lock().snapshots += 1;
                }
            }
            // Servers may have evicted these since the session was read.
            let kept = self.index.still_needed(bad.keys().cloned().collect()).await?;
            let evicted = bad.keys().filter(|id| !kept.contains(*id)).count();
            if evicted == 0 {
                break;
            }
            let Some(again) = self.index.export(&[session.id.to_string()]).await?.pop() else {
                // The session was deleted.
                return Ok(());
            };
            session = again;
            if read + 1 == READS {
                lock().skipped.push(format!("session {}: its versions were evicted while they were read", session.id));
                return Ok(());
            }
        }
        for (id, found) in &bad {
            lock().skipped.push(format!("session {}: the snapshot of version {id} {}", session.id, found.describe()));
        }
        if bad.contains_key(&session.row.head) {
            lock().skipped.push(format!("session {}: its current version cannot be read", session.id));
            return Ok(());
        }
        for version in &mut session.versions {
            version.kept &= !bad.contains_key(&version.id);
        }
        files.write(session)?;
        lock().sessions += 1;
        Ok(())
    }

    /// Returns a whole object, or what is wrong with it.
    async fn object(&self, id: &str, bytes: u64) -> Result<Result<bytes::Bytes, Bad>, StoreError> {
        let Some(id) = VersionId::parse(id) else { return Ok(Err(Bad::Damaged("has an invalid id".to_owned()))) };
        match self.objects.get(&id, bytes).await {
            Ok(Some(found)) => Ok(match check_digest(&found) {
                Ok(()) => Ok(found),
                Err(error) => Err(Bad::Damaged(format!("is damaged: {error}"))),
            }),
            Ok(None) => Ok(Err(Bad::Missing)),
            Err(StoreError::Corrupt { reason, .. }) => Ok(Err(Bad::Damaged(format!("is damaged: {reason}")))),
            Err(error) => Err(error),
        }
    }

    /// Adds the sessions that were exported to `from`, under the same ids. Skips sessions that exist already. After an
    /// interruption, the index has some of the sessions, each of them whole; importing again adds the others.
    ///
    /// # Errors
    /// The database or the object store cannot be written, they do not belong together, or a file cannot be read.
    pub async fn import(&self, from: &Path, progress: Progress<'_>) -> Result<Moved, StoreError> {
        if !self.index.has_begun().await? {
            if self.objects.any().await? {
                // The snapshots belong to sessions in another database.
                let reason = "it is new, but there are snapshots: name the database that has their sessions";
                return Err(StoreError::Database { reason: reason.to_owned() });
            }
            self.index.begin().await?;
        }
        let (files, moved, uploaded) = (Files::new(from), Mutex::new(Moved::default()), Mutex::default());
        let (paths, done) = (files.paths()?, Mutex::new(0));
        let each = paths.iter().map(|path| async {
            let lock = || moved.lock().unwrap_or_else(PoisonError::into_inner);
            let added = match files.read(path) {
                Ok(session) => self.import_session(&session, &files, &uploaded).await?,
                Err(reason) => Err(reason),
            };
            match added {
                Ok(snapshots) => {
                    let mut moved = lock();
                    (moved.sessions, moved.snapshots) = (moved.sessions + 1, moved.snapshots + snapshots);
                }
                Err(reason) => lock().skipped.push(format!("{}: {reason}", path.display())),
            }
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            *done += 1;
            progress(*done, paths.len() as u64);
            Ok::<_, StoreError>(())
        });
        stream::iter(each).buffer_unordered(AT_ONCE).try_for_each(|()| std::future::ready(Ok(()))).await?;
        let mut moved = moved.into_inner().unwrap_or_else(PoisonError::into_inner);
        moved.skipped.sort();
        Ok(moved)
    }

    /// Adds a session, and returns how many snapshots it keeps; the inner error says why it is skipped. `uploaded` has
    /// the objects that this import has written.
    async fn import_session(
        &self,
        session: &Transfer,
        files: &Files,
        uploaded: &Mutex<HashSet<String>>,
    ) -> Result<Result<usize, String>, StoreError> {
        let uploaded = || uploaded.lock().unwrap_or_else(PoisonError::into_inner);
        // Check this first, so that nothing is written that no session would name.
        if let Err(reason) = self.index.may_import(session).await? {
            return Ok(Err(reason));
        }
        // While these exist, the objects count as being written.
        let mut uploads = Vec::new();
        for (id, bytes) in session.objects() {
            let Some(id) = VersionId::parse(id).filter(|id| !uploaded().contains(id.as_str())) else { continue };
            match files.read_snapshot(id.as_str(), bytes) {
                Ok(found) => uploads.push(self.objects.put(&id, found.into()).await?),
                Err(reason) => return Ok(Err(reason)),
            }
            uploaded().insert(id.to_string());
        }
        if let Err(reason) = self.index.import(session).await? {
            return Ok(Err(reason));
        }
        // A sweep that had found an object to be garbage may have removed it before the session was added. It cannot do
        // so now.
        for (id, bytes) in session.objects() {
            let Some(id) = VersionId::parse(id) else { continue };
            if !self.objects.exists(&id).await?
                && let Ok(found) = files.read_snapshot(id.as_str(), bytes)
            {
                uploads.push(self.objects.put(&id, found.into()).await?);
            }
        }
        Ok(Ok(session.objects().count()))
    }

    /// Checks that every version that needs an object has a whole one, and lists the objects that no version needs.
    /// Changes nothing.
    ///
    /// # Errors
    /// The database or the object store cannot be read.
    pub async fn verify(&self, progress: Progress<'_>) -> Result<Report, StoreError> {
        let (sessions, total) = self.index.capacity().totals(|totals| (totals.sessions, totals.versions));
        let mut report = Report { sessions: sessions as usize, ..Report::default() };
        report.problems = self.index.problems().await?;
        let (mut after, mut bad) = (String::new(), BTreeMap::new());
        loop {
            let needed = self.index.needed(&after, NAMES).await?;
            let Some((last, _)) = needed.last() else { break };
            last.as_str().clone_into(&mut after);
            let each = needed.into_iter().map(|(id, bytes)| async move {
                let found = self.object(id.as_str(), bytes).await?;
                Ok::<_, StoreError>((id.to_string(), found.err()))
            });
            let mut checked = stream::iter(each).buffer_unordered(AT_ONCE);
            while let Some((id, found)) = checked.try_next().await? {
                report.snapshots += 1;
                progress(report.snapshots as u64, total.max(report.snapshots as u64));
                if let Some(found) = found {
                    bad.insert(id, found);
                }
            }
        }
        // Servers may have evicted these since they were listed.
        let kept = self.index.still_needed(bad.keys().cloned().collect()).await?;
        bad.retain(|id, _| kept.contains(id));
        for (keeper, version) in self.index.keepers(bad.keys().cloned().collect()).await? {
            if let Some(found) = bad.get(&version) {
                report.problems.push(format!("{keeper}: the snapshot of version {version} {}", found.describe()));
            }
        }
        let mut unnamed = BTreeSet::new();
        let mut batches = self.objects.batches(NAMES);
        while let Some(batch) = self.objects.next(&mut batches).await? {
            let ids = batch.iter().map(|(id, _)| id.to_string()).collect();
            unnamed.extend(self.index.unnamed(ids).await?);
        }
        report.notes =
            unnamed_notes(&unnamed, "a server is writing it now or has parked a turn in it, or a sweep removes it");
        Ok(report)
    }
}

impl Bad {
    fn describe(&self) -> &str {
        match self {
            Self::Missing => "is missing",
            Self::Damaged(reason) => reason,
        }
    }
}
