//! Read queries on sessions and their versions.

use std::collections::HashSet;

use tokio_postgres::Row;

use super::connection::step;
use super::database::Database;
use super::reads::{CHAIN, RESPONSES, response};
use super::rows::{
    SESSION_COLUMNS, column, get, number, owner_column, session, session_columns, version, version_columns,
};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{Head, Listed, Missing, ResponseRow, SessionRow, VersionRow};

const SESSION: &str = concat!("SELECT ", session_columns!(), " FROM sessions s WHERE s.id = $1 AND s.owner = $2");

const HEAD: &str = concat!(
    "SELECT ",
    session_columns!(),
    ", ",
    version_columns!(),
    " FROM sessions s JOIN versions v ON v.id = s.head WHERE s.id = $1 AND s.owner = $2"
);

const OLDEST_FIRST: &str = concat!(
    "SELECT ",
    session_columns!(),
    ", ",
    version_columns!(),
    " FROM sessions s JOIN versions v ON v.id = s.head WHERE s.owner = $1 AND s.number > $2 ORDER BY s.number LIMIT $3"
);

const NEWEST_FIRST: &str = concat!(
    "SELECT ",
    session_columns!(),
    ", ",
    version_columns!(),
    " FROM sessions s JOIN versions v ON v.id = s.head WHERE s.owner = $1 AND s.number < $2 ORDER BY s.number DESC LIMIT $3"
);

const VERSIONS: &str = concat!(
    "SELECT l.kept, ",
    version_columns!(),
    " FROM lineage l JOIN versions v ON v.id = l.version WHERE l.session = $1 ORDER BY l.position"
);

const LISTED: &str = concat!(
    "SELECT l.kept, ",
    version_columns!(),
    " FROM sessions s JOIN lineage l ON l.session = s.id JOIN versions v ON v.id = l.version WHERE s.id = $1 AND s.owner = $2 \
     AND l.version = coalesce($3, s.head)"
);

const VERSION: &str = concat!("SELECT ", version_columns!(), " FROM versions v WHERE v.id = $1 AND v.owner = $2");

const TEXT: &str = "WITH RECURSIVE chain AS (SELECT id, parent, content, octet_length(content)::bigint AS read, 1::bigint AS \
    number FROM texts WHERE id = $1 UNION ALL SELECT t.id, t.parent, t.content, c.read + octet_length(t.content), c.number + 1 \
    FROM chain c JOIN texts t ON t.id = c.parent WHERE c.read < $2) SELECT id, content FROM chain ORDER BY number";

const RECEIPT: &str = "SELECT ends, answer FROM receipts WHERE owner = $1 AND key = $2";

const NEEDED: &str = "SELECT id FROM versions WHERE id > $1 AND kept_by > 0 AND bytes > 0 ORDER BY id LIMIT $2";

const MISSING: &str = concat!("SELECT ", version_columns!(), " FROM versions v WHERE v.id = ANY($1) AND v.kept_by > 0");

const KEEPERS: &str = "SELECT session, version FROM lineage WHERE kept AND version = ANY($1)";

const GARBAGE: &str = "SELECT id FROM garbage LIMIT $1";

/// Number of versions in one page: small in tests, so that they need several pages.
const PAGE: usize = if cfg!(test) { 3 } else { 10_000 };

fn head(row: &Row) -> Result<(String, Head), StoreError> {
    let (id, found) = session(row, 0)?;
    Ok((id, (found, version(row, SESSION_COLUMNS)?.1)))
}

fn listed(row: &Row) -> Result<Listed, StoreError> {
    let (id, found) = version(row, 1)?;
    Ok(Listed { id, row: found, kept: get(row, 0)? })
}

impl Database {
    pub(super) async fn session(&self, owner: Owner, id: &SessionId) -> Result<SessionRow, StoreError> {
        let rows = self.query_of(owner, step!(SESSION, id.to_string(), owner_column(owner))).await?;
        Ok(session(rows.first().ok_or(StoreError::SESSION)?, 0)?.1)
    }

    pub(super) async fn head(&self, owner: Owner, id: &SessionId) -> Result<Head, StoreError> {
        let rows = self.query_of(owner, step!(HEAD, id.to_string(), owner_column(owner))).await?;
        Ok(head(rows.first().ok_or(StoreError::SESSION)?)?.1)
    }

    pub(super) async fn list(
        &self,
        owner: Owner,
        after: Option<u64>,
        newest_first: bool,
        limit: usize,
    ) -> Result<Vec<(SessionId, Head)>, StoreError> {
        let (sql, first) = if newest_first { (NEWEST_FIRST, i64::MAX) } else { (OLDEST_FIRST, -1) };
        let after = after.map_or(first, column);
        let rows = self.query_of(owner, step!(sql, owner_column(owner), after, column(limit as u64))).await?;
        let found = rows.iter().map(|row| {
            let (id, head) = head(row)?;
            Ok((
                SessionId::parse(&id).ok_or_else(|| super::failure::damaged(format!("{id:?} is no session's id")))?,
                head,
            ))
        });
        found.collect()
    }

    pub(super) async fn versions(&self, owner: Owner, id: &SessionId) -> Result<(SessionRow, Vec<Listed>), StoreError> {
        let steps = [step!(SESSION, id.to_string(), owner_column(owner)), step!(VERSIONS, id.to_string())];
        let rows = self.snapshot_of(owner, &steps).await?;
        let row = session(rows[0].first().ok_or(StoreError::SESSION)?, 0)?.1;
        Ok((row, rows[1].iter().map(listed).collect::<Result<_, _>>()?))
    }

    pub(super) async fn listed(
        &self,
        owner: Owner,
        id: &SessionId,
        version: Option<&VersionId>,
    ) -> Result<Listed, StoreError> {
        let version = version.map(ToString::to_string);
        let steps = [
            step!(SESSION, id.to_string(), owner_column(owner)),
            step!(LISTED, id.to_string(), owner_column(owner), version),
        ];
        let rows = self.snapshot_of(owner, &steps).await?;
        rows[0].first().ok_or(StoreError::SESSION)?;
        listed(rows[1].first().ok_or(StoreError::VERSION)?)
    }

    pub(super) async fn version(&self, owner: Owner, id: &VersionId) -> Result<Option<VersionRow>, StoreError> {
        let rows = self.query_of(owner, step!(VERSION, id.to_string(), owner_column(owner))).await?;
        rows.first().map(|row| Ok(version(row, 0)?.1)).transpose()
    }

    pub(super) async fn chain(
        &self,
        owner: Owner,
        id: &str,
        limit: usize,
    ) -> Result<Vec<(String, VersionRow)>, StoreError> {
        if limit == 0 {
            return Ok(Vec::new());
        }
        let rows = self.query_of(owner, step!(CHAIN, id.to_owned(), owner_column(owner), column(limit as u64))).await?;
        rows.iter().map(|row| version(row, 0)).collect()
    }

    pub(super) async fn text(&self, version: &str, bytes: usize) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let rows = self.query(step!(TEXT, version.to_owned(), column(bytes as u64))).await?;
        rows.iter().map(|row| Ok((get(row, 0)?, get(row, 1)?))).collect()
    }

    pub(super) async fn response(&self, owner: Owner, id: &str) -> Result<ResponseRow, StoreError> {
        let rows = self.query_of(owner, step!(RESPONSES, vec![id.to_owned()])).await?;
        let found = rows.first().map(response).transpose()?.filter(|(_, row)| row.owner == owner);
        Ok(found.ok_or(StoreError::RESPONSE)?.1)
    }

    pub(super) async fn receipt(&self, owner: Owner, key: &str) -> Result<Option<(u64, Vec<u8>)>, StoreError> {
        let rows = self.query_of(owner, step!(RECEIPT, owner_column(owner), key.as_bytes().to_vec())).await?;
        rows.first().map(|row| Ok((number(row, 0)?, get(row, 1)?))).transpose()
    }

    pub(super) async fn missing(&self, objects: &HashSet<String>) -> Result<Missing, StoreError> {
        let (mut missing, mut after) = (Missing::new(), String::new());
        loop {
            let rows = self.query(step!(NEEDED, after.clone(), column(PAGE as u64))).await?;
            let ids = rows.iter().map(|row| get::<String>(row, 0)).collect::<Result<Vec<_>, _>>()?;
            let Some(last) = ids.last() else { return Ok(missing) };
            after.clone_from(last);
            let gone: Vec<String> = ids.into_iter().filter(|id| !objects.contains(id)).collect();
            if gone.is_empty() {
                continue;
            }
            let rows = self.snapshot(&[step!(MISSING, gone.clone()), step!(KEEPERS, gone)]).await?;
            for row in &rows[0] {
                let (id, found) = version(row, 0)?;
                missing.insert(id, (found, Vec::new()));
            }
            for row in &rows[1] {
                if let Some((_, keepers)) = missing.get_mut(get::<&str>(row, 1)?) {
                    keepers.push(get(row, 0)?);
                }
            }
        }
    }

    pub(super) async fn garbage(&self, limit: usize) -> Result<Vec<VersionId>, StoreError> {
        let rows = self.query(step!(GARBAGE, column(limit as u64))).await?;
        let ids = rows.iter().map(|row| get::<&str>(row, 0)).collect::<Result<Vec<_>, _>>()?;
        Ok(ids.into_iter().filter_map(VersionId::parse).collect())
    }
}
