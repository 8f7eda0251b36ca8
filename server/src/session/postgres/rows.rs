//! Converts database rows to the index's own types, and back.

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use super::failure::damaged;
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::{SessionRow, VersionRow};

/// The columns of a session, in the order of [`session`].
macro_rules! session_columns {
    () => {
        "s.id, s.owner, s.number, s.created, s.updated, s.used, s.ttl, s.head, s.next, s.kept, s.known, s.metadata, s.tags, \
         s.forked_from, s.forked_from_version"
    };
}
pub(super) use session_columns;

/// The number of these columns.
pub(super) const SESSION_COLUMNS: usize = 15;

/// The columns of a version, in the order of [`version`].
macro_rules! version_columns {
    () => {
        "v.id, v.owner, v.parent, v.tokens, v.time, v.label, v.kind, v.prompt_tokens, v.completion_tokens, v.bytes, v.seed, \
         v.kept_by, v.known_by, v.origin, v.session"
    };
}
pub(super) use version_columns;

/// Returns the value of a column.
pub(super) fn get<'r, T: FromSql<'r>>(row: &'r Row, at: usize) -> Result<T, StoreError> {
    row.try_get(at).map_err(|error| damaged(error.to_string()))
}

/// Returns a number that is never negative.
pub(super) fn number(row: &Row, at: usize) -> Result<u64, StoreError> {
    get::<i64>(row, at).map(|number| number as u64)
}

/// Converts a number for a column; a number beyond the column's range becomes the largest one in it.
pub(super) fn column(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn owner(row: &Row, at: usize) -> Result<Owner, StoreError> {
    let bytes: &[u8] = get(row, at)?;
    bytes.try_into().map(Owner).map_err(|_| damaged("an owner has not 16 bytes"))
}

pub(super) fn owner_column(owner: Owner) -> Vec<u8> {
    owner.0.to_vec()
}

/// Parses a column's JSON; returns the default if it is null.
pub(super) fn json<T: DeserializeOwned + Default>(row: &Row, at: usize) -> Result<T, StoreError> {
    let bytes: Option<&[u8]> = get(row, at)?;
    let parsed = bytes.map(serde_json::from_slice).transpose();
    Ok(parsed.map_err(|error| damaged(error.to_string()))?.unwrap_or_default())
}

/// Converts a value to JSON; returns `None` if it is the default.
pub(super) fn json_column<T: Serialize + Default + PartialEq>(value: &T) -> Option<Vec<u8>> {
    // Maps and lists of strings can always be written as JSON.
    (*value != T::default()).then(|| serde_json::to_vec(value).unwrap_or_default())
}

/// Parses a session and its id. Its columns begin at `at`.
pub(super) fn session(row: &Row, at: usize) -> Result<(String, SessionRow), StoreError> {
    let forked: (Option<String>, Option<String>) = (get(row, at + 13)?, get(row, at + 14)?);
    let found = SessionRow {
        owner: owner(row, at + 1)?,
        number: number(row, at + 2)?,
        created: number(row, at + 3)?,
        updated: number(row, at + 4)?,
        used: number(row, at + 5)?,
        ttl: get::<Option<i64>>(row, at + 6)?.map(|ttl| ttl as u64),
        head: get(row, at + 7)?,
        metadata: json(row, at + 11)?,
        forked_from: forked.0.zip(forked.1),
        next: number(row, at + 8)?,
        kept: number(row, at + 9)?,
        known: number(row, at + 10)?,
        tags: json(row, at + 12)?,
    };
    Ok((get(row, at)?, found))
}

/// Parses a version and its id. Its columns begin at `at`.
pub(super) fn version(row: &Row, at: usize) -> Result<(String, VersionRow), StoreError> {
    let label: Option<Vec<u8>> = get(row, at + 5)?;
    let found = VersionRow {
        owner: owner(row, at + 1)?,
        parent: get(row, at + 2)?,
        tokens: number(row, at + 3)?,
        time: number(row, at + 4)?,
        label: label.map(String::from_utf8).transpose().map_err(|error| damaged(error.to_string()))?,
        kind: get(row, at + 6)?,
        prompt_tokens: number(row, at + 7)?,
        completion_tokens: number(row, at + 8)?,
        bytes: number(row, at + 9)?,
        seed: get::<Option<i64>>(row, at + 10)?.map(|seed| seed as u64),
        kept_by: number(row, at + 11)?,
        known_by: number(row, at + 12)?,
        origin: json(row, at + 13)?,
        session: get(row, at + 14)?,
    };
    Ok((get(row, at)?, found))
}
