//! Decides which versions a session keeps and lists: those of its turns, those that it adopts from elsewhere, and those
//! that tags name.

use std::collections::HashSet;

use super::requests::Bounds;
use super::rows::SessionRow;
use super::transaction::Transaction;

/// Appends a version to a session, as its head.
pub(crate) fn push_head<T: Transaction>(
    rows: &mut T,
    id: &str,
    row: &mut SessionRow,
    version: &str,
    bounds: Bounds,
) -> Result<(), T::Error> {
    append(rows, id, row, version, true)?;
    rows.point(version, 1, 1)?;
    version.clone_into(&mut row.head);
    release_beyond(rows, id, row, bounds)
}

/// Makes an existing version of the same owner the session's head; the session need not list it yet. The version's
/// ancestors that the session does not list yet are listed as well, and the newest of them are kept if anything still
/// keeps them.
pub(super) fn adopt<T: Transaction>(
    rows: &mut T,
    id: &str,
    row: &mut SessionRow,
    version: &str,
    bounds: Bounds,
) -> Result<(), T::Error> {
    version.clone_into(&mut row.head);
    match rows.position(id, version)? {
        Some((_, true)) => return Ok(()),
        Some((position, false)) => {
            rows.remove_entry(id, position, false)?;
            row.known -= 1;
            rows.point(version, 1, 0)?;
        }
        None => {
            adopt_ancestors(rows, id, row, version, bounds)?;
            rows.point(version, 1, 1)?;
        }
    }
    append(rows, id, row, version, true)?;
    release_beyond(rows, id, row, bounds)
}

/// Adds a version's ancestors to the session's list, up to the first that the session already lists.
fn adopt_ancestors<T: Transaction>(
    rows: &mut T,
    id: &str,
    row: &mut SessionRow,
    version: &str,
    bounds: Bounds,
) -> Result<(), T::Error> {
    let listed: HashSet<String> = rows.lineage(id)?.into_iter().map(|entry| entry.version).collect();
    let most = bounds.most_adopted();
    let mut ancestors = Vec::new();
    let mut next = rows.require_version(version)?.parent;
    while let Some(ancestor) = next.filter(|ancestor| ancestors.len() < most && !listed.contains(ancestor))
        && let Some(found) = rows.find_version(&ancestor)?.filter(|found| found.owner == row.owner)
    {
        // One of the kept snapshots is the head's.
        let kept = found.kept_by > 0 && ancestors.len() + 1 < bounds.keep;
        ancestors.push((ancestor, kept));
        next = found.parent;
    }
    for (ancestor, kept) in ancestors.iter().rev() {
        append(rows, id, row, ancestor, *kept)?;
        rows.point(ancestor, i64::from(*kept), 1)?;
    }
    Ok(())
}

/// Adds a version to the end of a session's list.
fn append<T: Transaction>(
    rows: &mut T,
    id: &str,
    row: &mut SessionRow,
    version: &str,
    kept: bool,
) -> Result<(), T::Error> {
    rows.put_entry(id, row.next, version, kept)?;
    *(if kept { &mut row.kept } else { &mut row.known }) += 1;
    row.next += 1;
    Ok(())
}

/// Releases the oldest snapshots beyond the bound, except the head's and those of tagged versions, which do not count
/// toward the bound. The snapshot of the head's parent is released last, even if it is old because the session was
/// rewound to it: so the last turn can be undone, and its stream computed again.
fn release_beyond<T: Transaction>(
    rows: &mut T,
    id: &str,
    row: &mut SessionRow,
    bounds: Bounds,
) -> Result<(), T::Error> {
    let (beyond, tagged) = (row.kept.saturating_sub(bounds.keep as u64) as usize, row.tagged_versions());
    if beyond > 0 {
        // If there are tagged versions, they must be counted, so all versions are read. The head and its parent may be
        // old.
        let limit = if tagged.is_empty() { beyond + 2 } else { usize::MAX };
        let mut releasable = rows.oldest(id, true, limit)?;
        releasable.retain(|(_, version)| *version != row.head && !tagged.contains(&**version));
        let before = rows.require_version(&row.head)?.parent;
        releasable.sort_by_key(|(_, version)| before.as_ref() == Some(version));
        // The head counts toward the bound, tagged or not.
        let most = if tagged.is_empty() { beyond } else { (releasable.len() + 1).saturating_sub(bounds.keep) };
        for (position, _) in releasable.into_iter().take(most) {
            drop_version(rows, id, row, position, bounds.lineage)?;
        }
    }
    unlist_beyond(rows, id, row, bounds.lineage)
}

/// Releases a version's snapshot; the session still lists the version. Beyond `lineage` such versions, the oldest are
/// removed from the list.
pub(crate) fn drop_version<T: Transaction>(
    rows: &mut T,
    id: &str,
    row: &mut SessionRow,
    position: u64,
    lineage: usize,
) -> Result<(), T::Error> {
    let Some(version) = rows.remove_entry(id, position, true)? else {
        return Err(T::damaged(format!("session {id} keeps no version at position {position}")));
    };
    rows.put_entry(id, position, &version, false)?;
    row.kept -= 1;
    row.known += 1;
    rows.point(&version, -1, 0)?;
    unlist_beyond(rows, id, row, lineage)
}

/// Removes the oldest versions without snapshots from a session's list, and their tags.
fn unlist_beyond<T: Transaction>(rows: &mut T, id: &str, row: &mut SessionRow, lineage: usize) -> Result<(), T::Error> {
    while row.known > lineage as u64 {
        let Some((position, version)) = rows.oldest(id, false, 1)?.pop() else {
            return Err(T::damaged(format!("session {id} lists fewer versions than its row says")));
        };
        rows.remove_entry(id, position, false)?;
        row.known -= 1;
        row.tags.retain(|_, tagged| *tagged != version);
        rows.point(&version, 0, -1)?;
    }
    Ok(())
}
