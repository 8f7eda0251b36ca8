//! The texts of versions. Forks share them, they outlive snapshots, they count toward budgets, and they are removed
//! with their last reference.

use std::fs;

use tidegate_server::session::{
    AddedMessage, AddedText, Content, ResponseId, Role, SessionId, Start, Store, StoreError, StoreOptions, TurnNote,
};

use crate::kit::{
    ANN, BOB, BYTES, NOW, added, copies, empty, ended, extended, in_folder, in_memory, new, note, open, snapshot,
    speak, tokens, told, turn, until, words,
};

async fn conversation(store: &Store, turns: u64) -> (SessionId, Vec<u32>) {
    let id = store.create(ANN, new(told(0))).await.expect("a session").id;
    let mut text = extended(&[], 0);
    for number in 1..=turns {
        speak(store, ANN, &id, number).await.expect("a turn");
        text = extended(&text, number);
    }
    (id, text)
}

#[tokio::test]
async fn a_text_outlives_the_snapshots_and_the_list_of_versions() {
    let store = open(StoreOptions { keep_versions: 2, lineage: 3, ..in_memory() }).await;
    let (id, text) = conversation(&store, 20).await;
    assert_eq!(store.versions(ANN, &id).await.expect("versions").len(), 5);
    assert_eq!(tokens(&store, ANN, &id, None).await, text);
    let versions = store.versions(ANN, &id).await.expect("versions");
    assert!(!versions[0].kept);
    assert_eq!(tokens(&store, ANN, &id, Some(&versions[0].id)).await, [&text[..16], &[16, 16]].concat());
}

#[tokio::test]
async fn any_range_of_a_text_can_be_read_and_no_other() {
    let store = open(in_memory()).await;
    let (id, text) = conversation(&store, 9).await;
    let total = text.len() as u64;
    for start in 0..=total {
        for end in start..=total {
            let part = store.text(ANN, &id, None, (Some(start), Some(end))).await.expect("a part").1;
            assert_eq!((part.start, part.end, part.total), (start, end, total));
            assert_eq!(part.tokens, text[start as usize..end as usize]);
        }
    }
    let range = |parameter, least, found| Err(StoreError::Range { parameter, least, most: total, found });
    let read = async |start, end| store.text(ANN, &id, None, (start, end)).await.map(|(_, part)| part.tokens);
    assert_eq!(read(Some(total + 1), None).await, range("start", 0, total + 1));
    assert_eq!(read(None, Some(total + 1)).await, range("end", 0, total + 1));
    assert_eq!(read(Some(4), Some(3)).await, range("end", 4, 3));
    assert!(matches!(store.text(BOB, &id, None, (None, None)).await, Err(StoreError::NotFound { what: "session" })));
    let other = store.create(ANN, new(told(5))).await.expect("a session").head.id;
    let refused = store.text(ANN, &id, Some(&other), (None, None)).await;
    assert!(matches!(refused, Err(StoreError::NotFound { what: "version" })));
}

#[tokio::test]
async fn a_stop_string_that_reaches_back_several_turns_removes_their_tokens() {
    let store = open(in_memory()).await;
    let id = store.create(ANN, new(told(1))).await.expect("a session").id;
    let commit = async |kept, tokens: Vec<u32>| {
        let turn = store.begin(ANN, &id, None, NOW).await.expect("a turn");
        let text = Some(AddedText { kept, tokens, messages: Vec::new() });
        let note = TurnNote { text, ..note() };
        turn.commit(snapshot(2), note, None, tidegate_server::session::VersionId::new()).await.expect("committed");
    };
    commit(2, vec![7]).await;
    commit(3, vec![8]).await;
    commit(2, vec![9]).await;
    assert_eq!(tokens(&store, ANN, &id, None).await, [1, 1, 9]);
    // A new source replaces the whole text.
    commit(0, vec![10, 11]).await;
    assert_eq!(tokens(&store, ANN, &id, None).await, [10, 11]);
}

#[tokio::test]
async fn forks_share_their_text_and_the_last_one_takes_it_along() {
    let store = open(in_memory()).await;
    let (id, text) = conversation(&store, 10).await;
    let before = store.stats().text_bytes;
    let forks = store.fork(ANN, &id, copies(5), None).await.expect("forks");
    assert_eq!(store.stats().text_bytes, before);
    speak(&store, ANN, &forks[0].id, 77).await.expect("a turn");
    assert_eq!(tokens(&store, ANN, &forks[0].id, None).await, extended(&text, 77));
    store.delete(ANN, &id).await.expect("deleted");
    for fork in &forks[1..] {
        assert_eq!(tokens(&store, ANN, &fork.id, None).await, text);
        store.delete(ANN, &fork.id).await.expect("deleted");
    }
    assert_eq!(tokens(&store, ANN, &forks[0].id, None).await, extended(&text, 77));
    store.delete(ANN, &forks[0].id).await.expect("deleted");
    until("no texts", async || store.stats().text_bytes == 0).await;
}

#[tokio::test]
async fn a_long_conversation_is_removed_in_bounded_transactions() {
    let store = open(StoreOptions { keep_versions: 1, lineage: 1, ..in_memory() }).await;
    let (id, _) = conversation(&store, 1800).await;
    let before = store.stats().transactions;
    store.delete(ANN, &id).await.expect("deleted");
    // At least five transactions: the deletion, and four batches of up to 500 of the 1,801 texts. Their count grows
    // only after their changes are visible.
    let done = async || store.stats().text_bytes == 0 && store.stats().transactions >= before + 5;
    until("no texts after several transactions", done).await;
}

#[tokio::test]
async fn texts_survive_a_restart_and_a_lost_index() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(in_folder(folder.path())).await;
    let (id, text) = conversation(&store, 5).await;
    let bytes = store.stats().text_bytes;
    store.close().await.expect("closed");
    for lost in ["none", "index.redb", "index.journal"] {
        drop(fs::remove_file(folder.path().join(lost)));
        let store = open(in_folder(folder.path())).await;
        assert_eq!((tokens(&store, ANN, &id, None).await, store.stats().text_bytes), (text.clone(), bytes), "{lost}");
        store.close().await.expect("closed");
    }
}

#[tokio::test]
async fn a_server_that_keeps_no_text_says_so_and_later_turns_have_none_either() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = open(StoreOptions { keep_text: false, ..in_folder(folder.path()) }).await;
    let id = store.create(ANN, new(told(1))).await.expect("a session").id;
    assert_eq!(store.stats().text_bytes, 0);
    store.close().await.expect("closed");
    let store = open(in_folder(folder.path())).await;
    let later = turn(&store, ANN, &id, 2).await.expect("a turn").head.id;
    let begun = store.begin(ANN, &id, None, NOW).await.expect("a turn");
    let note = TurnNote { text: Some(added(3, 3)), ..note() };
    let last =
        begun.commit(snapshot(3), note, None, tidegate_server::session::VersionId::new()).await.expect("it").head.id;
    for version in [None, Some(&later), Some(&last)] {
        let refused = store.text(ANN, &id, version, (None, None)).await.expect_err("no text");
        assert!(matches!(refused, StoreError::TextNotKept { .. }), "{refused}");
    }
    assert_eq!(store.stats().text_bytes, 0);
    // A session that begins with an empty text has its complete text.
    let id = store.create(ANN, empty()).await.expect("a session").id;
    assert_eq!(tokens(&store, ANN, &id, None).await, [0_u32; 0]);
    speak(&store, ANN, &id, 4).await.expect("a turn");
    assert_eq!(tokens(&store, ANN, &id, None).await, [4, 4]);
}

#[tokio::test]
async fn a_damaged_text_costs_no_turn() {
    const TEXTS: redb::TableDefinition<'_, &str, &[u8]> = redb::TableDefinition::new("texts");
    // A row that cannot be parsed, a row of a text that is too short, and a row without a reference count.
    for damage in [Some(&[9_u8][..]), Some(&[1, 0, 0, 0, 0, 0]), None] {
        let folder = tempfile::tempdir().expect("a folder");
        let store = open(in_folder(folder.path())).await;
        let (id, text) = conversation(&store, 3).await;
        let head = store.get(ANN, &id).await.expect("the session").head.id;
        store.close().await.expect("closed");
        let index = redb::Database::open(folder.path().join("index.redb")).expect("the index");
        let transaction = index.begin_write().expect("a transaction");
        if let Some(row) = damage {
            transaction.open_table(TEXTS).expect("the texts").insert(head.as_str(), row).expect("overwritten");
        } else {
            let counts = redb::TableDefinition::<&str, (&[u8; 16], u64, u64)>::new("text_refs");
            transaction.open_table(counts).expect("the counts").remove(head.as_str()).expect("removed");
        }
        transaction.commit().expect("committed");
        drop(index);
        fs::remove_file(folder.path().join("index.journal")).expect("removed");

        let store = open(in_folder(folder.path())).await;
        let begun = store.begin(ANN, &id, None, NOW).await.expect("a turn");
        let note = TurnNote { text: Some(added(text.len() as u64, 9)), ..note() };
        let version = tidegate_server::session::VersionId::new();
        let later = begun.commit(snapshot(9), note, None, version).await.expect("committed").head.id;
        assert_ne!(later, head);
        let refused = store.text(ANN, &id, None, (None, None)).await.expect_err("no text");
        assert!(matches!(refused, StoreError::TextNotKept { .. }), "{refused}");
        turn(&store, ANN, &id, 10).await.expect("a turn");
        assert_eq!(store.failure(), None);
    }
}

#[tokio::test]
async fn without_an_end_as_much_is_read_as_one_request_may() {
    let store = open(in_memory()).await;
    let message = AddedMessage { role: Role::User, continues: false, content: Content::None, more: None };
    let long = AddedText { tokens: vec![1; 1_000_002], messages: vec![message; 10_002], kept: 0 };
    let id = store.create(ANN, new(Start::Read(snapshot(1), long))).await.expect("a session").id;
    for (start, end) in [(None, 1_000_000), (Some(1), 1_000_001), (Some(5), 1_000_002)] {
        let part = store.text(ANN, &id, None, (start, None)).await.expect("a part").1;
        assert_eq!((part.start, part.end, part.total), (start.unwrap_or(0), end, 1_000_002));
    }
    for (start, end) in [(None, 10_000), (Some(1), 10_001), (Some(5), 10_002)] {
        let part = store.messages(ANN, &id, None, (start, None), words()).await.expect("a part").1;
        assert_eq!((part.start, part.end, part.total), (start.unwrap_or(0), end, 10_002));
    }
    let refused = store.text(ANN, &id, None, (None, Some(1_000_001))).await.expect_err("too long");
    assert_eq!(refused, StoreError::Range { parameter: "end", least: 0, most: 1_000_000, found: 1_000_001 });
}

#[tokio::test]
async fn texts_count_towards_the_budgets_and_are_reserved_before_a_turn_runs() {
    for by_owner in [true, false] {
        let budget = 10 * BYTES;
        let options = if by_owner {
            StoreOptions { owner_bytes: budget, ..in_memory() }
        } else {
            StoreOptions { disk_bytes: budget, ..in_memory() }
        };
        let store = open(options).await;
        let id = store.create(ANN, new(told(1))).await.expect("a session").id;
        let used = BYTES + store.stats().text_bytes;
        let mut turn = store.begin(ANN, &id, None, NOW).await.expect("a turn");
        let refused = turn.reserve_text(budget - used, 2, 0).await.expect_err("too much text");
        assert_eq!(matches!(refused, StoreError::Quota { .. }), by_owner, "{refused}");
        turn.reserve_text(100, 2, 0).await.expect("space");
        // Reserved space is not available to others.
        let long = |tokens: u64| AddedText { tokens: vec![1; tokens as usize], ..AddedText::default() };
        let rest = budget - used - BYTES - 100;
        assert!(store.create(ANN, new(Start::Read(snapshot(2), long(rest - BYTES)))).await.is_err());
        drop(turn);
        store.create(ANN, new(Start::Read(snapshot(2), long(rest - BYTES - 300)))).await.expect("space");
        assert!(store.stats().text_bytes > rest - BYTES - 300);
    }
}

#[tokio::test]
async fn deleting_a_conversation_makes_space_at_once() {
    let store = open(StoreOptions { owner_bytes: 20 * BYTES, keep_versions: 1, lineage: 0, ..in_memory() }).await;
    let long = || AddedText { tokens: vec![1; 17 * BYTES as usize], ..AddedText::default() };
    for _ in 0..5 {
        let id = store.create(ANN, new(Start::Read(snapshot(2), long()))).await.expect("space").id;
        store.delete(ANN, &id).await.expect("deleted");
    }
}

#[tokio::test]
async fn stored_responses_share_their_texts_too() {
    let store = open(in_memory()).await;
    let (first, second) = (ResponseId::new(), ResponseId::new());
    let mut new_response = ended(vec![1], snapshot(1));
    new_response.text = Some(added(0, 1));
    store.put_response(ANN, &first, new_response.clone(), None).await.expect("stored");
    let parent = store.response(ANN, &first).await.expect("the response").1;
    (new_response.parent, new_response.text) = (Some(parent), Some(added(2, 2)));
    store.put_response(ANN, &second, new_response, None).await.expect("stored");
    store.delete_response(ANN, &first).await.expect("deleted");
    // A session that starts from the second response has the texts of both.
    let version = store.response(ANN, &second).await.expect("the response").1;
    let id = store.create(ANN, new(Start::Version(version))).await.expect("a session").id;
    store.delete_response(ANN, &second).await.expect("deleted");
    assert_eq!(tokens(&store, ANN, &id, None).await, [1, 2, 2]);
    store.delete(ANN, &id).await.expect("deleted");
    until("no texts", async || store.stats().text_bytes == 0).await;
}
