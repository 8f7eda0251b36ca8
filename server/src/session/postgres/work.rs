//! The rows of one owner that a transaction has read, and the changes that it makes to them. Nothing here waits: the
//! rows are read before, and the changes are written after.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::failure::damaged;
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::{
    LineageEntry, NewReceipt, NewVersion, Reservation, ResponseRow, SessionRow, TextRow, Transaction, VersionRow,
    receipt_bytes, text_bytes,
};

/// The counters of an owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Account {
    pub(super) sessions: i64,
    /// The number of the next session.
    pub(super) next: i64,
    /// Number of sessions that keep more than their head, plus responses.
    pub(super) evictable: i64,
    pub(super) versions: i64,
    pub(super) live: i64,
    pub(super) receipts: i64,
    pub(super) texts: i64,
}

impl Account {
    /// Returns the bytes that count toward the owner's budget.
    pub(super) const fn bytes(&self) -> i64 {
        self.live + self.receipts + self.texts
    }
}

/// The versions that a session lists, by position, each with whether it is kept: as many as the transaction needs.
pub(super) type Entries = BTreeMap<u64, (String, bool)>;

/// A row before the transaction and now; `None` where there is no row.
#[derive(Debug)]
pub(super) struct Pair<T> {
    pub(super) old: Option<T>,
    pub(super) new: Option<T>,
}

/// The counts of a text that existed before or is added.
#[derive(Clone, Debug)]
pub(super) struct TextHead {
    pub(super) tokens: u64,
    pub(super) messages: u64,
}

/// A text to add.
#[derive(Debug)]
pub(super) struct NewText {
    pub(super) id: String,
    pub(super) parent: Option<String>,
    pub(super) head: TextHead,
    pub(super) bytes: u64,
    pub(super) content: Vec<u8>,
}

/// A receipt's expiry, the bytes that it counts, and its answer if it is to be written.
pub(super) type ReceiptState = (u64, u64, Option<Vec<u8>>);

/// An obstacle to adding a version that another index had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// The version belongs to another owner.
    Foreign,
    /// A sweep may be removing the version's object.
    Removing,
    /// There is only a claim on an object that a sweep has removed.
    Claim,
}

#[derive(Debug)]
pub(super) struct Work {
    pub(super) owner: Owner,
    pub(super) before: Account,
    pub(super) account: Account,
    /// The bytes that all owners use, garbage included.
    pub(super) disk: i64,
    pub(super) sessions: BTreeMap<String, Pair<SessionRow>>,
    /// The lists of the sessions that were read or added.
    pub(super) entries: HashMap<String, Entries>,
    /// The list positions that have changed.
    pub(super) moved: BTreeSet<(String, u64)>,
    pub(super) versions: BTreeMap<String, Pair<VersionRow>>,
    pub(super) responses: BTreeMap<String, Pair<ResponseRow>>,
    pub(super) receipts: BTreeMap<String, Pair<ReceiptState>>,
    pub(super) texts: HashMap<String, TextHead>,
    pub(super) new_texts: Vec<NewText>,
    /// The changes in the number of references to existing texts.
    pub(super) text_refs: BTreeMap<String, i64>,
    /// Texts that nothing needs any more, each with its parent and bytes, if they were requested.
    pub(super) dead_texts: Vec<(String, Option<String>, i64)>,
    pub(super) removed_texts: Vec<String>,
    pub(super) obstacles: BTreeMap<String, Obstacle>,
    /// The versions whose claims are removed, because they are added.
    pub(super) taken: Vec<String>,
    /// Sessions that a live server works on.
    pub(super) leased: BTreeSet<String>,
    pub(super) fulfilled: Vec<Arc<Reservation>>,
    /// Bytes that were added, regardless of what was removed.
    pub(super) added: u64,
}

impl Work {
    pub(super) fn new(owner: Owner, account: Account, disk: i64) -> Self {
        Self {
            owner,
            before: account,
            account,
            disk,
            sessions: BTreeMap::new(),
            entries: HashMap::new(),
            moved: BTreeSet::new(),
            versions: BTreeMap::new(),
            responses: BTreeMap::new(),
            receipts: BTreeMap::new(),
            texts: HashMap::new(),
            new_texts: Vec::new(),
            text_refs: BTreeMap::new(),
            dead_texts: Vec::new(),
            removed_texts: Vec::new(),
            obstacles: BTreeMap::new(),
            taken: Vec::new(),
            leased: BTreeSet::new(),
            fulfilled: Vec::new(),
            added: 0,
        }
    }

    // ---- Reading

    pub(super) fn session(&self, id: &str) -> Option<&SessionRow> {
        self.sessions.get(id)?.new.as_ref()
    }

    /// Returns the owner's version, if anything lists it.
    pub(super) fn version(&self, id: &str) -> Option<&VersionRow> {
        self.versions.get(id)?.new.as_ref().filter(|row| row.owner == self.owner)
    }

    pub(super) fn response(&self, id: &str) -> Result<ResponseRow, StoreError> {
        let row = self.responses.get(id).and_then(|pair| pair.new.as_ref());
        row.filter(|row| row.owner == self.owner).cloned().ok_or(StoreError::RESPONSE)
    }

    /// Returns the versions of a session that were read.
    pub(super) fn list(&self, session: &str) -> &Entries {
        const NONE: &Entries = &Entries::new();
        self.entries.get(session).unwrap_or(NONE)
    }

    // ---- Texts

    /// Removes the texts that were found to be dead, and returns how many there were.
    pub(super) fn remove_dead_texts(&mut self) -> usize {
        self.removed_texts = self.dead_texts.iter().map(|(id, ..)| id.clone()).collect();
        let removed: BTreeSet<&String> = self.removed_texts.iter().collect();
        for (_, parent, bytes) in &self.dead_texts {
            self.account.texts -= bytes;
            if let Some(parent) = parent.as_ref().filter(|parent| !removed.contains(parent)) {
                *self.text_refs.entry(parent.clone()).or_default() -= 1;
            }
        }
        self.removed_texts.len()
    }

    // ---- Responses and receipts

    pub(super) fn remove_response(&mut self, id: &str) -> Result<(), StoreError> {
        let row = self.response(id)?;
        self.point(&row.version, -1, -1)?;
        self.account.evictable -= 1;
        if let Some(pair) = self.responses.get_mut(id) {
            pair.new = None;
        }
        Ok(())
    }

    /// Sets what is stored under a key.
    pub(super) fn set_receipt(&mut self, key: &str, receipt: Option<ReceiptState>) {
        let pair = self.receipts.entry(key.to_owned()).or_insert(Pair { old: None, new: None });
        let bytes = |receipt: &Option<ReceiptState>| receipt.as_ref().map_or(0, |(_, bytes, _)| *bytes as i64);
        self.account.receipts += bytes(&receipt) - bytes(&pair.new);
        pair.new = receipt;
    }
}

/// Finds only rows that were read before.
impl Transaction for Work {
    type Error = StoreError;

    fn damaged(reason: String) -> StoreError {
        damaged(reason)
    }

    // ---- Reading

    fn find_session(&self, id: &str) -> Result<Option<SessionRow>, StoreError> {
        Ok(self.session(id).cloned())
    }

    fn find_version(&self, id: &str) -> Result<Option<VersionRow>, StoreError> {
        Ok(self.version(id).cloned())
    }

    fn count_sessions(&self, _owner: Owner) -> Result<u64, StoreError> {
        Ok(self.account.sessions as u64)
    }

    fn lineage(&self, session: &str) -> Result<Vec<LineageEntry>, StoreError> {
        let entry = |(position, (version, kept)): (&u64, &(String, bool))| LineageEntry {
            position: *position,
            version: version.clone(),
            kept: *kept,
        };
        Ok(self.list(session).iter().map(entry).collect())
    }

    fn oldest(&self, session: &str, kept: bool, limit: usize) -> Result<Vec<(u64, String)>, StoreError> {
        let entries = self.list(session).iter().filter(|(_, (_, found))| *found == kept).take(limit);
        Ok(entries.map(|(position, (version, _))| (*position, version.clone())).collect())
    }

    fn position(&self, session: &str, version: &str) -> Result<Option<(u64, bool)>, StoreError> {
        let found = self.list(session).iter().find(|(_, (id, _))| id == version);
        Ok(found.map(|(position, (_, kept))| (*position, *kept)))
    }

    fn receipt_ends(&self, _owner: Owner, key: &str) -> Result<Option<u64>, StoreError> {
        Ok(self.receipts.get(key).and_then(|pair| pair.new.as_ref()).map(|(ends, ..)| *ends))
    }

    // ---- Changing

    fn number(&mut self) -> Result<u64, StoreError> {
        let number = self.account.next as u64;
        self.account.next += 1;
        Ok(number)
    }

    fn put_session(&mut self, id: &str, _old: Option<&SessionRow>, new: Option<&SessionRow>) -> Result<(), StoreError> {
        let pair = self.sessions.entry(id.to_owned()).or_insert(Pair { old: None, new: None });
        let counts = |row: Option<&SessionRow>| row.map_or((0, 0), |row| (1, i64::from(row.kept > 1)));
        let (before, after) = (counts(pair.new.as_ref()), counts(new));
        self.account.sessions += after.0 - before.0;
        self.account.evictable += after.1 - before.1;
        pair.new = new.cloned();
        Ok(())
    }

    fn put_entry(&mut self, session: &str, position: u64, version: &str, kept: bool) -> Result<(), StoreError> {
        self.moved.insert((session.to_owned(), position));
        self.entries.entry(session.to_owned()).or_default().insert(position, (version.to_owned(), kept));
        Ok(())
    }

    fn remove_entry(&mut self, session: &str, position: u64, kept: bool) -> Result<Option<String>, StoreError> {
        let Some(entries) = self.entries.get_mut(session) else { return Ok(None) };
        if entries.get(&position).is_none_or(|(_, found)| *found != kept) {
            return Ok(None);
        }
        self.moved.insert((session.to_owned(), position));
        Ok(entries.remove(&position).map(|(version, _)| version))
    }

    fn add_new(&mut self, version: &NewVersion) -> Result<(), StoreError> {
        let NewVersion { id, row, text, reserved } = version;
        self.added += row.bytes;
        let row = VersionRow { kept_by: 0, known_by: 0, ..row.clone() };
        self.versions.insert(id.to_string(), Pair { old: None, new: Some(row) });
        self.fulfilled.extend(reserved.iter().cloned());
        let Some(text) = text else { return Ok(()) };
        // The text that it continues must be kept as well. If it is not, the turn succeeds without its text.
        let parent = version.row.parent.as_deref().filter(|_| text.kept > 0);
        let head = parent.and_then(|parent| self.texts.get(parent)).filter(|head| text.kept <= head.tokens).cloned();
        if text.kept > 0 && head.is_none() {
            return Ok(());
        }
        let parent = parent.filter(|_| head.is_some());
        let content = text.row(parent.zip(head.map(|head| head.messages)));
        let Ok(head) = TextRow::parse(&content).map(|row| TextHead { tokens: row.total(), messages: row.messages })
        else {
            return Ok(());
        };
        if let Some(parent) = parent {
            *self.text_refs.entry(parent.to_owned()).or_default() += 1;
        }
        let bytes = text_bytes(content.len() as u64);
        self.account.texts += bytes as i64;
        self.added += bytes;
        let (id, parent) = (id.to_string(), parent.map(str::to_owned));
        self.new_texts.push(NewText { id, parent, head, bytes, content });
        Ok(())
    }

    fn put_version(&mut self, id: &str, row: &VersionRow) -> Result<(), StoreError> {
        if let Some(pair) = self.versions.get_mut(id) {
            pair.new = Some(row.clone());
        }
        Ok(())
    }

    fn point(&mut self, id: &str, kept_by: i64, known_by: i64) -> Result<(), StoreError> {
        let row = self.versions.get_mut(id).and_then(|pair| pair.new.as_mut());
        let row = row.ok_or_else(|| damaged(format!("version {id} has no row")))?;
        row.kept_by = row.kept_by.saturating_add_signed(kept_by);
        row.known_by = row.known_by.saturating_add_signed(known_by);
        Ok(())
    }

    fn put_response(&mut self, id: &str, row: &ResponseRow) -> Result<(), StoreError> {
        self.point(&row.version, 1, 1)?;
        self.account.evictable += 1;
        self.responses.insert(id.to_owned(), Pair { old: None, new: Some(row.clone()) });
        Ok(())
    }

    fn put_receipt(&mut self, _owner: Owner, receipt: &NewReceipt<Vec<u8>>) -> Result<(), StoreError> {
        let NewReceipt { key, ends, answer, .. } = receipt;
        let bytes = receipt_bytes(key, answer);
        self.added += bytes;
        self.set_receipt(key, Some((*ends, bytes, Some(answer.clone()))));
        Ok(())
    }
}
