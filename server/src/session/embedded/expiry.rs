//! Expiry of sessions, stored responses and receipts.

use std::collections::BTreeMap;

use redb::ReadableTable;

use super::error::IndexError;
use super::eviction::response_rank;
use super::tables::{Access, Tables, damaged_row};
use super::transaction::Write;
use crate::session::id::Owner;
use crate::session::index::{NewReceipt, ResponseRow, Transaction, receipt_bytes};

/// The prefix of a receipt's name in the expiry order.
const RECEIPT: &str = "key_";

/// Sorts after every name.
const LAST: &str = "\u{10ffff}";

fn receipt_name(owner: Owner, key: &str) -> String {
    format!("{RECEIPT}{:032x}{key}", u128::from_be_bytes(owner.0))
}

fn parse_receipt_name(name: &str) -> Option<(Owner, &str)> {
    let (owner, key) = name.strip_prefix(RECEIPT)?.split_at_checked(32)?;
    Some((Owner(u128::from_str_radix(owner, 16).ok()?.to_be_bytes()), key))
}

impl<A: Access> Tables<A> {
    /// Returns whether anything has expired at `now`, except what is `exempt`.
    pub(crate) fn any_expired(&self, now: u64, exempt: impl Fn(&str) -> bool) -> Result<bool, IndexError> {
        for entry in self.ends.range(..=(now, LAST))? {
            if !exempt(entry?.0.value().1) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Checks every row that removing a session, response or receipt would read.
    fn check_rows(&self, name: &str) -> Result<(), IndexError> {
        if parse_receipt_name(name).is_some() {
            return Ok(());
        }
        if self.session(name)?.is_some() {
            return self.lineage(name)?.iter().try_for_each(|entry| self.require_version(&entry.version).map(drop));
        }
        let version = self.responses.get(name)?.map(|row| row.value().1.to_owned());
        let version = version.ok_or_else(|| damaged_row(format!("{name} expires and has no row")))?;
        self.require_version(&version).map(drop)
    }
}

impl Write<'_> {
    pub(super) fn put_receipt(&mut self, owner: Owner, receipt: &NewReceipt<Vec<u8>>) -> Result<(), IndexError> {
        let NewReceipt { key, ends, answer, .. } = receipt;
        self.remove_receipt(owner, key)?;
        self.add_receipt_bytes(owner, receipt_bytes(key, answer) as i64)?;
        self.tables.receipts.insert((&owner.0, &**key), (*ends, &**answer))?;
        self.tables.ends.insert((*ends, &*receipt_name(owner, key)), ())?;
        Ok(())
    }

    fn remove_receipt(&mut self, owner: Owner, key: &str) -> Result<(), IndexError> {
        let row = self.tables.receipts.remove((&owner.0, key))?;
        let row = row.map(|row| (row.value().0, receipt_bytes(key, row.value().1)));
        if let Some((ends, bytes)) = row {
            self.add_receipt_bytes(owner, -(bytes as i64))?;
            self.tables.ends.remove((ends, &*receipt_name(owner, key)))?;
        }
        Ok(())
    }

    fn add_receipt_bytes(&mut self, owner: Owner, bytes: i64) -> Result<(), IndexError> {
        let had = self.tables.receipt_bytes.get(&owner.0)?.map_or(0, |row| row.value());
        match had.saturating_add_signed(bytes) {
            0 => drop(self.tables.receipt_bytes.remove(&owner.0)?),
            sum => drop(self.tables.receipt_bytes.insert(&owner.0, sum)?),
        }
        self.change.receipts += bytes;
        *self.change.owners.entry(owner).or_default() += bytes;
        Ok(())
    }

    /// Counts the bytes of receipts in an index written by an earlier version of the server.
    pub(super) fn rebuild_receipt_bytes(&mut self) -> Result<(), IndexError> {
        let mut found: BTreeMap<Owner, u64> = BTreeMap::new();
        for entry in self.tables.receipts.iter()? {
            let (key, row) = entry?;
            let (owner, key) = key.value();
            *found.entry(Owner(*owner)).or_default() += receipt_bytes(key, row.value().1);
        }
        for (owner, bytes) in found {
            self.tables.receipt_bytes.insert(&owner.0, bytes)?;
        }
        Ok(())
    }

    pub(super) fn put_response(&mut self, id: &str, row: &ResponseRow) -> Result<(), IndexError> {
        self.point(&row.version, 1, 1)?;
        self.tables.responses.insert(id, (&row.owner.0, &*row.version, row.ends, &*row.body))?;
        self.tables.ends.insert((row.ends, id), ())?;
        self.add_droppable(row.owner, response_rank(row.ends), id)
    }

    pub(crate) fn remove_response(&mut self, id: &str, row: &ResponseRow) -> Result<(), IndexError> {
        self.tables.responses.remove(id)?;
        self.tables.ends.remove((row.ends, id))?;
        self.remove_droppable(row.owner, response_rank(row.ends), id)?;
        self.point(&row.version, -1, -1)
    }

    /// Removes at most `max` expired items, except those that are `exempt`, and returns how many it removed.
    pub(crate) fn remove_expired(
        &mut self,
        now: u64,
        max: usize,
        exempt: impl Fn(&str) -> bool,
    ) -> Result<usize, IndexError> {
        let mut expired = Vec::new();
        for entry in self.tables.ends.range(..=(now, LAST))? {
            let (key, _) = entry?;
            let (ends, name) = key.value();
            if !exempt(name) {
                expired.push((ends, name.to_owned()));
            }
            if expired.len() == max {
                break;
            }
        }
        for (ends, name) in &expired {
            match self.tables.check_rows(name) {
                Ok(()) => self.remove_named(name)?,
                // One damaged row must not keep the others from expiring.
                Err(IndexError::Row(reason)) => {
                    tracing::error!(name, reason, "a damaged row: it stays in the index, and no longer expires");
                    self.tables.ends.remove((*ends, &**name))?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(expired.len())
    }

    fn remove_named(&mut self, name: &str) -> Result<(), IndexError> {
        if let Some((owner, key)) = parse_receipt_name(name) {
            self.remove_receipt(owner, key)
        } else if let Some(row) = self.tables.session(name)? {
            self.remove_session(name, &row)
        } else {
            let row = self.any_response(name)?;
            self.remove_response(name, &row)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_name_contains_its_owner_and_key() {
        let owner = Owner([7; 16]);
        for key in ["", "a key", "é_key_"] {
            assert_eq!(parse_receipt_name(&receipt_name(owner, key)), Some((owner, key)));
        }
        assert_eq!(parse_receipt_name("ses_0"), None);
        assert_eq!(parse_receipt_name("key_é"), None);
    }
}
