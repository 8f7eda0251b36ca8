//! Records the changes that a transaction makes to rows, for the journal.

use std::borrow::Borrow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::RangeBounds;
use std::rc::Rc;

use redb::{
    AccessGuard, Key, Range, ReadableTable, ReadableTableMetadata, StorageError, Table, TableStats, Value as RedbValue,
};

/// The number of the table of texts.
pub(super) const TEXTS: u8 = 14;

/// A row's table number and key.
pub(crate) type RowKey = (u8, Vec<u8>);

/// Changed rows by table and key: the new value, or `None` for a removed row.
pub(super) type Changes = BTreeMap<RowKey, Option<Vec<u8>>>;

/// The recorded changes of an open transaction, shared by all its tables.
pub(super) type Recorder = Rc<RefCell<Changes>>;

/// A writable table that records its changes.
pub(crate) struct Recorded<'t, K: Key + 'static, V: RedbValue + 'static> {
    table: Table<'t, K, V>,
    tag: u8,
    recorder: Recorder,
}

impl<'t, K: Key + 'static, V: RedbValue + 'static> Recorded<'t, K, V> {
    pub(super) fn new(table: Table<'t, K, V>, tag: u8, recorder: &Recorder) -> Self {
        Self { table, tag, recorder: Rc::clone(recorder) }
    }

    fn record(&self, key: &K::SelfType<'_>, value: Option<Vec<u8>>) {
        let key = K::as_bytes(key).as_ref().to_vec();
        self.recorder.borrow_mut().insert((self.tag, key), value);
    }

    pub(super) fn insert<'k, 'v>(
        &mut self,
        key: impl Borrow<K::SelfType<'k>>,
        value: impl Borrow<V::SelfType<'v>>,
    ) -> Result<Option<AccessGuard<'_, V>>, StorageError> {
        self.record(key.borrow(), Some(V::as_bytes(value.borrow()).as_ref().to_vec()));
        self.table.insert(key, value)
    }

    pub(super) fn remove<'k>(
        &mut self,
        key: impl Borrow<K::SelfType<'k>>,
    ) -> Result<Option<AccessGuard<'_, V>>, StorageError> {
        self.record(key.borrow(), None);
        self.table.remove(key)
    }

    /// Returns the table itself. Changes made through it are not recorded.
    pub(super) fn unrecorded(&mut self) -> &mut Table<'t, K, V> {
        &mut self.table
    }
}

impl<K: Key + 'static, V: RedbValue + 'static> ReadableTableMetadata for Recorded<'_, K, V> {
    fn stats(&self) -> Result<TableStats, StorageError> {
        self.table.stats()
    }

    fn len(&self) -> Result<u64, StorageError> {
        self.table.len()
    }
}

impl<K: Key + 'static, V: RedbValue + 'static> ReadableTable<K, V> for Recorded<'_, K, V> {
    fn get<'a>(&self, key: impl Borrow<K::SelfType<'a>>) -> Result<Option<AccessGuard<'_, V>>, StorageError> {
        self.table.get(key)
    }

    fn range<'a, R>(&self, range: impl RangeBounds<R> + 'a) -> Result<Range<'_, K, V>, StorageError>
    where
        R: Borrow<K::SelfType<'a>> + 'a,
    {
        self.table.range(range)
    }

    fn first(&self) -> Result<Option<(AccessGuard<'_, K>, AccessGuard<'_, V>)>, StorageError> {
        self.table.first()
    }

    fn last(&self) -> Result<Option<(AccessGuard<'_, K>, AccessGuard<'_, V>)>, StorageError> {
        self.table.last()
    }
}
