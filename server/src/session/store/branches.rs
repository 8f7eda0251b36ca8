//! Names of versions: tags and labels.

use std::collections::HashMap;

use super::inner::{Store, version, version_id};
use super::types::{Tag, Version};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::IndexError;
use crate::session::tag::{TagName, VersionRef};

/// Most tags of a session.
const MAX_TAGS: usize = 100;

impl Store {
    /// The version that is meant in a session: the one with this id, which may be any, or the one that the tag names.
    ///
    /// # Errors
    /// No such session, or it has no such tag.
    pub async fn resolve(&self, owner: Owner, id: &SessionId, meant: VersionRef) -> Result<VersionId, StoreError> {
        match meant {
            VersionRef::Id(version) => Ok(version),
            VersionRef::Tag(name) => {
                let row = self.inner.live(owner, id).await?;
                version_id(row.tagged(&name).map_err(|error| error.to_store_error())?)
            }
        }
    }

    /// A session's tags, by name.
    ///
    /// # Errors
    /// No such session.
    pub async fn tags(&self, owner: Owner, id: &SessionId) -> Result<Vec<Tag>, StoreError> {
        let mut versions: HashMap<VersionId, Version> =
            self.versions(owner, id).await?.into_iter().map(|version| (version.id.clone(), version)).collect();
        let mut tags = Vec::new();
        versions.retain(|_, version| !version.tags.is_empty());
        for version in versions.values() {
            tags.extend(version.tags.iter().map(|name| Tag { name: name.clone(), version: version.clone() }));
        }
        tags.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(tags)
    }

    /// Gives a version that the session keeps a tag, or moves the tag to it; by default the head.
    ///
    /// # Errors
    /// No such session, tag or version, the session has too many tags, or the disk fails.
    pub async fn tag(
        &self,
        owner: Owner,
        id: &SessionId,
        name: TagName,
        meant: Option<VersionRef>,
    ) -> Result<Tag, StoreError> {
        self.inner.live(owner, id).await?;
        self.inner.ensure_ballast().await?;
        self.inner.last_uses.record(id);
        let (id, tag) = (id.clone(), name.clone());
        let tagged = self.inner.writer.run(move |write| {
            let old = write.tables.own_session(owner, id.as_str())?;
            let version = old.resolve(meant.as_ref())?.to_owned();
            if write.tables.keeps(id.as_str(), &version)? != Some(true) {
                return Err(IndexError::Refused(StoreError::VERSION));
            }
            if old.tags.len() >= MAX_TAGS && !old.tags.contains_key(name.as_str()) {
                return Err(IndexError::Refused(StoreError::TooManyTags { bound: MAX_TAGS }));
            }
            let found = write.tables.require_version(&version)?;
            let mut row = old.clone();
            row.tags.insert(name.as_str().to_owned(), version.clone());
            row.touch();
            write.put_session(id.as_str(), Some(&old), &row)?;
            Ok((row.tags_of(&version), version, found))
        });
        let (tags, id, row) = tagged.await?;
        Ok(Tag { name: tag.as_str().to_owned(), version: Version { tags, ..version(&id, row, true)? } })
    }

    /// Removes a tag. Its version stays.
    ///
    /// # Errors
    /// No such session or tag, or the disk fails.
    pub async fn untag(&self, owner: Owner, id: &SessionId, name: &TagName) -> Result<(), StoreError> {
        self.inner.live(owner, id).await?;
        self.inner.ensure_ballast().await?;
        self.inner.last_uses.record(id);
        let (id, name) = (id.clone(), name.clone());
        let removed = self.inner.writer.run(move |write| {
            let old = write.tables.own_session(owner, id.as_str())?;
            old.tagged(&name)?;
            let mut row = old.clone();
            row.tags.remove(name.as_str());
            row.touch();
            write.put_session(id.as_str(), Some(&old), &row)
        });
        removed.await
    }

    /// Changes the label of a version that the session lists. All sessions that list the version have the new label.
    ///
    /// # Errors
    /// No such session, tag or version, or the disk fails.
    pub async fn label(
        &self,
        owner: Owner,
        id: &SessionId,
        meant: VersionRef,
        label: Option<String>,
    ) -> Result<Version, StoreError> {
        self.inner.live(owner, id).await?;
        self.inner.ensure_ballast().await?;
        self.inner.last_uses.record(id);
        let id = id.clone();
        let labelled = self.inner.writer.run(move |write| {
            let old = write.tables.own_session(owner, id.as_str())?;
            let version = old.resolve(Some(&meant))?.to_owned();
            let kept = write.tables.keeps(id.as_str(), &version)?;
            let kept = kept.ok_or(IndexError::Refused(StoreError::VERSION))?;
            let mut found = write.tables.require_version(&version)?;
            found.label.clone_from(&label);
            write.add_version(&version, &found)?;
            let mut row = old.clone();
            row.touch();
            write.put_session(id.as_str(), Some(&old), &row)?;
            Ok((row.tags_of(&version), version, found, kept))
        });
        let (tags, id, row, kept) = labelled.await?;
        Ok(Version { tags, ..version(&id, row, kept)? })
    }
}
