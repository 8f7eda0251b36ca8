//! Removes expired items, and texts that nothing needs: one owner at a time, so that others do not wait.

use std::collections::BTreeMap;

use super::connection::step;
use super::database::Database;
use super::reads::{Lists, Reads};
use super::rows::{column, get, number, owner};
use super::work::Work;
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::{Exempt, Transaction};

/// Number of items in one page: small in tests, so that they need several pages.
const PAGE: usize = if cfg!(test) { 2 } else { 500 };

/// Maximum number of versions listed by the sessions that are removed in one transaction, unless it is only one
/// session.
const MOST_ROWS: u64 = if cfg!(test) { 5 } else { 5000 };

const SESSIONS: &str = "SELECT s.id, s.owner, s.ends, s.kept + s.known FROM sessions s WHERE (s.ends, s.id) > ($1, $2) AND \
    s.ends <= $3 AND NOT EXISTS (SELECT FROM leases l JOIN servers v ON v.id = l.server WHERE l.session = s.id AND v.seen > \
    clock_timestamp() - make_interval(secs => $4::double precision)) ORDER BY s.ends, s.id LIMIT $5";

const RESPONSES: &str = "SELECT id, owner FROM responses WHERE ends <= $1 ORDER BY ends, id LIMIT $2";

const RECEIPTS: &str = "SELECT key, owner FROM receipts WHERE ends <= $1 ORDER BY ends LIMIT $2";

const ANY: &str = "SELECT EXISTS (SELECT FROM responses WHERE ends <= $1) OR EXISTS (SELECT FROM receipts WHERE ends <= $1) OR \
    EXISTS (SELECT FROM texts WHERE refs = 0)";

const DEAD_TEXTS: &str = "SELECT DISTINCT owner FROM texts WHERE refs = 0 LIMIT 100";

/// Removes what nothing needs any more: servers that have not been seen for a long time, their leases, and owners of
/// nothing.
const CLEAN: [&str; 3] = [
    "DELETE FROM servers WHERE seen < clock_timestamp() - make_interval(secs => 100 * $1::double precision)",
    "DELETE FROM leases l WHERE NOT EXISTS (SELECT FROM servers v WHERE v.id = l.server)",
    "DELETE FROM owners WHERE owner IN (SELECT owner FROM owners WHERE (sessions, evictable, versions, live, receipts, texts) = (0, \
     0, 0, 0, 0, 0) FOR UPDATE SKIP LOCKED)",
];

const STREAMS: &str = "DELETE FROM streams WHERE ends <= $1";

/// Expired items of one owner that are removed together.
#[derive(Debug, Default)]
struct Batch {
    reads: Reads,
    rows: u64,
}

/// A place in the order of expiry.
type Cursor = (i64, String);

impl Database {
    /// Returns a page of expired sessions that are not exempt: id, owner, and the number of versions that they list.
    /// Advances the cursor; returns `None` at the end. Only sessions are ever in use, so nothing else can be exempt.
    async fn expired_sessions(
        &self,
        now: u64,
        exempt: &Exempt,
        cursor: &mut Cursor,
    ) -> Result<Option<Vec<(String, Owner, u64)>>, StoreError> {
        let (ends, id) = cursor.clone();
        let rows =
            self.query(step!(SESSIONS, ends, id, column(now), self.ttl.as_secs_f64(), column(PAGE as u64))).await?;
        let Some(last) = rows.last() else { return Ok(None) };
        *cursor = (get(last, 2)?, get(last, 0)?);
        let mut found = Vec::new();
        for row in &rows {
            let id: String = get(row, 0)?;
            if !exempt(&id) {
                found.push((id, owner(row, 1)?, number(row, 3)?));
            }
        }
        Ok(Some(found))
    }

    pub(super) async fn can_sweep(&self, now: u64, exempt: Exempt) -> Result<bool, StoreError> {
        let any = self.query(step!(ANY, column(now))).await?;
        if any.first().is_some_and(|row| row.get(0)) {
            return Ok(true);
        }
        let mut cursor = Cursor::default();
        while let Some(found) = self.expired_sessions(now, &exempt, &mut cursor).await? {
            if !found.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) async fn expire(&self, now: u64, exempt: Exempt) -> Result<usize, StoreError> {
        let (mut removed, mut cursor) = (0, Cursor::default());
        while let Some(found) = self.expired_sessions(now, &exempt, &mut cursor).await? {
            let mut batches: BTreeMap<Owner, Batch> = BTreeMap::new();
            for (id, owner, rows) in found {
                let batch = batches.entry(owner).or_default();
                if !batch.reads.sessions.is_empty() && batch.rows + rows > MOST_ROWS {
                    removed += self.remove_expired(owner, now, std::mem::take(batch).reads).await?;
                }
                batch.reads.sessions.push(id);
                batch.rows += rows;
            }
            for (owner, batch) in batches {
                removed += self.remove_expired(owner, now, batch.reads).await?;
            }
        }
        removed += self.expire_others(now, RESPONSES).await? + self.expire_others(now, RECEIPTS).await?;
        self.retry(step!(STREAMS, column(now))).await?;
        self.retry(step!(CLEAN[0], self.ttl.as_secs_f64())).await?;
        for sql in &CLEAN[1..] {
            self.retry(step!(sql)).await?;
        }
        Ok(removed)
    }

    /// Removes expired responses or receipts.
    async fn expire_others(&self, now: u64, sql: &'static str) -> Result<usize, StoreError> {
        let mut removed = 0;
        loop {
            let mut found: BTreeMap<Owner, Reads> = BTreeMap::new();
            for row in &self.query(step!(sql, column(now), column(PAGE as u64))).await? {
                let reads = found.entry(owner(row, 1)?).or_default();
                if sql == RESPONSES {
                    reads.responses.push(get(row, 0)?);
                } else {
                    reads.receipts.push(String::from_utf8_lossy(get(row, 0)?).into_owned());
                }
            }
            let before = removed;
            for (owner, reads) in found {
                removed += self.remove_expired(owner, now, reads).await?;
            }
            if removed == before {
                return Ok(removed);
            }
        }
    }

    /// Removes these items if they are still expired, and returns how many were removed.
    async fn remove_expired(&self, owner: Owner, now: u64, reads: Reads) -> Result<usize, StoreError> {
        let leased = (!reads.sessions.is_empty()).then_some(self.ttl.as_secs_f64());
        let reads = Reads { lists: Lists::All, leased, ..reads };
        self.write(owner, reads, |work| work.remove_expired(now)).await
    }

    pub(super) async fn prune_texts(&self) -> Result<usize, StoreError> {
        let mut removed = 0;
        loop {
            let rows = self.query(step!(DEAD_TEXTS)).await?;
            if rows.is_empty() {
                return Ok(removed);
            }
            for row in &rows {
                let reads = Reads { dead_texts: Some(PAGE), ..Reads::default() };
                removed += self.write(owner(row, 0)?, reads, |work| Ok(work.remove_dead_texts())).await?;
            }
        }
    }
}

impl Work {
    /// Removes everything that was read and has expired.
    fn remove_expired(&mut self, now: u64) -> Result<usize, StoreError> {
        let mut removed = 0;
        let sessions: Vec<String> = self.sessions.keys().cloned().collect();
        for id in sessions {
            let Ok(row) = self.own_session(self.owner, &id) else { continue };
            if row.ends(0).is_some_and(|ends| ends <= now) && !self.leased.contains(&id) {
                self.remove_session(&id, &row)?;
                removed += 1;
            }
        }
        let responses: Vec<String> = self.responses.keys().cloned().collect();
        for id in responses {
            if self.response(&id)?.ends <= now {
                self.remove_response(&id)?;
                removed += 1;
            }
        }
        let receipts =
            self.receipts.iter().filter(|(_, pair)| pair.old.as_ref().is_some_and(|(ends, ..)| *ends <= now));
        let receipts: Vec<String> = receipts.map(|(key, _)| key.clone()).collect();
        for key in receipts {
            self.set_receipt(&key, None);
            removed += 1;
        }
        Ok(removed)
    }
}
