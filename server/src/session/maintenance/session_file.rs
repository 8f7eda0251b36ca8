//! The files of an export: for each session, a JSON file and a file with its texts; for each version with a snapshot, a
//! snapshot file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::files::failed;
use super::texts;
use crate::session::conversation::Ancestor;
use crate::session::disk::{Disk as _, SystemDisk, write};
use crate::session::error::StoreError;
use crate::session::format::check_digest;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{Listed, SessionRow, Transfer, VersionRow};
use crate::session::tag::TagName;

/// The folders of an export.
pub(super) struct Files {
    sessions: PathBuf,
    snapshots: PathBuf,
    texts: PathBuf,
}

/// A session's file.
#[derive(Serialize, Deserialize)]
struct SessionFile {
    id: String,
    owner: Owner,
    created: u64,
    updated: u64,
    used: u64,
    ttl_seconds: Option<u64>,
    metadata: BTreeMap<String, String>,
    forked_from: Option<(String, String)>,
    /// The current version.
    version: String,
    /// The versions that the session lists, oldest first.
    versions: Vec<VersionFile>,
    /// Tagged versions, by the name of the tag.
    #[serde(default)]
    tags: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
struct VersionFile {
    id: String,
    parent: Option<String>,
    label: Option<String>,
    kind: String,
    tokens: u64,
    time: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    bytes: u64,
    seed: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    origin: Vec<Ancestor>,
    /// Whether the version's snapshot is kept.
    kept: bool,
    /// The session that created it.
    #[serde(default)]
    session: Option<String>,
}

impl Files {
    pub(super) fn new(folder: &Path) -> Self {
        let [sessions, snapshots, texts] = ["sessions", "snapshots", "texts"].map(|name| folder.join(name));
        Self { sessions, snapshots, texts }
    }

    fn folders(&self) -> [&Path; 3] {
        [&self.sessions, &self.snapshots, &self.texts]
    }

    pub(super) fn create(&self) -> Result<(), StoreError> {
        self.folders().into_iter().try_for_each(|folder| SystemDisk.make_folder(folder).map_err(failed(folder)))
    }

    pub(super) fn sync(&self) -> Result<(), StoreError> {
        self.folders().into_iter().try_for_each(|folder| SystemDisk.sync_folder(folder).map_err(failed(folder)))
    }

    fn snapshot(&self, version: &str) -> PathBuf {
        self.snapshots.join(format!("{version}.tidegate"))
    }

    /// Returns whether this snapshot has a whole file.
    #[cfg(feature = "postgres")]
    pub(super) fn has_snapshot(&self, version: &str, bytes: u64) -> bool {
        self.read_snapshot(version, bytes).is_ok()
    }

    pub(super) fn write_snapshot(&self, version: &str, bytes: &[u8]) -> Result<(), StoreError> {
        write(&SystemDisk, &self.snapshot(version), bytes).map_err(failed(&self.snapshots))
    }

    pub(super) fn read_snapshot(&self, version: &str, bytes: u64) -> Result<Vec<u8>, String> {
        let path = self.snapshot(version);
        let found = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        if found.len() as u64 != bytes {
            return Err(format!("{} must have {bytes} bytes, found {}", path.display(), found.len()));
        }
        check_digest(&found).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(found)
    }

    /// Writes a session's files, except the snapshots.
    pub(super) fn write(&self, session: Transfer) -> Result<(), StoreError> {
        let Transfer { id, row, versions, texts } = session;
        write(&SystemDisk, &self.texts.join(format!("{id}.text")), &texts::encode(&texts))
            .map_err(failed(&self.texts))?;
        let file = SessionFile {
            id: id.to_string(),
            owner: row.owner,
            created: row.created,
            updated: row.updated,
            used: row.used,
            ttl_seconds: row.ttl,
            metadata: row.metadata,
            forked_from: row.forked_from,
            version: row.head,
            versions: versions.into_iter().map(VersionFile::from).collect(),
            tags: row.tags,
        };
        let json = serde_json::to_vec_pretty(&file)
            .map_err(|error| StoreError::Unavailable { reason: format!("session {id}: {error}") })?;
        write(&SystemDisk, &self.sessions.join(format!("{id}.json")), &json).map_err(failed(&self.sessions))
    }

    /// Returns the paths of the sessions' JSON files.
    pub(super) fn paths(&self) -> Result<Vec<PathBuf>, StoreError> {
        let entries = fs::read_dir(&self.sessions)
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>());
        let mut paths = entries.map_err(failed(&self.sessions))?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
        paths.sort();
        Ok(paths)
    }

    /// Reads the session in one of these files, and checks it.
    pub(super) fn read(&self, path: &Path) -> Result<Transfer, String> {
        let json = fs::read(path).map_err(|error| error.to_string())?;
        let file = serde_json::from_slice::<SessionFile>(&json).map_err(|error| error.to_string())?;
        let id = file.check()?;
        let texts = texts::read(&self.texts.join(format!("{id}.text")))?;
        let mut row = SessionRow::new(file.owner, &file.version, file.ttl_seconds, file.used);
        (row.created, row.updated) = (file.created, file.updated);
        (row.metadata, row.forked_from, row.tags) = (file.metadata, file.forked_from, file.tags);
        let versions = file.versions.into_iter().map(|version| version.listed(file.owner)).collect();
        Ok(Transfer { id, row, versions, texts })
    }
}

impl SessionFile {
    /// Checks the ids and names, because nothing else vouches for them.
    fn check(&self) -> Result<SessionId, String> {
        let id = SessionId::parse(&self.id).ok_or("the id is not that of a session")?;
        if !self.versions.iter().any(|version| version.kept && version.id == self.version) {
            return Err("its current version is not among those that it keeps".to_owned());
        }
        let mut listed = BTreeSet::new();
        for version in &self.versions {
            let maker = version.session.as_deref();
            maker
                .map_or(Some(()), |id| SessionId::parse(id).map(drop))
                .ok_or("the id of a version's session is invalid")?;
            VersionId::parse(&version.id).ok_or("the id of a version is invalid")?;
            if !listed.insert(&version.id) {
                return Err(format!("it lists version {} twice", version.id));
            }
        }
        for (name, tagged) in &self.tags {
            TagName::parse(name).ok_or_else(|| format!("the name of the tag {name:?} is invalid"))?;
            if !listed.contains(tagged) {
                return Err(format!("the tag {name} names a version that the session does not list"));
            }
        }
        Ok(id)
    }
}

impl From<Listed> for VersionFile {
    fn from(Listed { id, row, kept }: Listed) -> Self {
        Self {
            id,
            parent: row.parent,
            label: row.label,
            kind: row.kind,
            tokens: row.tokens,
            time: row.time,
            prompt_tokens: row.prompt_tokens,
            completion_tokens: row.completion_tokens,
            bytes: row.bytes,
            seed: row.seed,
            origin: row.origin,
            kept,
            session: row.session,
        }
    }
}

impl VersionFile {
    fn listed(self, owner: Owner) -> Listed {
        let row = VersionRow {
            owner,
            parent: self.parent,
            tokens: self.tokens,
            time: self.time,
            label: self.label,
            kind: self.kind,
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            bytes: self.bytes,
            seed: self.seed,
            kept_by: 0,
            known_by: 0,
            origin: self.origin,
            session: self.session,
        };
        Listed { id: self.id, row, kept: self.kept }
    }
}
