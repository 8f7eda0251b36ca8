//! The texts of versions. A version's row holds what it adds to its parent's text and never changes; forks share the
//! rows of their ancestors. A row lives as long as its version is listed or a child needs it, so texts outlive
//! snapshots.

use std::collections::BTreeMap;

use redb::ReadableTable;

use super::error::IndexError;
use super::tables::{Access, Tables, damaged_row};
use super::transaction::Write;
use crate::session::id::Owner;
use crate::session::index::{EncodedText, TextRow, text_bytes};

impl<A: Access> Tables<A> {
    /// Returns the rows of a version's text, starting with its own and followed by those of the texts it continues: at
    /// least one row, and more until they have `bytes` bytes. Empty if the version has no text.
    pub(super) fn text_rows(&self, version: &str, bytes: usize) -> Result<Vec<(String, Vec<u8>)>, IndexError> {
        let (mut rows, mut read, mut next) = (Vec::new(), 0, Some(version.to_owned()));
        while let Some(id) = next.take().filter(|_| rows.is_empty() || read < bytes)
            && let Some(row) = self.texts.get(&*id)?
        {
            let row = row.value().to_owned();
            read += row.len();
            // A damaged row is reported where it is needed and parsed.
            next = TextRow::parse(&row).ok().and_then(|row| row.parent.map(str::to_owned));
            rows.push((id, row));
        }
        Ok(rows)
    }

    /// Returns the number of tokens and messages of a version's text; `None` if it has none.
    fn text_totals(&self, version: &str) -> Result<Option<(u64, u64)>, IndexError> {
        let Some(row) = self.texts.get(version)? else { return Ok(None) };
        let row = TextRow::parse(row.value())?;
        Ok(Some((row.total(), row.messages)))
    }

    /// Returns whether there are texts that nothing refers to any more.
    pub(crate) fn any_dead_text(&self) -> Result<bool, IndexError> {
        Ok(self.dead_texts.first()?.is_some())
    }
}

impl Write<'_> {
    /// Adds the text of a version that is being added. Skips it if the text that it continues is not kept or is
    /// damaged, because a turn does not need the text.
    pub(crate) fn add_text(
        &mut self,
        owner: Owner,
        version: &str,
        parent: Option<&str>,
        text: &EncodedText,
    ) -> Result<(), IndexError> {
        let parent = match parent.filter(|_| text.kept > 0) {
            None if text.kept > 0 => return Ok(()),
            None => None,
            Some(parent) => match self.hold_parent(parent, text.kept) {
                Ok(Some(messages)) => Some((parent, messages)),
                Ok(None) => return Ok(()),
                Err(IndexError::Row(error)) => {
                    tracing::error!(version, parent, ?error, "a damaged text: those that continue it are not kept");
                    return Ok(());
                }
                Err(error) => return Err(error),
            },
        };
        self.put_text(owner, version, &text.row(parent))
    }

    /// Counts a reference to the text that another continues after its first `kept` tokens, and returns the number of
    /// messages; `None` if that text is not kept.
    fn hold_parent(&mut self, parent: &str, kept: u64) -> Result<Option<u64>, IndexError> {
        let Some((total, messages)) = self.tables.text_totals(parent)? else { return Ok(None) };
        if kept > total {
            return Err(damaged_row(format!("the text of version {parent} has {total} tokens, not {kept}")));
        }
        self.hold_text(parent)?;
        Ok(Some(messages))
    }

    /// Adds a row that its version refers to.
    fn put_text(&mut self, owner: Owner, version: &str, row: &[u8]) -> Result<(), IndexError> {
        let bytes = text_bytes(row.len() as u64);
        self.tables.texts.insert(version, row)?;
        self.tables.text_refs.insert(version, (&owner.0, 1, bytes))?;
        self.add_text_bytes(owner, bytes as i64)
    }

    /// Adds a reference to a text.
    pub(crate) fn hold_text(&mut self, version: &str) -> Result<(), IndexError> {
        let (owner, references, bytes) = self.text_ref(version)?;
        if references == 0 {
            self.tables.dead_texts.remove(version)?;
        }
        self.tables.text_refs.insert(version, (&owner.0, references + 1, bytes))?;
        Ok(())
    }

    /// Removes a reference to a version's text, if it has one. After the last, [`Self::remove_dead_texts`] removes the
    /// text.
    pub(super) fn release_text(&mut self, version: &str) -> Result<(), IndexError> {
        if self.tables.text_refs.get(version)?.is_none() {
            return Ok(());
        }
        let (owner, references, bytes) = self.text_ref(version)?;
        let references = references.saturating_sub(1);
        if references == 0 {
            self.tables.dead_texts.insert(version, ())?;
        }
        self.tables.text_refs.insert(version, (&owner.0, references, bytes))?;
        Ok(())
    }

    /// Adds an imported text. Its version was `added` by this import, existed before, or is not listed. The inner error
    /// says why the text is refused.
    pub(crate) fn import_text(
        &mut self,
        owner: Owner,
        version: &str,
        row: &[u8],
        added: bool,
    ) -> Result<Result<(), String>, IndexError> {
        let refused = |reason: &str| Ok(Err(format!("the text of version {version} {reason}")));
        let Ok(text) = TextRow::parse(row).and_then(|text| text.added().map(|_| text)) else {
            return refused("cannot be read");
        };
        if self.tables.version(version)?.is_some_and(|listed| listed.tokens != text.total()) {
            return refused("has another number of tokens than the version");
        }
        if self.tables.text_refs.get(version)?.is_some() {
            if self.text_ref(version)?.0 != owner {
                return refused("belongs to another owner");
            }
            if added {
                self.hold_text(version)?;
            }
            return Ok(Ok(()));
        }
        if let Some(parent) = text.parent {
            let known = self.tables.text_refs.get(parent)?.is_some() && self.text_ref(parent)?.0 == owner;
            let total = self.tables.text_totals(parent)?.map_or(0, |(total, _)| total);
            if !known || text.kept > total {
                return refused("does not continue one of its owner");
            }
            self.hold_text(parent)?;
        }
        self.put_text(owner, version, row)?;
        if self.tables.version(version)?.is_none() {
            self.release_text(version)?;
        }
        Ok(Ok(()))
    }

    fn text_ref(&self, version: &str) -> Result<(Owner, u64, u64), IndexError> {
        let row = self.tables.text_refs.get(version)?;
        let row = row.ok_or_else(|| damaged_row(format!("the text of version {version} is not counted")))?;
        let (owner, references, bytes) = row.value();
        Ok((Owner(*owner), references, bytes))
    }

    /// Removes at most `max` texts that nothing refers to, and returns how many it removed. This may leave a parent
    /// without references.
    pub(crate) fn remove_dead_texts(&mut self, max: usize) -> Result<usize, IndexError> {
        for removed in 0..max {
            let Some(version) = self.tables.dead_texts.first()?.map(|(version, _)| version.value().to_owned()) else {
                return Ok(removed);
            };
            let version = version.as_str();
            let row = self.tables.texts.get(version)?.map(|row| row.value().to_owned());
            match row.as_deref().map(TextRow::parse).transpose() {
                Ok(row) => {
                    if let Some(parent) = row.and_then(|row| row.parent) {
                        self.release_text(parent)?;
                    }
                }
                // Its ancestors stay.
                Err(error) => tracing::error!(version, ?error, "a damaged row: the text before it is not removed"),
            }
            self.tables.dead_texts.remove(version)?;
            self.tables.texts.remove(version)?;
            let counted = self.tables.text_refs.remove(version)?.map(|row| (Owner(*row.value().0), row.value().2));
            if let Some((owner, bytes)) = counted {
                self.add_text_bytes(owner, -(bytes as i64))?;
            }
        }
        Ok(max)
    }

    /// Removes texts that cannot be read and the texts that continue them, and recounts the references and bytes of all
    /// others.
    pub(crate) fn recount_texts(&mut self) -> Result<(), IndexError> {
        let (mut parents, mut bad) = (BTreeMap::new(), Vec::new());
        for entry in self.tables.texts.iter()? {
            let (id, row) = entry?;
            match TextRow::parse(row.value()).and_then(|row| row.added().map(|_| row.parent)) {
                Ok(parent) => drop(parents.insert(id.value().to_owned(), parent.map(str::to_owned))),
                Err(_) => bad.push(id.value().to_owned()),
            }
        }
        let mut children: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (id, parent) in &parents {
            match parent {
                Some(parent) if parents.contains_key(parent) => {
                    children.entry(parent.clone()).or_default().push(id.clone());
                }
                Some(_) => bad.push(id.clone()),
                None => {}
            }
        }
        while let Some(id) = bad.pop() {
            bad.extend(children.remove(&id).unwrap_or_default());
            parents.remove(&id);
            self.tables.texts.remove(id.as_str())?;
        }
        let mut references: BTreeMap<&str, u64> = BTreeMap::new();
        for parent in parents.values().flatten() {
            *references.entry(parent).or_default() += 1;
        }
        let mut counted = Vec::new();
        for entry in self.tables.text_refs.iter()? {
            let (id, row) = entry?;
            counted.push((id.value().to_owned(), Owner(*row.value().0), row.value().2));
        }
        for (id, owner, bytes) in counted {
            self.tables.dead_texts.remove(id.as_str())?;
            if !parents.contains_key(&id) {
                self.tables.text_refs.remove(id.as_str())?;
                self.add_text_bytes(owner, -(bytes as i64))?;
                continue;
            }
            let listed = u64::from(self.tables.versions.get(&*id)?.is_some());
            let references = listed + references.get(id.as_str()).copied().unwrap_or(0);
            self.tables.text_refs.insert(id.as_str(), (&owner.0, references, bytes))?;
            if references == 0 {
                self.tables.dead_texts.insert(id.as_str(), ())?;
            }
        }
        Ok(())
    }

    fn add_text_bytes(&mut self, owner: Owner, bytes: i64) -> Result<(), IndexError> {
        let had = self.tables.text_bytes.get(&owner.0)?.map_or(0, |row| row.value());
        match had.saturating_add_signed(bytes) {
            0 => drop(self.tables.text_bytes.remove(&owner.0)?),
            sum => drop(self.tables.text_bytes.insert(&owner.0, sum)?),
        }
        self.change.texts += bytes;
        *self.change.owners.entry(owner).or_default() += bytes;
        Ok(())
    }
}
