//! The tables of the index, and the queries on them, in transactions that read or write.

use std::marker::PhantomData;

use redb::{Key, ReadOnlyTable, ReadTransaction, ReadableTable, Table, TableDefinition, Value, WriteTransaction};

use super::error::IndexError;
use super::rows::{LineageEntry, ResponseRow, SessionRow, VersionRow};
use crate::session::error::StoreError;
use crate::session::id::Owner;

type Str = &'static str;
type Bytes = &'static [u8];
type OwnerKey = &'static [u8; 16];

/// Read-only or writable tables.
pub(crate) trait Access {
    type Table<K: Key + 'static, V: Value + 'static>: ReadableTable<K, V>;
}

/// Tables of a read transaction.
pub(crate) struct ReadOnly;

impl Access for ReadOnly {
    type Table<K: Key + 'static, V: Value + 'static> = ReadOnlyTable<K, V>;
}

/// Tables of a write transaction.
pub(crate) struct ReadWrite<'t>(PhantomData<&'t ()>);

impl<'t> Access for ReadWrite<'t> {
    type Table<K: Key + 'static, V: Value + 'static> = Table<'t, K, V>;
}

/// Declares the tables; each field's name is also the table's name in the file.
macro_rules! tables {
    ($($(#[$doc:meta])* $field:ident: $key:ty => $value:ty;)*) => {
        pub(crate) struct Tables<A: Access> {
            $($(#[$doc])* pub(super) $field: A::Table<$key, $value>,)*
        }

        impl Tables<ReadOnly> {
            pub(crate) fn reading(transaction: &ReadTransaction) -> Result<Self, IndexError> {
                Ok(Self { $($field: transaction.open_table(TableDefinition::<$key, $value>::new(stringify!($field)))?,)* })
            }
        }

        impl<'t> Tables<ReadWrite<'t>> {
            /// Opens the tables, creating missing ones.
            pub(crate) fn writing(transaction: &'t WriteTransaction) -> Result<Self, IndexError> {
                Ok(Self { $($field: transaction.open_table(TableDefinition::<$key, $value>::new(stringify!($field)))?,)* })
            }
        }
    };
}

tables! {
    /// Session -> its row.
    sessions: Str => Bytes;
    /// Owner and order of creation -> session.
    created: (OwnerKey, u64) => Str;
    /// Version -> its row.
    versions: Str => Bytes;
    /// Session and position -> a version whose snapshot it keeps.
    kept: (Str, u64) => Str;
    /// Session and position -> a version that it lists, whose snapshot is gone.
    known: (Str, u64) => Str;
    /// Eviction rank and name -> owner: sessions that keep more than their head, by last use, then responses, by
    /// expiry. The lowest rank is evicted first.
    droppable: (u64, Str) => OwnerKey;
    /// The same for each owner.
    droppable_by: (OwnerKey, u64, Str) => ();
    /// Expiry and name of whatever expires (a session, a response, a receipt).
    ends: (u64, Str) => ();
    /// Response -> owner, version, expiry, body.
    responses: Str => (OwnerKey, Str, u64, Bytes);
    /// Owner and key -> expiry, answer.
    receipts: (OwnerKey, Str) => (u64, Bytes);
    /// Object that nothing points to and that may still exist -> bytes.
    garbage: Str => u64;
    /// Owner -> bytes of versions, number of sessions.
    owners: OwnerKey => (u64, u64);
    /// Name of a total -> its value.
    totals: Str => u64;
}

pub(crate) fn parse<'r, T: serde::Deserialize<'r>>(bytes: &'r [u8]) -> Result<T, IndexError> {
    serde_json::from_slice(bytes).map_err(|error| damaged_row(format!("a row cannot be parsed: {error}")))
}

/// The error for rows that cannot be read or that contradict each other.
pub(super) fn damaged_row(reason: String) -> IndexError {
    IndexError::Row(reason)
}

impl<A: Access> Tables<A> {
    pub(crate) fn session(&self, id: &str) -> Result<Option<SessionRow>, IndexError> {
        self.sessions.get(id)?.map(|row| parse(row.value())).transpose()
    }

    /// The owner's session; one of another owner is not found.
    pub(crate) fn own_session(&self, owner: Owner, id: &str) -> Result<SessionRow, IndexError> {
        let row = self.session(id)?.filter(|row| row.owner == owner);
        row.ok_or(IndexError::Refused(StoreError::SESSION))
    }

    pub(crate) fn version(&self, id: &str) -> Result<Option<VersionRow>, IndexError> {
        self.versions.get(id)?.map(|row| parse(row.value())).transpose()
    }

    /// A version that another row names, so that it must exist.
    pub(crate) fn require_version(&self, id: &str) -> Result<VersionRow, IndexError> {
        self.version(id)?.ok_or_else(|| damaged_row(format!("version {id} has no row")))
    }

    /// The owner's version, if its snapshot still exists.
    pub(crate) fn kept_version(&self, owner: Owner, id: &str) -> Result<VersionRow, IndexError> {
        let row = self.version(id)?.filter(|row| row.owner == owner && row.kept_by > 0);
        row.ok_or(IndexError::Refused(StoreError::VERSION))
    }

    /// All versions that the session lists, oldest first.
    pub(crate) fn lineage(&self, session: &str) -> Result<Vec<LineageEntry>, IndexError> {
        let mut entries = Vec::new();
        for (table, kept) in [(&self.kept, true), (&self.known, false)] {
            for entry in table.range((session, 0)..=(session, u64::MAX))? {
                let (key, version) = entry?;
                entries.push(LineageEntry { position: key.value().1, version: version.value().to_owned(), kept });
            }
        }
        entries.sort_by_key(|entry| entry.position);
        Ok(entries)
    }

    /// The position of a version among those that the session keeps.
    pub(crate) fn position(&self, session: &str, version: &str) -> Result<Option<u64>, IndexError> {
        for entry in self.kept.range((session, 0)..=(session, u64::MAX))? {
            let (key, found) = entry?;
            if found.value() == version {
                return Ok(Some(key.value().1));
            }
        }
        Ok(None)
    }

    pub(crate) fn response(&self, owner: Owner, id: &str) -> Result<ResponseRow, IndexError> {
        let row = self.responses.get(id)?.map(|row| {
            let (owner, version, ends, body) = row.value();
            ResponseRow { owner: Owner(*owner), version: version.to_owned(), ends, body: body.to_owned() }
        });
        row.filter(|row| row.owner == owner).ok_or(IndexError::Refused(StoreError::RESPONSE))
    }

    /// Up to `limit` garbage objects.
    pub(crate) fn garbage(&self, limit: usize) -> Result<Vec<String>, IndexError> {
        self.garbage.iter()?.take(limit).map(|entry| Ok(entry?.0.value().to_owned())).collect()
    }

    /// Whether nothing points to an object and it is not garbage either.
    pub(crate) fn is_orphan(&self, id: &str) -> Result<bool, IndexError> {
        // Garbage is removed separately, once the index on disk says that it is garbage.
        Ok(self.garbage.get(id)?.is_none() && self.version(id)?.is_none_or(|row| row.kept_by == 0))
    }

    /// Calls `visit` with an owner's sessions in order of creation, starting after session number `after`, until it
    /// returns false.
    pub(crate) fn visit_sessions(
        &self,
        owner: Owner,
        after: Option<u64>,
        newest_first: bool,
        mut visit: impl FnMut(&str, SessionRow) -> Result<bool, IndexError>,
    ) -> Result<(), IndexError> {
        let (first, last) = match (after, newest_first) {
            (None, _) => (0, u64::MAX),
            (Some(after), false) => (after + 1, u64::MAX),
            (Some(0), true) => return Ok(()),
            (Some(after), true) => (0, after - 1),
        };
        let mut entries = self.created.range((&owner.0, first)..=(&owner.0, last))?;
        while let Some(entry) = if newest_first { entries.next_back() } else { entries.next() } {
            let name = entry?.1;
            if !visit(name.value(), self.own_session(owner, name.value())?)? {
                break;
            }
        }
        Ok(())
    }

    /// A receipt's expiry and answer.
    pub(crate) fn receipt(&self, owner: Owner, key: &str) -> Result<Option<(u64, Vec<u8>)>, IndexError> {
        let row = self.receipts.get((&owner.0, key))?;
        Ok(row.map(|row| (row.value().0, row.value().1.to_owned())))
    }

    /// Bytes of an owner's versions, and number of sessions.
    pub(crate) fn owner(&self, owner: Owner) -> Result<(u64, u64), IndexError> {
        Ok(self.owners.get(&owner.0)?.map_or((0, 0), |row| row.value()))
    }

    pub(crate) fn total(&self, name: &str) -> Result<u64, IndexError> {
        Ok(self.totals.get(name)?.map_or(0, |row| row.value()))
    }
}
