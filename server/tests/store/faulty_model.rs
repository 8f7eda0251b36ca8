//! A simple model of a store on a failing disk: random operations, and what the store must hold after them.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tidegate_server::session::{Metadata, ResponseId, SessionId, VersionId};

pub(crate) const KEEP: usize = 3;

/// A random operation. Its numbers select among what exists.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Create,
    Turn(usize),
    Fork(usize, usize),
    Rewind(usize, usize),
    Adopt(usize, usize, usize),
    Tag(usize, usize),
    Update(usize),
    Expire(usize),
    Delete(usize),
    Receipt,
    Respond,
    Unrespond(usize),
    /// The process is killed, and a new one starts.
    Kill,
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let some = 0..1000usize;
    prop_oneof![
        2 => Just(Step::Create),
        8 => some.clone().prop_map(Step::Turn),
        2 => (some.clone(), 1..4usize).prop_map(|(session, n)| Step::Fork(session, n)),
        3 => (some.clone(), some.clone()).prop_map(|(session, version)| Step::Rewind(session, version)),
        2 => (some.clone(), some.clone(), some.clone())
            .prop_map(|(session, other, version)| Step::Adopt(session, other, version)),
        2 => (some.clone(), some.clone()).prop_map(|(session, version)| Step::Tag(session, version)),
        2 => some.clone().prop_map(Step::Update),
        1 => some.clone().prop_map(Step::Expire),
        1 => some.clone().prop_map(Step::Delete),
        1 => Just(Step::Receipt),
        1 => Just(Step::Respond),
        1 => some.prop_map(Step::Unrespond),
        1 => Just(Step::Kill),
    ]
}

/// Versions, each with its number and with whether its snapshot is kept.
pub(crate) type Versions = Vec<(VersionId, u64, bool)>;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Line {
    pub(crate) versions: Versions,
    pub(crate) head: VersionId,
    pub(crate) metadata: Metadata,
    pub(crate) tagged: Option<VersionId>,
}

impl Line {
    /// Releases the oldest snapshots beyond [`KEEP`]. The head's snapshot counts and stays, a tagged one stays and does
    /// not count, and that of the head's parent goes last.
    fn released(mut self, parents: &BTreeMap<VersionId, VersionId>) -> Self {
        let (head, tagged, before) = (&self.head, self.tagged.as_ref(), parents.get(&self.head));
        let releasable = |found: &&mut (VersionId, u64, bool)| found.2 && found.0 != *head && Some(&found.0) != tagged;
        let mut oldest: Vec<_> = self.versions.iter_mut().filter(releasable).collect();
        oldest.sort_by_key(|found| Some(&found.0) == before);
        let most = (oldest.len() + 1).saturating_sub(KEEP);
        for found in oldest.into_iter().take(most) {
            found.2 = false;
        }
        self
    }
}

/// What the store must hold for one owner.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Model {
    pub(crate) sessions: BTreeMap<SessionId, Line>,
    pub(crate) receipts: BTreeMap<String, Vec<u8>>,
    pub(crate) responses: BTreeMap<ResponseId, u64>,
}

/// An operation with everything that it chose at random.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Create { number: u64, key: String },
    Turn { session: SessionId, version: VersionId, parent: VersionId, number: u64, key: String },
    Fork { session: SessionId, n: usize },
    Rewind { session: SessionId, to: VersionId },
    Tag { session: SessionId, to: VersionId },
    Update { session: SessionId, metadata: Metadata },
    Expire { session: SessionId },
    Delete { session: SessionId },
    Receipt { key: String },
    Respond { response: ResponseId, number: u64 },
    Unrespond { response: ResponseId },
}

impl Model {
    pub(crate) fn session(&self, choice: usize) -> Option<(&SessionId, &Line)> {
        self.sessions.iter().nth(choice.checked_rem(self.sessions.len())?)
    }

    /// Returns a version that a session keeps.
    pub(crate) fn kept(&self, choice: usize, version: usize) -> Option<VersionId> {
        let kept: Vec<_> = self.session(choice)?.1.versions.iter().filter(|version| version.2).collect();
        Some(kept[version % kept.len()].0.clone())
    }

    /// Returns a session whose head has moved to a version of any session.
    fn moved(&self, mut line: Line, to: &VersionId, parents: &BTreeMap<VersionId, VersionId>) -> Line {
        line.head = to.clone();
        let listed = |line: &Line, id: &VersionId| line.versions.iter().find(|found| found.0 == *id).cloned();
        let everywhere =
            |id: &VersionId| -> Versions { self.sessions.values().filter_map(|line| listed(line, id)).collect() };
        let before = listed(&line, to);
        if before.as_ref().is_some_and(|found| found.2) {
            return line;
        }
        line.versions.retain(|found| found.0 != *to);
        let (mut ancestors, mut next) = (Versions::new(), parents.get(to).filter(|_| before.is_none()));
        while let Some(id) = next.filter(|id| listed(&line, id).is_none())
            && let Some((_, number, _)) = everywhere(id).first()
        {
            let kept = ancestors.len() + 1 < KEEP && everywhere(id).iter().any(|found| found.2);
            ancestors.insert(0, (id.clone(), *number, kept));
            next = parents.get(id);
        }
        line.versions.append(&mut ancestors);
        line.versions.push((to.clone(), everywhere(to)[0].1, true));
        line.released(parents)
    }

    pub(crate) fn plan(&self, step: &Step, number: u64) -> Option<Action> {
        let (key, of) = (format!("key {number}"), |choice: &usize| self.session(*choice).map(|found| found.0.clone()));
        Some(match step {
            Step::Create => Action::Create { number, key },
            Step::Turn(choice) => {
                let (session, line) = self.session(*choice)?;
                let (session, parent) = (session.clone(), line.head.clone());
                Action::Turn { session, version: VersionId::new(), parent, number, key }
            }
            Step::Fork(choice, n) => Action::Fork { session: of(choice)?, n: *n },
            Step::Rewind(choice, version) => Action::Rewind { session: of(choice)?, to: self.kept(*choice, *version)? },
            Step::Adopt(choice, other, version) => {
                Action::Rewind { session: of(choice)?, to: self.kept(*other, *version)? }
            }
            Step::Tag(choice, version) => Action::Tag { session: of(choice)?, to: self.kept(*choice, *version)? },
            Step::Update(choice) => {
                let metadata = [("number".to_owned(), number.to_string())].into();
                Action::Update { session: of(choice)?, metadata }
            }
            Step::Expire(choice) => Action::Expire { session: of(choice)? },
            Step::Delete(choice) => Action::Delete { session: of(choice)? },
            Step::Receipt => Action::Receipt { key },
            Step::Respond => Action::Respond { response: ResponseId::new(), number },
            Step::Unrespond(choice) => {
                let at = choice.checked_rem(self.responses.len())?;
                Action::Unrespond { response: self.responses.keys().nth(at)?.clone() }
            }
            Step::Kill => return None,
        })
    }

    /// Returns the model after an action that created these sessions, each with its head.
    pub(crate) fn after(
        &self,
        action: &Action,
        made: &[(SessionId, VersionId)],
        parents: &BTreeMap<VersionId, VersionId>,
    ) -> Self {
        let mut next = self.clone();
        let line = |next: &mut Self, id: &SessionId| next.sessions.remove(id).expect("it was chosen");
        match action.clone() {
            Action::Create { number, key } => {
                for (id, head) in made {
                    let versions = vec![(head.clone(), number, true)];
                    let line = Line { versions, head: head.clone(), metadata: Metadata::new(), tagged: None };
                    next.sessions.insert(id.clone(), line);
                    next.receipts.insert(key.clone(), id.to_string().into_bytes());
                }
            }
            Action::Turn { session, version, number, key, .. } => {
                let mut line = line(&mut next, &session);
                line.versions.push((version.clone(), number, true));
                line.head = version;
                next.sessions.insert(session, line.released(parents));
                next.receipts.insert(key, number.to_string().into_bytes());
            }
            Action::Fork { session, .. } => {
                let from = &self.sessions[&session];
                let (mut versions, mut at) = (Versions::new(), Some(&from.head));
                while let Some(found) = at.and_then(|id| from.versions.iter().find(|version| version.0 == *id)) {
                    versions.insert(0, found.clone());
                    at = parents.get(&found.0);
                }
                for (id, _) in made {
                    next.sessions.insert(id.clone(), Line { versions: versions.clone(), tagged: None, ..from.clone() });
                }
            }
            Action::Rewind { session, to } => {
                let line = self.moved(line(&mut next, &session), &to, parents);
                next.sessions.insert(session, line);
            }
            Action::Tag { session, to } => {
                let line = Line { tagged: Some(to), ..line(&mut next, &session) };
                next.sessions.insert(session, line);
            }
            Action::Update { session, metadata } => {
                let line = Line { metadata, ..line(&mut next, &session) };
                next.sessions.insert(session, line);
            }
            Action::Expire { session } | Action::Delete { session } => drop(line(&mut next, &session)),
            Action::Receipt { key } => drop(next.receipts.insert(key, vec![1])),
            Action::Respond { response, number } => drop(next.responses.insert(response, number)),
            Action::Unrespond { response } => drop(next.responses.remove(&response)),
        }
        next
    }
}

impl Model {
    /// Returns the sessions that only `seen` has, each with its head.
    pub(crate) fn new_in(&self, seen: &Self) -> Vec<(SessionId, VersionId)> {
        let new = seen.sessions.iter().filter(|(id, _)| !self.sessions.contains_key(id));
        new.map(|(id, line)| (id.clone(), line.head.clone())).collect()
    }

    /// Returns the model after the evictions that `seen` shows. A full disk costs old versions and responses, but never
    /// a head.
    pub(crate) fn evicted(mut self, seen: &Self) -> Self {
        for (id, line) in &mut self.sessions {
            for version in line.versions.iter_mut().filter(|version| version.0 != line.head) {
                let found = seen.sessions.get(id).and_then(|line| line.versions.iter().find(|it| it.0 == version.0));
                version.2 &= found.is_none_or(|found| found.2);
            }
        }
        self.responses.retain(|id, _| seen.responses.contains_key(id));
        self
    }
}
