//! Names of versions: tags and labels.

use std::collections::HashMap;

use super::inner::{Inner, Store, now, version, version_id};
use super::types::{Tag, Version};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{Edit, Edited};
use crate::session::tag::{TagName, VersionRef};

impl Store {
    /// Resolves a version reference in a session. A version id is returned unchecked; a tag is looked up in the
    /// session.
    ///
    /// # Errors
    /// The session does not exist, or it has no such tag.
    pub async fn resolve(&self, owner: Owner, id: &SessionId, meant: VersionRef) -> Result<VersionId, StoreError> {
        match meant {
            VersionRef::Id(version) => Ok(version),
            VersionRef::Tag(name) => {
                let row = self.inner.live(owner, id).await?;
                version_id(row.tagged(&name)?)
            }
        }
    }

    /// Returns a session's tags, sorted by name.
    ///
    /// # Errors
    /// The session does not exist.
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

    /// Tags a version that the session keeps, or moves the tag to it; by default the head.
    ///
    /// # Errors
    /// The session, tag or version does not exist, the session has too many tags, or the disk fails.
    pub async fn tag(
        &self,
        owner: Owner,
        id: &SessionId,
        name: TagName,
        meant: Option<VersionRef>,
    ) -> Result<Tag, StoreError> {
        let edited = self.inner.edit(owner, id, Edit::Tag(name.clone(), meant)).await?;
        Ok(Tag { name: name.as_str().to_owned(), version: version_of(edited)? })
    }

    /// Removes a tag. The version remains.
    ///
    /// # Errors
    /// The session or tag does not exist, or the disk fails.
    pub async fn untag(&self, owner: Owner, id: &SessionId, name: &TagName) -> Result<(), StoreError> {
        self.inner.edit(owner, id, Edit::Untag(name.clone())).await.map(drop)
    }

    /// Changes the label of a version that the session lists. Every session that lists the version sees the new label.
    ///
    /// # Errors
    /// The session, tag or version does not exist, or the disk fails.
    pub async fn label(
        &self,
        owner: Owner,
        id: &SessionId,
        meant: VersionRef,
        label: Option<String>,
    ) -> Result<Version, StoreError> {
        version_of(self.inner.edit(owner, id, Edit::Label(meant, label)).await?)
    }
}

/// Returns the version that an edit is about.
fn version_of(Edited { session, version: about }: Edited) -> Result<Version, StoreError> {
    Ok(Version { tags: session.tags_of(&about.id), ..version(&about.id, about.row, about.kept)? })
}

impl Inner {
    /// Edits a session, which counts as a use of it.
    pub(super) async fn edit(&self, owner: Owner, id: &SessionId, edit: Edit) -> Result<Edited, StoreError> {
        self.live(owner, id).await?;
        self.index.ready().await?;
        // The edit also records the use in the index.
        self.last_uses.record(id);
        self.index.edit(owner, id, edit, now()).await
    }
}
