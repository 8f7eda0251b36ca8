//! The texts of two versions of one owner, from where they part.

use super::inner::Store;
use super::lineage::own_version;
use super::texts::totals;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::IndexError;
use crate::session::text::PartedTexts;

/// Most tokens of a text after what it shares with the other one.
const MAX_END: u64 = 100_000;

/// Tokens before the place where they part that are returned as well: a word or a character may begin there.
const BEFORE: u64 = 64;

impl Store {
    /// The texts of two versions, from where they part. What they share because one was forked from the other is not read.
    /// Counts as a use of the session `id`.
    ///
    /// # Errors
    /// No such session or version, a text was not kept or is too long after what both share, or the disk fails.
    pub async fn parted_texts(
        &self,
        owner: Owner,
        id: &SessionId,
        versions: [VersionId; 2],
    ) -> Result<PartedTexts, StoreError> {
        self.inner.use_session(owner, id).await?;
        let parted = self.inner.read(move |tables| {
            let mut texts = Vec::with_capacity(2);
            for version in &versions {
                own_version(tables, owner, version.as_str())?;
                texts.push((version, totals(tables, version.as_str())?.0));
            }
            let [one, other] = [texts[0], texts[1]].map(|(version, total)| (version.as_str(), total));
            let start = tables.shared_text(one, other)?.saturating_sub(BEFORE);
            let end = |(version, total): (&VersionId, u64)| {
                if total - start > MAX_END {
                    let version = version.clone();
                    return Err(IndexError::Refused(StoreError::FarApart { version, bound: MAX_END }));
                }
                Ok(tables.text_part(version.as_str(), total, (start, total))?.tokens)
            };
            Ok(PartedTexts { start, ends: [end(texts[0])?, end(texts[1])?] })
        });
        parted.await
    }
}
