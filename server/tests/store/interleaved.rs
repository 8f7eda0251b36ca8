//! Requests that read the index several times, with a change between any two of these steps.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use tidegate_server::session::{
    Conversation, Filter, Listing, Metadata, NewSession, SessionId, Snapshot, SnapshotCodec, Store, StoreError,
};

use crate::kit::{ANN, NOW, Plain, empty, in_memory, new, open, speak, told, words};

/// Polls `work` `steps` times, then runs `other`, then the rest of `work`. Also returns whether `work` had already
/// ended before `other`.
async fn after_steps<W: Future>(work: W, steps: usize, other: impl Future) -> (W::Output, bool) {
    let (mut work, mut taken) = (pin!(work), 0);
    let ended = poll_fn(|context| {
        if taken == steps {
            return Poll::Ready(None);
        }
        taken += 1;
        work.as_mut().poll(context).map(Some)
    });
    if let Some(output) = ended.await {
        return (output, true);
    }
    other.await;
    (work.await, false)
}

/// A codec whose exports state how much the conversation has.
struct Telling;

impl SnapshotCodec for Telling {
    fn encode(&self, snapshot: &Snapshot) -> Vec<u8> {
        Plain.encode(snapshot)
    }

    fn decode(&self, bytes: &[u8]) -> Result<Snapshot, String> {
        Plain.decode(bytes)
    }

    fn export(&self, _: Bytes, conversation: &Conversation) -> Result<Bytes, String> {
        let tokens = conversation.text.as_ref().map(|text| text.tokens.len());
        Ok(format!("{tokens:?} tokens, {} ancestors", conversation.lineage.len()).into())
    }

    fn max_bytes(&self) -> usize {
        Plain.max_bytes()
    }
}

#[tokio::test]
async fn an_export_is_whole_or_refused_if_its_session_is_removed_meanwhile() {
    let store = Store::open(in_memory(), Arc::new(Telling)).await.expect("a store");
    for steps in 0.. {
        let id = store.create(ANN, new(told(1))).await.expect("a session").id;
        for number in 2..5 {
            speak(&store, ANN, &id, number).await.expect("a turn");
        }
        let export = store.bytes(ANN, &id, None, words());
        let (exported, ended) =
            after_steps(export, steps, async { store.delete(ANN, &id).await.expect("deleted") }).await;
        match exported {
            Ok((_, bytes)) => assert_eq!(bytes, "Some(5) tokens, 3 ancestors", "after {steps} steps"),
            Err(error) => assert!(matches!(error, StoreError::NotFound { .. }), "after {steps} steps: {error}"),
        }
        if ended {
            break;
        }
    }
}

#[tokio::test]
async fn a_session_that_is_replaced_meanwhile_is_listed_once() {
    let wanted =
        |name: &str| NewSession { metadata: Metadata::from([("kind".to_owned(), name.to_owned())]), ..empty() };
    let filter = Filter { metadata: Metadata::from([("kind".to_owned(), "wanted".to_owned())]), ..Filter::default() };
    for steps in 0.. {
        let store = open(in_memory()).await;
        let id = SessionId::named(ANN, "test", "replaced");
        store.create_as(ANN, &id, wanted("wanted"), NOW).await.expect("a session");
        // The filter refuses more than one page of sessions.
        for _ in 0..9 {
            store.create(ANN, wanted("other")).await.expect("a session");
        }
        let listing = Listing { after: None, limit: 2, newest_first: false, filter: filter.clone() };
        let replace = async { store.create_as(ANN, &id, wanted("wanted"), NOW).await.map(drop).expect("replaced") };
        let (page, ended) = after_steps(store.list(ANN, listing), steps, replace).await;
        let ids: Vec<_> = page.expect("a page").sessions.into_iter().map(|session| session.id).collect();
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "after {steps} steps: {ids:?}");
        if ended {
            break;
        }
    }
}
