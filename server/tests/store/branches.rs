//! Versions that a session adopts from other sessions, tags, ancestors, and filtered lists of sessions.

use tidegate_server::session::{
    ChainFrom, Filter, Fork, Listing, Metadata, NewSession, Owner, Patch, ResponseId, Session, SessionId, Start, Store,
    StoreError, StoreOptions, TagName, Version, VersionId, VersionRef,
};

use crate::kit::{
    ANN, BOB, BYTES, NOW, agree, copies, empty, ended, head, in_folder, in_memory, new, open, seen, snapshot, turn,
};

const NO_VERSION: StoreError = StoreError::NotFound { what: "version" };

fn name(text: &str) -> TagName {
    TagName::parse(text).expect("a name")
}

fn tag(text: &str) -> VersionRef {
    VersionRef::Tag(name(text))
}

fn ids(versions: &[Version]) -> Vec<VersionId> {
    versions.iter().map(|version| version.id.clone()).collect()
}

async fn turns(store: &Store, owner: Owner, id: &SessionId, numbers: impl IntoIterator<Item = u64>) -> Vec<VersionId> {
    let mut made = Vec::new();
    for number in numbers {
        made.push(turn(store, owner, id, number).await.expect("a turn").head.id);
    }
    made
}

#[tokio::test]
async fn a_session_adopts_its_best_fork() {
    let (store, objects) = seen(in_memory()).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let own = turns(&store, ANN, &id, 1..=2).await;
    let fork = store.fork(ANN, &id, copies(1), None).await.expect("a fork").remove(0);
    let forks = turns(&store, ANN, &fork.id, 11..=13).await;
    let after = turns(&store, ANN, &id, [3]).await;
    let disk = store.stats().disk_bytes;

    let adopted = store.rewind(ANN, &id, &forks[2], None, NOW).await.expect("adopted");
    assert_eq!((&adopted.head.id, adopted.head.tokens), (&forks[2], 14));
    let listed = store.versions(ANN, &id).await.expect("versions");
    let expected = [vec![listed[0].id.clone()], own, after, forks.clone()].concat();
    assert_eq!(ids(&listed), expected, "its own, and then the fork's that it did not have");
    assert!(listed.iter().all(|version| version.kept));
    assert_eq!((&listed[1].session, &listed[5].session), (&Some(id.clone()), &Some(fork.id.clone())));
    assert_eq!(store.stats().disk_bytes, disk, "nothing is stored twice");
    agree(&store, &*objects, &[ANN], &[]).await;

    store.delete(ANN, &fork.id).await.expect("removed");
    assert_eq!(head(&store, ANN, &id).await, snapshot(13));
    store.rewind(ANN, &id, &forks[0], None, NOW).await.expect("what came before it is there as well");
    turn(&store, ANN, &id, 20).await.expect("a turn");
    agree(&store, &*objects, &[ANN], &[]).await;
    store.delete(ANN, &id).await.expect("removed");
    agree(&store, &*objects, &[ANN], &[]).await;
    assert_eq!(store.stats().versions, 0);
}

#[tokio::test]
async fn only_kept_versions_of_the_same_owner_are_adopted() {
    let (store, objects) = seen(StoreOptions { keep_versions: 2, ..in_memory() }).await;
    let [ann, other] = [1, 2].map(|number| new(Start::Snapshot(snapshot(number))));
    let (ann, other) = (store.create(ANN, ann).await.expect("it"), store.create(ANN, other).await.expect("it"));
    let bob = store.create(BOB, new(Start::Snapshot(snapshot(3)))).await.expect("a session");
    let before = store.versions(ANN, &ann.id).await;
    for unknown in [&bob.head.id, &VersionId::new()] {
        assert_eq!(store.rewind(ANN, &ann.id, unknown, None, NOW).await, Err(NO_VERSION));
    }
    let old = turns(&store, ANN, &other.id, 4..=6).await;
    assert_eq!(store.rewind(ANN, &ann.id, &old[0], None, NOW).await, Err(NO_VERSION), "its snapshot is gone");
    assert_eq!(store.versions(ANN, &ann.id).await, before);

    // The session lists the adopted version with its whole chain, and releases the oldest snapshots beyond the limit.
    store.rewind(ANN, &ann.id, &old[2], None, NOW).await.expect("adopted");
    let listed = store.versions(ANN, &ann.id).await.expect("versions");
    let kept: Vec<_> = listed.iter().map(|version| (version.id.clone(), version.kept)).collect();
    let expected = [(&ann.head.id, false), (&other.head.id, false), (&old[0], false), (&old[1], true), (&old[2], true)];
    assert_eq!(kept, expected.map(|(id, kept)| (id.clone(), kept)));
    // A session can adopt a version that it lists but no longer keeps. It then keeps this version again.
    store.delete(ANN, &ann.id).await.expect("removed");
    let twin = store.fork(ANN, &other.id, copies(1), None).await.expect("a fork").remove(0);
    turns(&store, ANN, &other.id, 7..=9).await;
    store.rewind(ANN, &other.id, &twin.head.id, None, NOW).await.expect("adopted");
    let listed = store.versions(ANN, &other.id).await.expect("versions");
    assert_eq!(listed.iter().filter(|version| version.id == twin.head.id).count(), 1);
    assert!(listed.iter().filter(|version| version.kept).count() == 2 && listed.last().expect("it").kept);
    agree(&store, &*objects, &[ANN, BOB], &[]).await;
    // A session can also adopt a version that only a stored response keeps.
    let response = ResponseId::new();
    store.put_response(BOB, &response, ended(vec![1], snapshot(30)), None).await.expect("stored");
    let version = store.response(BOB, &response).await.expect("it").1;
    store.rewind(BOB, &bob.id, &version, None, NOW).await.expect("adopted");
    store.delete_response(BOB, &response).await.expect("removed");
    assert_eq!(head(&store, BOB, &bob.id).await, snapshot(30));
    agree(&store, &*objects, &[ANN, BOB], &[]).await;
}

#[tokio::test]
async fn a_tag_keeps_its_version_and_names_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = StoreOptions { keep_versions: 2, lineage: 3, ..in_folder(folder.path()) };
    let store = open(options.clone()).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let made = turns(&store, ANN, &id, 1..=2).await;
    let tagged = store.tag(ANN, &id, name("best"), Some(VersionRef::Id(made[0].clone()))).await.expect("tagged");
    assert_eq!(
        (&*tagged.name, &tagged.version.id, &*tagged.version.tags),
        ("best", &made[0], &["best".to_owned()][..])
    );
    store.tag(ANN, &id, name("also"), Some(tag("best"))).await.expect("a tag names a version");
    let later = turns(&store, ANN, &id, 3..=9).await;
    store.close().await.expect("closed");
    drop(store);

    let store = open(options).await;
    let session = store.get(ANN, &id).await.expect("the session");
    assert_eq!(
        session.tags,
        [("also", &made[0]), ("best", &made[0])].map(|(tag, id)| (tag.to_owned(), id.clone())).into()
    );
    let kept = |versions: Vec<Version>| ids(&versions.into_iter().filter(|version| version.kept).collect::<Vec<_>>());
    let versions = store.versions(ANN, &id).await.expect("versions");
    assert_eq!(versions.iter().find(|it| it.id == made[0]).expect("it").tags, ["also", "best"]);
    assert_eq!(kept(versions), [made[0].clone(), later[5].clone(), later[6].clone()], "the tagged one does not count");
    assert_eq!(store.resolve(ANN, &id, tag("best")).await, Ok(made[0].clone()));
    for (owner, wrong) in [(ANN, "worst"), (BOB, "best")] {
        let found = store.resolve(owner, &id, tag(wrong)).await;
        assert_eq!(found, Err(StoreError::NotFound { what: if owner == ANN { "tag" } else { "session" } }));
    }
    // A rewind to the tagged version releases nothing.
    store.rewind(ANN, &id, &made[0], None, NOW).await.expect("rewound");
    assert_eq!(kept(store.versions(ANN, &id).await.expect("versions")).len(), 3);
    let fork = store.fork(ANN, &id, copies(1), None).await.expect("a fork").remove(0);
    assert!(fork.tags.is_empty(), "a fork has no tags");
    store.delete(ANN, &fork.id).await.expect("removed");

    // Without tags, the version is released when it is the oldest, and is finally no longer listed.
    assert_eq!(
        store.tag(ANN, &id, name("x"), Some(VersionRef::Id(made[1].clone()))).await,
        Err(NO_VERSION),
        "not kept"
    );
    store.untag(ANN, &id, &name("also")).await.expect("removed");
    assert_eq!(store.untag(ANN, &id, &name("also")).await, Err(StoreError::NotFound { what: "tag" }));
    store.tag(ANN, &id, name("best"), Some(VersionRef::Id(later[6].clone()))).await.expect("moved");
    turns(&store, ANN, &id, 10..=12).await;
    assert!(!kept(store.versions(ANN, &id).await.expect("versions")).contains(&made[0]));
    let tags = store.tags(ANN, &id).await.expect("tags");
    assert_eq!(tags.iter().map(|tag| (&*tag.name, &tag.version.id)).collect::<Vec<_>>(), [("best", &later[6])]);
    for number in 0..99 {
        store.tag(ANN, &id, name(&format!("tag-{number}")), None).await.expect("tagged");
    }
    let refused = store.tag(ANN, &id, name("one-more"), None).await;
    assert_eq!(refused, Err(StoreError::TooManyTags { bound: 100 }));
    store.tag(ANN, &id, name("best"), None).await.expect("a tag that exists can be moved");
}

#[tokio::test]
async fn eviction_takes_tagged_versions_last() {
    let options = StoreOptions { disk_bytes: 5 * BYTES, ram_bytes: 0, ..in_memory() };
    let (store, objects) = seen(options).await;
    let [first, second] = [1, 2].map(|number| new(Start::Snapshot(snapshot(number))));
    let (first, second) = (store.create(ANN, first).await.expect("it"), store.create(ANN, second).await.expect("it"));
    store.tag(ANN, &first.id, name("start"), None).await.expect("tagged");
    turn(&store, ANN, &first.id, 3).await.expect("a turn");
    turn(&store, ANN, &second.id, 4).await.expect("a turn");
    let response = ResponseId::new();
    store.put_response(ANN, &response, ended(vec![1], snapshot(5)), None).await.expect("stored");

    let keeps = async |session: &Session| {
        let versions = store.versions(ANN, &session.id).await.expect("versions");
        versions.into_iter().filter(|version| version.kept).count()
    };
    // The old version of the second session goes first, although that session was used later.
    turn(&store, ANN, &first.id, 6).await.expect("a turn");
    assert_eq!((keeps(&first).await, keeps(&second).await), (3, 1));
    turn(&store, ANN, &first.id, 7).await.expect("a turn");
    assert_eq!(store.load(ANN, &first.id, Some(&first.head.id)).await.expect("it is kept").1, snapshot(1));
    // Next are the other untagged versions, then the stored response, then the tagged version.
    turn(&store, ANN, &first.id, 8).await.expect("a turn");
    turn(&store, ANN, &first.id, 9).await.expect("a turn");
    assert!(store.response(ANN, &response).await.is_ok());
    let third = store.create(ANN, new(Start::Snapshot(snapshot(10)))).await.expect("a session");
    assert!(store.response(ANN, &response).await.is_ok());
    let fourth = store.create(ANN, new(Start::Snapshot(snapshot(11)))).await.expect("a session");
    assert!(store.response(ANN, &response).await.is_err(), "before the tagged version");
    assert_eq!(store.load(ANN, &first.id, Some(&first.head.id)).await.expect("it is kept").1, snapshot(1));
    store.create(ANN, new(Start::Snapshot(snapshot(12)))).await.expect("a session");
    assert_eq!(store.load(ANN, &first.id, Some(&first.head.id)).await.map(drop), Err(NO_VERSION));
    let tags = store.tags(ANN, &first.id).await.expect("tags");
    assert_eq!((tags.len(), tags[0].version.kept), (1, false), "the tag still names it");
    agree(&store, &*objects, &[ANN], &[]).await;
    for session in [first, third, fourth] {
        store.delete(ANN, &session.id).await.expect("removed");
    }
    agree(&store, &*objects, &[ANN], &[]).await;
}

#[tokio::test]
async fn labels_can_be_changed_later() {
    let store = open(in_memory()).await;
    let id = store.create(ANN, NewSession { label: Some("first".to_owned()), ..empty() }).await.expect("a session").id;
    turn(&store, ANN, &id, 1).await.expect("a turn");
    let patch = |label: Option<&str>| Patch { label: Some(label.map(str::to_owned)), ..Patch::default() };
    let named = store.update(ANN, &id, patch(Some("second"))).await.expect("updated");
    assert_eq!(named.head.label.as_deref(), Some("second"));
    assert_eq!(store.update(ANN, &id, Patch::default()).await.expect("updated").head.label.as_deref(), Some("second"));
    let fork = store.fork(ANN, &id, copies(1), None).await.expect("a fork").remove(0).id;
    let first = store.versions(ANN, &id).await.expect("versions")[0].id.clone();
    let changed =
        store.label(ANN, &id, VersionRef::Id(first.clone()), Some("start".to_owned())).await.expect("changed");
    assert_eq!((changed.id, changed.label.as_deref()), (first, Some("start")));
    store.update(ANN, &id, patch(None)).await.expect("updated");
    for id in [&id, &fork] {
        let versions = store.versions(ANN, id).await.expect("versions");
        let labels: Vec<_> = versions.into_iter().map(|version| version.label).collect();
        assert_eq!(labels, [Some("start".to_owned()), None], "a label belongs to the version");
    }
    let other = store.create(ANN, empty()).await.expect("a session").head.id;
    assert_eq!(
        store.label(ANN, &id, VersionRef::Id(other), None).await,
        Err(NO_VERSION),
        "the session does not list it"
    );
}

#[tokio::test]
async fn a_chain_crosses_forks_and_two_chains_meet() {
    let store = open(StoreOptions { keep_versions: 2, ..in_memory() }).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let own = turns(&store, ANN, &id, 1..=3).await;
    let fork = store.fork(ANN, &id, copies(1), None).await.expect("a fork").remove(0).id;
    let forks = turns(&store, ANN, &fork, 11..=12).await;
    let from = Fork { from: Some(forks[0].clone()), ..copies(1) };
    let second = store.fork(ANN, &fork, from, None).await.expect("a fork").remove(0).id;
    let seconds = turns(&store, ANN, &second, 21..=22).await;
    turns(&store, ANN, &id, 4..=5).await;

    let all = |id: &VersionId| ChainFrom::Version(id.clone());
    let (chain, more) = store.chain(ANN, &second, all(&seconds[1]), 100).await.expect("a chain");
    let first = chain.last().expect("the first").id.clone();
    let line = [&seconds[1], &seconds[0], &forks[0], &own[2], &own[1], &own[0], &first].map(Clone::clone);
    assert_eq!((ids(&chain), more), (line.to_vec(), false));
    let makers: Vec<_> = chain.iter().map(|version| version.session.clone().expect("it is known")).collect();
    assert_eq!(makers, [&second, &second, &fork, &id, &id, &id, &id].map(Clone::clone));
    assert!(chain[0].kept && !chain[5].kept);
    let (page, more) = store.chain(ANN, &second, all(&seconds[1]), 3).await.expect("a chain");
    assert_eq!((ids(&page), more), (line[..3].to_vec(), true));
    let (page, more) = store.chain(ANN, &second, ChainFrom::After(line[2].clone()), 4).await.expect("a chain");
    assert_eq!((ids(&page), more), (line[3..].to_vec(), false));

    let head = store.get(ANN, &id).await.expect("the session").head.id;
    for (one, other, common) in [
        (&seconds[1], &forks[1], Some(&forks[0])),
        (&forks[1], &head, Some(&own[2])),
        (&head, &own[1], Some(&own[1])),
        (&head, &head, Some(&head)),
    ] {
        assert_eq!(store.common_ancestor(ANN, one.clone(), other.clone()).await, Ok(common.cloned()));
        assert_eq!(store.common_ancestor(ANN, other.clone(), one.clone()).await, Ok(common.cloned()));
    }
    let apart = store.create(ANN, empty()).await.expect("a session").head.id;
    assert_eq!(store.common_ancestor(ANN, head.clone(), apart).await, Ok(None));
    let bob = store.create(BOB, empty()).await.expect("a session");
    assert_eq!(store.common_ancestor(ANN, head.clone(), bob.head.id.clone()).await, Err(NO_VERSION));
    assert_eq!(store.chain(ANN, &id, all(&bob.head.id), 9).await, Err(NO_VERSION));
    assert_eq!(store.chain(BOB, &bob.id, all(&head), 9).await, Err(NO_VERSION));
    // A version outlives the session that made it as long as another session lists it.
    store.delete(ANN, &id).await.expect("removed");
    assert_eq!(ids(&store.chain(ANN, &second, all(&seconds[1]), 100).await.expect("a chain").0), line);
}

#[tokio::test]
async fn a_list_has_what_matches_and_reads_a_bounded_part() {
    let store = open(in_memory()).await;
    let pair = |key: &str, value: &str| -> Metadata { [(key.to_owned(), value.to_owned())].into() };
    let fox = NewSession { metadata: pair("tale", "fox"), label: Some("a".to_owned()), ..empty() };
    let fox = store.create(ANN, fox).await.expect("a session");
    let both = [pair("tale", "fox"), pair("who", "me")].into_iter().flatten().collect();
    let both = store.create(ANN, NewSession { metadata: both, ..empty() }).await.expect("a session");
    store.tag(ANN, &both.id, name("best"), None).await.expect("tagged");
    let forks = store.fork(ANN, &fox.id, Fork { metadata: Some(Metadata::new()), ..copies(1000) }, None).await;
    let forks = forks.expect("forks");
    let (time, changed) = (fox.created, both.updated);
    let find = async |filter: Filter, limit: usize, after: Option<SessionId>| {
        let page = store.list(ANN, Listing { after, limit, newest_first: false, filter }).await.expect("a page");
        let found: Vec<SessionId> = page.sessions.into_iter().map(|session| session.id).collect();
        (found, page.next)
    };
    let none = Filter::default;
    for (filter, expected) in [
        (Filter { metadata: pair("tale", "fox"), ..none() }, vec![&fox.id, &both.id]),
        (Filter { metadata: both.metadata.clone(), ..none() }, vec![&both.id]),
        (Filter { metadata: pair("tale", "crow"), ..none() }, vec![]),
        (Filter { tag: Some("best".to_owned()), ..none() }, vec![&both.id]),
        (Filter { label: Some("b".to_owned()), ..none() }, vec![]),
        (Filter { created: (Some(time + 1000), None), ..none() }, vec![]),
        (Filter { updated: (None, Some(changed.min(time))), ..none() }, vec![]),
        (Filter { forked_from: Some(both.id.to_string()), ..none() }, vec![]),
    ] {
        let (found, next) = find(filter.clone(), 20, None).await;
        assert_eq!(found.iter().collect::<Vec<_>>(), expected, "{filter:?}");
        // A request reads at most 1000 sessions, so it stops before the last two of 1002.
        assert_eq!(next.as_ref(), Some(&forks[997].id), "{filter:?}");
        assert_eq!(find(filter, 20, next).await, (Vec::new(), None));
    }
    let from = Filter { forked_from: Some(fox.id.to_string()), label: Some("a".to_owned()), ..none() };
    let (found, next) = find(from.clone(), 2, None).await;
    assert_eq!((&found[..], next), (&[forks[0].id.clone(), forks[1].id.clone()][..], Some(forks[1].id.clone())));
    let (found, next) = find(from, 5, Some(forks[995].id.clone())).await;
    assert_eq!((found.len(), next), (4, None));
    let recent = Filter { created: (Some(time - 1), Some(time + 1000)), updated: (Some(time - 1), None), ..none() };
    assert_eq!(find(recent, 3, None).await.0.len(), 3);
}
