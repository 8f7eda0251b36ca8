//! Random sequences of operations, compared with a simple model in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use tidegate_server::session::{
    Fork, Location, Metadata, Owner, ResponseId, SessionId, Snapshot, Start, Store, StoreError, StoreOptions, TagName,
    VersionId, VersionRef,
};

use crate::kit::{
    ANN, BOB, NOW, Plain, agree, copies, empty, ended, extended, in_memory, new, seen, snapshot, speak, tokens, told,
    turn, until,
};

/// A random operation. Its numbers select among what exists.
#[derive(Clone, Debug)]
enum Step {
    Create(bool),
    Upload,
    FromVersion(usize, usize),
    Turn(usize),
    Abandon(usize),
    Fork(usize, Option<usize>, usize),
    Rewind(usize, usize),
    Adopt(usize, usize, usize),
    Tag(usize, usize, u8),
    Untag(usize),
    Delete(usize),
    Respond,
    Unrespond(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let some = 0..1000usize;
    prop_oneof![
        2 => any::<bool>().prop_map(Step::Create),
        2 => Just(Step::Upload),
        1 => (some.clone(), some.clone()).prop_map(|(session, version)| Step::FromVersion(session, version)),
        8 => some.clone().prop_map(Step::Turn),
        1 => some.clone().prop_map(Step::Abandon),
        3 => (some.clone(), proptest::option::of(some.clone()), 1..4usize)
            .prop_map(|(session, version, n)| Step::Fork(session, version, n)),
        3 => (some.clone(), some.clone()).prop_map(|(session, version)| Step::Rewind(session, version)),
        3 => (some.clone(), some.clone(), some.clone())
            .prop_map(|(session, other, version)| Step::Adopt(session, other, version)),
        3 => (some.clone(), some.clone(), 0..3u8).prop_map(|(session, version, tag)| Step::Tag(session, version, tag)),
        1 => some.clone().prop_map(Step::Untag),
        2 => some.clone().prop_map(Step::Delete),
        1 => Just(Step::Respond),
        1 => some.prop_map(Step::Unrespond),
    ]
}

/// A session. `versions` are in order, each with whether its snapshot is kept.
#[derive(Clone, Debug)]
struct Kept {
    owner: Owner,
    versions: Vec<(VersionId, bool)>,
    head: VersionId,
    tags: BTreeMap<String, VersionId>,
}

impl Kept {
    /// Releases the oldest versions beyond `keep`, and the head's parent last.
    fn drop_beyond(&mut self, before: Option<&VersionId>, keep: usize) {
        let (head, tags) = (&self.head, &self.tags);
        let releasable = |(id, kept): &&mut (VersionId, bool)| *kept && id != head && !tags.values().any(|it| it == id);
        let mut found: Vec<_> = self.versions.iter_mut().filter(releasable).collect();
        found.sort_by_key(|(id, _)| before == Some(id));
        let most = (found.len() + 1).saturating_sub(keep);
        found.into_iter().take(most).for_each(|oldest| oldest.1 = false);
    }
}

#[derive(Default)]
struct World {
    sessions: BTreeMap<SessionId, Kept>,
    contents: BTreeMap<VersionId, Arc<Snapshot>>,
    /// The text of each version; `None` if it is not kept.
    texts: BTreeMap<VersionId, Option<Vec<u32>>>,
    parents: BTreeMap<VersionId, VersionId>,
    responses: Vec<(ResponseId, VersionId)>,
    next: u64,
}

impl World {
    fn session(&self, choice: usize) -> Option<(SessionId, Kept)> {
        let at = choice.checked_rem(self.sessions.len())?;
        self.sessions.iter().nth(at).map(|(id, kept)| (id.clone(), kept.clone()))
    }

    fn version(kept: &Kept, choice: usize) -> VersionId {
        let there: Vec<&VersionId> = kept.versions.iter().filter(|(_, kept)| *kept).map(|(id, _)| id).collect();
        there[choice % there.len()].clone()
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    async fn step(&mut self, store: &Store, step: Step, keep: usize) {
        match step {
            Step::Create(anns) => {
                let owner = if anns { ANN } else { BOB };
                let made = store.create(owner, empty()).await.expect("a session");
                self.contents.insert(made.head.id.clone(), Arc::new(Snapshot::empty(1)));
                self.texts.insert(made.head.id.clone(), Some(Vec::new()));
                self.add(owner, made.id, made.head.id);
            }
            Step::Upload => {
                let number = self.number();
                let has_text = !number.is_multiple_of(3);
                let start = if has_text { told(number) } else { Start::Snapshot(snapshot(number)) };
                let made = store.create(ANN, new(start)).await.expect("a session");
                self.texts.insert(made.head.id.clone(), has_text.then(|| extended(&[], number)));
                self.contents.insert(made.head.id.clone(), snapshot(number));
                self.add(ANN, made.id, made.head.id);
            }
            Step::FromVersion(session, version) => {
                let Some((_, kept)) = self.session(session) else { return };
                let version = Self::version(&kept, version);
                let made = store.create(kept.owner, new(Start::Version(version.clone()))).await.expect("a session");
                self.add(kept.owner, made.id, version);
            }
            Step::Turn(session) => {
                let Some((id, mut kept)) = self.session(session) else { return };
                let number = self.number();
                let text = self.texts[&kept.head].as_ref().map(|text| extended(text, number));
                let made = match &text {
                    Some(_) => speak(store, kept.owner, &id, number).await,
                    None => turn(store, kept.owner, &id, number).await,
                };
                let made = made.expect("a turn");
                self.texts.insert(made.head.id.clone(), text);
                self.contents.insert(made.head.id.clone(), snapshot(number));
                self.parents.insert(made.head.id.clone(), kept.head.clone());
                kept.versions.push((made.head.id.clone(), true));
                let before = std::mem::replace(&mut kept.head, made.head.id);
                kept.drop_beyond(Some(&before), keep);
                self.sessions.insert(id, kept);
            }
            Step::Abandon(session) => {
                let Some((id, kept)) = self.session(session) else { return };
                drop(store.begin(kept.owner, &id, Some(kept.head), NOW).await.expect("a turn"));
            }
            Step::Fork(session, version, n) => {
                let Some((id, kept)) = self.session(session) else { return };
                let from = version.map(|choice| Self::version(&kept, choice));
                let forks = store
                    .fork(
                        kept.owner,
                        &id,
                        Fork { from: from.clone(), metadata: Some(Metadata::new()), ..copies(n) },
                        None,
                    )
                    .await;
                let head = from.unwrap_or_else(|| kept.head.clone());
                let mut line = Vec::new();
                let mut next = Some(&head);
                while let Some(found) = next.and_then(|id| kept.versions.iter().find(|(known, _)| known == id)) {
                    line.insert(0, found.clone());
                    next = self.parents.get(&found.0);
                }
                for fork in forks.expect("forks") {
                    let fresh =
                        Kept { owner: kept.owner, versions: line.clone(), head: head.clone(), tags: BTreeMap::new() };
                    self.sessions.insert(fork.id, fresh);
                }
            }
            Step::Rewind(session, version) => {
                let Some((id, mut kept)) = self.session(session) else { return };
                kept.head = Self::version(&kept, version);
                store.rewind(kept.owner, &id, &kept.head, None, NOW).await.expect("a rewind");
                self.sessions.insert(id, kept);
            }
            Step::Adopt(..) | Step::Tag(..) | Step::Untag(_) => self.branch(store, step, keep).await,
            Step::Delete(session) => {
                let Some((id, kept)) = self.session(session) else { return };
                store.delete(kept.owner, &id).await.expect("removed");
                self.sessions.remove(&id);
            }
            Step::Respond => {
                let (id, number) = (ResponseId::new(), self.number());
                store.put_response(ANN, &id, ended(vec![1], snapshot(number)), None).await.expect("a response");
                let version = store.response(ANN, &id).await.expect("the response").1;
                self.contents.insert(version.clone(), snapshot(number));
                self.responses.push((id, version));
            }
            Step::Unrespond(choice) => {
                let Some(at) = choice.checked_rem(self.responses.len()) else { return };
                let (id, _) = self.responses.remove(at);
                store.delete_response(ANN, &id).await.expect("removed");
            }
        }
    }

    /// Performs a step that moves a head to another version, or changes a tag.
    async fn branch(&mut self, store: &Store, step: Step, keep: usize) {
        match step {
            Step::Adopt(session, other, version) => {
                let (Some((id, mut kept)), Some((_, other))) = (self.session(session), self.session(other)) else {
                    return;
                };
                let to = Self::version(&other, version);
                let adopted = store.rewind(kept.owner, &id, &to, None, NOW).await;
                if other.owner != kept.owner {
                    assert_eq!(adopted, Err(StoreError::NotFound { what: "version" }));
                    return;
                }
                adopted.expect("adopted");
                self.adopt(&mut kept, to, keep);
                self.sessions.insert(id, kept);
            }
            Step::Tag(session, version, tag) => {
                let Some((id, mut kept)) = self.session(session) else { return };
                let (to, name) = (Self::version(&kept, version), format!("tag-{tag}"));
                let tag = TagName::parse(&name).expect("a name");
                let tagged = store.tag(kept.owner, &id, tag, Some(VersionRef::Id(to.clone()))).await.expect("tagged");
                assert_eq!(tagged.version.id, to);
                kept.tags.insert(name, to);
                self.sessions.insert(id, kept);
            }
            Step::Untag(session) => {
                let Some((id, mut kept)) = self.session(session) else { return };
                let Some((name, _)) = kept.tags.pop_first() else { return };
                let tag = TagName::parse(&name).expect("a name");
                store.untag(kept.owner, &id, &tag).await.expect("removed");
                assert_eq!(store.untag(kept.owner, &id, &tag).await, Err(StoreError::NotFound { what: "tag" }));
                self.sessions.insert(id, kept);
            }
            _ => unreachable!("it is another step"),
        }
    }

    fn add(&mut self, owner: Owner, id: SessionId, head: VersionId) {
        self.sessions.insert(id, Kept { owner, versions: vec![(head.clone(), true)], head, tags: BTreeMap::new() });
    }

    /// Makes a version the head, and lists the version and its ancestors.
    fn adopt(&self, kept: &mut Kept, to: VersionId, keep: usize) {
        kept.head = to.clone();
        let listed = |kept: &Kept, id: &VersionId| kept.versions.iter().find(|(known, _)| known == id).map(|it| it.1);
        let before = listed(kept, &to);
        if before == Some(true) {
            return;
        }
        kept.versions.retain(|(id, _)| *id != to);
        let mut ancestors = Vec::new();
        let mut next = self.parents.get(&to).filter(|_| before.is_none());
        while let Some(id) = next.filter(|id| listed(kept, id).is_none()) {
            let lists: Vec<bool> = self.sessions.values().filter_map(|other| listed(other, id)).collect();
            let responds = self.responses.iter().any(|(_, version)| version == id);
            if lists.is_empty() && !responds {
                break;
            }
            let stays = ancestors.len() + 1 < keep && (responds || lists.contains(&true));
            ancestors.insert(0, (id.clone(), stays));
            next = self.parents.get(id);
        }
        kept.versions.append(&mut ancestors);
        let before = self.parents.get(&to);
        kept.versions.push((to, true));
        kept.drop_beyond(before, keep);
    }

    async fn check(&self, store: &Store) {
        assert_eq!(store.stats().sessions, self.sessions.len() as u64);
        for (id, kept) in &self.sessions {
            let session = store.get(kept.owner, id).await.expect("a session");
            assert_eq!((&session.head.id, &session.tags), (&kept.head, &kept.tags));
            let versions = store.versions(kept.owner, id).await.expect("versions");
            let found: Vec<(VersionId, bool)> = versions.into_iter().map(|known| (known.id, known.kept)).collect();
            assert_eq!(found, kept.versions);
            for (version, _) in &kept.versions {
                match &self.texts[version] {
                    Some(text) => assert_eq!(&tokens(store, kept.owner, id, Some(version)).await, text),
                    None => drop(store.text(kept.owner, id, Some(version), (None, None)).await.expect_err("no text")),
                }
            }
            for (version, _) in kept.versions.iter().filter(|(_, kept)| *kept) {
                let (_, found, _) = store.load(kept.owner, id, Some(version)).await.expect("a kept version");
                assert_eq!(&found, &self.contents[version]);
            }
        }
        for (id, version) in &self.responses {
            assert_eq!(store.response_snapshot(ANN, id).await.expect("a snapshot").0, self.contents[version]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn the_store_behaves_like_the_model(steps in proptest::collection::vec(step(), 1..60), keep in 1..5usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let (store, objects) = seen(StoreOptions { keep_versions: keep, ram_bytes: 2000, ..in_memory() }).await;
            let mut world = World::default();
            for step in steps {
                world.step(&store, step, keep).await;
            }
            world.check(&store).await;
            let responses: Vec<VersionId> = world.responses.iter().map(|(_, version)| version.clone()).collect();
            agree(&store, &*objects, &[ANN, BOB], &responses).await;
            for (id, kept) in &world.sessions {
                store.delete(kept.owner, id).await.expect("removed");
            }
            until("no texts", async || store.stats().text_bytes == 0).await;
        });
    }
}

proptest! {
    // There are fewer cases, because each turn waits for the disk.
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn a_reopened_folder_behaves_like_the_model(steps in proptest::collection::vec(step(), 1..40), every in 1..12usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let folder = tempfile::tempdir().expect("a folder");
            let options = StoreOptions { keep_versions: 3, ..StoreOptions::new(Location::Folder(folder.path().to_owned())) };
            let open = async || Store::open(options.clone(), Arc::new(Plain)).await.expect("the store opens");
            let mut store = open().await;
            let mut world = World::default();
            for (at, step) in steps.into_iter().enumerate() {
                world.step(&store, step, 3).await;
                if at % every == 0 {
                    drop(store);
                    store = open().await;
                }
            }
            world.check(&store).await;
            let responses: Vec<VersionId> = world.responses.iter().map(|(_, version)| version.clone()).collect();
            let objects = object_store::local::LocalFileSystem::new_with_prefix(folder.path().join("objects")).expect("objects");
            agree(&store, &objects, &[ANN, BOB], &responses).await;
        });
    }
}
