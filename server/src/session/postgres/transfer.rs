//! Moves sessions out of the index and into it, and reads what its verification needs. Servers may use the index at the
//! same time.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tokio_postgres::Client;

use super::address::PostgresUrl;
use super::connection::step;
use super::failure::{damaged, described};
use super::index::PostgresIndex;
use super::reads::Reads;
use super::rows::{column, get, number, session, session_columns, version, version_columns};
use super::work::{NewText, Obstacle, Pair, TextHead, Work};
use crate::session::error::StoreError;
use crate::session::id::{SessionId, VersionId};
use crate::session::index::{Listed, TextRow, Transaction, Transfer, VersionRow, text_bytes, text_chains};

/// Model names from the names of schemas, without those of tests.
const MODELS: &str = "SELECT substr(nspname, 10) FROM pg_namespace WHERE nspname ~ '^tidegate_[0-9a-z]+$' ORDER BY 1";

const IDS: &str = "SELECT id FROM sessions WHERE id > $1 ORDER BY id LIMIT $2";

const SESSIONS: &str = concat!("SELECT ", session_columns!(), " FROM sessions s WHERE s.id = ANY($1) ORDER BY s.id");

const LISTS: &str = concat!(
    "SELECT l.session, l.kept, ",
    version_columns!(),
    " FROM lineage l JOIN versions v ON v.id = l.version WHERE l.session = ANY($1) ORDER BY l.session, l.position"
);

const TEXTS: &str = "WITH RECURSIVE chain AS (SELECT t.id, t.parent FROM lineage l JOIN texts t ON t.id = l.version WHERE \
    l.session = ANY($1) UNION SELECT t.id, t.parent FROM chain c JOIN texts t ON t.id = c.parent) SELECT t.id, t.content FROM \
    chain c JOIN texts t ON t.id = c.id";

const NEEDED: &str = "SELECT id, bytes FROM versions WHERE id > $1 AND kept_by > 0 AND bytes > 0 ORDER BY id LIMIT $2";

const STILL_NEEDED: &str = "SELECT id FROM versions WHERE id = ANY($1) AND kept_by > 0";

const KEEPERS: &str = "SELECT 'session ' || session, version FROM lineage WHERE kept AND version = ANY($1) UNION ALL SELECT \
    'response ' || id, version FROM responses WHERE version = ANY($1) ORDER BY 1";

const UNNAMED: &str = "SELECT a.id FROM unnest($1::text[]) AS a (id) WHERE NOT EXISTS (SELECT FROM versions v WHERE v.id = a.id \
    AND v.kept_by > 0) AND NOT EXISTS (SELECT FROM garbage g WHERE g.id = a.id)";

const WITHOUT_HEAD: &str = "SELECT s.id, s.head FROM sessions s WHERE NOT EXISTS (SELECT FROM lineage l WHERE l.session = s.id \
    AND l.version = s.head AND l.kept) ORDER BY s.id";

const WITHOUT_ROW: &str = "SELECT l.session, l.version FROM lineage l WHERE NOT EXISTS (SELECT FROM versions v WHERE v.id = \
    l.version AND v.known_by > 0) ORDER BY l.session, l.position";

/// Returns the models whose sessions are in a database.
pub(crate) async fn models(url: &PostgresUrl) -> Result<Vec<String>, StoreError> {
    let refused = |error: &tokio_postgres::Error| StoreError::Database { reason: described(error) };
    let (client, connection): (Client, _) =
        url.config.connect(url.tls.clone()).await.map_err(|error| refused(&error))?;
    let task = tokio::spawn(connection);
    let rows = client.query(MODELS, &[]).await.map_err(|error| refused(&error));
    task.abort();
    rows?.iter().map(|row| get(row, 0)).collect()
}

impl PostgresIndex {
    /// Returns the ids of at most `limit` sessions of all owners after `after`, in order.
    pub(crate) async fn session_ids(&self, after: &str, limit: usize) -> Result<Vec<String>, StoreError> {
        let rows = self.database.query(step!(IDS, after.to_owned(), column(limit as u64))).await?;
        rows.iter().map(|row| get(row, 0)).collect()
    }

    /// Exports those of the sessions that exist, from one consistent snapshot.
    pub(crate) async fn export(&self, ids: &[String]) -> Result<Vec<Transfer>, StoreError> {
        let ids = ids.to_vec();
        let steps = [step!(SESSIONS, ids.clone()), step!(LISTS, ids.clone()), step!(TEXTS, ids)];
        let rows = self.database.snapshot(&steps).await?;
        let (mut lists, mut texts) = (HashMap::<String, Vec<Listed>>::new(), BTreeMap::new());
        for row in &rows[1] {
            let (id, found) = version(row, 2)?;
            lists.entry(get(row, 0)?).or_default().push(Listed { id, row: found, kept: get(row, 1)? });
        }
        for row in &rows[2] {
            texts.insert(get(row, 0)?, get(row, 1)?);
        }
        let found = rows[0].iter().map(|found| {
            let (name, row) = session(found, 0)?;
            let id = SessionId::parse(&name).ok_or_else(|| damaged(format!("{name:?} is no session's id")))?;
            let versions = lists.remove(&name).unwrap_or_default();
            let texts = text_chains(&texts, versions.iter().map(|version| version.id.as_str()));
            Ok(Transfer { id, row, versions, texts })
        });
        found.collect()
    }

    /// Checks whether a session could be added now; the inner error says why not.
    pub(crate) async fn may_import(&self, session: &Transfer) -> Result<Result<(), String>, StoreError> {
        let found = self.database.read(session.row.owner, &to_import(session)).await?;
        Ok(found.check_import(session).map(drop))
    }

    /// Adds a session under its id, once the objects of the versions that it keeps are written; the inner error says
    /// why the session is left out.
    pub(crate) async fn import(&self, session: &Transfer) -> Result<Result<(), String>, StoreError> {
        self.database.write(session.row.owner, to_import(session), |work| Ok(work.import(session))).await
    }

    /// Returns at most `limit` versions after `after` that need an object, with the size of each object in bytes.
    pub(crate) async fn needed(&self, after: &str, limit: usize) -> Result<Vec<(VersionId, u64)>, StoreError> {
        let rows = self.database.query(step!(NEEDED, after.to_owned(), column(limit as u64))).await?;
        let needed = rows.iter().map(|row| {
            let id = get(row, 0)?;
            Ok((VersionId::parse(id).ok_or_else(|| damaged(format!("{id:?} is no version's id")))?, number(row, 1)?))
        });
        needed.collect()
    }

    /// Returns those of the versions that still need an object.
    pub(crate) async fn still_needed(&self, ids: Vec<String>) -> Result<BTreeSet<String>, StoreError> {
        let rows = self.database.query(step!(STILL_NEEDED, ids)).await?;
        rows.iter().map(|row| get(row, 0)).collect()
    }

    /// Returns the sessions and responses that keep these versions, each with its version.
    pub(crate) async fn keepers(&self, ids: Vec<String>) -> Result<Vec<(String, String)>, StoreError> {
        let rows = self.database.query(step!(KEEPERS, ids)).await?;
        rows.iter().map(|row| Ok((get(row, 0)?, get(row, 1)?))).collect()
    }

    /// Returns those of the objects that no version needs and that are not garbage. Claims nothing.
    pub(crate) async fn unnamed(&self, ids: Vec<String>) -> Result<Vec<String>, StoreError> {
        let rows = self.database.query(step!(UNNAMED, ids)).await?;
        rows.iter().map(|row| get(row, 0)).collect()
    }

    /// Returns the problems of the rows, one line each.
    pub(crate) async fn problems(&self) -> Result<Vec<String>, StoreError> {
        let rows = self.database.snapshot(&[step!(WITHOUT_HEAD), step!(WITHOUT_ROW)]).await?;
        let mut problems = Vec::new();
        for row in &rows[0] {
            let (session, head): (&str, &str) = (get(row, 0)?, get(row, 1)?);
            problems.push(format!("session {session}: its version {head} is not among those that it keeps"));
        }
        for row in &rows[1] {
            let (session, version): (&str, &str) = (get(row, 0)?, get(row, 1)?);
            problems.push(format!("session {session}: version {version} has no row"));
        }
        Ok(problems)
    }
}

/// Returns what must be read to import a session.
fn to_import(session: &Transfer) -> Reads {
    let added: Vec<String> = session.versions.iter().map(|version| version.id.clone()).collect();
    let texts: Vec<String> = session.texts.iter().map(|(id, _)| id.clone()).collect();
    // A text counts as referenced by its version, whichever session lists the version.
    let versions = added.iter().chain(&texts).cloned().collect();
    Reads { versions, texts, added, ..Reads::session(session.id.as_str()) }
}

impl Work {
    /// Returns the versions of a session to import, and whether it can keep each of them here; the error says why the
    /// session is left out.
    fn check_import(&self, session: &Transfer) -> Result<Vec<(String, bool)>, String> {
        let Transfer { id, row, versions, .. } = session;
        if self.session(id.as_str()).is_some() {
            return Err("the session exists already".to_owned());
        }
        for (version, obstacle) in &self.obstacles {
            match obstacle {
                Obstacle::Foreign => return Err(format!("version {version} belongs to another owner")),
                Obstacle::Removing => {
                    return Err(format!(
                        "the snapshot of version {version} is being removed; import it again in an hour"
                    ));
                }
                Obstacle::Claim => {}
            }
        }
        // The sweep may be removing the objects of versions that are listed but not kept.
        let is_gone = |version: &str| self.version(version).is_some_and(|row| row.kept_by == 0);
        let listed: Vec<_> =
            versions.iter().map(|version| (version.id.clone(), version.kept && !is_gone(&version.id))).collect();
        if listed.iter().any(|(version, kept)| *kept && *version == row.head) {
            return Ok(listed);
        }
        Err(format!("the snapshot of its version {} is gone here, where other sessions list it", row.head))
    }

    /// Adds a session and its versions. After an error, nothing has changed.
    fn import(&mut self, session: &Transfer) -> Result<(), String> {
        let Transfer { id, row, versions, .. } = session;
        let listed = self.check_import(session)?;
        let claims = self.obstacles.keys().cloned();
        self.taken = claims.collect();
        let mut added = BTreeSet::new();
        for (version, (id, kept)) in versions.iter().zip(&listed) {
            if self.version(id).is_none() {
                added.insert(id.as_str());
                self.added += version.row.bytes;
                let row = VersionRow { kept_by: 0, known_by: 0, ..version.row.clone() };
                self.versions.insert(id.clone(), Pair { old: None, new: Some(row) });
            }
            // This cannot fail: the version was read or added just now.
            let _ = self.point(id, i64::from(*kept), 1);
        }
        // This cannot fail either.
        let _ = self.add_session(id.as_str(), row.clone(), &listed);
        for (version, row) in &session.texts {
            if let Err(reason) = self.import_text(version, row, added.contains(version.as_str())) {
                tracing::warn!(session = %id, reason, "a text is left out, and those that continue it");
            }
        }
        Ok(())
    }

    /// Adds a text. `added` says whether its version is added now; otherwise the version existed before, or is not
    /// listed. The error says why the text is left out.
    fn import_text(&mut self, version: &str, row: &[u8], added: bool) -> Result<(), String> {
        let refused = |reason: &str| Err(format!("the text of version {version} {reason}"));
        let Ok(text) = TextRow::parse(row).and_then(|text| text.added().map(|_| text)) else {
            return refused("cannot be read");
        };
        let listed = self.version(version);
        if listed.is_some_and(|listed| listed.tokens != text.total()) {
            return refused("has another number of tokens than the version");
        }
        let is_listed = listed.is_some();
        if self.texts.contains_key(version) {
            *self.text_refs.entry(version.to_owned()).or_default() += i64::from(added);
            return Ok(());
        }
        if let Some(parent) = text.parent {
            if self.texts.get(parent).is_none_or(|before| text.kept > before.tokens) {
                return refused("does not continue one of its owner");
            }
            *self.text_refs.entry(parent.to_owned()).or_default() += 1;
        }
        // A new text starts with one reference.
        *self.text_refs.entry(version.to_owned()).or_default() -= i64::from(!is_listed);
        let (head, bytes) = (TextHead { tokens: text.total(), messages: text.messages }, text_bytes(row.len() as u64));
        self.account.texts += bytes as i64;
        self.added += bytes;
        self.texts.insert(version.to_owned(), head.clone());
        let (id, parent) = (version.to_owned(), text.parent.map(str::to_owned));
        self.new_texts.push(NewText { id, parent, head, bytes, content: row.to_vec() });
        Ok(())
    }
}
