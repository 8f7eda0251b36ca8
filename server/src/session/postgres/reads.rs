//! The reads of a transaction before it decides anything. They are all sent at once.

use tokio_postgres::Row;

use super::connection::{Step, step};
use super::rows::{column, get, number, owner, owner_column, session, session_columns, version, version_columns};
use super::work::{Account, Obstacle, Pair, TextHead, Work};
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::ResponseRow;

/// The rows that a transaction needs.
#[derive(Clone, Debug, Default)]
pub(super) struct Reads {
    pub(super) sessions: Vec<String>,
    /// Which versions of these sessions to read.
    pub(super) lists: Lists,
    pub(super) versions: Vec<String>,
    /// A version, and how many versions of its chain to read, itself included.
    pub(super) chain: Option<(String, usize)>,
    pub(super) responses: Vec<String>,
    /// Keys of receipts.
    pub(super) receipts: Vec<String>,
    pub(super) texts: Vec<String>,
    /// The approximate maximum number of unneeded texts to read, if any are to be read.
    pub(super) dead_texts: Option<usize>,
    /// Versions to add that another index had. Rows that are in their way are read.
    pub(super) added: Vec<String>,
    /// The time in seconds after its last heartbeat that a server counts as alive, if the leases of the sessions are to
    /// be read.
    pub(super) leased: Option<f64>,
}

/// Which versions of a session are read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Lists {
    #[default]
    None,
    /// The versions that the session keeps, and those that it would no longer list if it may list only this many
    /// versions that it does not keep.
    Beyond(usize),
    All,
}

const LOCK: &str =
    "SELECT sessions, next, evictable, versions, live, receipts, texts FROM owners WHERE owner = $1 FOR UPDATE";

const ACCOUNT: &str = "SELECT sessions, next, evictable, versions, live, receipts, texts FROM owners WHERE owner = $1";

const ADD_OWNER: &str = "INSERT INTO owners (owner) VALUES ($1) ON CONFLICT (owner) DO UPDATE SET owner = excluded.owner \
                         RETURNING sessions, next, evictable, versions, live, receipts, texts";

const DISK: &str = "SELECT coalesce(sum(bytes), 0)::bigint FROM used";

const SESSIONS: &str = concat!("SELECT ", session_columns!(), " FROM sessions s WHERE s.id = ANY($1)");

/// The limit is an upper bound, because a released version stays in the list without its object.
const LISTS: &str = concat!(
    "SELECT l.session, l.position, l.kept, ",
    version_columns!(),
    " FROM sessions s CROSS JOIN LATERAL ((SELECT * FROM lineage WHERE session = s.id AND kept) UNION ALL (SELECT * FROM \
     lineage WHERE session = s.id AND NOT kept ORDER BY position LIMIT greatest(0, s.known + s.kept - $2))) l \
     JOIN versions v ON v.id = l.version WHERE s.id = ANY($1)"
);

const VERSIONS: &str = concat!(
    "SELECT ",
    version_columns!(),
    " FROM versions v WHERE v.owner = $3 AND (v.id = ANY($1) OR v.id IN (SELECT version FROM responses WHERE id = ANY($2)))"
);

/// Reads a version and its ancestors.
pub(super) const CHAIN: &str = concat!(
    "WITH RECURSIVE chain AS (SELECT v.*, 1::bigint AS number FROM versions v WHERE v.id = $1 AND v.owner = $2 UNION ALL \
     SELECT v.*, c.number + 1 FROM chain c JOIN versions v ON v.id = c.parent AND v.owner = $2 WHERE c.number < $3) SELECT ",
    version_columns!(),
    " FROM chain v ORDER BY v.number"
);

/// Reads responses.
pub(super) const RESPONSES: &str = "SELECT id, owner, version, ends, body FROM responses WHERE id = ANY($1)";

const RECEIPTS: &str = "SELECT key, ends, bytes FROM receipts WHERE owner = $1 AND key = ANY($2)";

const TEXTS: &str = "SELECT id, tokens, messages FROM texts WHERE owner = $1 AND id = ANY($2)";

/// Texts without references, and the texts that only they continue.
const DEAD_TEXTS: &str = "WITH RECURSIVE dead AS (SELECT * FROM (SELECT id, parent, bytes, 1 AS number FROM texts WHERE owner = \
    $1 AND refs = 0 LIMIT $2) AS first UNION ALL SELECT t.id, t.parent, t.bytes, d.number + 1 FROM dead d JOIN texts t ON t.id \
    = d.parent AND t.owner = $1 AND t.refs = 1 WHERE d.number < $2) SELECT id, parent, bytes FROM dead";

/// Reads what is in the way of versions that another index had. An hour after an object was claimed, it is gone,
/// because removing it takes only seconds. The clock is the database's.
const OBSTACLES: &str = "SELECT v.id, CASE WHEN v.owner <> '' THEN 'foreign' WHEN v.time > extract(epoch FROM \
    clock_timestamp()) * 1000 - 3600000 THEN 'removing' ELSE 'claim' END FROM versions v WHERE v.id = ANY($1) AND v.owner <> $2 \
    UNION ALL SELECT g.id, 'removing' FROM garbage g WHERE g.id = ANY($1)";

const LEASED: &str = "SELECT l.session FROM leases l JOIN servers v ON v.id = l.server WHERE l.session = ANY($1) AND v.seen > \
                      clock_timestamp() - make_interval(secs => $2::double precision)";

/// How the owner's row is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Without a lock.
    Read,
    /// With a lock on the row, which all other writes of the owner wait for.
    Lock,
    /// With a lock, after adding the row.
    Add,
}

impl Reads {
    /// Reads only a session.
    pub(super) fn session(id: &str) -> Self {
        Self { sessions: vec![id.to_owned()], ..Self::default() }
    }

    pub(super) fn steps(&self, of: Owner, access: Access) -> Vec<Step> {
        let account = match access {
            Access::Read => ACCOUNT,
            Access::Lock => LOCK,
            Access::Add => ADD_OWNER,
        };
        let of = owner_column(of);
        let mut steps = vec![step!(account, of.clone()), step!(DISK)];
        if !self.sessions.is_empty() {
            steps.push(step!(SESSIONS, self.sessions.clone()));
            match self.lists {
                Lists::None => {}
                Lists::Beyond(lineage) => {
                    steps.push(step!(LISTS, self.sessions.clone(), column(lineage as u64)));
                }
                Lists::All => steps.push(step!(LISTS, self.sessions.clone(), 0_i64)),
            }
        }
        if !self.versions.is_empty() || !self.responses.is_empty() {
            steps.push(step!(VERSIONS, self.versions.clone(), self.responses.clone(), of.clone()));
        }
        if let Some((id, limit)) = &self.chain {
            steps.push(step!(CHAIN, id.clone(), of.clone(), column(*limit as u64)));
        }
        if !self.responses.is_empty() {
            steps.push(step!(RESPONSES, self.responses.clone()));
        }
        if !self.receipts.is_empty() {
            let keys: Vec<Vec<u8>> = self.receipts.iter().map(|key| key.as_bytes().to_vec()).collect();
            steps.push(step!(RECEIPTS, of.clone(), keys));
        }
        if !self.texts.is_empty() {
            steps.push(step!(TEXTS, of.clone(), self.texts.clone()));
        }
        if let Some(limit) = self.dead_texts {
            steps.push(step!(DEAD_TEXTS, of.clone(), column(limit as u64)));
        }
        if !self.added.is_empty() {
            steps.push(step!(OBSTACLES, self.added.clone(), of));
        }
        if let Some(ttl) = self.leased {
            steps.push(step!(LEASED, self.sessions.clone(), ttl));
        }
        steps
    }

    /// Loads the rows that these steps have read; returns `None` if the owner has no row.
    pub(super) fn load(of: Owner, steps: &[Step], rows: &[Vec<Row>]) -> Result<Option<Work>, StoreError> {
        let (Some(account), Some(disk)) = (rows[0].first(), rows[1].first()) else { return Ok(None) };
        let account = Account {
            sessions: get(account, 0)?,
            next: get(account, 1)?,
            evictable: get(account, 2)?,
            versions: get(account, 3)?,
            live: get(account, 4)?,
            receipts: get(account, 5)?,
            texts: get(account, 6)?,
        };
        Self::fill(Work::new(of, account, get(disk, 0)?), steps, rows).map(Some)
    }

    /// Adds the rows that these steps have read, except for the owner's row.
    pub(super) fn fill(mut work: Work, steps: &[Step], rows: &[Vec<Row>]) -> Result<Work, StoreError> {
        for (step, rows) in steps.iter().zip(rows).skip(2) {
            for row in rows {
                work.load(step.sql, row)?;
            }
        }
        Ok(work)
    }
}

impl Work {
    /// Adds a row that this statement has read.
    fn load(&mut self, sql: &str, row: &Row) -> Result<(), StoreError> {
        match sql {
            SESSIONS => {
                let (id, found) = session(row, 0)?;
                self.entries.entry(id.clone()).or_default();
                self.sessions.insert(id, Pair { old: Some(found.clone()), new: Some(found) });
            }
            LISTS => {
                let (session, position, kept): (String, u64, bool) = (get(row, 0)?, number(row, 1)?, get(row, 2)?);
                let (id, found) = version(row, 3)?;
                self.entries.entry(session).or_default().insert(position, (id.clone(), kept));
                self.versions.insert(id, Pair { old: Some(found.clone()), new: Some(found) });
            }
            VERSIONS | CHAIN => {
                let (id, found) = version(row, 0)?;
                self.versions.insert(id, Pair { old: Some(found.clone()), new: Some(found) });
            }
            RESPONSES => {
                let (id, found) = response(row)?;
                self.responses.insert(id, Pair { old: Some(found.clone()), new: Some(found) });
            }
            RECEIPTS => {
                let key = String::from_utf8_lossy(get(row, 0)?).into_owned();
                let found = (number(row, 1)?, number(row, 2)?, None);
                self.receipts.insert(key, Pair { old: Some(found.clone()), new: Some(found) });
            }
            TEXTS => {
                let head = TextHead { tokens: number(row, 1)?, messages: number(row, 2)? };
                self.texts.insert(get(row, 0)?, head);
            }
            OBSTACLES => {
                let obstacle = match get(row, 1)? {
                    "foreign" => Obstacle::Foreign,
                    "removing" => Obstacle::Removing,
                    _ => Obstacle::Claim,
                };
                self.obstacles.insert(get(row, 0)?, obstacle);
            }
            DEAD_TEXTS => self.dead_texts.push((get(row, 0)?, get(row, 1)?, get(row, 2)?)),
            _ => drop(self.leased.insert(get(row, 0)?)),
        }
        Ok(())
    }
}

/// Parses a response and its id.
pub(super) fn response(row: &Row) -> Result<(String, ResponseRow), StoreError> {
    let found = ResponseRow { owner: owner(row, 1)?, version: get(row, 2)?, ends: number(row, 3)?, body: get(row, 4)? };
    Ok((get(row, 0)?, found))
}
