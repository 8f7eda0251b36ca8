//! The operations of a transaction on sessions: creating, forking, changing and removing them, and committing turns.
//!
//! Several requests may share a transaction, so each function checks everything before it changes anything.

use std::collections::HashMap;

use super::branches::{adopt, push_head};
use super::edit::{Edit, Edited, Edits};
use super::requests::{Answer, Commit, Create, Fork, Forks, MAX_FORK_ROWS, NewReceipt, NewResponse, Rewind};
use super::rows::{Head, Listed, SessionRow};
use super::transaction::Transaction;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};

/// Checks that an owner may create a session, and returns the one that it replaces, if any.
pub(crate) fn check_create<T: Transaction>(
    rows: &T,
    owner: Owner,
    replaced: Option<&SessionId>,
    max_sessions: usize,
) -> Result<Option<SessionRow>, T::Error> {
    let old = replaced.map(|id| rows.find_session(id.as_str())).transpose()?.flatten();
    let old = old.filter(|row| row.owner == owner);
    rows.check_session_quota(owner, usize::from(old.is_none()), max_sessions)?;
    Ok(old)
}

/// Returns the receipt of a request that is about to create sessions. Refuses if the key already has one.
fn answer<T: Transaction>(
    rows: &T,
    owner: Owner,
    receipt: Option<&NewReceipt<Answer>>,
    created: &Forks,
) -> Result<Option<NewReceipt<Vec<u8>>>, T::Error> {
    rows.check_receipt(owner, receipt)?;
    let Some(NewReceipt { key, now, ends, answer }) = receipt else { return Ok(None) };
    let answer = (answer.0)(created)?;
    Ok(Some(NewReceipt { key: key.clone(), now: *now, ends: *ends, answer }))
}

pub(crate) fn create<T: Transaction>(rows: &mut T, create: &Create) -> Result<Head, T::Error> {
    let Create { id, row, version, replace, max_sessions, receipt } = create;
    let old = check_create(rows, row.owner, Some(id).filter(|_| *replace), *max_sessions)?;
    if old.is_none() && rows.find_session(id.as_str())?.is_some() {
        return Err(StoreError::SESSION.into());
    }
    let head = match version {
        Some(version) => version.row.clone(),
        None => rows.kept_version(row.owner, &row.head)?,
    };
    let created = Forks { sessions: vec![(id.clone(), row.clone())], head };
    let answered = answer(rows, row.owner, receipt.as_ref(), &created)?;
    if let Some(version) = version {
        rows.add_new(version)?;
    }
    rows.point(&row.head, 1, 1)?;
    // This comes after the new session points to its version: the old session may be the only one that keeps it.
    if let Some(old) = &old {
        rows.remove_session(id.as_str(), old)?;
    }
    let row = rows.add_session(id.as_str(), row.clone(), &[(row.head.clone(), true)])?;
    if let Some(receipt) = &answered {
        rows.put_receipt(row.owner, receipt)?;
    }
    let head = rows.require_version(&row.head)?;
    Ok((row, head))
}

/// Returns a version that the session keeps and its ancestors, as far back as the session lists them, oldest first, for
/// `n` forks that start from it. The flag says whether the session keeps the snapshot. Refuses forks that the owner may
/// not create.
pub(crate) fn check_fork<T: Transaction>(
    rows: &T,
    owner: Owner,
    (session, from): (&str, &str),
    n: usize,
    max_sessions: usize,
) -> Result<Vec<(String, bool)>, T::Error> {
    rows.own_session(owner, session)?;
    rows.check_session_quota(owner, n, max_sessions)?;
    let entries = rows.lineage(session)?;
    let mut known: HashMap<String, bool> = entries.into_iter().map(|entry| (entry.version, entry.kept)).collect();
    if known.get(from) != Some(&true) {
        return Err(StoreError::VERSION.into());
    }
    let mut ancestry = Vec::new();
    let mut next = Some(from.to_owned());
    while let Some(version) = next
        && let Some(kept) = known.remove(&version)
    {
        next = rows.require_version(&version)?.parent;
        ancestry.push((version, kept));
    }
    let versions = ancestry.len();
    if n.saturating_mul(versions) > MAX_FORK_ROWS {
        return Err(StoreError::TooManyForks { n, versions, bound: MAX_FORK_ROWS }.into());
    }
    ancestry.reverse();
    Ok(ancestry)
}

/// Adds sessions with these versions; the last version is their head.
fn add_forks<'i, T: Transaction>(
    rows: &mut T,
    ids: impl ExactSizeIterator<Item = &'i SessionId>,
    new: &SessionRow,
    ancestry: &[(String, bool)],
) -> Result<Vec<(SessionId, SessionRow)>, T::Error> {
    let n = ids.len() as i64;
    for (version, kept) in ancestry {
        rows.point(version, if *kept { n } else { 0 }, n)?;
    }
    ids.map(|id| Ok((id.clone(), rows.add_session(id.as_str(), new.clone(), ancestry)?))).collect()
}

pub(crate) fn fork<T: Transaction>(rows: &mut T, fork: &Fork) -> Result<Forks, T::Error> {
    let Fork { owner, session, from, ids, metadata, ttl, max_sessions, now, receipt } = fork;
    let row = rows.own_session(*owner, session.as_str())?;
    let from = from.as_ref().map_or(&*row.head, VersionId::as_str);
    let ancestry = check_fork(rows, *owner, (session.as_str(), from), ids.len(), *max_sessions)?;
    let mut new = SessionRow::new(*owner, from, ttl.or(row.ttl), *now);
    new.metadata = metadata.clone().unwrap_or(row.metadata);
    new.forked_from = Some((session.as_str().to_owned(), from.to_owned()));
    let head = rows.require_version(from)?;
    let planned = Forks { sessions: ids.iter().map(|id| (id.clone(), new.clone())).collect(), head };
    let answered = answer(rows, *owner, receipt.as_ref(), &planned)?;
    let sessions = add_forks(rows, ids.iter(), &new, &ancestry)?;
    if let Some(receipt) = &answered {
        rows.put_receipt(*owner, receipt)?;
    }
    Ok(Forks { sessions, ..planned })
}

pub(crate) fn edit<T: Transaction>(
    rows: &mut T,
    owner: Owner,
    id: &str,
    edit: &Edit,
    now: u64,
) -> Result<Edited, T::Error> {
    let old = rows.own_session(owner, id)?;
    let mut row = old.clone();
    let edits = edit.apply(&mut row, now)?;
    let kept = edits.check(rows.position(id, &edits.version)?.map(|(_, kept)| kept))?;
    let Edits { version, label, .. } = edits;
    let mut found = rows.require_version(&version)?;
    if let Some(label) = label {
        found.label = label;
        rows.put_version(&version, &found)?;
    }
    rows.put_session(id, Some(&old), Some(&row))?;
    Ok(Edited { session: row, version: Listed { id: version, row: found, kept } })
}

pub(crate) fn delete<T: Transaction>(rows: &mut T, owner: Owner, id: &str) -> Result<(), T::Error> {
    let row = rows.own_session(owner, id)?;
    rows.remove_session(id, &row)
}

/// Returns the owner's session, if `expected` is its head.
fn session_at<T: Transaction>(
    rows: &T,
    owner: Owner,
    session: &SessionId,
    expected: &VersionId,
) -> Result<SessionRow, T::Error> {
    let row = rows.own_session(owner, session.as_str())?;
    if row.head == expected.as_str() {
        return Ok(row);
    }
    Err(match VersionId::parse(&row.head) {
        Some(head) => StoreError::Stale { head }.into(),
        None => T::damaged(format!("{:?} is no version's id", row.head)),
    })
}

pub(crate) fn commit<T: Transaction>(rows: &mut T, commit: &Commit) -> Result<Head, T::Error> {
    let Commit { owner, session, expected, version, bounds, now, receipt, .. } = commit;
    let old = session_at(rows, *owner, session, expected)?;
    rows.check_receipt(*owner, receipt.as_ref())?;
    if rows.find_version(version.id.as_str())?.is_some() {
        return Err(StoreError::Unavailable { reason: format!("version {} exists already", version.id) }.into());
    }
    // The forks come first, because the new head may make the session release a version that they keep.
    add_turn_forks(rows, commit, &old)?;
    let mut row = old.clone();
    row.touch(*now);
    rows.add_new(version)?;
    push_head(rows, session.as_str(), &mut row, version.id.as_str(), *bounds)?;
    rows.put_session(session.as_str(), Some(&old), Some(&row))?;
    if let Some(receipt) = receipt {
        rows.put_receipt(*owner, receipt)?;
    }
    Ok((row, version.row.clone()))
}

/// Creates the forks that a turn leaves beside its session. `row` is the session's row before the turn.
fn add_turn_forks<T: Transaction>(rows: &mut T, commit: &Commit, row: &SessionRow) -> Result<(), T::Error> {
    let Commit { owner, session, expected, forks, max_sessions, bounds, now, .. } = commit;
    if forks.is_empty() {
        return Ok(());
    }
    let from = (session.as_str(), expected.as_str());
    let ancestry = check_fork(rows, *owner, from, forks.len(), *max_sessions)?;
    let mut new = SessionRow::new(*owner, &row.head, row.ttl, *now);
    new.metadata.clone_from(&row.metadata);
    new.forked_from = Some((session.as_str().to_owned(), row.head.clone()));
    let added = add_forks(rows, forks.iter().map(|(id, _)| id), &new, &ancestry)?;
    for ((id, old), (_, version)) in added.into_iter().zip(forks) {
        let mut row = old.clone();
        rows.add_new(version)?;
        push_head(rows, id.as_str(), &mut row, version.id.as_str(), *bounds)?;
        rows.put_session(id.as_str(), Some(&old), Some(&row))?;
    }
    Ok(())
}

pub(crate) fn rewind<T: Transaction>(rows: &mut T, rewind: &Rewind) -> Result<Head, T::Error> {
    let Rewind { owner, session, expected, to, bounds, now } = rewind;
    let old = session_at(rows, *owner, session, expected)?;
    let head = rows.kept_version(*owner, to.as_str())?;
    let mut row = old.clone();
    row.touch(*now);
    adopt(rows, session.as_str(), &mut row, to.as_str(), *bounds)?;
    rows.put_session(session.as_str(), Some(&old), Some(&row))?;
    Ok((row, head))
}

pub(crate) fn store_response<T: Transaction>(rows: &mut T, response: &NewResponse) -> Result<(), T::Error> {
    let NewResponse { id, row, version, receipt } = response;
    rows.check_receipt(row.owner, receipt.as_ref())?;
    rows.add_new(version)?;
    rows.put_response(id.as_str(), row)?;
    if let Some(receipt) = receipt {
        rows.put_receipt(row.owner, receipt)?;
    }
    Ok(())
}
