//! Grammars of several keys: one key's expensive grammars do not keep another key's from being compiled.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::engine::EngineOptions;
use tidegate_server::engine::spawn;
use tidegate_server::text::{Grammars, HelperCommand};
use tidegate_server::{ApiOptions, AppState, Served};

use crate::common::fake::{Fake, rules};
use crate::common::{send, served, text};

fn completion(token: &str, regex: &str) -> Request<Body> {
    let body = json!({"prompt": [1], "max_tokens": 2, "regex": regex});
    let request = Request::post("/v1/completions").header(header::AUTHORIZATION, format!("Bearer {token}"));
    request.header(header::CONTENT_TYPE, "application/json").body(Body::from(body.to_string())).unwrap()
}

async fn ask(state: &AppState, token: &str, regex: &str) -> (StatusCode, Value) {
    let response = send(state, completion(token, regex)).await;
    let status = response.status();
    (status, serde_json::from_str(&text(response).await).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn expensive_grammars_of_one_key_do_not_keep_another_from_its_grammar() {
    let (engine, _thread) = spawn(Fake::new(4).step(Duration::ZERO), rules(), EngineOptions::default()).unwrap();
    let helper =
        HelperCommand { program: env!("CARGO_BIN_EXE_tidegate").into(), args: vec!["compile-grammars".into()] };
    let grammars = Grammars::with_helper(&rules().vocabulary, &rules().eos, &rules().encode, helper).unwrap();
    let state = AppState::new(ApiOptions::default());
    state.serve(Served { grammars: Arc::new(grammars), ..served(engine) });

    let bombs = (0..4).map(|n| {
        let state = state.clone();
        tokio::spawn(async move { ask(&state, "eve", &(".*".repeat(7_900) + &format!("{n}x"))).await })
    });
    let bombs: Vec<_> = bombs.collect();
    for at in 0..8 {
        let (status, body) = ask(&state, "ann", &format!("[a-c]{{1,{}}}", at + 1)).await;
        assert_eq!(status, StatusCode::OK, "{body}");
    }
    for bomb in bombs {
        let (status, body) = bomb.await.unwrap();
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
        assert_eq!(body["error"]["param"], "regex");
    }
}
