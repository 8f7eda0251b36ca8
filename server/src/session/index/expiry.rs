//! Expiry of sessions, stored responses and receipts.

use redb::ReadableTable;

use super::error::IndexError;
use super::eviction::response_rank;
use super::rows::{ResponseRow, VersionRow};
use super::tables::{Access, Tables};
use super::transaction::Write;
use crate::session::id::Owner;

/// Prefix of a receipt's name in the order of expiry.
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
    /// Whether anything has expired at `now`, except what is `exempt`.
    pub(crate) fn any_expired(&self, now: u64, exempt: impl Fn(&str) -> bool) -> Result<bool, IndexError> {
        for entry in self.ends.range(..=(now, LAST))? {
            if !exempt(entry?.0.value().1) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Write<'_> {
    /// Stores a receipt, replacing any earlier one under the same key.
    pub(crate) fn put_receipt(&mut self, owner: Owner, key: &str, ends: u64, answer: &[u8]) -> Result<(), IndexError> {
        self.remove_receipt(owner, key)?;
        self.tables.receipts.insert((&owner.0, key), (ends, answer))?;
        self.tables.ends.insert((ends, &*receipt_name(owner, key)), ())?;
        Ok(())
    }

    fn remove_receipt(&mut self, owner: Owner, key: &str) -> Result<(), IndexError> {
        let ends = self.tables.receipts.remove((&owner.0, key))?.map(|row| row.value().0);
        if let Some(ends) = ends {
            self.tables.ends.remove((ends, &*receipt_name(owner, key)))?;
        }
        Ok(())
    }

    /// Stores a response, which keeps its version.
    pub(crate) fn put_response(&mut self, id: &str, row: &ResponseRow, version: &VersionRow) -> Result<(), IndexError> {
        self.add_version(&row.version, version)?;
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

    /// Removes at most `max` expired items, except those that are `exempt`. Returns how many were removed.
    pub(crate) fn remove_expired(
        &mut self,
        now: u64,
        max: usize,
        exempt: impl Fn(&str) -> bool,
    ) -> Result<usize, IndexError> {
        let mut expired = Vec::new();
        for entry in self.tables.ends.range(..=(now, LAST))? {
            let name = entry?.0.value().1.to_owned();
            if !exempt(&name) {
                expired.push(name);
            }
            if expired.len() == max {
                break;
            }
        }
        for name in &expired {
            if let Some((owner, key)) = parse_receipt_name(name) {
                self.remove_receipt(owner, key)?;
            } else if let Some(row) = self.tables.session(name)? {
                self.remove_session(name, &row)?;
            } else {
                let row = self.any_response(name)?;
                self.remove_response(name, &row)?;
            }
        }
        Ok(expired.len())
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
