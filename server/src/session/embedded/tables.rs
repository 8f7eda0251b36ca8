//! The tables of the index and the queries on them, for transactions that read and transactions that write.

use std::collections::{BTreeMap, HashSet};
use std::marker::PhantomData;

use redb::{Key, ReadOnlyTable, ReadTransaction, ReadableTable, TableDefinition, Value, WriteTransaction};

use super::changes::{Recorded, Recorder, RowKey};
use super::error::IndexError;
use super::record::Position;
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::{LineageEntry, Missing, ResponseRow, SessionRow, VersionRow};

type Str = &'static str;
type Bytes = &'static [u8];
type OwnerKey = &'static [u8; 16];

/// Access to tables: read-only or writable.
pub(crate) trait Access {
    type Table<K: Key + 'static, V: Value + 'static>: ReadableTable<K, V>;
}

/// The tables of a read transaction.
pub(crate) struct ReadOnly;

impl Access for ReadOnly {
    type Table<K: Key + 'static, V: Value + 'static> = ReadOnlyTable<K, V>;
}

/// The tables of a write transaction.
pub(crate) struct ReadWrite<'t>(PhantomData<&'t ()>);

impl<'t> Access for ReadWrite<'t> {
    type Table<K: Key + 'static, V: Value + 'static> = Recorded<'t, K, V>;
}

/// Declares the tables. A field's name is also the table's name in the file, and its number identifies the table in the
/// journal; neither may change.
macro_rules! tables {
    ($($(#[$doc:meta])* $field:ident = $tag:literal: $key:ty => $value:ty;)*) => {
        pub(crate) struct Tables<A: Access> {
            $($(#[$doc])* pub(super) $field: A::Table<$key, $value>,)*
        }

        impl Tables<ReadOnly> {
            pub(crate) fn reading(transaction: &ReadTransaction) -> Result<Self, IndexError> {
                Ok(Self { $($field: transaction.open_table(TableDefinition::<$key, $value>::new(stringify!($field)))?,)* })
            }
        }

        impl<'t> Tables<ReadWrite<'t>> {
            /// Opens the tables, creating missing ones. Their changes are recorded.
            pub(super) fn writing(transaction: &'t WriteTransaction, recorder: &Recorder) -> Result<Self, IndexError> {
                Ok(Self {
                    $($field: Recorded::new(
                        transaction.open_table(TableDefinition::<$key, $value>::new(stringify!($field)))?,
                        $tag,
                        recorder,
                    ),)*
                })
            }

            /// Sets or removes a row that a journal names.
            pub(super) fn apply(&mut self, table: u8, key: &[u8], value: Option<&[u8]>) -> Result<(), IndexError> {
                match (table, value) {
                    $(
                        ($tag, Some(value)) => {
                            let (key, value) = (<$key as Value>::from_bytes(key), <$value as Value>::from_bytes(value));
                            self.$field.unrecorded().insert(key, value)?;
                        }
                        ($tag, None) => {
                            self.$field.unrecorded().remove(<$key as Value>::from_bytes(key))?;
                        }
                    )*
                    _ => return Err(damaged_row(format!("the journal has rows of table {table}, which is unknown"))),
                }
                Ok(())
            }
        }

        impl<A: Access> Tables<A> {
            /// Calls `visit` with the table, key and value of every row, except the rows about the file itself.
            pub(super) fn visit_rows<E: From<IndexError>>(
                &self,
                visit: &mut dyn FnMut(u8, &[u8], &[u8]) -> Result<(), E>,
            ) -> Result<(), E> {
                $(
                    for entry in self.$field.iter().map_err(IndexError::from)? {
                        let (key, value) = entry.map_err(IndexError::from)?;
                        let (key, value) = (key.value(), value.value());
                        let (key, value) = (<$key as Value>::as_bytes(&key), <$value as Value>::as_bytes(&value));
                        if $tag != TOTALS || !is_about_the_file(key.as_ref()) {
                            visit($tag, key.as_ref(), value.as_ref())?;
                        }
                    }
                )*
                Ok(())
            }
        }
    };
}

tables! {
    /// Session -> its row.
    sessions = 0: Str => Bytes;
    /// Owner and order of creation -> session.
    created = 1: (OwnerKey, u64) => Str;
    /// Version -> its row.
    versions = 2: Str => Bytes;
    /// Session and position -> a version whose snapshot the session keeps.
    kept = 3: (Str, u64) => Str;
    /// Session and position -> a version that the session lists, whose snapshot is gone.
    known = 4: (Str, u64) => Str;
    /// Eviction rank and name -> owner: the content of `droppable_by`, in one order for all owners. Earlier versions of
    /// the server wrote it; this one only removes from it.
    droppable = 5: (u64, Str) => OwnerKey;
    /// Owner, eviction rank and name: sessions that keep more than their head, by last use, then responses, by expiry,
    /// then the tagged versions of sessions. The lowest rank is evicted first.
    droppable_by = 6: (OwnerKey, u64, Str) => ();
    /// Expiry and name of whatever expires: sessions, responses and receipts.
    ends = 7: (u64, Str) => ();
    /// Response -> owner, version, expiry, body.
    responses = 8: Str => (OwnerKey, Str, u64, Bytes);
    /// Owner and key -> expiry, answer.
    receipts = 9: (OwnerKey, Str) => (u64, Bytes);
    /// Object that nothing points to but that may still exist -> bytes.
    garbage = 10: Str => u64;
    /// Owner -> bytes of versions, number of sessions.
    owners = 11: OwnerKey => (u64, u64);
    /// Name of a total -> its value.
    totals = 12: Str => u64;
    /// Owner -> bytes of receipts.
    receipt_bytes = 13: OwnerKey => u64;
    /// Version -> the text that it adds to its parent's text (`text_row.rs`).
    texts = 14: Str => Bytes;
    /// Version with a text -> owner, references (from its own row, if listed, and from texts that continue it), bytes.
    text_refs = 15: Str => (OwnerKey, u64, u64);
    /// Texts without references, which are about to be removed.
    dead_texts = 16: Str => ();
    /// Owner -> bytes of texts.
    text_bytes = 17: OwnerKey => u64;
}

/// Numbers of the tables that readers of the journal look into.
pub(super) const SESSIONS: u8 = 0;
pub(super) const VERSIONS: u8 = 2;
pub(super) const KEPT: u8 = 3;
pub(super) const KNOWN: u8 = 4;
pub(super) const RESPONSES: u8 = 8;
pub(super) const TEXT_REFS: u8 = 15;
const TOTALS: u8 = 12;

/// The tables that are made from others if an index of an earlier version lacks them.
pub(super) const REBUILT: [u8; 3] = [5, 6, 13];

/// The totals that state the index's position in the journal. They are not in the journal themselves.
const POSITION: [&str; 2] = ["journal sequence", "journal digest"];

/// The total that holds the version of the tables and rows. It is not in the journal, which has its own version.
const FORMAT: &str = "format version";

fn is_about_the_file(total: &[u8]) -> bool {
    total == FORMAT.as_bytes() || POSITION.iter().any(|name| name.as_bytes() == total)
}

pub(crate) fn parse<'r, T: serde::Deserialize<'r>>(bytes: &'r [u8]) -> Result<T, IndexError> {
    serde_json::from_slice(bytes).map_err(|error| damaged_row(format!("a row cannot be parsed: {error}")))
}

/// Returns the error for rows that cannot be read or that contradict each other.
pub(super) fn damaged_row(reason: String) -> IndexError {
    IndexError::Row(reason)
}

impl Tables<ReadOnly> {
    /// Returns the version of the tables and rows.
    pub(super) fn format(transaction: &ReadTransaction) -> Result<u64, IndexError> {
        let totals = transaction.open_table(TableDefinition::<Str, u64>::new("totals"))?;
        Ok(totals.get(FORMAT)?.map_or(1, |row| row.value()))
    }
}

impl Tables<ReadWrite<'_>> {
    pub(super) fn set_format(&mut self, version: u64) -> Result<(), IndexError> {
        self.totals.unrecorded().insert(FORMAT, version)?;
        Ok(())
    }

    pub(super) fn set_position(&mut self, position: Position) -> Result<(), IndexError> {
        for (name, value) in POSITION.into_iter().zip([position.sequence, position.digest]) {
            self.totals.unrecorded().insert(name, value)?;
        }
        Ok(())
    }
}

impl<A: Access> Tables<A> {
    /// Returns the index's position in the journal; `None` if an earlier version of the server wrote the index, without
    /// a journal.
    pub(super) fn journal_position(&self) -> Result<Option<Position>, IndexError> {
        let [sequence, digest] = POSITION.map(|name| self.totals.get(name));
        let (sequence, digest) = (sequence?.map(|row| row.value()), digest?.map(|row| row.value()));
        Ok(sequence.zip(digest).map(|(sequence, digest)| Position { sequence, digest }))
    }

    /// Returns all rows, by table and key.
    pub(crate) fn rows(&self) -> Result<BTreeMap<RowKey, Vec<u8>>, IndexError> {
        let mut rows = BTreeMap::new();
        self.visit_rows::<IndexError>(&mut |table, key, value| {
            rows.insert((table, key.to_vec()), value.to_vec());
            Ok(())
        })?;
        Ok(rows)
    }

    pub(crate) fn session(&self, id: &str) -> Result<Option<SessionRow>, IndexError> {
        self.sessions.get(id)?.map(|row| parse(row.value())).transpose()
    }

    /// Returns the owner's session. A session of another owner counts as not found.
    pub(crate) fn own_session(&self, owner: Owner, id: &str) -> Result<SessionRow, IndexError> {
        let row = self.session(id)?.filter(|row| row.owner == owner);
        row.ok_or(IndexError::Refused(StoreError::SESSION))
    }

    pub(crate) fn version(&self, id: &str) -> Result<Option<VersionRow>, IndexError> {
        self.versions.get(id)?.map(|row| parse(row.value())).transpose()
    }

    /// Returns a version that another row names, so that it must exist.
    pub(crate) fn require_version(&self, id: &str) -> Result<VersionRow, IndexError> {
        self.version(id)?.ok_or_else(|| damaged_row(format!("version {id} has no row")))
    }

    /// Returns all versions that the session lists, oldest first.
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

    /// Returns the position of a version in a session's list, and whether the session keeps it.
    pub(super) fn position(&self, session: &str, version: &str) -> Result<Option<(u64, bool)>, IndexError> {
        for (table, kept) in [(&self.kept, true), (&self.known, false)] {
            for entry in table.range((session, 0)..=(session, u64::MAX))? {
                let (key, found) = entry?;
                if found.value() == version {
                    return Ok(Some((key.value().1, kept)));
                }
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

    /// Returns up to `limit` garbage objects.
    pub(crate) fn garbage(&self, limit: usize) -> Result<Vec<String>, IndexError> {
        self.garbage.iter()?.take(limit).map(|entry| Ok(entry?.0.value().to_owned())).collect()
    }

    /// Returns whether nothing points to an object and it is not garbage either.
    pub(crate) fn is_orphan(&self, id: &str) -> Result<bool, IndexError> {
        // Garbage is removed separately, once the index on disk lists it as garbage.
        Ok(self.garbage.get(id)?.is_none() && self.version(id)?.is_none_or(|row| row.kept_by == 0))
    }

    /// Returns the versions that need an object which is not among `objects`, each with the sessions that keep it.
    pub(super) fn missing(&self, objects: &HashSet<String>) -> Result<Missing, IndexError> {
        let mut missing = Missing::new();
        for entry in self.versions.iter()? {
            let (id, row) = entry?;
            let row = parse::<VersionRow>(row.value()).ok().filter(|row| row.kept_by > 0 && row.bytes > 0);
            if let Some(row) = row.filter(|_| !objects.contains(id.value())) {
                missing.insert(id.value().to_owned(), (row, Vec::new()));
            }
        }
        if !missing.is_empty() {
            for entry in self.kept.iter()? {
                let (key, version) = entry?;
                if let Some((_, sessions)) = missing.get_mut(version.value()) {
                    sessions.push(key.value().0.to_owned());
                }
            }
        }
        Ok(missing)
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
            let row = match self.own_session(owner, name.value()) {
                Ok(row) => row,
                Err(IndexError::Row(reason)) => {
                    tracing::error!(session = name.value(), reason, "a damaged row: the session is not listed");
                    continue;
                }
                Err(error) => return Err(error),
            };
            if !visit(name.value(), row)? {
                break;
            }
        }
        Ok(())
    }

    /// Returns a receipt's expiry and answer.
    pub(crate) fn receipt(&self, owner: Owner, key: &str) -> Result<Option<(u64, Vec<u8>)>, IndexError> {
        let row = self.receipts.get((&owner.0, key))?;
        Ok(row.map(|row| (row.value().0, row.value().1.to_owned())))
    }

    /// Returns the bytes of an owner's versions, and the number of its sessions.
    pub(crate) fn owner(&self, owner: Owner) -> Result<(u64, u64), IndexError> {
        Ok(self.owners.get(&owner.0)?.map_or((0, 0), |row| row.value()))
    }

    pub(crate) fn total(&self, name: &str) -> Result<u64, IndexError> {
        Ok(self.totals.get(name)?.map_or(0, |row| row.value()))
    }
}
