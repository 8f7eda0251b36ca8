//! The texts of versions: reserves space for them before a turn runs, and reads them back.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::inner::{Inner, Store, version_id};
use crate::session::blocking::blocking;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{DamagedText, EncodedText, NewVersion, Reservation, TextRow, text_bytes};
use crate::session::text::{AddedText, TextPart};

/// Maximum number of tokens of a text that are read at once.
pub const MAX_TEXT_PART: u64 = 1_000_000;

/// Bytes of rows that are read at once: few at first, because most texts are short, then twice as many each time.
const FIRST_BYTES: usize = 64 << 10;
const MOST_BYTES: usize = 4 << 20;

/// The text of a new version, with the space reserved for it.
#[derive(Debug)]
pub(super) struct PreparedText {
    encoded: EncodedText,
    reservation: Arc<Reservation>,
}

impl NewVersion {
    /// Adds the version's text, if there is one.
    pub(super) fn add_text(&mut self, text: Option<PreparedText>) {
        if let Some(PreparedText { encoded, reservation }) = text {
            self.text = Some(encoded);
            self.reserved.push(reservation);
        }
    }
}

impl Store {
    /// Returns whether the texts of new versions are kept.
    pub fn keeps_text(&self) -> bool {
        self.inner.options.keep_text
    }

    /// Returns the tokens from `start` to `end` of a version that the session lists; of the head if `version` is
    /// `None`. At most [`MAX_TEXT_PART`].
    ///
    /// # Errors
    /// The session or version does not exist, its text was not kept, the range is outside the text, or the disk fails.
    pub async fn text(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
        (start, end): (Option<u64>, Option<u64>),
    ) -> Result<(VersionId, TextPart), StoreError> {
        self.inner.use_session(owner, id).await?;
        let (version, total, _) = self.inner.totals(owner, id, version).await?;
        let (start, end) = within((start, end), total, MAX_TEXT_PART)?;
        let part = self.inner.text_part(&version, total, (start, end)).await?;
        Ok((version, part))
    }
}

/// Checks a range of a text that has `total` tokens or messages, of which at most `most` are read at once. Without an
/// end, the range is as long as possible.
pub(super) fn within(
    (start, end): (Option<u64>, Option<u64>),
    total: u64,
    most: u64,
) -> Result<(u64, u64), StoreError> {
    let start = start.unwrap_or(0);
    let end = end.unwrap_or_else(|| total.min(start.saturating_add(most)));
    let refused = |parameter, least, most, found| Err(StoreError::Range { parameter, least, most, found });
    if start > total {
        return refused("start", 0, total, start);
    }
    if !(start..=total).contains(&end) || end - start > most {
        return refused("end", start, total.min(start.saturating_add(most)), end);
    }
    Ok((start, end))
}

impl Inner {
    /// Encodes the text of a new version, and reserves space for it unless `reserved` is enough. Returns `None` if
    /// there is no text or texts are not kept.
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

    /// Returns a version that the session lists (or its head), and the numbers of tokens and messages of its text.
    pub(super) async fn totals(
        &self,
        owner: Owner,
        session: &SessionId,
        version: Option<&VersionId>,
    ) -> Result<(VersionId, u64, u64), StoreError> {
        let listed = self.index.listed(owner, session, version).await?;
        let version = version_id(&listed.id)?;
        let (tokens, messages) = self.totals_of(&version, listed.row.seed.is_some()).await?;
        Ok((version, tokens, messages))
    }

    /// Returns the numbers of tokens and messages of a version's text.
    pub(super) async fn totals_of(&self, version: &VersionId, is_empty: bool) -> Result<(u64, u64), StoreError> {
        match self.index.text(version.as_str(), 1).await?.first() {
            Some((_, row)) => {
                let row = TextRow::parse(row)?;
                Ok((row.total(), row.messages))
            }
            // An empty version has no row.
            None if is_empty => Ok((0, 0)),
            None => Err(StoreError::TextNotKept { version: version.clone() }),
        }
    }

    /// Returns the tokens of a version's text from `start` to `end`.
    pub(super) async fn text_part(
        &self,
        version: &VersionId,
        total: u64,
        (start, end): (u64, u64),
    ) -> Result<TextPart, StoreError> {
        let mut pieces = Vec::new();
        if start < end {
            let visit = move |pieces: &mut Vec<Vec<u32>>, _: &str, row: &TextRow<'_>, end: u64| {
                if row.kept.max(start) < end {
                    pieces.push(row.tokens(row.kept.max(start) - row.kept, end - row.kept)?);
                }
                Ok(row.kept > start)
            };
            pieces = self.visit_text(version, end, pieces, visit).await?;
        }
        pieces.reverse();
        let tokens = pieces.concat();
        if tokens.len() as u64 != end - start {
            let found = tokens.len();
            let reason = format!("the text of version {version} has {found} of {} tokens", end - start);
            return Err(DamagedText(reason).into());
        }
        Ok(TextPart { total, start, end, tokens })
    }

    /// Returns how many leading tokens two versions share because they come from the same rows. More of their leading
    /// tokens may be equal. Each version comes with its number of tokens.
    pub(super) async fn shared_text(
        &self,
        one: (&VersionId, u64),
        other: (&VersionId, u64),
    ) -> Result<u64, StoreError> {
        if one.1.min(other.1) == 0 {
            // An empty version has no row.
            return Ok(0);
        }
        let visit = |ends: &mut HashMap<String, u64>, version: &str, _: &TextRow<'_>, end: u64| {
            ends.insert(version.to_owned(), end);
            Ok(true)
        };
        let ends = self.visit_text(one.0, one.1, HashMap::new(), visit).await?;
        let visit = |(ends, shared): &mut (HashMap<String, u64>, u64), version: &str, _: &TextRow<'_>, end: u64| {
            let both = ends.get(version).map(|of_one| end.min(*of_one));
            *shared = both.unwrap_or(0);
            Ok(both.is_none())
        };
        Ok(self.visit_text(other.0, other.1, (ends, 0), visit).await?.1)
    }

    /// Visits the rows that make up the first `end` tokens of a version's text, from the last row backward, until
    /// `visit` returns false. `visit` gets what has been found so far, the version, its row, and the position where the
    /// row's part of the text ends. Returns what was found.
    pub(super) async fn visit_text<F: Send + 'static>(
        &self,
        version: &VersionId,
        end: u64,
        mut found: F,
        visit: impl Fn(&mut F, &str, &TextRow<'_>, u64) -> Result<bool, StoreError> + Copy + Send + 'static,
    ) -> Result<F, StoreError> {
        let (mut next, mut seen, mut bytes) = (Some((version.to_string(), end)), HashSet::new(), FIRST_BYTES);
        while let Some((id, end)) = next {
            let rows = self.index.text(&id, bytes).await?;
            if rows.is_empty() {
                return Err(self.missing_text(version, &id).await);
            }
            // Decoding takes time.
            (found, seen, next) = blocking(move || {
                let mut next = Some((id, end));
                for (id, row) in rows {
                    let row = TextRow::parse(&row)?;
                    let (id, end) = (id, next.take().map_or(0, |(_, end)| end));
                    if !visit(&mut found, &id, &row, end.min(row.total()))? {
                        break;
                    }
                    next = row.parent.map(|parent| (parent.to_owned(), row.kept.min(end)));
                    if !seen.insert(id) {
                        return Err(DamagedText("the text of a version is endless".to_owned()).into());
                    }
                }
                Ok((found, seen, next))
            })
            .await?;
            bytes = bytes.saturating_mul(2).min(MOST_BYTES);
        }
        Ok(found)
    }

    /// Returns the reason why a row of a version's text is missing.
    async fn missing_text(&self, version: &VersionId, missing: &str) -> StoreError {
        match self.index.text(version.as_str(), 1).await {
            // The version has been removed in the meantime.
            Ok(rows) if rows.is_empty() => StoreError::TextNotKept { version: version.clone() },
            Ok(_) => DamagedText(format!("the text of version {missing} is missing")).into(),
            Err(error) => error,
        }
    }
}
