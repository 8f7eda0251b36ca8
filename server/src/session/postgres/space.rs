//! The totals of all servers, and the objects that no server needs.

use super::connection::step;
use super::database::Database;
use super::failure::damaged;
use super::rows::{get, number, owner};
use super::totals::Moment;
use crate::session::error::StoreError;
use crate::session::id::{SessionId, VersionId};
use crate::session::index::{Change, Totals};

const MOMENT: &str = "SELECT pg_current_snapshot()::text, (SELECT coalesce(sum(bytes), 0)::bigint FROM garbage)";

const OWNERS: &str = "SELECT owner, sessions, evictable, versions, live, receipts, texts FROM owners";

const FORGET: &str = "WITH gone AS (DELETE FROM garbage WHERE id = ANY($1) RETURNING bytes), total AS (INSERT INTO used (stripe, \
    bytes) SELECT pg_backend_pid() % 64, -coalesce(sum(bytes), 0)::bigint FROM gone ON CONFLICT (stripe) DO UPDATE SET bytes = \
    used.bytes + excluded.bytes) SELECT pg_current_xact_id()::text, coalesce(sum(bytes), 0)::bigint FROM gone";

/// Claims objects. A version's row is inserted only once: by the commit of the version, or here, as the claim of an
/// object that no version has; whichever comes second finds the row. A claim records when the object was last found,
/// because an import may take over an old claim. An object whose version is listed but not kept is never needed again,
/// so it is returned as well. Rows of kept versions are only read, because most objects have one.
const CLAIM: &str = "WITH asked AS (SELECT id FROM unnest($1::text[]) AS id WHERE NOT EXISTS (SELECT FROM garbage g WHERE g.id \
    = id.id) AND NOT EXISTS (SELECT FROM versions v WHERE v.id = id.id AND v.owner <> '' AND v.kept_by > 0)), claimed AS (INSERT INTO versions (id, owner, tokens, time, kind, prompt_tokens, completion_tokens, bytes, \
    kept_by, known_by) SELECT id, '', 0, extract(epoch FROM clock_timestamp()) * 1000, '', 0, 0, 0, 0, 0 FROM asked ORDER BY id \
    ON CONFLICT (id) DO UPDATE SET time = excluded.time WHERE versions.owner = '' RETURNING id) SELECT id FROM claimed UNION \
    SELECT v.id FROM asked JOIN versions v ON v.id = asked.id WHERE v.kept_by = 0 AND v.owner <> ''";

/// The rows are locked in order, so that two servers do not deadlock.
const USES: &str = "UPDATE sessions s SET used = c.used FROM (SELECT s.id, u.used FROM sessions s JOIN unnest($1::text[], \
    $2::bigint[]) AS u (id, used) ON u.id = s.id WHERE s.used < u.used ORDER BY s.id FOR UPDATE OF s) c WHERE s.id = c.id";

impl Database {
    /// Reads the totals.
    pub(super) async fn refresh(&self) -> Result<(), StoreError> {
        let rows =
            self.bounded(async { self.own.get().await?.snapshot(&[step!(MOMENT), step!(OWNERS)]).await }).await?;
        let first = rows[0].first().ok_or_else(|| damaged("there is no snapshot"))?;
        let moment = Moment::parse(get(first, 0)?).ok_or_else(|| damaged("a snapshot cannot be parsed"))?;
        let mut totals = Totals { garbage: number(first, 1)?, ..Totals::default() };
        for row in &rows[1] {
            let owner = owner(row, 0)?;
            let [live, receipts, texts] = [number(row, 4)?, number(row, 5)?, number(row, 6)?];
            totals.sessions += number(row, 1)?;
            totals.versions += number(row, 3)?;
            totals.live += live;
            totals.receipts += receipts;
            totals.texts += texts;
            totals.owners.insert(owner, live + receipts + texts);
            if number(row, 2)? > 0 {
                totals.evictable.insert(owner);
            }
        }
        self.ledger.replace(totals, moment);
        Ok(())
    }

    pub(super) async fn forget_garbage(&self, ids: &[VersionId]) -> Result<(), StoreError> {
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        let rows = self.retry(step!(FORGET, ids)).await?;
        let gone: i64 = rows.first().map_or(Ok(0), |row| get(row, 1))?;
        let change = Change { garbage: -gone, ..Change::default() };
        self.committed(Some(&rows), change, Vec::new()).map_err(|failure| self.health.note(failure))
    }

    pub(super) async fn orphans(&self, ids: &[VersionId]) -> Result<Vec<VersionId>, StoreError> {
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        let rows = self.retry(step!(CLAIM, ids)).await?;
        let found = rows.iter().map(|row| get::<&str>(row, 0)).collect::<Result<Vec<_>, _>>()?;
        Ok(found.into_iter().filter_map(VersionId::parse).collect())
    }

    pub(super) async fn record_uses(&self, uses: &[(SessionId, u64)]) -> Result<(), StoreError> {
        let ids: Vec<String> = uses.iter().map(|(id, _)| id.to_string()).collect();
        let used: Vec<i64> = uses.iter().map(|(_, used)| super::rows::column(*used)).collect();
        self.retry(step!(USES, ids, used)).await.map(drop)
    }
}
