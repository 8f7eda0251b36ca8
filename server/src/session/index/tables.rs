//! The tables of the index, and what is read from them, inside a transaction that writes or one that only reads.

use std::marker::PhantomData;

use redb::{Key, ReadOnlyTable, ReadTransaction, ReadableTable, Table, TableDefinition, Value, WriteTransaction};

use super::Fault;
use super::rows::{Place, ResponseRow, SessionRow, VersionRow};
use crate::session::{Owner, StoreError};

type Text = &'static str;
type Bytes = &'static [u8];
type OwnerKey = &'static [u8; 16];

/// Which tables: those of a transaction that writes, or of one that reads.
pub(crate) trait Access {
    type Table<K: Key + 'static, V: Value + 'static>: ReadableTable<K, V>;
}

/// Tables that are only read.
pub(crate) struct Reading;

impl Access for Reading {
    type Table<K: Key + 'static, V: Value + 'static> = ReadOnlyTable<K, V>;
}

/// Tables that are written, in one transaction.
pub(crate) struct Writing<'t>(PhantomData<&'t ()>);

impl<'t> Access for Writing<'t> {
    type Table<K: Key + 'static, V: Value + 'static> = Table<'t, K, V>;
}

/// A name of a table: its key and value are told where it is opened.
macro_rules! tables {
    ($($(#[$doc:meta])* $field:ident: $key:ty => $value:ty;)*) => {
        pub(crate) struct Tables<A: Access> {
            $($(#[$doc])* pub(crate) $field: A::Table<$key, $value>,)*
        }

        impl Tables<Reading> {
            pub(crate) fn reading(transaction: &ReadTransaction) -> Result<Self, Fault> {
                Ok(Self { $($field: transaction.open_table(TableDefinition::<$key, $value>::new(stringify!($field)))?,)* })
            }
        }

        impl<'t> Tables<Writing<'t>> {
            /// Opens the tables, those that are not there yet as well.
            pub(crate) fn writing(transaction: &'t WriteTransaction) -> Result<Self, Fault> {
                Ok(Self { $($field: transaction.open_table(TableDefinition::<$key, $value>::new(stringify!($field)))?,)* })
            }
        }
    };
}

tables! {
    /// Session -> its row.
    sessions: Text => Bytes;
    /// Owner and order of creation -> session.
    created: (OwnerKey, u64) => Text;
    /// Version -> its row.
    versions: Text => Bytes;
    /// Session and place -> a version that it keeps.
    kept: (Text, u64) => Text;
    /// Session and place -> a version that it remembers.
    known: (Text, u64) => Text;
    /// Last use and session, where the session keeps more than its head -> owner; after them, by their ends, the
    /// responses. What is dropped first comes first.
    droppable: (u64, Text) => OwnerKey;
    /// The same for each owner.
    droppable_by: (OwnerKey, u64, Text) => ();
    /// End and name of what goes by itself (a session, a response, a receipt).
    ends: (u64, Text) => ();
    /// Response -> owner, version, end, body.
    responses: Text => (OwnerKey, Text, u64, Bytes);
    /// Owner and key -> end, answer.
    receipts: (OwnerKey, Text) => (u64, Bytes);
    /// Object that nothing points to and that may still be there -> bytes.
    garbage: Text => u64;
    /// Owner -> bytes of versions, sessions.
    owners: OwnerKey => (u64, u64);
    /// Name of a sum -> the sum.
    totals: Text => u64;
}

/// A row that cannot be read was not written by this program.
pub(crate) fn parse<'r, T: serde::Deserialize<'r>>(bytes: &'r [u8]) -> Result<T, Fault> {
    serde_json::from_slice(bytes).map_err(|error| broken(format!("a row of the index cannot be read: {error}")))
}

/// What the index says contradicts itself.
pub(crate) fn broken(reason: String) -> Fault {
    Fault::Row(reason)
}

impl<A: Access> Tables<A> {
    pub(crate) fn session(&self, id: &str) -> Result<Option<SessionRow>, Fault> {
        self.sessions.get(id)?.map(|row| parse(row.value())).transpose()
    }

    /// The owner's session; another's is not found.
    pub(crate) fn own_session(&self, owner: Owner, id: &str) -> Result<SessionRow, Fault> {
        let row = self.session(id)?.filter(|row| row.owner == owner);
        row.ok_or(Fault::Refused(StoreError::SESSION))
    }

    pub(crate) fn version(&self, id: &str) -> Result<Option<VersionRow>, Fault> {
        self.versions.get(id)?.map(|row| parse(row.value())).transpose()
    }

    /// A version that something in the index names, so that it must be there.
    pub(crate) fn known_version(&self, id: &str) -> Result<VersionRow, Fault> {
        self.version(id)?.ok_or_else(|| broken(format!("version {id} has no row")))
    }

    /// The owner's version whose snapshot is still kept.
    pub(crate) fn kept_version(&self, owner: Owner, id: &str) -> Result<VersionRow, Fault> {
        let row = self.version(id)?.filter(|row| row.owner == owner && row.kept_by > 0);
        row.ok_or(Fault::Refused(StoreError::VERSION))
    }

    /// The session's versions, those that it keeps and those that it remembers, oldest first.
    pub(crate) fn lineage(&self, session: &str) -> Result<Vec<Place>, Fault> {
        let mut places = Vec::new();
        for (table, kept) in [(&self.kept, true), (&self.known, false)] {
            for entry in table.range((session, 0)..=(session, u64::MAX))? {
                let (key, version) = entry?;
                places.push(Place { at: key.value().1, version: version.value().to_owned(), kept });
            }
        }
        places.sort_by_key(|place| place.at);
        Ok(places)
    }

    /// The place of a version among those that the session keeps.
    pub(crate) fn place(&self, session: &str, version: &str) -> Result<Option<u64>, Fault> {
        for entry in self.kept.range((session, 0)..=(session, u64::MAX))? {
            let (key, found) = entry?;
            if found.value() == version {
                return Ok(Some(key.value().1));
            }
        }
        Ok(None)
    }

    pub(crate) fn response(&self, owner: Owner, id: &str) -> Result<ResponseRow, Fault> {
        let row = self.responses.get(id)?.map(|row| {
            let (owner, version, ends, body) = row.value();
            ResponseRow { owner: Owner(*owner), version: version.to_owned(), ends, body: body.to_owned() }
        });
        row.filter(|row| row.owner == owner).ok_or(Fault::Refused(StoreError::RESPONSE))
    }

    /// The receipt under a key and its end.
    pub(crate) fn receipt(&self, owner: Owner, key: &str) -> Result<Option<(u64, Vec<u8>)>, Fault> {
        let row = self.receipts.get((&owner.0, key))?;
        Ok(row.map(|row| (row.value().0, row.value().1.to_owned())))
    }

    /// Bytes of an owner's versions, and how many sessions the owner has.
    pub(crate) fn owner(&self, owner: Owner) -> Result<(u64, u64), Fault> {
        Ok(self.owners.get(&owner.0)?.map_or((0, 0), |row| row.value()))
    }

    pub(crate) fn total(&self, name: &str) -> Result<u64, Fault> {
        Ok(self.totals.get(name)?.map_or(0, |row| row.value()))
    }
}
