//! Models on the candle backend are served like any others: sessions, batches and snapshots. The native backend refuses
//! their snapshots.

use std::path::Path;

use axum::http::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_model::StateType;
use tidegate_server::checkpoint::{BackendChoice, DeviceChoice, OpenOptions, check, open, size};
use tidegate_server::session::Location;

use super::mixer_sessions::sessions_continue;
use crate::common::checkpoint;
use crate::common::random::{self, write_vocabulary, written_rwkv7};
use crate::common::sessions::{app_on, prompt, session};
use crate::published;

/// Writes a checkpoint of a family that only candle supports, with a tokenizer.
pub(super) fn written(kind: &str) -> TempDir {
    let rwkv = kind.starts_with("rwkv");
    let folder = published::written(kind, if rwkv { 272 } else { 300 }, 64, 7);
    if rwkv {
        write_vocabulary(folder.path());
    } else {
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/tests/fixtures/tiny/tokenizer.json");
        std::fs::copy(tiny, folder.path().join("tokenizer.json")).unwrap();
    }
    folder
}

fn options(backend: BackendChoice) -> OpenOptions {
    OpenOptions { slots: 4, backend, ..OpenOptions::default() }
}

#[tokio::test]
async fn sessions_survive_a_restart_fork_rewind_and_move_between_servers() {
    for kind in published::FAMILIES {
        sessions_continue(kind, written(kind).path(), || options(BackendChoice::Auto)).await;
    }
    sessions_continue("rfa-gate", random::written(&json!({})).path(), || options(BackendChoice::Candle)).await;
}

#[tokio::test]
async fn a_text_is_the_same_alone_in_a_batch_and_after_a_known_prefix() {
    for kind in published::FAMILIES {
        let model = written(kind);
        let [here, fresh] = [(); 2].map(|()| app_on(model.path(), options(BackendChoice::Auto), Location::Memory));
        let (here, fresh) = (here.await, fresh.await);
        let request = |seed: u64| {
            let more = json!({"seed": seed, "max_tokens": 12, "temperature": 1.0, "ignore_eos": true});
            prompt("the fox said: how deep is the river?", more)
        };
        let ids = |answer: &Value| answer["choices"][0]["token_ids"].clone();
        let mut alone = Vec::new();
        for seed in 0..4 {
            alone.push(ids(&here.post("/v1/completions", request(seed)).await.json()));
        }
        assert!(alone.iter().all(|ids| ids.as_array().is_some_and(|ids| ids.len() == 12)), "{kind}: {alone:?}");
        let together = futures_util::future::join_all((0..4).map(|seed| fresh.post("/v1/completions", request(seed))));
        let together: Vec<Value> = together.await.iter().map(|answer| ids(&answer.json())).collect();
        assert_eq!(together, alone, "{kind}");
    }
}

#[tokio::test]
async fn a_session_does_not_move_between_the_backends() {
    let ours = app_on(&checkpoint(), options(BackendChoice::Native), Location::Memory).await;
    let theirs = app_on(&checkpoint(), options(BackendChoice::Candle), Location::Memory).await;
    for (here, there) in [(&ours, &theirs), (&theirs, &ours)] {
        let made = session(here, json!({"text": "Once upon a time"})).await;
        let file = here.get(&format!("/v1/sessions/{}/snapshot", made["id"].as_str().unwrap())).await.body;
        assert_eq!(here.upload(file.clone()).await.status, StatusCode::CREATED);
        let refused = there.upload(file).await;
        assert!(refused.status.is_client_error() && refused.text().contains("architecture"), "{}", refused.text());
    }
}

#[test]
fn a_model_is_served_by_the_backend_that_has_its_family() {
    let of = |model: &Path, backend| open(model, &options(backend)).map(|(served, _thread)| served.device);
    let (mamba, tiny, rwkv7) = (written("mamba"), checkpoint(), written_rwkv7());
    assert_eq!(of(mamba.path(), BackendChoice::Auto).unwrap(), "cpu by candle");
    assert_eq!(of(mamba.path(), BackendChoice::Candle).unwrap(), "cpu by candle");
    assert_eq!(of(&tiny, BackendChoice::Candle).unwrap(), "cpu by candle");
    assert_eq!(of(&tiny, BackendChoice::Native).unwrap(), "cpu");
    assert_eq!(of(&tiny, BackendChoice::Auto).unwrap(), "cpu");
    let error = |model: &Path, options: OpenOptions| open(model, &options).err().unwrap().to_string();
    let found = error(mamba.path(), options(BackendChoice::Native));
    assert!(found.contains("--backend native has no kernels for this family; --backend candle"), "{found}");
    let found = error(rwkv7.path(), options(BackendChoice::Candle));
    assert!(found.contains("head_dim must be 64 for the candle backend, found 32"), "{found}");
    let found = error(mamba.path(), OpenOptions { state: StateType::Bf16, ..options(BackendChoice::Auto) });
    assert!(found.contains("keeps states in f32: --state must be f32"), "{found}");
    let found = error(mamba.path(), OpenOptions { device: DeviceChoice::Cuda(0), ..options(BackendChoice::Auto) });
    assert!(found.starts_with("--device cuda:0: "), "{found}");

    // Weights are f32 in memory, whatever their type in the file.
    let memory = size(mamba.path(), &options(BackendChoice::Auto)).unwrap();
    let file = std::fs::metadata(mamba.path().join("model.safetensors")).unwrap().len();
    assert!(memory.weights <= file && memory.weights > file * 9 / 10, "{} of {file}", memory.weights);
    assert_eq!(memory.slots, 4 * 2 * (128 * 16 + 3 * 128) * 4);
    assert!(check(mamba.path()).is_ok());
    let config = mamba.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace("\"state_size\":16", "\"state_size\":8");
    std::fs::write(config, text).unwrap();
    let found = check(mamba.path()).unwrap_err().to_string();
    assert!(found.contains("state_size must be 16 for the candle backend, found 8"), "{found}");
}
