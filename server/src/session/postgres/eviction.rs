//! Evicts versions to make space. The owner that uses most loses first, as long as it uses more than its share: old
//! versions of its least recently used sessions, then its stored responses, oldest first, and then the tagged versions
//! of its sessions. A session's head is never evicted.

use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};

use super::connection::step;
use super::database::Database;
use super::reads::{Lists, Reads};
use super::rows::{column, get, json, number, owner_column};
use super::work::Work;
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::branches::drop_version;
use crate::session::index::{Transaction, Victims};

/// Number of sessions or responses in one page: small in tests, so that they need several pages.
const PAGE: usize = if cfg!(test) { 2 } else { 64 };

/// Maximum number of holders that release their versions in one transaction.
const BATCH: usize = if cfg!(test) { 3 } else { 500 };

const SESSIONS: &str = "SELECT s.id, s.used, s.head, s.tags, l.position, l.version, v.bytes, v.kept_by FROM (SELECT id, used, \
    head, tags FROM sessions WHERE owner = $1 AND kept > 1 AND (used, id) > ($2, $3) AND ($5 OR tags IS NOT NULL) ORDER BY \
    used, id LIMIT $4) s JOIN lineage l ON l.session = s.id AND l.kept JOIN versions v ON v.id = l.version ORDER BY s.used, \
    s.id, l.position";

const RESPONSES: &str = "SELECT r.id, r.ends, r.version, v.bytes, v.kept_by FROM responses r JOIN versions v ON v.id = \
    r.version WHERE r.owner = $1 AND (r.ends, r.id) > ($2, $3) ORDER BY r.ends, r.id LIMIT $4";

/// The classes of holders, in the order of eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Class {
    #[default]
    Untagged,
    Responses,
    Tagged,
    End,
}

/// Something that keeps a version.
#[derive(Clone, Debug)]
struct Holder {
    class: Class,
    /// The id of a session or a response.
    name: String,
    /// The position in the session's list; 0 for a response.
    position: u64,
}

/// A holder, the version that it may release, that version's bytes, and the number of its holders.
type Found = (Holder, String, u64, u64);

/// The holders of an owner's versions, in the order of eviction.
#[derive(Debug, Default)]
struct Holders {
    class: Class,
    after: (i64, String),
    next: VecDeque<Found>,
}

/// A version that at least one of its holders may release.
#[derive(Debug)]
struct Candidate {
    other_holders: u64,
    bytes: u64,
    holders: Vec<Holder>,
}

/// The search for versions to evict.
#[derive(Debug, Default)]
struct Search {
    owners: HashMap<Owner, Holders>,
    candidates: HashMap<String, Candidate>,
    chosen: BTreeMap<Owner, Vec<Holder>>,
}

impl Database {
    pub(super) async fn can_evict(&self, victims: &Victims, missing: u64) -> Result<bool, StoreError> {
        Ok(self.droppable(victims, missing).await?.is_some())
    }

    pub(super) async fn evict(
        &self,
        victims: &Victims,
        missing: u64,
        lineage: usize,
    ) -> Result<Option<usize>, StoreError> {
        let chosen = self.droppable(victims, missing).await?;
        tracing::debug!(missing, possible = chosen.is_some(), "evicting versions");
        let Some(chosen) = chosen else { return Ok(None) };
        let mut evicted = 0;
        for (owner, holders) in chosen {
            for holders in holders.chunks(BATCH) {
                let names = |of: bool| {
                    let named = holders.iter().filter(move |holder| (holder.class == Class::Responses) == of);
                    named.map(|holder| holder.name.clone()).collect::<HashSet<_>>().into_iter().collect()
                };
                let (sessions, responses) = (names(false), names(true));
                let reads = Reads { sessions, responses, lists: Lists::Beyond(lineage), ..Reads::default() };
                evicted += self.write(owner, reads, |work| work.evict(holders, lineage)).await?;
            }
        }
        Ok(Some(evicted))
    }

    /// Returns the holders that must release their versions to free at least `missing` bytes; `None` if that would not
    /// free enough. Reads only rows of owners that may lose versions, starting with the owner that uses most.
    async fn droppable(
        &self,
        victims: &Victims,
        missing: u64,
    ) -> Result<Option<BTreeMap<Owner, Vec<Holder>>>, StoreError> {
        let mut search = Search::default();
        let mut largest = BinaryHeap::from([victims.writer]);
        let mut other = victims.next(None);
        // An owner whose use shrinks in the meantime comes up again, and must not lose twice.
        let mut seen = HashSet::new();
        let mut freed = 0;
        while freed < missing {
            // The other owners are looked up as they become the largest.
            while let Some(next) = other.filter(|next| largest.peek() < Some(next)) {
                if seen.insert(next.1) {
                    largest.push(next);
                }
                other = victims.next(other);
            }
            let Some((used, owner)) = largest.pop() else { return Ok(None) };
            if victims.may_lose((used, owner))
                && let Some(found) = self.next_holder(owner, search.owners.entry(owner).or_default()).await?
            {
                let bytes = search.release(owner, found);
                freed += bytes;
                largest.push((used.saturating_sub(bytes), owner));
            }
        }
        Ok(Some(search.chosen))
    }

    async fn next_holder(&self, owner: Owner, holders: &mut Holders) -> Result<Option<Found>, StoreError> {
        while holders.next.is_empty() && holders.class != Class::End {
            let read = match holders.class {
                Class::Responses => self.read_responses(owner, holders).await?,
                _ => self.read_sessions(owner, holders).await?,
            };
            if read < PAGE {
                holders.after = (i64::MIN, String::new());
                holders.class = match holders.class {
                    Class::Untagged => Class::Responses,
                    Class::Responses => Class::Tagged,
                    Class::Tagged | Class::End => Class::End,
                };
            }
        }
        Ok(holders.next.pop_front())
    }

    async fn read_sessions(&self, owner: Owner, holders: &mut Holders) -> Result<usize, StoreError> {
        let (class, (used, id)) = (holders.class, holders.after.clone());
        let all = class == Class::Untagged;
        let rows = self.query(step!(SESSIONS, owner_column(owner), used, id, column(PAGE as u64), all)).await?;
        let mut read = HashSet::new();
        for row in &rows {
            let (name, head, version): (String, &str, String) = (get(row, 0)?, get(row, 2)?, get(row, 5)?);
            let tags: BTreeMap<String, String> = json(row, 3)?;
            let is_tagged = tags.values().any(|tagged| *tagged == version);
            if version != head && is_tagged != all {
                let holder = Holder { class, name: name.clone(), position: number(row, 4)? };
                holders.next.push_back((holder, version, number(row, 6)?, number(row, 7)?));
            }
            holders.after = (get(row, 1)?, name.clone());
            read.insert(name);
        }
        Ok(read.len())
    }

    async fn read_responses(&self, owner: Owner, holders: &mut Holders) -> Result<usize, StoreError> {
        let (class, (ends, id)) = (holders.class, holders.after.clone());
        let rows = self.query(step!(RESPONSES, owner_column(owner), ends, id, column(PAGE as u64))).await?;
        for row in &rows {
            let name: String = get(row, 0)?;
            holders.after = (get(row, 1)?, name.clone());
            let holder = Holder { class, name, position: 0 };
            holders.next.push_back((holder, get(row, 2)?, number(row, 3)?, number(row, 4)?));
        }
        Ok(rows.len())
    }
}

impl Search {
    /// Lets a holder release its version, and returns the bytes that this frees.
    fn release(&mut self, owner: Owner, (holder, version, bytes, kept_by): Found) -> u64 {
        let new = || Candidate { other_holders: kept_by, bytes, holders: Vec::new() };
        let found = self.candidates.entry(version).or_insert_with(new);
        found.other_holders = found.other_holders.saturating_sub(1);
        found.holders.push(holder);
        // A version's bytes are free only once all of its holders have released it.
        if found.other_holders > 0 || found.bytes == 0 {
            return 0;
        }
        self.chosen.entry(owner).or_default().append(&mut found.holders);
        found.bytes
    }
}

impl Work {
    /// Makes holders release their versions, and returns how many did. Skips holders that have changed in the meantime.
    fn evict(&mut self, holders: &[Holder], lineage: usize) -> Result<usize, StoreError> {
        let mut evicted = 0;
        for Holder { class, name, position } in holders {
            if *class == Class::Responses {
                if self.response(name).is_ok() {
                    self.remove_response(name)?;
                    evicted += 1;
                }
                continue;
            }
            let (Ok(old), Some((version, true))) = (self.own_session(self.owner, name), self.list(name).get(position))
            else {
                continue;
            };
            if *version != old.head && (*class == Class::Tagged || !old.tagged_versions().contains(&**version)) {
                let mut row = old.clone();
                drop_version(self, name, &mut row, *position, lineage)?;
                self.put_session(name, Some(&old), Some(&row))?;
                evicted += 1;
            }
        }
        Ok(evicted)
    }
}
