//! Compares two versions of one owner: the texts from where they diverge.

use super::inner::Store;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::text::PartedTexts;

/// Maximum number of tokens of a text after the part that it shares with the other one.
const MAX_END: u64 = 100_000;

/// Number of tokens before the point of divergence that are returned as well: a word or a character may begin there.
const BEFORE: u64 = 64;

impl Store {
    /// Returns the texts of two versions, from where they diverge. The part that they share because one was forked from
    /// the other is not read. Counts as a use of the session `id`.
    ///
    /// # Errors
    /// The session or a version does not exist, a text was not kept or is too long after the shared part, or the disk
    /// fails.
    pub async fn parted_texts(
        &self,
        owner: Owner,
        id: &SessionId,
        versions: [VersionId; 2],
    ) -> Result<PartedTexts, StoreError> {
        self.inner.use_session(owner, id).await?;
        let inner = &self.inner;
        let mut totals = [0; 2];
        for (total, version) in totals.iter_mut().zip(&versions) {
            let row = inner.index.version(owner, version).await?.ok_or(StoreError::VERSION)?;
            *total = inner.totals_of(version, row.seed.is_some()).await?.0;
        }
        let [one, other] = [0, 1].map(|at| (&versions[at], totals[at]));
        let start = inner.shared_text(one, other).await?.saturating_sub(BEFORE);
        let mut ends = [Vec::new(), Vec::new()];
        for (end, (version, total)) in ends.iter_mut().zip([one, other]) {
            if total - start > MAX_END {
                return Err(StoreError::FarApart { version: version.clone(), bound: MAX_END });
            }
            *end = inner.text_part(version, total, (start, total)).await?.tokens;
        }
        Ok(PartedTexts { start, ends })
    }
}
