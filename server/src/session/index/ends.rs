//! What goes by itself at its time, sessions aside: stored responses and receipts; and what is gone at a time.

use redb::ReadableTable;

use super::Fault;
use super::room::response_place;
use super::rows::{ResponseRow, VersionRow};
use super::tables::{Access, Tables};
use super::write::Write;
use crate::session::Owner;

/// The name of a receipt among the things that end.
const RECEIPT: &str = "key_";

/// No name comes after it.
const LAST: &str = "\u{10ffff}";

fn receipt_name(owner: Owner, key: &str) -> String {
    format!("{RECEIPT}{:032x}{key}", u128::from_be_bytes(owner.0))
}

fn named_receipt(name: &str) -> Option<(Owner, &str)> {
    let (owner, key) = name.strip_prefix(RECEIPT)?.split_at_checked(32)?;
    Some((Owner(u128::from_str_radix(owner, 16).ok()?.to_be_bytes()), key))
}

impl<A: Access> Tables<A> {
    /// Whether anything has ended at `now` and does not stay.
    pub(crate) fn any_ended(&self, now: u64, stays: impl Fn(&str) -> bool) -> Result<bool, Fault> {
        for entry in self.ends.range(..=(now, LAST))? {
            if !stays(entry?.0.value().1) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Write<'_> {
    /// Keeps an answer under a key until `ends`; what was there before is replaced.
    pub(crate) fn put_receipt(&mut self, owner: Owner, key: &str, ends: u64, answer: &[u8]) -> Result<(), Fault> {
        self.remove_receipt(owner, key)?;
        self.tables.receipts.insert((&owner.0, key), (ends, answer))?;
        self.tables.ends.insert((ends, &*receipt_name(owner, key)), ())?;
        Ok(())
    }

    fn remove_receipt(&mut self, owner: Owner, key: &str) -> Result<(), Fault> {
        let ends = self.tables.receipts.remove((&owner.0, key))?.map(|row| row.value().0);
        if let Some(ends) = ends {
            self.tables.ends.remove((ends, &*receipt_name(owner, key)))?;
        }
        Ok(())
    }

    /// Keeps a response, and its version for as long.
    pub(crate) fn put_response(&mut self, id: &str, row: &ResponseRow, version: &VersionRow) -> Result<(), Fault> {
        self.add_version(&row.version, version)?;
        self.point(&row.version, 1, 1)?;
        self.tables.responses.insert(id, (&row.owner.0, &*row.version, row.ends, &*row.body))?;
        self.tables.ends.insert((row.ends, id), ())?;
        self.add_droppable(row.owner, response_place(row.ends), id)
    }

    pub(crate) fn remove_response(&mut self, id: &str, row: &ResponseRow) -> Result<(), Fault> {
        self.tables.responses.remove(id)?;
        self.tables.ends.remove((row.ends, id))?;
        self.forget_droppable(row.owner, response_place(row.ends), id)?;
        self.point(&row.version, -1, -1)
    }

    /// Removes what has ended at `now`, at most `most` things, but for what `stays`. Says how many went.
    pub(crate) fn end(&mut self, now: u64, most: usize, stays: impl Fn(&str) -> bool) -> Result<usize, Fault> {
        let mut ended = Vec::new();
        for entry in self.tables.ends.range(..=(now, LAST))? {
            let name = entry?.0.value().1.to_owned();
            if !stays(&name) {
                ended.push(name);
            }
            if ended.len() == most {
                break;
            }
        }
        for name in &ended {
            if let Some((owner, key)) = named_receipt(name) {
                self.remove_receipt(owner, key)?;
            } else if let Some(row) = self.tables.session(name)? {
                self.remove_session(name, &row)?;
            } else {
                let row = self.any_response(name)?;
                self.remove_response(name, &row)?;
            }
        }
        Ok(ended.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_receipt_says_whose_it_is() {
        let owner = Owner([7; 16]);
        for key in ["", "a key", "é_key_"] {
            assert_eq!(named_receipt(&receipt_name(owner, key)), Some((owner, key)));
        }
        assert_eq!(named_receipt("ses_0"), None);
        assert_eq!(named_receipt("key_é"), None);
    }
}
