//! An index as `interleavings.rs` sees it: what it says after some changes, and how it answers the next one. An index
//! depends only on the transactions so far, so the real one is asked each question once, on a session of its own, and
//! the answer is remembered.

use super::*;

/// A bit set of versions, numbered in the order of their turns: 0 is the session's first.
pub(super) type Set = u16;

pub(super) fn has(set: Set, version: u8) -> bool {
    set >> version & 1 == 1
}

/// Maximum number of versions of one session.
const VERSIONS: u8 = 5;

/// A change that is requested of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Ask {
    Commit {
        version: u8,
        /// The version from which the turn started.
        parent: u8,
        /// Whether the head must still be that version.
        fenced: bool,
        key: Option<u8>,
    },
    /// A client moves the head to the first version.
    Rewind,
    /// The sweep claims those of the objects that the index does not name, so that no later commit may name them.
    Claim(Set),
    /// The sweep has removed these objects.
    Forget(Set),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    Refused,
    /// The request has a receipt.
    Answered,
    Claimed(Set),
}

/// A version that the session lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    pub(super) version: u8,
    pub(super) parent: Option<u8>,
    pub(super) kept: bool,
}

/// Everything that the index says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct View {
    pub(super) head: u8,
    pub(super) list: Vec<Entry>,
    /// The versions named by the receipts.
    pub(super) receipts: [Option<u8>; 2],
    pub(super) garbage: Set,
    pub(super) claimed: Set,
}

impl View {
    pub(super) fn lists(&self, version: u8) -> bool {
        self.list.iter().any(|entry| entry.version == version)
    }

    /// Returns the versions whose objects must exist.
    pub(super) fn kept(&self) -> Set {
        self.list.iter().filter(|entry| entry.kept).fold(0, |set, entry| set | 1 << entry.version)
    }
}

pub(super) struct Asked<'i> {
    index: &'i dyn Index,
    keep: usize,
    /// Each distinct view of the index, and a sequence of changes that leads to it.
    views: Vec<(View, Vec<Ask>)>,
    answers: HashMap<(usize, Ask), (Answer, usize)>,
}

impl<'i> Asked<'i> {
    /// Creates sessions that keep `keep` versions.
    pub(super) async fn new(index: &'i dyn Index, keep: usize) -> Self {
        let mut asked = Self { index, keep, views: Vec::new(), answers: HashMap::new() };
        let session = Session::new(index, keep).await;
        asked.views.push((session.view(0).await, Vec::new()));
        session.end().await;
        asked
    }

    pub(super) fn view(&self, at: usize) -> &View {
        &self.views[at].0
    }

    /// Returns how many questions the index was asked.
    pub(super) fn questions(&self) -> usize {
        self.answers.len()
    }

    /// Asks the index in view number `at`; returns its answer, and the number of the view afterward.
    pub(super) async fn ask(&mut self, at: usize, ask: Ask) -> (Answer, usize) {
        if let Some(known) = self.answers.get(&(at, ask)) {
            return *known;
        }
        let (view, mut way) = self.views[at].clone();
        let session = Session::new(self.index, self.keep).await;
        for earlier in &way {
            session.ask(*earlier).await;
        }
        // The embedded index has one server, which knows what it uploads, and therefore claims nothing. Here the test
        // applies the claims.
        let answer = match ask {
            Ask::Commit { version, .. } if !self.index.is_shared() && has(view.claimed, version) => Answer::Refused,
            ask => session.ask(ask).await,
        };
        let claimed = if let Answer::Claimed(more) = answer { view.claimed | more } else { view.claimed };
        let after = session.view(claimed).await;
        session.end().await;
        way.push(ask);
        let next = self.views.iter().position(|(known, _)| *known == after);
        let next = next.unwrap_or_else(|| {
            self.views.push((after, way));
            self.views.len() - 1
        });
        self.answers.insert((at, ask), (answer, next));
        (answer, next)
    }
}

/// A session of the real index.
struct Session<'i> {
    index: &'i dyn Index,
    keep: usize,
    /// An owner of its own, which has nothing else and shares no receipts with other sessions.
    owner: Owner,
    id: SessionId,
    versions: Vec<VersionId>,
}

impl<'i> Session<'i> {
    async fn new(index: &'i dyn Index, keep: usize) -> Self {
        let (id, versions) = (SessionId::new(), (0..VERSIONS).map(|_| VersionId::new()).collect());
        let owner = Owner(id.as_str().as_bytes()[4..20].try_into().expect("16 bytes"));
        let session = Self { index, keep, owner, id, versions };
        let (version, row) = (session.new_version(0, None), SessionRow::new(owner, session.name(0).as_str(), None, 0));
        let (id, version) = (session.id.clone(), Some(version));
        let create = Create { id, row, version, replace: false, max_sessions: 1, receipt: None };
        index.create(create).await.expect("a session");
        session
    }

    fn name(&self, version: u8) -> &VersionId {
        &self.versions[usize::from(version)]
    }

    fn number(&self, name: &str) -> Option<u8> {
        self.versions.iter().zip(0..).find(|(id, _)| id.as_str() == name).map(|(_, number)| number)
    }

    fn names(&self, set: Set) -> Vec<VersionId> {
        (0..VERSIONS).filter(|version| has(set, *version)).map(|version| self.name(version).clone()).collect()
    }

    fn set(&self, names: &[VersionId]) -> Set {
        names.iter().filter_map(|name| self.number(name.as_str())).fold(0, |set, version| set | 1 << version)
    }

    fn new_version(&self, version: u8, parent: Option<u8>) -> NewVersion {
        let row = VersionRow {
            owner: self.owner,
            parent: parent.map(|parent| self.name(parent).to_string()),
            tokens: version.into(),
            time: 0,
            label: None,
            kind: "turn".to_owned(),
            prompt_tokens: 1,
            completion_tokens: 1,
            bytes: 1,
            seed: None,
            kept_by: 0,
            known_by: 0,
            origin: Vec::new(),
            session: None,
        };
        NewVersion { id: self.name(version).clone(), row, text: None, reserved: Vec::new() }
    }

    async fn head(&self) -> VersionId {
        VersionId::parse(&self.index.session(self.owner, &self.id).await.expect("the session").head).expect("an id")
    }

    async fn ask(&self, ask: Ask) -> Answer {
        let (owner, session, bounds) = (self.owner, self.id.clone(), Bounds { keep: self.keep, lineage: 99 });
        let done = match ask {
            Ask::Commit { version, parent, fenced, key } => {
                let expected = if fenced { self.name(parent).clone() } else { self.head().await };
                let receipt =
                    key.map(|key| NewReceipt { key: key.to_string(), now: 0, ends: 1, answer: vec![version] });
                let (version, forks) = (self.new_version(version, Some(parent)), Vec::new());
                let commit =
                    Commit { owner, session, expected, version, forks, max_sessions: 1, bounds, now: 0, receipt };
                self.index.commit(commit).await.map(drop)
            }
            Ask::Rewind => {
                let (expected, to) = (self.head().await, self.name(0).clone());
                self.index.rewind(Rewind { owner, session, expected, to, bounds, now: 0 }).await.map(drop)
            }
            Ask::Claim(set) => {
                let claimed = self.index.orphans(self.names(set)).await.expect("the index is read");
                return Answer::Claimed(self.set(&claimed));
            }
            Ask::Forget(set) => self.index.forget_garbage(self.names(set)).await,
        };
        match done {
            Ok(()) => Answer::Done,
            Err(StoreError::Answered) => Answer::Answered,
            Err(_) => Answer::Refused,
        }
    }

    async fn view(&self, claimed: Set) -> View {
        let number = |name: &str| self.number(name).expect("a version of the session");
        let (row, versions) = self.index.versions(self.owner, &self.id).await.expect("the session");
        let entry = |Listed { id, row, kept }: Listed| Entry {
            version: number(&id),
            parent: row.parent.as_deref().map(number),
            kept,
        };
        let mut receipts = [None; 2];
        for (key, receipt) in (0..).zip(&mut receipts) {
            let key: u8 = key;
            let found = self.index.receipt(self.owner, &key.to_string()).await.expect("the index is read");
            *receipt = found.map(|(_, answer)| answer[0]);
        }
        let garbage = self.index.garbage(99).await.expect("the index is read");
        let list = versions.into_iter().map(entry).collect();
        View { head: number(&row.head), list, receipts, garbage: self.set(&garbage), claimed }
    }

    /// Removes the session, so that it leaves nothing behind for the next one.
    async fn end(self) {
        self.index.delete(self.owner, &self.id).await.expect("the session is removed");
        self.index.forget_garbage(self.versions).await.expect("the garbage is forgotten");
    }
}
