//! Streams that a server parks when it shuts down: another server continues after the text so far, and computes nothing
//! twice.

use object_store::ObjectStoreExt as _;

use super::*;

const PARKED: &str = "tidegate_streams_parked_total";
const RECOMPUTED: &str = "tidegate_stream_recomputed_tokens_total";

/// Lists the objects of the cluster.
async fn objects(cluster: &Cluster) -> Vec<object_store::path::Path> {
    cluster.objects.list(None).map(|object| object.unwrap().location).collect().await
}

/// Begins a stream, and shuts the server down once the client has received some of it. Returns the stream's id and the
/// events that the client has received, which are all that the server had when it stopped.
async fn left(server: &Server, path: &str, body: &Value) -> (String, Vec<String>) {
    let (_, id, _, mut stream) = server.stream(path, body).await;
    let mut begun = String::new();
    while !begun.contains("\n\nid: 2\n") {
        begun += std::str::from_utf8(&stream.next().await.unwrap().unwrap()).unwrap();
    }
    server.state.drain();
    let mut had = events(&begun);
    had.extend(whole(stream).await);
    server.state.settle().await;
    (id, had)
}

/// Returns the request for a longer text, if it has no grammar.
fn longer(body: &Value) -> Value {
    let mut body = body.clone();
    if body["max_tokens"].as_u64() < Some(40) && body["tools"].is_null() {
        body["max_tokens"] = 600.into();
        body["min_tokens"] = 500.into();
    }
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parked_turn_goes_on_where_it_was_with_the_same_events() {
    let (mut parked, mut twice) = (Vec::new(), 0.0);
    for (name, path, body) in requests() {
        let cluster = Cluster::new();
        let [first, second, third, fourth] = [0, 0, 8, 0].map(|drafts| server_of(&cluster, drafts, |_| ()));
        let (id, mut had) = left(&first, path, &longer(&body)).await;
        let rest = if had.last().unwrap().ends_with("[DONE]") {
            Vec::new()
        } else {
            parked.push(name);
            // The second server is shut down as well, once it has continued the stream.
            let mut more = second.resume(&id, Some(had.len() - 1)).await.into_body().into_data_stream();
            let first = more.next().await.unwrap().unwrap();
            second.state.drain();
            had.extend(events(std::str::from_utf8(&first).unwrap()));
            had.extend(whole(more).await);
            second.state.settle().await;
            twice += second.metric(PARKED).await;
            assert_eq!(second.metric(RECOMPUTED).await, 0.0, "{name}");
            if had.last().unwrap().ends_with("[DONE]") {
                Vec::new()
            } else {
                third.rest(&id, Some(had.len() - 1)).await
            }
        };
        assert_eq!(third.metric(RECOMPUTED).await, 0.0, "{name}");
        assert_eq!(third.metric(PARKED).await, 0.0, "{name}");
        let all = [had, rest].concat();
        assert!(all.last().unwrap().ends_with("data: [DONE]"), "{name}: {all:?}");
        // The parked state is gone, so this server computes the whole text.
        assert_eq!(fourth.rest(&id, None).await, all, "{name}");
        assert_eq!(objects(&cluster).await.len(), 1, "{name}: that of the version");
    }
    // The short texts may have ended before the shutdown.
    assert!(parked.len() >= 4 && twice >= 2.0, "{parked:?} were parked, and {twice} twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parked_turn_that_is_lost_or_damaged_is_computed_again() {
    for damage in ["none", "state", "tokens"] {
        let cluster = Cluster::new();
        let [first, second] = [(); 2].map(|()| server(&cluster));
        let body = json!({"prompt": "Once", "max_tokens": 600, "min_tokens": 600, "seed": 1});
        let (id, had) = left(&first, "/v1/completions", &body).await;
        assert_eq!(first.metric(PARKED).await, 1.0);
        let [object] = &objects(&cluster).await[..] else { panic!("the parked state alone") };
        match damage {
            "state" => drop(cluster.objects.put(object, "no state".into()).await.unwrap()),
            "tokens" => cluster.change_streams(|record| {
                let mut record: Value = serde_json::from_slice(record).unwrap();
                // This token ends the text, which has not ended.
                record["parked"]["tokens"][1] = 0.into();
                record.to_string().into()
            }),
            _ => cluster.objects.delete(object).await.unwrap(),
        }
        if damage == "tokens" {
            // The server notices this only after it has begun to continue the stream, and then starts over.
            let first = second.resume(&id, Some(had.len() - 1)).await;
            let is_refused = first.status() == StatusCode::SERVICE_UNAVAILABLE;
            assert!(is_refused || text(first).await.is_empty());
        }
        let rest = second.rest(&id, Some(had.len() - 1)).await;
        assert!(rest.last().unwrap().ends_with("data: [DONE]"));
        assert!(second.metric(RECOMPUTED).await > 0.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_without_a_token_is_given_up_at_once() {
    let cluster = Cluster::new();
    let [first, second] = [(); 2].map(|()| server(&cluster));
    let prompt = "one two three ".repeat(4000);
    let body = json!({"prompt": prompt, "max_tokens": 3});
    let (_, id, _, stream) = first.stream("/v1/completions", &body).await;
    first.state.drain();
    whole(stream).await;
    first.state.settle().await;
    assert_eq!(first.metric(PARKED).await, 0.0);
    assert!(second.rest(&id, None).await.last().unwrap().ends_with("data: [DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parked_turn_can_still_be_ended_early() {
    let cluster = Cluster::new();
    let [first, second] = [(); 2].map(|()| server(&cluster));
    let body = json!({"prompt": "Once", "max_tokens": 100_000, "min_tokens": 100_000, "seed": 1});
    let (id, had) = left(&first, "/v1/completions", &body).await;
    let again = second.resume(&id, None).await;
    let end = Request::delete(format!("/v1/streams/{id}")).body(Body::empty()).unwrap();
    assert_eq!(second.send(end).await.status(), StatusCode::NO_CONTENT);
    let all = events(&text(again).await);
    assert_eq!(all[..had.len()], had);
    assert!(all.last().unwrap().ends_with("data: [DONE]"));
    assert_eq!(objects(&cluster).await.len(), 1, "that of the version");
}
