//! Exports conversations as files: the snapshot of a version, with its label, metadata, ancestors and text.

use std::sync::Arc;

use bytes::Bytes;

use super::inner::{Inner, Store};
use super::messages::MAX_MESSAGES;
use super::texts::MAX_TEXT_PART;
use super::types::Version;
use crate::session::blocking::blocking;
use crate::session::conversation::{Ancestor, Conversation, shorten};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::VersionRow;
use crate::session::snapshot::Snapshot;
use crate::session::text::{AddedMessage, AddedText, Content, KeptMessage};
use crate::text::Vocabulary;

/// Maximum number of ancestors that are looked up.
const MAX_ANCESTORS: usize = 1024;

/// Maximum bytes of messages in a file.
const MAX_MESSAGE_BYTES: usize = 8 << 20;

impl Store {
    /// Returns the bytes of an export file of a session's head, or of another version that it keeps. The file includes
    /// the text if the text was kept and is not too long for a file.
    ///
    /// # Errors
    /// Same as [`Self::load`].
    pub async fn bytes(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
        vocabulary: Arc<Vocabulary>,
    ) -> Result<(Version, Bytes), StoreError> {
        let (row, name) = self.inner.find(owner, id, version).await?;
        let stored = match row.seed {
            Some(_) => None,
            None => Some(self.inner.object(&name, &row).await?),
        };
        let conversation = self.inner.conversation(owner, id, &name, vocabulary).await?;
        let (codec, seed, version) = (Arc::clone(&self.inner.codec), row.seed.unwrap_or(0), name.clone());
        let bytes = blocking(move || {
            let stored = stored.unwrap_or_else(|| codec.encode(&Snapshot::empty(seed)).into());
            codec.export(stored, &conversation).map_err(|reason| StoreError::Corrupt { version, reason })
        });
        let bytes = bytes.await?;
        tracing::info!(session = %id, version = %name, bytes = bytes.len(), "session downloaded");
        Ok((super::inner::version(name.as_str(), row, true)?, bytes))
    }
}

impl Inner {
    async fn conversation(
        &self,
        owner: Owner,
        session: &SessionId,
        version: &VersionId,
        vocabulary: Arc<Vocabulary>,
    ) -> Result<Conversation, StoreError> {
        let metadata = self.index.session(owner, session).await?.metadata;
        let row = self.version_row(owner, version).await?;
        let text = match self.whole_text(version, row.seed.is_some(), vocabulary).await {
            Err(StoreError::TextNotKept { .. } | StoreError::LongMessages { .. }) => None,
            text => text?,
        };
        let lineage = self.ancestors(owner, &row).await?;
        // If the version was removed in the meantime, its text and ancestors may be incomplete; if it still exists,
        // they are complete.
        self.version_row(owner, version).await?;
        Ok(Conversation { label: row.label, metadata, lineage, text })
    }

    /// Returns the listed ancestors of a version, oldest first. They follow the ancestors recorded in the file from
    /// which the first one was created, if any.
    async fn ancestors(&self, owner: Owner, row: &VersionRow) -> Result<Vec<Ancestor>, StoreError> {
        let (mut lineage, mut origin) = (Vec::new(), row.origin.clone());
        if let Some(parent) = &row.parent {
            for (id, row) in self.index.chain(owner, parent, MAX_ANCESTORS).await? {
                lineage.push(Ancestor { version: id, label: row.label, time: row.time });
                origin = row.origin;
            }
        }
        lineage.extend(origin.into_iter().rev());
        lineage.reverse();
        shorten(&mut lineage);
        Ok(lineage)
    }

    /// Returns the whole text of a version as one piece; `None` if it is too long.
    async fn whole_text(
        &self,
        version: &VersionId,
        is_empty: bool,
        vocabulary: Arc<Vocabulary>,
    ) -> Result<Option<AddedText>, StoreError> {
        let (tokens, messages) = self.totals_of(version, is_empty).await?;
        if tokens > MAX_TEXT_PART || messages > MAX_MESSAGES {
            return Ok(None);
        }
        let found = self.messages_of(version, (tokens, 0..messages), vocabulary, MAX_MESSAGE_BYTES).await?;
        let tokens = self.text_part(version, tokens, (0, tokens)).await?.tokens;
        let messages = found.into_iter().map(|KeptMessage { role, content, more, tokens, .. }| {
            let content = match (tokens, content) {
                (Some((start, end)), _) => Content::Tokens(start, end),
                (None, Some(text)) => Content::Text(text),
                (None, None) => Content::None,
            };
            AddedMessage { role, continues: false, content, more }
        });
        Ok(Some(AddedText { kept: 0, tokens, messages: messages.collect() }))
    }
}
