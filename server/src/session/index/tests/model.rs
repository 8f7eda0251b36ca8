//! A model of an index on plain lists. It computes every answer from the lists and keeps no counts.

use std::collections::{BTreeMap, BTreeSet};

use crate::session::id::{Owner, ResponseId, SessionId, VersionId};
use crate::session::index::edit::MAX_TAGS;
use crate::session::index::requests::{MAX_ADOPTED, MAX_FORK_ROWS};
use crate::session::index::*;
use crate::session::patch::Patch;

type Done<T> = Result<T, StoreError>;

/// A session, and the versions that it lists, each with whether the session keeps it.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) row: SessionRow,
    pub(super) list: Vec<(String, bool)>,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    /// The sessions in order of creation.
    pub(super) sessions: Vec<(SessionId, Kept)>,
    pub(super) versions: BTreeMap<String, VersionRow>,
    pub(super) texts: BTreeMap<String, Vec<u8>>,
    pub(super) responses: BTreeMap<String, ResponseRow>,
    pub(super) receipts: BTreeMap<(Owner, String), (u64, Vec<u8>)>,
    pub(super) garbage: BTreeMap<String, u64>,
    /// All versions that were ever added.
    pub(super) added: BTreeSet<String>,
    /// The refusals and bounds that tests have reached.
    pub(super) reached: BTreeSet<&'static str>,
}

impl Kept {
    fn keeps(&self, version: &str) -> Option<bool> {
        self.list.iter().find(|(id, _)| id == version).map(|(_, kept)| *kept)
    }

    fn push_head(&mut self, version: &str, before: Option<&str>, bounds: Bounds) {
        self.list.push((version.to_owned(), true));
        version.clone_into(&mut self.row.head);
        let free = |row: &SessionRow, (id, kept): &(String, bool)| {
            *kept && *id != row.head && !row.tags.values().any(|tagged| tagged == id)
        };
        let count = self.list.iter().filter(|entry| free(&self.row, entry)).count();
        for _ in 0..(count + 1).saturating_sub(bounds.keep) {
            let free = |entry: &&(String, bool)| free(&self.row, entry);
            let others = |entry: &&(String, bool)| free(entry) && before != Some(&*entry.0);
            let oldest = self.list.iter().find(others).or_else(|| self.list.iter().find(free)).expect("one is free");
            let at = self.list.iter().position(|entry| entry == oldest).expect("it is there");
            self.release(at, bounds.lineage);
        }
        self.unlist(bounds.lineage);
    }

    pub(super) fn release(&mut self, at: usize, lineage: usize) {
        self.list[at].1 = false;
        self.unlist(lineage);
    }

    fn unlist(&mut self, lineage: usize) {
        while self.list.iter().filter(|(_, kept)| !kept).count() > lineage {
            let oldest = self.list.iter().position(|(_, kept)| !kept).expect("there is one");
            let (id, _) = self.list.remove(oldest);
            self.row.tags.retain(|_, tagged| *tagged != id);
        }
    }
}

impl Model {
    pub(super) fn is_kept(&self, version: &str) -> bool {
        let kept = |kept: &Kept| kept.keeps(version) == Some(true);
        self.sessions.iter().any(|(_, session)| kept(session)) || self.has_response(version)
    }

    pub(super) fn is_listed(&self, version: &str) -> bool {
        self.sessions.iter().any(|(_, session)| session.keeps(version).is_some()) || self.has_response(version)
    }

    fn has_response(&self, version: &str) -> bool {
        self.responses.values().any(|row| row.version == version)
    }

    /// Returns the total number of tags.
    pub(super) fn tags(&self) -> usize {
        self.sessions.iter().map(|(_, kept)| kept.row.tags.len()).sum()
    }

    /// Returns the sessions that keep a version.
    pub(super) fn keepers(&self, version: &str) -> Vec<String> {
        let keepers = self.sessions.iter().filter(|(_, session)| session.keeps(version) == Some(true));
        keepers.map(|(id, _)| id.to_string()).collect()
    }

    /// Returns a version's row, with `kept_by` reduced to whether anything keeps the version.
    pub(super) fn row(&self, version: &str) -> VersionRow {
        VersionRow { kept_by: self.is_kept(version).into(), ..self.versions[version].clone() }
    }

    pub(super) fn session(&self, owner: Owner, id: &SessionId) -> Done<&Kept> {
        let found = self.sessions.iter().find(|(found, kept)| found == id && kept.row.owner == owner);
        found.map(|(_, kept)| kept).ok_or(StoreError::SESSION)
    }

    pub(super) fn session_mut(&mut self, id: &SessionId) -> &mut Kept {
        &mut self.sessions.iter_mut().find(|(found, _)| found == id).expect("the session").1
    }

    fn own_version(&self, owner: Owner, version: &str) -> Option<&VersionRow> {
        self.versions.get(version).filter(|row| row.owner == owner && self.is_listed(version))
    }

    fn kept_version(&self, owner: Owner, version: &str) -> Done<()> {
        self.own_version(owner, version).filter(|_| self.is_kept(version)).map(drop).ok_or(StoreError::VERSION)
    }

    pub(super) fn chain(&self, owner: Owner, version: &str, limit: usize) -> Vec<String> {
        let (mut chain, mut next) = (Vec::new(), Some(version.to_owned()));
        while let Some(id) = next.filter(|_| chain.len() < limit)
            && let Some(row) = self.own_version(owner, &id)
        {
            next = row.parent.clone();
            chain.push(id);
        }
        chain
    }

    /// Makes a change, and then removes what nothing needs any more.
    pub(super) fn change<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let before: Vec<String> = self.versions.keys().filter(|version| self.is_kept(version)).cloned().collect();
        let result = work(self);
        for version in before {
            let bytes = self.versions[&version].bytes;
            if bytes > 0 && !self.is_kept(&version) {
                self.garbage.insert(version, bytes);
            }
        }
        let gone: Vec<String> = self.versions.keys().filter(|version| !self.is_listed(version)).cloned().collect();
        for version in gone {
            self.versions.remove(&version);
        }
        result
    }

    fn add(&mut self, version: &NewVersion) {
        let id = version.id.to_string();
        self.added.insert(id.clone());
        self.versions.insert(id.clone(), version.row.clone());
        let Some(text) = &version.text else { return };
        let parent = version.row.parent.as_ref().filter(|_| text.kept > 0);
        let before = parent.and_then(|parent| Some((parent, TextRow::parse(self.texts.get(parent)?).ok()?)));
        let before = before.filter(|(_, row)| text.kept <= row.total());
        if text.kept == 0 || before.is_some() {
            let row = text.row(before.map(|(parent, row)| (parent.as_str(), row.messages)));
            self.texts.insert(id, row);
        }
    }

    /// Refuses if the key already has an unexpired receipt.
    fn check_receipt<A>(&self, owner: Owner, receipt: Option<&NewReceipt<A>>) -> Done<()> {
        let earlier = receipt.and_then(|new| Some((self.receipts.get(&(owner, new.key.clone()))?.0, new.now)));
        if earlier.is_some_and(|(ends, now)| ends > now) { Err(StoreError::Answered) } else { Ok(()) }
    }

    fn answer(&self, owner: Owner, receipt: Option<&NewReceipt<Answer>>, made: &Forks) -> Done<Option<Vec<u8>>> {
        self.check_receipt(owner, receipt)?;
        receipt.map(|receipt| (receipt.answer.0)(made)).transpose()
    }

    fn put<A>(&mut self, owner: Owner, receipt: Option<&NewReceipt<A>>, answer: impl FnOnce(&A) -> Vec<u8>) {
        if let Some(NewReceipt { key, ends, answer: made, .. }) = receipt {
            self.receipts.insert((owner, key.clone()), (*ends, answer(made)));
        }
    }

    fn check_quota(&self, owner: Owner, more: usize, bound: usize) -> Done<()> {
        let found = self.sessions.iter().filter(|(_, kept)| kept.row.owner == owner).count() + more;
        let quota = StoreError::Quota { quota: "sessions", bound: bound as u64, found: found as u64 };
        if found > bound { Err(quota) } else { Ok(()) }
    }

    pub(super) fn check_create(&self, owner: Owner, replaced: Option<&SessionId>, max: usize) -> Done<()> {
        let more = replaced.is_none_or(|id| self.session(owner, id).is_err());
        self.check_quota(owner, more.into(), max)
    }

    pub(super) fn create(&mut self, create: &Create) -> Done<Head> {
        let Create { id, row, version, replace, max_sessions, receipt } = create;
        self.check_create(row.owner, Some(id).filter(|_| *replace), *max_sessions)?;
        let others = self.sessions.iter().any(|(found, kept)| found == id && kept.row.owner != row.owner);
        if others {
            return Err(StoreError::SESSION);
        }
        let head = if let Some(version) = version {
            version.row.clone()
        } else {
            self.kept_version(row.owner, &row.head)?;
            self.row(&row.head)
        };
        let created = Forks { sessions: vec![(id.clone(), row.clone())], head };
        let answer = self.answer(row.owner, receipt.as_ref(), &created)?;
        self.change(|model| {
            if let Some(version) = version {
                model.add(version);
            }
            model.sessions.retain(|(found, _)| found != id);
            let kept = Kept { row: row.clone(), list: vec![(row.head.clone(), true)] };
            model.sessions.push((id.clone(), kept));
        });
        self.put(row.owner, receipt.as_ref(), |_| answer.unwrap_or_default());
        Ok((row.clone(), self.row(&row.head)))
    }

    /// Returns the list of a fork that starts from a version of a session.
    pub(super) fn check_fork(
        &self,
        owner: Owner,
        (session, from): (&SessionId, &str),
        n: usize,
        max: usize,
    ) -> Done<Vec<(String, bool)>> {
        let list = self.session(owner, session)?.list.clone();
        self.check_quota(owner, n, max)?;
        list.iter().find(|(id, kept)| id == from && *kept).ok_or(StoreError::VERSION)?;
        let (mut ancestry, mut next) = (Vec::new(), Some(from.to_owned()));
        while let Some(entry) = next.and_then(|next| list.iter().find(|(id, _)| *id == next)) {
            next = self.versions[&entry.0].parent.clone();
            ancestry.push(entry.clone());
        }
        let versions = ancestry.len();
        if n * versions > MAX_FORK_ROWS {
            return Err(StoreError::TooManyForks { n, versions, bound: MAX_FORK_ROWS });
        }
        ancestry.reverse();
        Ok(ancestry)
    }

    pub(super) fn fork(&mut self, fork: &Fork) -> Done<Forks> {
        let Fork { owner, session, from, ids, metadata, ttl, max_sessions, now, receipt } = fork;
        let source = self.session(*owner, session)?.row.clone();
        let from = from.as_ref().map_or(source.head.as_str(), VersionId::as_str);
        let list = self.check_fork(*owner, (session, from), ids.len(), *max_sessions)?;
        let mut row = SessionRow::new(*owner, from, ttl.or(source.ttl), *now);
        row.metadata = metadata.clone().unwrap_or(source.metadata);
        row.forked_from = Some((session.to_string(), from.to_owned()));
        let sessions = ids.iter().map(|id| (id.clone(), row.clone())).collect();
        let forks = Forks { sessions, head: self.row(from) };
        let answer = self.answer(*owner, receipt.as_ref(), &forks)?;
        self.sessions.extend(ids.iter().map(|id| (id.clone(), Kept { row: row.clone(), list: list.clone() })));
        self.put(*owner, receipt.as_ref(), |_| answer.unwrap_or_default());
        Ok(forks)
    }

    fn expect_head(&self, owner: Owner, session: &SessionId, expected: &VersionId) -> Done<SessionRow> {
        let row = &self.session(owner, session)?.row;
        let head = VersionId::parse(&row.head).expect("an id");
        if head == *expected { Ok(row.clone()) } else { Err(StoreError::Stale { head }) }
    }

    pub(super) fn commit(&mut self, commit: &Commit) -> Done<Head> {
        let Commit { owner, session, expected, version, forks, max_sessions, bounds, now, receipt } = commit;
        let old = self.expect_head(*owner, session, expected)?;
        self.check_receipt(*owner, receipt.as_ref())?;
        let list = match forks.len() {
            0 => Vec::new(),
            n => self.check_fork(*owner, (session, expected.as_str()), n, *max_sessions)?,
        };
        self.change(|model| {
            for (id, version) in forks {
                let mut row = SessionRow::new(*owner, &old.head, old.ttl, *now);
                row.metadata.clone_from(&old.metadata);
                row.forked_from = Some((session.to_string(), old.head.clone()));
                let mut fork = Kept { row, list: list.clone() };
                model.add(version);
                fork.push_head(version.id.as_str(), version.row.parent.as_deref(), *bounds);
                model.sessions.push((id.clone(), fork));
            }
            model.add(version);
            let kept = model.session_mut(session);
            kept.row.touch(*now);
            kept.push_head(version.id.as_str(), version.row.parent.as_deref(), *bounds);
        });
        self.put(*owner, receipt.as_ref(), Vec::clone);
        Ok((self.session(*owner, session)?.row.clone(), self.row(version.id.as_str())))
    }

    pub(super) fn rewind(&mut self, rewind: &Rewind) -> Done<Head> {
        let Rewind { owner, session, expected, to, bounds, now } = rewind;
        self.expect_head(*owner, session, expected)?;
        self.kept_version(*owner, to.as_str())?;
        let found = self.session(*owner, session)?.keeps(to.as_str());
        let mut ancestors = Vec::new();
        if found.is_none() {
            let list = &self.session(*owner, session)?.list;
            let most = bounds.keep.saturating_add(bounds.lineage).min(MAX_ADOPTED);
            let chain = self.chain(*owner, to.as_str(), usize::MAX).into_iter().skip(1);
            let unlisted = chain.take_while(|id| !list.iter().any(|(listed, _)| listed == id));
            for (at, id) in unlisted.enumerate() {
                if at == most {
                    let _ = most == MAX_ADOPTED && self.reached.insert("adopted");
                    break;
                }
                ancestors.push((id.clone(), self.is_kept(&id) && at + 1 < bounds.keep));
            }
        }
        self.change(|model| {
            let before = model.versions[to.as_str()].parent.clone();
            let kept = model.session_mut(session);
            kept.row.touch(*now);
            to.as_str().clone_into(&mut kept.row.head);
            if found != Some(true) {
                kept.list.retain(|(id, _)| id != to.as_str());
                kept.list.extend(ancestors.into_iter().rev());
                kept.push_head(to.as_str(), before.as_deref(), *bounds);
            }
        });
        Ok((self.session(*owner, session)?.row.clone(), self.row(to.as_str())))
    }

    pub(super) fn edit(&mut self, owner: Owner, id: &SessionId, edit: &Edit, now: u64) -> Done<Edited> {
        let mut kept = self.session(owner, id)?.clone();
        let (version, label) = match edit {
            Edit::Patch(Patch { metadata, ttl, label }) => {
                kept.row.metadata = metadata.clone().unwrap_or(kept.row.metadata);
                kept.row.ttl = ttl.map_or(kept.row.ttl, |ttl| ttl.map(|ttl| ttl.as_secs()));
                (kept.row.head.clone(), label.clone())
            }
            Edit::Tag(name, meant) => {
                let version = kept.row.resolve(meant.as_ref())?.to_owned();
                if kept.row.tags.len() >= MAX_TAGS && !kept.row.tags.contains_key(name.as_str()) {
                    return Err(StoreError::TooManyTags { bound: MAX_TAGS });
                }
                kept.keeps(&version).filter(|kept| *kept).ok_or(StoreError::VERSION)?;
                kept.row.tags.insert(name.as_str().to_owned(), version.clone());
                (version, None)
            }
            Edit::Untag(name) => {
                kept.row.tags.remove(name.as_str()).ok_or(StoreError::TAG)?;
                (kept.row.head.clone(), None)
            }
            Edit::Label(meant, label) => (kept.row.resolve(Some(meant))?.to_owned(), Some(label.clone())),
        };
        let is_kept = kept.keeps(&version).ok_or(StoreError::VERSION)?;
        if let Some(label) = label {
            self.versions.get_mut(&version).expect("a row").label = label;
        }
        kept.row.touch(now);
        *self.session_mut(id) = kept.clone();
        Ok(Edited { session: kept.row, version: Listed { row: self.row(&version), id: version, kept: is_kept } })
    }

    pub(super) fn delete(&mut self, owner: Owner, id: &SessionId) -> Done<()> {
        self.session(owner, id)?;
        self.change(|model| model.sessions.retain(|(found, _)| found != id));
        Ok(())
    }

    pub(super) fn record_uses(&mut self, uses: &HashMap<SessionId, u64>) {
        for (id, kept) in &mut self.sessions {
            kept.row.used = kept.row.used.max(uses.get(id).copied().unwrap_or(0));
        }
    }

    pub(super) fn put_response(&mut self, response: &NewResponse) -> Done<()> {
        self.check_receipt(response.row.owner, response.receipt.as_ref())?;
        self.add(&response.version);
        self.responses.insert(response.id.to_string(), response.row.clone());
        self.put(response.row.owner, response.receipt.as_ref(), Vec::clone);
        Ok(())
    }

    pub(super) fn delete_response(&mut self, owner: Owner, id: &ResponseId) -> Done<()> {
        self.responses.get(id.as_str()).filter(|row| row.owner == owner).ok_or(StoreError::RESPONSE)?;
        self.change(|model| model.responses.remove(id.as_str()));
        Ok(())
    }

    pub(super) fn put_receipt(&mut self, owner: Owner, receipt: &NewReceipt<Vec<u8>>) {
        self.put(owner, Some(receipt), Vec::clone);
    }
}
