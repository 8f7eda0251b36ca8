//! `/ready` reflects what the server can do.

use axum::http::StatusCode;
use serde_json::{Value, json};
use tidegate_server::checkpoint::OpenOptions;
use tidegate_server::session::Location;

use crate::common::sessions::app_on;
use crate::common::{checkpoint, get, post, send, text};

#[tokio::test]
async fn a_server_whose_data_folder_is_gone_is_not_ready() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let options = OpenOptions { slots: 2, ..OpenOptions::default() };
    let state = app_on(&checkpoint(), options, Location::Folder(data.clone())).await.state;
    let session = |body: Value| {
        let request = axum::http::Request::post("/v1/sessions").header("content-type", "application/json");
        send(&state, request.body(body.to_string().into()).unwrap())
    };
    assert_eq!(session(json!({})).await.status(), StatusCode::CREATED);
    assert_eq!(send(&state, get("/ready")).await.status(), StatusCode::OK);

    std::fs::remove_dir_all(&data).unwrap();
    let refused = session(json!({})).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let ready = send(&state, get("/ready")).await;
    assert_eq!(ready.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(ready.headers().contains_key("retry-after"));
    let answer: Value = serde_json::from_str(&text(ready).await).unwrap();
    assert_eq!(answer["error"]["code"], "store_unavailable", "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().starts_with("sessions cannot be stored: "), "{answer}");
    assert!(text(send(&state, get("/metrics")).await).await.contains("\ntidegate_ready 0\n"));
    // The process is alive, and text that is not stored can be generated.
    assert_eq!(send(&state, get("/health")).await.status(), StatusCode::OK);
    assert_eq!(post(&state, json!({"prompt": "Once", "max_tokens": 2})).await.0, StatusCode::OK);
}
