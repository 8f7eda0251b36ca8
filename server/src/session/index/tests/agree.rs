//! Compares everything that an index says with the model.

use super::*;

/// Returns a row without the fields that only its index knows.
fn plain(row: SessionRow) -> SessionRow {
    SessionRow { number: 0, next: 0, kept: 0, known: 0, ..row }
}

/// Like [`plain`]; keeps only whether anything keeps the version.
fn plain_version(row: VersionRow) -> VersionRow {
    VersionRow { kept_by: row.kept_by.min(1), known_by: 0, ..row }
}

/// Returns a row as a change returns it, which may be the row before anything kept the version.
fn described(row: VersionRow) -> VersionRow {
    VersionRow { kept_by: 0, known_by: 0, ..row }
}

pub(super) fn heads(found: Result<Head, StoreError>, expected: Result<Head, StoreError>) {
    let head = |(row, head): Head| (plain(row), described(head));
    assert_eq!(found.map(head), expected.map(head));
}

pub(super) fn forks(found: Result<Forks, StoreError>, expected: Result<Forks, StoreError>) {
    let forks = |forks: Forks| {
        let sessions: Vec<_> = forks.sessions.into_iter().map(|(id, row)| (id, plain(row))).collect();
        (sessions, described(forks.head))
    };
    assert_eq!(found.map(forks), expected.map(forks));
}

pub(super) fn edits(found: Result<Edited, StoreError>, expected: Result<Edited, StoreError>) {
    let edited = |edited: Edited| {
        let version = Listed { row: described(edited.version.row), ..edited.version };
        Edited { session: plain(edited.session), version }
    };
    assert_eq!(found.map(edited), expected.map(edited));
}

impl World {
    /// Compares everything that can be read, whoever asks.
    pub(super) async fn agree(&mut self) {
        for number in 0..2 {
            self.agree_on_lists(owner(number)).await;
        }
        for (owner, id) in &self.sessions {
            self.agree_on_session(*owner, id).await;
        }
        for id in &self.versions {
            for number in 0..2 {
                self.agree_on_version(owner(number), id).await;
            }
        }
        for id in &self.responses {
            for number in 0..2 {
                let expected = self.model.responses.get(id.as_str()).filter(|row| row.owner == owner(number)).cloned();
                let found = self.index.response(owner(number), id).await;
                assert_eq!(found, expected.ok_or(StoreError::RESPONSE));
            }
        }
        for key in ["create", "commit", "fork", "respond", "key 0", "key 1", "key 2", "key 3"] {
            for number in 0..2 {
                let expected = self.model.receipts.get(&(owner(number), key.to_owned())).cloned();
                assert_eq!(self.index.receipt(owner(number), key).await, Ok(expected));
            }
        }
        self.agree_on_objects().await;
        let owners = self.agree_on_totals();
        self.agree_on_space(owners);
    }

    async fn agree_on_lists(&self, owner: Owner) {
        let sessions = self.model.sessions.iter().filter(|(_, kept)| kept.row.owner == owner);
        let expected: Vec<_> =
            sessions.map(|(id, kept)| (id.clone(), kept.row.clone(), self.model.row(&kept.row.head))).collect();
        for newest_first in [false, true] {
            let (mut found, mut after) = (Vec::new(), None);
            loop {
                let page = self.index.list(owner, after, newest_first, 3).await.expect("a page");
                assert!(page.len() <= 3);
                let is_last = page.len() < 3;
                for (id, (row, head)) in page {
                    after = Some(row.number);
                    found.push((id, plain(row), plain_version(head)));
                }
                if is_last {
                    break;
                }
            }
            if newest_first {
                found.reverse();
            }
            assert_eq!(found, expected);
        }
    }

    async fn agree_on_session(&self, owner: Owner, id: &SessionId) {
        let expected = self.model.session(owner, id);
        let found = self.index.session(owner, id).await;
        assert_eq!(found.map(plain), expected.clone().map(|kept| kept.row.clone()));
        assert_eq!(self.index.session(Owner([8; 16]), id).await, Err(StoreError::SESSION));
        let Ok(kept) = expected else {
            assert_eq!(self.index.head(owner, id).await, Err(StoreError::SESSION));
            assert_eq!(self.index.versions(owner, id).await, Err(StoreError::SESSION));
            assert_eq!(self.index.listed(owner, id, None).await, Err(StoreError::SESSION));
            return;
        };
        let listed = |version: &str, kept| Listed { id: version.to_owned(), row: self.model.row(version), kept };
        let (row, head) = self.index.head(owner, id).await.expect("a head");
        assert_eq!((plain(row), plain_version(head)), (kept.row.clone(), self.model.row(&kept.row.head)));
        let (row, versions) = self.index.versions(owner, id).await.expect("versions");
        let plain_listed = |found: Listed| Listed { row: plain_version(found.row), ..found };
        let versions: Vec<_> = versions.into_iter().map(plain_listed).collect();
        let expected: Vec<_> = kept.list.iter().map(|(id, kept)| listed(id, *kept)).collect();
        assert_eq!((plain(row), versions), (kept.row.clone(), expected));
        let head = self.index.listed(owner, id, None).await.map(plain_listed);
        assert_eq!(head, Ok(listed(&kept.row.head, true)));
        for version in self.versions.iter().rev().take(4) {
            let found = self.index.listed(owner, id, Some(version)).await.map(plain_listed);
            let expected = kept.list.iter().find(|(id, _)| id == version.as_str());
            assert_eq!(found, expected.map(|(id, kept)| listed(id, *kept)).ok_or(StoreError::VERSION));
        }
    }

    async fn agree_on_version(&self, owner: Owner, id: &VersionId) {
        let limit = self.part(7);
        let chain = self.model.chain(owner, id.as_str(), limit);
        let row = self.index.version(owner, id).await.expect("the index is read");
        assert_eq!(row.map(plain_version), chain.first().map(|id| self.model.row(id)));
        let found = self.index.chain(owner, id.as_str(), limit).await.expect("a chain").into_iter();
        let found: Vec<_> = found.map(|(id, row)| (id, plain_version(row))).collect();
        let expected: Vec<_> = chain.into_iter().map(|id| (id.clone(), self.model.row(&id))).collect();
        assert_eq!(found, expected);
        if self.model.is_listed(id.as_str()) {
            let text = self.model.text(id.as_str());
            assert_eq!(self.index.text(id.as_str(), usize::MAX).await, Ok(text.clone()));
            for bytes in [1, self.part(400)] {
                // The first rows, until they have this many bytes.
                let mut read = 0;
                let first = text.iter().take_while(|(_, row)| {
                    let more = read < bytes;
                    read += row.len();
                    more
                });
                assert_eq!(self.index.text(id.as_str(), bytes).await, Ok(first.cloned().collect()));
            }
        }
    }

    /// Returns a page size of at most `most`, which changes after each step.
    fn part(&self, most: usize) -> usize {
        1 + (self.now / TICK * 31) as usize % most
    }

    async fn agree_on_objects(&self) {
        let garbage = self.index.garbage(usize::MAX).await.expect("the index is read");
        let garbage: BTreeSet<String> = garbage.iter().map(ToString::to_string).collect();
        assert_eq!(garbage, self.model.garbage.keys().cloned().collect());
        let orphans = self.index.orphans(self.versions.clone()).await.expect("the index is read");
        let is_orphan =
            |id: &&VersionId| !self.model.is_kept(id.as_str()) && !self.model.garbage.contains_key(id.as_str());
        let expected: BTreeSet<_> = self.versions.iter().filter(is_orphan).cloned().collect();
        assert_eq!(orphans.into_iter().collect::<BTreeSet<_>>(), expected);
        let there: HashSet<String> = self.versions.iter().step_by(2).map(ToString::to_string).collect();
        let missing = self.index.missing(there.clone()).await.expect("the index is read");
        let missing: BTreeMap<_, _> = missing
            .into_iter()
            .map(|(id, (row, mut keepers))| {
                keepers.sort();
                (id, (plain_version(row), keepers))
            })
            .collect();
        let needed =
            |id: &&String| self.model.is_kept(id) && self.model.versions[*id].bytes > 0 && !there.contains(*id);
        let expected = self.model.versions.keys().filter(needed).map(|id| {
            let mut keepers = self.model.keepers(id);
            keepers.sort();
            (id.clone(), (self.model.row(id), keepers))
        });
        assert_eq!(missing, expected.collect());
    }

    /// Compares the totals, and returns what each owner has stored.
    fn agree_on_totals(&self) -> HashMap<Owner, u64> {
        let mut expected = Totals { sessions: self.model.sessions.len() as u64, ..Totals::default() };
        let mut owners: HashMap<Owner, u64> = HashMap::new();
        for (_, row) in self.model.versions.iter().filter(|(id, _)| self.model.is_kept(id)) {
            expected.versions += 1;
            expected.live += row.bytes;
            *owners.entry(row.owner).or_default() += row.bytes;
        }
        for ((owner, key), (_, answer)) in &self.model.receipts {
            expected.receipts += receipt_bytes(key, answer);
            *owners.entry(*owner).or_default() += receipt_bytes(key, answer);
        }
        for (id, row) in &self.model.texts {
            expected.texts += text_bytes(row.len() as u64);
            *owners.entry(self.owners[id]).or_default() += text_bytes(row.len() as u64);
        }
        owners.retain(|_, bytes| *bytes > 0);
        expected.garbage = self.model.garbage.values().sum();
        let numbers = |totals: &Totals| {
            let Totals { live, garbage, sessions, versions, receipts, texts, .. } = totals;
            [*live, *garbage, *sessions, *versions, *receipts, *texts]
        };
        self.index.capacity().totals(|totals| {
            assert_eq!(numbers(totals), numbers(&expected));
            assert_eq!(totals.owners, owners);
        });
        owners
    }

    /// Compares the reserved space, and the order of the owners that may lose something by what they use.
    fn agree_on_space(&mut self, mut owners: HashMap<Owner, u64>) {
        let mut reserved = 0;
        for (version, reservation) in &self.reserved {
            let bytes = if self.model.added.contains(version) { 0 } else { RESERVED };
            assert_eq!(reservation.bytes(), bytes, "{version}");
            *owners.entry(self.owners[version]).or_default() += bytes;
            reserved += bytes;
        }
        assert_eq!(self.index.capacity().reserved(), reserved);
        let evictable = self.index.capacity().totals(|totals| totals.evictable.clone());
        let [least, most] = self.model.evictable_owners();
        assert!(least.is_subset(&evictable) && evictable.is_subset(&most), "{least:?} {evictable:?} {most:?}");
        let used = |owner: &Owner| (owners.get(owner).copied().unwrap_or(0), *owner);
        let mut ranked: Vec<_> = evictable.iter().map(used).collect();
        ranked.sort_unstable();
        assert_eq!(self.index.capacity().ranked(), ranked);
        for (_, reservation) in self.reserved.drain(..) {
            reservation.shrink(0);
        }
    }
}
