//! The texts of versions: space for them before a turn runs, and reading them back.

use std::sync::Arc;

use super::inner::{Inner, Store, version_id};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{EncodedText, IndexError, ReadOnly, Reservation, Tables, Write, text_bytes};
use crate::session::text::{AddedText, TextPart};

/// Texts removed in one transaction, so that removing a long conversation does not keep others waiting.
pub(super) const BATCH: usize = 500;

/// Most tokens of a text that are read at once.
pub const MAX_TEXT_PART: u64 = 1_000_000;

/// The text of a new version, with space for it.
#[derive(Debug)]
pub(super) struct PreparedText {
    encoded: EncodedText,
    reservation: Arc<Reservation>,
}

impl PreparedText {
    /// Adds it in the transaction that adds its version.
    pub(super) fn add(
        &self,
        write: &mut Write<'_>,
        owner: Owner,
        version: &str,
        parent: Option<&str>,
    ) -> Result<(), IndexError> {
        write.add_text(owner, version, parent, &self.encoded)?;
        write.fulfil(Some(&self.reservation));
        Ok(())
    }
}

impl Store {
    /// Whether the texts of new versions are kept.
    pub fn keeps_text(&self) -> bool {
        self.inner.options.keep_text
    }

    /// The tokens from `start` to `end` of a version that the session lists; of its head if none is named. At most
    /// [`MAX_TEXT_PART`].
    ///
    /// # Errors
    /// No such session or version, its text was not kept, the range is not within the text, or the disk fails.
    pub async fn text(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
        (start, end): (Option<u64>, Option<u64>),
    ) -> Result<(VersionId, TextPart), StoreError> {
        let id = self.inner.use_session(owner, id).await?;
        let version = version.cloned();
        let part = self.inner.read(move |tables| {
            let version = listed(tables, owner, &id, version.as_ref())?;
            let (total, _) = totals(tables, &version)?;
            let (start, end) = within((start, end), total, MAX_TEXT_PART)?;
            let part = tables.text_part(&version, total, (start, end))?;
            Ok((version_id(&version).map_err(IndexError::Refused)?, part))
        });
        part.await
    }
}

/// The version of a session that is named, or its head.
pub(super) fn listed(
    tables: &Tables<ReadOnly>,
    owner: Owner,
    session: &SessionId,
    version: Option<&VersionId>,
) -> Result<String, IndexError> {
    let head = tables.own_session(owner, session.as_str())?.head;
    let Some(named) = version.map(VersionId::as_str).filter(|named| *named != head) else { return Ok(head) };
    let is_listed = tables.lineage(session.as_str())?.iter().any(|entry| entry.version == named);
    if is_listed { Ok(named.to_owned()) } else { Err(IndexError::Refused(StoreError::VERSION)) }
}

/// Tokens and messages of a version's text.
pub(super) fn totals(tables: &Tables<ReadOnly>, version: &str) -> Result<(u64, u64), IndexError> {
    match tables.text_totals(version)? {
        Some(totals) => Ok(totals),
        // An empty version has no row, because nothing would be in it.
        None if tables.require_version(version)?.seed.is_some() => Ok((0, 0)),
        None => {
            let version = version_id(version).map_err(IndexError::Refused)?;
            Err(IndexError::Refused(StoreError::TextNotKept { version }))
        }
    }
}

/// Checks a range of a text of `total` tokens or messages, of which at most `most` are read at once. Without an end, as much
/// as is read at once.
pub(super) fn within(
    (start, end): (Option<u64>, Option<u64>),
    total: u64,
    most: u64,
) -> Result<(u64, u64), IndexError> {
    let start = start.unwrap_or(0);
    let end = end.unwrap_or_else(|| total.min(start.saturating_add(most)));
    let refused =
        |parameter, least, most, found| Err(IndexError::Refused(StoreError::Range { parameter, least, most, found }));
    if start > total {
        return refused("start", 0, total, start);
    }
    if !(start..=total).contains(&end) || end - start > most {
        return refused("end", start, total.min(start.saturating_add(most)), end);
    }
    Ok((start, end))
}

impl Inner {
    /// Checks that a session exists and records its use.
    pub(super) async fn use_session(&self, owner: Owner, id: &SessionId) -> Result<SessionId, StoreError> {
        self.live(owner, id).await?;
        self.last_uses.record(id);
        Ok(id.clone())
    }

    /// Encodes the text of a new version and reserves space for it, if `reserved` is not enough. `None` if texts are not kept.
    pub(super) async fn prepare_text(
        self: &Arc<Self>,
        owner: Owner,
        text: Option<&AddedText>,
        reserved: Option<Arc<Reservation>>,
    ) -> Result<Option<PreparedText>, StoreError> {
        let Some(text) = text.filter(|_| self.options.keep_text) else { return Ok(None) };
        let encoded = EncodedText::new(text);
        let bytes = text_bytes(encoded.most_bytes());
        let reservation = match reserved.filter(|reserved| reserved.bytes() >= bytes) {
            Some(reserved) => reserved,
            None => Arc::new(self.admit(owner, bytes).await?),
        };
        reservation.shrink(bytes);
        Ok(Some(PreparedText { encoded, reservation }))
    }

    /// Removes texts that nothing refers to any more, and returns how many.
    pub(super) async fn remove_dead_texts(&self) -> Result<usize, StoreError> {
        let mut removed = 0;
        while self.read(Tables::any_dead_text).await? {
            removed += self.run_freeing(|write| write.remove_dead_texts(BATCH)).await?;
        }
        Ok(removed)
    }
}
