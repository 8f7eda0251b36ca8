//! Served encoder-decoders with random weights: over HTTP they give the model's own output, alone, in a batch, and in
//! conversations that were interrupted, restarted and moved.

use crate::common::random::written_about;
use crate::common::sessions::{App, app_on, prompt, session, state_of};
use axum::http::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_model::{Decoder, Device, PoolOptions, StateType, checkpoint};
use tidegate_server::checkpoint::OpenOptions;
use tidegate_server::session::Location;

const SOURCES: [&str; 3] = [
    "The fox said to the hare: how long is the river, and how deep the sea?",
    "A house",
    "Where have you been? said she.",
];

/// Returns the config keys of encoder-decoders with either mixer. The window of the second is shorter than a text.
fn models() -> [Value; 2] {
    [json!({"attention": "rfa"}), json!({"attention": "softmax", "sliding_window": 16})].map(|keys| {
        let more = json!({
            "model_type": "rfa_seq2seq", "encoder_layers": 2, "max_source_positions": 96, "decoder_start_token_id": 0,
            "position_embedding": "rope", "conv_kernel": 0, "output_norm": false,
        });
        crate::common::with(keys, more)
    })
}

/// Returns the likeliest tokens after a source, computed with the model directly.
fn likeliest(decoder: &Decoder, state: StateType, source: &[u32], count: usize) -> Vec<u64> {
    let mut pool = decoder.new_pool_with(PoolOptions { state, ..PoolOptions::new(1) }).unwrap();
    decoder.read_source(source, &mut pool, 0).unwrap();
    let mut token = decoder.config().source().unwrap().start;
    let mut next = || {
        let logits = decoder.decode(&[token], &mut pool, &[0]).unwrap();
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        token = logits.iter().position(|logit| *logit == best).unwrap() as u32;
        u64::from(token)
    };
    (0..count).map(|_| next()).collect()
}

async fn said(app: &App, body: Value) -> Value {
    let answer = app.post("/v1/completions", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

fn ids(answer: &Value, choice: usize) -> Vec<u64> {
    answer["choices"][choice]["token_ids"].as_array().unwrap().iter().filter_map(Value::as_u64).collect()
}

#[tokio::test]
async fn a_translation_equals_the_models_own_alone_in_a_batch_and_moved() {
    for (keys, state) in models().into_iter().flat_map(|keys| [(keys.clone(), StateType::F32), (keys, StateType::Bf16)])
    {
        let (model, kept) = (written_about(0.0, &keys), TempDir::new().unwrap());
        let decoder = checkpoint::load(model.path(), &Device::Cpu).unwrap();
        let options = || OpenOptions { slots: 4, state, ..OpenOptions::default() };
        let place = || Location::Folder(kept.path().to_owned());
        let greedy = |text: &str, more: Value| {
            prompt(text, crate::common::with(json!({"max_tokens": 24, "ignore_eos": true}), more))
        };
        let here = app_on(model.path(), options(), place()).await;

        let mut expected = Vec::new();
        for text in SOURCES {
            let tokens = here.post("/tokenize", json!({"prompt": text})).await.json()["tokens"].clone();
            let source: Vec<u32> = serde_json::from_value(tokens).unwrap();
            expected.push(likeliest(&decoder, state, &source, 24));
            let answer = said(&here, greedy(text, json!({}))).await;
            assert_eq!(ids(&answer, 0), expected[expected.len() - 1], "{keys} {state:?}: {text}");
            assert_eq!(answer["usage"]["prompt_tokens"], source.len());
        }
        assert!(
            expected[1..].iter().all(|other| *other != expected[0]),
            "{keys}: sources are told apart: {expected:?}"
        );
        let again = said(&here, greedy(SOURCES[0], json!({}))).await;
        assert_eq!(ids(&again, 0), expected[0]);
        assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        let metrics = here.get("/metrics").await.text();
        let kept: Vec<_> = metrics.lines().filter(|line| line.starts_with("tidegate_prefixes ")).collect();
        assert_eq!(kept, ["tidegate_prefixes 0"], "no prefixes are stored");
        let together = crate::common::with(greedy("", json!({"n": 2})), json!({"prompt": SOURCES}));
        let together = said(&here, together).await;
        for (at, expected) in expected.iter().enumerate() {
            assert_eq!(
                [ids(&together, 2 * at), ids(&together, 2 * at + 1)],
                [(); 2].map(|()| expected.clone()),
                "{keys}"
            );
        }

        // 8 tokens, a restart, 8 more, a move, and the last 8 on both servers.
        let made = session(&here, json!({})).await;
        let turn = |text: &str, id: &Value| greedy(text, json!({"max_tokens": 8, "session": id}));
        let first = ids(&said(&here, turn(SOURCES[0], &made["id"])).await, 0);
        here.store.close().await.unwrap();
        drop(here);
        let here = app_on(model.path(), options(), place()).await;
        let second = said(&here, turn("", &made["id"])).await;
        assert_eq!((&second["session"]["tier"], &second["session"]["restored"]), (&json!("disk"), &json!(true)));
        let there = app_on(model.path(), options(), Location::Memory).await;
        let snapshot = |id: &Value| format!("/v1/sessions/{}/snapshot", id.as_str().unwrap());
        let moved = there.upload(here.get(&snapshot(&made["id"])).await.body).await;
        assert_eq!(moved.status, StatusCode::CREATED, "{}", moved.text());
        let moved = moved.json();
        let third = ids(&said(&here, turn("", &made["id"])).await, 0);
        assert_eq!(ids(&said(&there, turn("", &moved["id"])).await, 0), third);
        assert_eq!([first, ids(&second, 0), third].concat(), expected[0], "{keys} {state:?}");
        let stayed = state_of(&here.get(&snapshot(&made["id"])).await.body);
        let went = state_of(&there.get(&snapshot(&moved["id"])).await.body);
        assert!(stayed == went, "{keys}: a bit differs");

        // Another source in the same conversation.
        assert_eq!(ids(&said(&there, turn(SOURCES[2], &moved["id"])).await, 0), expected[2][..8]);
    }
}

#[tokio::test]
async fn a_source_longer_than_the_models_limit_is_refused() {
    let model = written_about(0.0, &models()[0]);
    std::fs::write(model.path().join("chat_template.jinja"), "{{ messages[-1]['content'] }}").unwrap();
    let app = app_on(model.path(), OpenOptions { slots: 1, ..OpenOptions::default() }, Location::Memory).await;
    for (tokens, status) in [(96, StatusCode::OK), (97, StatusCode::BAD_REQUEST)] {
        let answer = app.post("/v1/completions", json!({"prompt": vec![5; tokens], "max_tokens": 1})).await;
        assert_eq!(answer.status, status, "{}", answer.text());
    }
    assert_eq!(app.get("/v1/models").await.json()["data"][0]["max_source_tokens"], 96);
    let answer = app.post("/v1/completions", json!({"prompt": vec![5; 97]})).await;
    assert_eq!(answer.json()["error"]["message"], "prompt must be 1 to 96 tokens long, found 97 tokens");

    // The model's limit applies only to sources, not to generated texts.
    let long = json!({"prompt": vec![5; 96], "max_tokens": 200, "ignore_eos": true, "return_token_ids": true});
    let tokens = said(&app, long).await["choices"][0]["token_ids"].clone();
    assert_eq!(tokens.as_array().unwrap().len(), 200);
    assert_eq!(app.post("/detokenize", json!({"tokens": tokens})).await.status, StatusCode::OK);
    let props = app.get("/props").await.json();
    assert_eq!(props["default_generation_settings"]["n_ctx"], 1_000_096);
    assert_eq!(props["chat_template"], "", "the checkpoint's is of no use");
    let messages = json!({"messages": [{"role": "user", "content": "A house"}]});
    let refused = app.post("/apply-template", messages).await.text();
    assert!(refused.contains("the model translates: it takes no messages"), "{refused}");
}
