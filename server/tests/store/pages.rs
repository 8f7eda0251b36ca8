//! Texts and chains of versions that are too long for one page of the index.

use tidegate_server::session::{AddedText, Owner, SessionId, Store, StoreOptions, TurnNote, VersionId};

use crate::kit::{ANN, SOON, copies, empty, in_memory, note, open, snapshot, turn};

/// Number of tokens that each turn adds, at two bytes each. One turn fits in the first page of a text, and a few turns
/// do not.
const ADDED: u64 = 20_000;

/// Runs a turn that keeps `kept` tokens of the text and adds [`ADDED`] of its own.
async fn long_turn(store: &Store, owner: Owner, id: &SessionId, kept: u64, number: u64) -> VersionId {
    let tokens = (0..ADDED).map(|at| 128 + ((at * 7 + number) % 16_000) as u32).collect();
    let text = Some(AddedText { kept, tokens, messages: Vec::new() });
    let turn = store.begin(owner, id, None, SOON).await.expect("the session");
    let done = turn.commit(snapshot(number), TurnNote { text, ..note() }, None, VersionId::new()).await;
    done.expect("the turn ends").head.id
}

#[tokio::test]
async fn a_text_of_several_pages_is_read_whole_and_in_parts() {
    let store = open(in_memory()).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let (mut expected, mut versions) = (Vec::new(), Vec::new());
    for number in 0..12 {
        // Most turns remove the end of the turn before.
        let kept = (expected.len() as u64).saturating_sub(1000 * (number % 3));
        versions.push(long_turn(&store, ANN, &id, kept, number).await);
        expected.truncate(kept as usize);
        expected.extend((0..ADDED).map(|at| 128 + ((at * 7 + number) % 16_000) as u32));
    }
    let total = expected.len() as u64;
    for (start, end) in
        [(0, total), (0, 1), (ADDED - 1, ADDED + 1), (total / 2, total / 2 + 3 * ADDED), (total - 1, total)]
    {
        let (_, part) = store.text(ANN, &id, None, (Some(start), Some(end))).await.expect("the text");
        assert_eq!((part.total, &part.tokens[..]), (total, &expected[start as usize..end as usize]), "{start}..{end}");
    }
    // These two texts share all but the last turn.
    let fork = store.fork(ANN, &id, copies(1), None).await.expect("a fork").remove(0).id;
    let one = long_turn(&store, ANN, &id, total, 100).await;
    let other = long_turn(&store, ANN, &fork, total, 200).await;
    let parted = store.parted_texts(ANN, &id, [one, other]).await.expect("the texts");
    assert!(parted.start <= total && total - parted.start < 100, "{} of {total}", parted.start);
    let first = [100, 200].map(|number| 128 + (number % 16_000) as u32);
    assert_eq!([0, 1].map(|at| parted.ends[at][(total - parted.start) as usize]), first);
}

#[tokio::test]
async fn the_common_ancestor_is_found_on_any_page_of_a_chain() {
    let store = open(StoreOptions { keep_versions: 1000, ..in_memory() }).await;
    let id = store.create(ANN, empty()).await.expect("a session").id;
    let mut heads = vec![store.get(ANN, &id).await.expect("the session").head.id];
    for number in 0..402 {
        heads.push(turn(&store, ANN, &id, number).await.expect("a turn").head.id);
    }
    let newest = heads.last().expect("a head").clone();
    for back in [0, 1, 199, 200, 201, 399, 400, 401, 402] {
        let from = heads[heads.len() - 1 - back].clone();
        let fork = store.fork(ANN, &id, tidegate_server::session::Fork { from: Some(from.clone()), ..copies(1) }, None);
        let fork = fork.await.expect("a fork").remove(0).id;
        let tip = turn(&store, ANN, &fork, 1000).await.expect("a turn").head.id;
        let found = store.common_ancestor(ANN, newest.clone(), tip).await;
        assert_eq!(found, Ok(Some(from)), "{back} versions back");
    }
    let other = store.create(ANN, empty()).await.expect("a session").head.id;
    assert_eq!(store.common_ancestor(ANN, newest, other).await, Ok(None));
}
