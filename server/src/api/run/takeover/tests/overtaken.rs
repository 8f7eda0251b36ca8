//! Tests servers that are wrongly considered dead, so that another server has taken over their streams.

use super::*;
use crate::session::Owner;

fn long() -> Value {
    json!({"prompt": "Once", "max_tokens": 100_000, "min_tokens": 100_000, "seed": 1})
}

fn end(id: &str) -> Request<Body> {
    Request::delete(format!("/v1/streams/{id}")).body(Body::empty()).unwrap()
}

/// Ends the stream early, as the run's own time limit does.
fn is_over(server: &Server, id: &str) {
    let owner = Owner::default();
    server.state.streams().delete(owner, id).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_was_overtaken_commits_nothing_if_it_ends_early() {
    for by_the_client in [false, true] {
        let cluster = Cluster::new();
        let [first, second] = [(); 2].map(|()| server(&cluster));
        let (session, id, version, stream) = first.stream("/v1/completions", &long()).await;
        let before = first.head(&session).await;
        first.member.lapses();
        let again = second.resume(&id, None).await;
        assert_eq!(again.status(), StatusCode::OK);
        if by_the_client {
            assert_eq!(first.send(end(&id)).await.status(), StatusCode::NO_CONTENT);
        } else {
            is_over(&first, &id);
        }
        let had = whole(stream).await;
        assert!(
            had.iter().all(|event| !event.ends_with("[DONE]") && data(event)["error"].is_null()),
            "{:?}",
            had.last()
        );
        assert_eq!(second.head(&session).await, before);
        if by_the_client {
            assert_eq!(cluster.streams(), 0, "as at any server that does not hold the stream");
            continue;
        }
        assert_eq!(second.send(end(&id)).await.status(), StatusCode::NO_CONTENT);
        assert!(whole(again.into_body().into_data_stream()).await.last().unwrap().ends_with("[DONE]"));
        assert_eq!((second.head(&session).await, cluster.streams()), (version, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_cannot_withdraw_the_record_leaves_the_turn_to_another() {
    let cluster = Cluster::new();
    let [first, second] = [(); 2].map(|()| server(&cluster));
    let (session, id, version, stream) = first.stream("/v1/completions", &long()).await;
    let before = first.head(&session).await;
    first.member.refuses_streams();
    assert_eq!(first.send(end(&id)).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(first.state.streams().has(Owner::default(), &id), "the turn goes on");
    is_over(&first, &id);
    whole(stream).await;
    assert_eq!(second.head(&session).await, before);
    assert_eq!(second.resume(&id, None).await.status(), StatusCode::OK);
    assert_eq!(second.send(end(&id)).await.status(), StatusCode::NO_CONTENT);
    second.state.settle().await;
    assert_eq!(second.head(&session).await, version);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_stream_changes_only_the_record_that_its_server_holds() {
    let cluster = Cluster::new();
    let [first, second] = [(); 2].map(|()| server(&cluster));
    let body = json!({"prompt": "Once", "max_tokens": 200, "min_tokens": 200, "seed": 1});
    // Deleted by the client, before its end or after it.
    let (_, id, _, stream) = first.stream("/v1/completions", &body).await;
    assert_eq!(second.send(end(&id)).await.status(), StatusCode::NO_CONTENT);
    whole(stream).await;
    first.state.settle().await;
    assert_eq!(cluster.streams(), 0);
    // Held by another server: both have the whole text, and the first one commits it.
    for server in [&first, &second] {
        server.member.dies(Death::BeforeCommit);
        server.member.hangs();
    }
    let (session, id, version, stream) = first.stream("/v1/completions", &body).await;
    first.member.died.notified().await;
    first.member.lapses();
    assert_eq!(second.resume(&id, None).await.status(), StatusCode::OK);
    second.member.died.notified().await;
    first.member.wakes.notify_one();
    assert!(whole(stream).await.last().unwrap().ends_with("[DONE]"));
    first.state.settle().await;
    assert_eq!(first.head(&session).await, version);
    assert!(cluster.is_held(&id));
}

#[tokio::test(flavor = "multi_thread")]
async fn long_requests_are_not_recorded() {
    let cluster = Cluster::new();
    let first = server(&cluster);
    let mut body = json!({"prompt": "Once", "max_tokens": 2, "metadata": {"note": "a"}});
    for (bytes, recorded) in [(200 << 10, 1), (256 << 10, 0)] {
        let cluster_before = cluster.streams();
        body["padding"] = "a".repeat(bytes).into();
        let (_, _, _, stream) = first.stream("/v1/completions", &body).await;
        whole(stream).await;
        assert_eq!(cluster.streams() - cluster_before, recorded, "{bytes}");
    }
}
