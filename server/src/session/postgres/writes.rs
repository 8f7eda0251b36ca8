//! The changes of a transaction, as the statements that store them. They are all sent at once.

use std::sync::Arc;

use super::connection::{Param, Step, step};
use super::rows::{column, json_column, owner_column};
use super::work::{Pair, Work};
use crate::session::error::StoreError;
use crate::session::id::VersionId;
use crate::session::index::{Change, Limits, Reservation, SessionRow, Shortfall, VersionRow};

/// What a transaction stores.
pub(super) struct Writes {
    /// The statements, of which the last returns the number of the transaction. Empty if nothing has changed.
    pub(super) steps: Vec<Step>,
    pub(super) change: Change,
    /// Reservations for what is stored from now on.
    pub(super) fulfilled: Vec<Arc<Reservation>>,
    /// Versions whose objects nothing points to any more.
    pub(super) freed: Vec<VersionId>,
}

const TAKE_CLAIMS: &str = "DELETE FROM versions WHERE id = ANY($1) AND owner = ''";

const ADD_VERSIONS: &str = "INSERT INTO versions (owner, id, parent, tokens, time, label, kind, prompt_tokens, \
    completion_tokens, bytes, seed, kept_by, known_by, origin, session) SELECT $1, * FROM unnest($2::text[], $3::text[], \
    $4::bigint[], $5::bigint[], $6::bytea[], $7::text[], $8::bigint[], $9::bigint[], $10::bigint[], $11::bigint[], \
    $12::bigint[], $13::bigint[], $14::bytea[], $15::text[])";

const COUNT_VERSIONS: &str = "UPDATE versions v SET kept_by = c.kept_by, known_by = c.known_by FROM unnest($1::text[], \
    $2::bigint[], $3::bigint[]) AS c (id, kept_by, known_by) WHERE v.id = c.id";

const LABEL_VERSIONS: &str =
    "UPDATE versions v SET label = c.label FROM unnest($1::text[], $2::bytea[]) AS c (id, label) WHERE v.id = c.id";

const REMOVE_VERSIONS: &str = "DELETE FROM versions WHERE id = ANY($1)";

const ADD_GARBAGE: &str = "INSERT INTO garbage (id, bytes) SELECT * FROM unnest($1::text[], $2::bigint[])";

const ADD_SESSIONS: &str = "INSERT INTO sessions (owner, id, number, created, updated, used, ttl, head, next, kept, known, \
    metadata, tags, forked_from, forked_from_version) SELECT $1, * FROM unnest($2::text[], $3::bigint[], $4::bigint[], \
    $5::bigint[], $6::bigint[], $7::bigint[], $8::text[], $9::bigint[], $10::bigint[], $11::bigint[], $12::bytea[], \
    $13::bytea[], $14::text[], $15::text[])";

/// A last use that another server has recorded in the meantime stays if it is later.
const CHANGE_SESSIONS: &str = "UPDATE sessions s SET number = c.number, created = c.created, updated = c.updated, used = \
    greatest(s.used, c.used), ttl = c.ttl, head = c.head, next = c.next, kept = c.kept, known = c.known, metadata = c.metadata, \
    tags = c.tags, forked_from = c.forked_from, forked_from_version = c.forked_from_version FROM unnest($2::text[], \
    $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::text[], $9::bigint[], $10::bigint[], \
    $11::bigint[], $12::bytea[], $13::bytea[], $14::text[], $15::text[]) AS c (id, number, created, updated, used, ttl, head, \
    next, kept, known, metadata, tags, forked_from, forked_from_version) WHERE s.owner = $1 AND s.id = c.id";

const REMOVE_SESSIONS: &str = "DELETE FROM sessions WHERE id = ANY($1)";

const REMOVE_LISTS: &str = "DELETE FROM lineage WHERE session = ANY($1)";

const LIST: &str = "INSERT INTO lineage (session, position, version, kept) SELECT * FROM unnest($1::text[], $2::bigint[], \
    $3::text[], $4::boolean[]) ON CONFLICT (session, position) DO UPDATE SET version = excluded.version, kept = excluded.kept";

const UNLIST: &str = "DELETE FROM lineage l USING unnest($1::text[], $2::bigint[]) AS c (session, position) WHERE l.session = \
    c.session AND l.position = c.position";

const ADD_TEXTS: &str = "INSERT INTO texts (owner, id, parent, refs, tokens, messages, bytes, content) SELECT $1, c.id, \
    c.parent, 1, c.tokens, c.messages, c.bytes, c.content FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bigint[], \
    $6::bigint[], $7::bytea[]) AS c (id, parent, tokens, messages, bytes, content)";

const COUNT_TEXTS: &str =
    "UPDATE texts t SET refs = t.refs + c.more FROM unnest($1::text[], $2::bigint[]) AS c (id, more) WHERE t.id = c.id";

const REMOVE_TEXTS: &str = "DELETE FROM texts WHERE id = ANY($1)";

const PUT_RECEIPTS: &str = "INSERT INTO receipts (owner, key, ends, bytes, answer) SELECT $1, * FROM unnest($2::bytea[], \
    $3::bigint[], $4::bigint[], $5::bytea[]) ON CONFLICT (owner, key) DO UPDATE SET ends = excluded.ends, bytes = \
    excluded.bytes, answer = excluded.answer";

const REMOVE_RECEIPTS: &str = "DELETE FROM receipts WHERE owner = $1 AND key = ANY($2)";

const ADD_RESPONSES: &str = "INSERT INTO responses (owner, id, version, ends, body) SELECT $1, * FROM unnest($2::text[], \
    $3::text[], $4::bigint[], $5::bytea[])";

const REMOVE_RESPONSES: &str = "DELETE FROM responses WHERE id = ANY($1)";

/// This is the last statement, because it may wait for a transaction of another connection with the same stripe, which
/// then has nothing more to wait for.
const COUNT_OWNER: &str = "WITH total AS (INSERT INTO used (stripe, bytes) VALUES (pg_backend_pid() % 64, $2) ON CONFLICT \
    (stripe) DO UPDATE SET bytes = used.bytes + excluded.bytes) UPDATE owners SET sessions = $3, next = $4, evictable = $5, \
    versions = $6, live = $7, receipts = $8, texts = $9 WHERE owner = $1 RETURNING pg_current_xact_id()::text";

/// Makes the columns of rows, as the arrays that a statement takes.
macro_rules! columns {
    ($rows:expr, |$row:pat_param| $($column:expr),* $(,)?) => {
        [$(Box::new($rows.iter().map(|#[allow(unused_variables, reason = "each column takes its own")] $row| $column).collect::<Vec<_>>()) as Param),*]
    };
}

impl Work {
    /// Refuses if the owner, or all owners together, would use more than they may. Other servers also reserve space,
    /// which this server does not know of, so the space that was reserved here may not be free.
    fn check_limits(&self, garbage: i64, limits: Limits) -> Result<(), StoreError> {
        let grown = self.account.bytes() - self.before.bytes();
        let (owner, disk) = (self.account.bytes().max(0) as u64, (self.disk + grown + garbage).max(0) as u64);
        if self.added > 0 && owner > limits.owner {
            return Err(Shortfall::Owner { missing: owner - limits.owner, found: owner }.refusal(limits));
        }
        if self.added > 0 && disk > limits.disk {
            return Err(Shortfall::Disk { missing: disk - limits.disk }.refusal(limits));
        }
        Ok(())
    }

    /// Returns the statements for everything that has changed.
    pub(super) fn finish(mut self, limits: Limits) -> Result<Writes, StoreError> {
        let mut steps = Vec::new();
        let (freed, garbage) = self.write_versions(&mut steps);
        self.check_limits(garbage, limits)?;
        self.write_sessions(&mut steps);
        self.write_lists(&mut steps);
        self.write_texts(&mut steps);
        self.write_responses(&mut steps);
        self.write_receipts(&mut steps);
        let change = self.write_owner(&mut steps, garbage);
        Ok(Writes { steps, change, fulfilled: self.fulfilled, freed })
    }

    /// Writes the versions; returns those that nothing keeps any more, and the bytes of their objects.
    fn write_versions(&mut self, steps: &mut Vec<Step>) -> (Vec<VersionId>, i64) {
        let (mut added, mut counted, mut labelled, mut removed) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut freed, mut garbage) = (Vec::new(), Vec::new());
        for (id, Pair { old, new }) in &self.versions {
            let Some(new) = new else { continue };
            let kept = |row: &VersionRow| i64::from(row.kept_by > 0);
            let change = kept(new) - old.as_ref().map_or(0, kept);
            self.account.versions += change;
            self.account.live += change * new.bytes as i64;
            if change < 0 {
                freed.extend(VersionId::parse(id));
                if new.bytes > 0 {
                    garbage.push((id.clone(), column(new.bytes)));
                }
            }
            let counts = |row: &VersionRow| (row.kept_by, row.known_by);
            match old {
                None => added.push((id, new)),
                Some(_) if new.known_by == 0 => removed.push(id.clone()),
                Some(old) => {
                    if counts(old) != counts(new) {
                        counted.push((id, new));
                    }
                    if old.label != new.label {
                        labelled.push((id, new));
                    }
                }
            }
        }
        if !self.taken.is_empty() {
            steps.push(step!(TAKE_CLAIMS, self.taken.clone()));
        }
        if !added.is_empty() {
            let params = columns!(
                added,
                |(id, row)| (*id).clone(),
                row.parent.clone(),
                column(row.tokens),
                column(row.time),
                row.label.clone().map(String::into_bytes),
                row.kind.clone(),
                column(row.prompt_tokens),
                column(row.completion_tokens),
                column(row.bytes),
                row.seed.map(|seed| seed as i64),
                column(row.kept_by),
                column(row.known_by),
                json_column(&row.origin),
                row.session.clone()
            );
            steps.push(self.owned(ADD_VERSIONS, params));
        }
        if !counted.is_empty() {
            let params = columns!(counted, |(id, row)| (*id).clone(), column(row.kept_by), column(row.known_by));
            steps.push(Step { sql: COUNT_VERSIONS, params: params.into() });
        }
        if !labelled.is_empty() {
            let params = columns!(labelled, |(id, row)| (*id).clone(), row.label.clone().map(String::into_bytes));
            steps.push(Step { sql: LABEL_VERSIONS, params: params.into() });
        }
        if !removed.is_empty() {
            for id in &removed {
                *self.text_refs.entry(id.clone()).or_default() -= 1;
            }
            steps.push(step!(REMOVE_VERSIONS, removed));
        }
        let bytes = garbage.iter().map(|(_, bytes)| bytes).sum();
        if !garbage.is_empty() {
            let params = columns!(garbage, |(id, bytes)| id.clone(), *bytes);
            steps.push(Step { sql: ADD_GARBAGE, params: params.into() });
        }
        (freed, bytes)
    }

    fn write_sessions(&self, steps: &mut Vec<Step>) {
        let (mut added, mut changed, mut removed) = (Vec::new(), Vec::new(), Vec::new());
        for (id, pair) in &self.sessions {
            match (&pair.old, &pair.new) {
                (None, Some(new)) => added.push((id, new)),
                (Some(old), Some(new)) if old != new => changed.push((id, new)),
                (Some(_), None) => removed.push(id.clone()),
                _ => {}
            }
        }
        for (sql, rows) in [(ADD_SESSIONS, added), (CHANGE_SESSIONS, changed)] {
            if !rows.is_empty() {
                let from = |row: &SessionRow| row.forked_from.clone().unzip();
                let params = columns!(
                    rows,
                    |(id, row)| (*id).clone(),
                    column(row.number),
                    column(row.created),
                    column(row.updated),
                    column(row.used),
                    row.ttl.map(column),
                    row.head.clone(),
                    column(row.next),
                    column(row.kept),
                    column(row.known),
                    json_column(&row.metadata),
                    json_column(&row.tags),
                    from(row).0,
                    from(row).1
                );
                steps.push(self.owned(sql, params));
            }
        }
        if !removed.is_empty() {
            steps.push(step!(REMOVE_LISTS, removed.clone()));
            steps.push(step!(REMOVE_SESSIONS, removed));
        }
    }

    fn write_lists(&self, steps: &mut Vec<Step>) {
        let (mut listed, mut unlisted) = (Vec::new(), Vec::new());
        for (session, position) in &self.moved {
            if self.session(session).is_none() {
                continue;
            }
            match self.list(session).get(position) {
                Some((version, kept)) => listed.push((session, *position, version, *kept)),
                None => unlisted.push((session, *position)),
            }
        }
        if !unlisted.is_empty() {
            let params = columns!(unlisted, |(session, position)| (*session).clone(), column(*position));
            steps.push(Step { sql: UNLIST, params: params.into() });
        }
        if !listed.is_empty() {
            let params = columns!(
                listed,
                |(session, position, version, kept)| (*session).clone(),
                column(*position),
                (*version).clone(),
                *kept
            );
            steps.push(Step { sql: LIST, params: params.into() });
        }
    }

    fn write_texts(&self, steps: &mut Vec<Step>) {
        if !self.new_texts.is_empty() {
            let params = columns!(
                self.new_texts,
                |text| text.id.clone(),
                text.parent.clone(),
                column(text.head.tokens),
                column(text.head.messages),
                column(text.bytes),
                text.content.clone()
            );
            steps.push(self.owned(ADD_TEXTS, params));
        }
        if !self.removed_texts.is_empty() {
            steps.push(step!(REMOVE_TEXTS, self.removed_texts.clone()));
        }
        if !self.text_refs.is_empty() {
            let params = columns!(self.text_refs, |(id, more)| (*id).clone(), *more);
            steps.push(Step { sql: COUNT_TEXTS, params: params.into() });
        }
    }

    fn write_responses(&self, steps: &mut Vec<Step>) {
        let added: Vec<_> = self.responses.iter().filter(|(_, pair)| pair.old.is_none()).collect();
        let added: Vec<_> = added.into_iter().filter_map(|(id, pair)| Some((id, pair.new.as_ref()?))).collect();
        if !added.is_empty() {
            let params =
                columns!(added, |(id, row)| (*id).clone(), row.version.clone(), column(row.ends), row.body.clone());
            steps.push(self.owned(ADD_RESPONSES, params));
        }
        let removed = self.responses.iter().filter(|(_, pair)| pair.new.is_none());
        let removed: Vec<String> = removed.map(|(id, _)| id.clone()).collect();
        if !removed.is_empty() {
            steps.push(step!(REMOVE_RESPONSES, removed));
        }
    }

    fn write_receipts(&self, steps: &mut Vec<Step>) {
        let written = self.receipts.iter().filter_map(|(key, pair)| match &pair.new {
            Some((ends, bytes, Some(answer))) => Some((key, *ends, *bytes, answer)),
            _ => None,
        });
        let written: Vec<_> = written.collect();
        if !written.is_empty() {
            let params = columns!(
                written,
                |(key, ends, bytes, answer)| key.as_bytes().to_vec(),
                column(*ends),
                column(*bytes),
                (*answer).clone()
            );
            steps.push(self.owned(PUT_RECEIPTS, params));
        }
        let removed = self.receipts.iter().filter(|(_, pair)| pair.old.is_some() && pair.new.is_none());
        let removed: Vec<Vec<u8>> = removed.map(|(key, _)| key.as_bytes().to_vec()).collect();
        if !removed.is_empty() {
            steps.push(step!(REMOVE_RECEIPTS, owner_column(self.owner), removed));
        }
    }

    /// Writes the owner's counters, and returns how they have changed.
    fn write_owner(&self, steps: &mut Vec<Step>, garbage: i64) -> Change {
        let (now, before) = (self.account, self.before);
        let grown = now.bytes() - before.bytes();
        if !steps.is_empty() {
            steps.push(step!(
                COUNT_OWNER,
                owner_column(self.owner),
                grown + garbage,
                now.sessions,
                now.next,
                now.evictable,
                now.versions,
                now.live,
                now.receipts,
                now.texts
            ));
        }
        Change {
            live: now.live - before.live,
            garbage,
            sessions: now.sessions - before.sessions,
            versions: now.versions - before.versions,
            receipts: now.receipts - before.receipts,
            texts: now.texts - before.texts,
            owners: [(self.owner, grown)].into(),
            evictable: [(self.owner, now.evictable > 0)].into(),
            fulfilled: Vec::new(),
        }
    }

    /// Makes a statement whose first parameter is the owner.
    fn owned<const N: usize>(&self, sql: &'static str, params: [Param; N]) -> Step {
        let mut all: Vec<Param> = vec![Box::new(owner_column(self.owner))];
        all.extend(params);
        Step { sql, params: all }
    }
}
