//! Sessions in transfer from one index to another.

use std::collections::{BTreeMap, HashSet};

use super::rows::{Listed, SessionRow};
use super::text_row::TextRow;
use crate::session::id::SessionId;

/// A session with everything that it lists.
#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    pub(crate) id: SessionId,
    /// The session's row. Its number and counts are those of the source index.
    pub(crate) row: SessionRow,
    /// The listed versions, oldest first.
    pub(crate) versions: Vec<Listed>,
    /// The rows of the versions' texts, each after the rows that it continues.
    pub(crate) texts: Vec<(String, Vec<u8>)>,
}

impl Transfer {
    /// Returns the versions that the session keeps and that have objects, with the sizes of the objects in bytes.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (&str, u64)> {
        let kept = self.versions.iter().filter(|version| version.kept && version.row.bytes > 0);
        kept.map(|version| (&*version.id, version.row.bytes))
    }
}

/// Returns the text rows of these versions and of the versions that they continue, ancestors first. The ancestors of a
/// row that cannot be read are left out.
pub(crate) fn text_chains<'v>(
    texts: &BTreeMap<String, Vec<u8>>,
    versions: impl Iterator<Item = &'v str>,
) -> Vec<(String, Vec<u8>)> {
    let (mut rows, mut seen) = (Vec::new(), HashSet::new());
    for version in versions {
        let (mut chain, mut next) = (Vec::new(), Some(version));
        while let Some((id, row)) = next.and_then(|id| texts.get_key_value(id))
            && seen.insert(id.as_str())
        {
            chain.push((id.clone(), row.clone()));
            next = TextRow::parse(row).ok().and_then(|row| row.parent);
        }
        rows.extend(chain.into_iter().rev());
    }
    rows
}
