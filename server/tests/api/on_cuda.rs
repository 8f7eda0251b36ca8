//! The server on CUDA, with its kernels on the emulator or on the GPU that `TIDEGATE_TEST_DEVICE` names: texts, batches
//! and sessions give the same guarantees as on the CPU, and a conversation can move between the two. Run with
//! `cargo test --workspace --features tidegate-server/cuda-emulator --test api on_cuda`.

use crate::common::checkpoint;
use crate::common::random::written_about;
use crate::common::sessions::{App, app_on, prompt, session};
use axum::http::StatusCode;
use serde_json::{Value, json};
use tidegate_model::cuda::{CudaDecoder, CudaDevice};
use tidegate_model::sampling::{Permitted, Plans, Sampled, Sampler};
use tidegate_model::{DecoderConfig, LanguageModel, ModelRunner, SamplingParams, StateType, WeightType};
use tidegate_server::checkpoint::{DeviceChoice, OpenError, OpenOptions, open, open_on};
use tidegate_server::session::Location;

const TEXT: &str = "The old house by the sea";

/// Returns the emulator, or the GPU that `TIDEGATE_TEST_DEVICE` names (`cuda:0`).
fn gpu() -> DeviceChoice {
    std::env::var("TIDEGATE_TEST_DEVICE").map_or(DeviceChoice::Emulator, |name| name.parse().expect("cuda:N"))
}

async fn app(device: DeviceChoice, state: StateType) -> App {
    app_on(&checkpoint(), OpenOptions { device, state, slots: 6, ..OpenOptions::default() }, Location::Memory).await
}

/// Returns the token ids of a sampled answer to `text`.
async fn said(app: &App, text: &str, more: Value) -> Vec<u64> {
    let body = prompt(text, crate::common::with(json!({"temperature": 1.0, "seed": 7, "ignore_eos": true}), more));
    let answer = app.post("/v1/completions", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()["choices"][0]["token_ids"].as_array().unwrap().iter().filter_map(Value::as_u64).collect()
}

#[tokio::test]
async fn a_text_is_the_same_alone_in_a_batch_and_in_turns() {
    for state in [StateType::F32, StateType::Bf16] {
        let app = app(gpu(), state).await;
        let tokens = |count: usize| json!({"max_tokens": count});
        let alone = said(&app, TEXT, tokens(9)).await;
        let others = ["Once upon a time", TEXT, "It was", TEXT, "A"];
        let texts = futures_util::future::join_all(others.map(|text| said(&app, text, tokens(9)))).await;
        assert_eq!((&texts[1], &texts[3]), (&alone, &alone), "{state:?}");
        assert_ne!(texts[0], alone);
        let made = session(&app, json!({"seed": 7})).await;
        let turn = |count: usize| json!({"max_tokens": count, "session": made["id"], "seed": null});
        let turns = [said(&app, TEXT, turn(4)).await, said(&app, "", turn(5)).await];
        assert_eq!(turns.concat(), alone, "{state:?}");
    }
}

#[tokio::test]
async fn sampling_on_the_device_equals_sampling_from_logits() {
    let app = app(gpu(), StateType::F32).await;
    let ways = [
        json!({"temperature": 0.0, "frequency_penalty": 1.0}),
        json!({"top_p": 0.9, "logit_bias": {"5": 3.0, "17": -100}, "min_p": 0.01}),
        json!({"top_k": 9, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
        json!({"regex": "[a-f ]{9,30}", "ignore_eos": false}),
        json!({"min_tokens": 6, "ignore_eos": false, "temperature": 2.0}),
        json!({"typical_p": 0.7}),
    ];
    let more = |way: &Value, more: Value| {
        crate::common::with(crate::common::with(json!({"max_tokens": 8}), way.clone()), more)
    };
    // Log probabilities need logits, so rows that list them sample from logits; other rows of the same steps do not.
    let mut texts = Vec::new();
    for way in &ways {
        texts.push(said(&app, TEXT, more(way, json!({}))));
        texts.push(said(&app, TEXT, more(way, json!({"logprobs": 1}))));
    }
    let texts = futures_util::future::join_all(texts).await;
    for (way, pair) in ways.iter().zip(texts.chunks_exact(2)) {
        assert_eq!(pair[0], pair[1], "{way}");
    }
    assert!((1..ways.len()).all(|at| texts[2 * at] != texts[0]));
}

#[tokio::test]
async fn conversations_with_concurrent_transfers_give_the_same_texts_as_alone() {
    let app = app(gpu(), StateType::F32).await;
    let turn =
        |id: &Value, count: usize| json!({"max_tokens": count, "session": id, "seed": null, "stop": ["the", ". "]});
    let mut alone = Vec::new();
    for seed in 0..3 {
        let id = session(&app, json!({"seed": seed})).await["id"].clone();
        alone.push((said(&app, TEXT, turn(&id, 5)).await, said(&app, " And", turn(&id, 4)).await));
    }
    let mut ids = Vec::new();
    for seed in 0..3 {
        ids.push(session(&app, json!({"seed": seed})).await["id"].clone());
    }
    let first = futures_util::future::join_all(ids.iter().map(|id| said(&app, TEXT, turn(id, 5)))).await;
    // By then every slot holds another text, so each conversation has to be restored.
    let beside = json!({"max_tokens": 3, "n": 6, "best_of": 6});
    said(&app, "It was", beside.clone()).await;
    let (second, _) = tokio::join!(
        futures_util::future::join_all(ids.iter().map(|id| said(&app, " And", turn(id, 4)))),
        said(&app, "It was", beside)
    );
    assert_eq!(first.into_iter().zip(second).collect::<Vec<_>>(), alone);
}

#[test]
fn the_served_model_samples_where_its_logits_are() {
    let text = std::fs::read_to_string(checkpoint().join("config.json")).unwrap();
    let config = DecoderConfig::from_json(&text).unwrap();
    let vocab = config.vocab_size;
    let device = match gpu() {
        DeviceChoice::Cuda(ordinal) => CudaDevice::open(ordinal).unwrap(),
        _ => CudaDevice::emulated(),
    };
    let decoder = CudaDecoder::random(config, WeightType::F32, 1, &device).unwrap();
    let pool = decoder.new_pool(2, StateType::F32).unwrap();
    let mut model = ModelRunner::new(decoder, pool);
    assert!(model.samples());
    let mut sampler = Sampler::new(SamplingParams::default(), vocab).unwrap();
    let mut plan = |rows: std::ops::Range<usize>, plans: &mut Plans| {
        assert!(sampler.plan(Permitted::default(), plans));
        plans.skip_to(rows.len());
    };
    let (mut sampled, mut logits) = (Vec::new(), Vec::new());
    model.decode_and_sample(&[1, 2], &[0, 1], &mut plan, (&mut sampled, &mut logits)).unwrap();
    // The planned row returns a token; the row without a plan returns all of its logits.
    assert!(matches!(sampled[..], [Sampled::Token(_), Sampled::Logits]), "{sampled:?}");
    assert_eq!(logits.len(), vocab);
}

#[tokio::test]
async fn a_conversation_moves_between_the_devices() {
    for state in [StateType::F32, StateType::Bf16] {
        let (cpu, other) = (app(DeviceChoice::Cpu, state).await, app(gpu(), state).await);
        let snapshot = |id: &Value| format!("/v1/sessions/{}/snapshot", id.as_str().unwrap());
        let mut held = session(&cpu, json!({"seed": 3})).await;
        let turn = |id: &Value| json!({"max_tokens": 4, "session": id, "seed": null});
        said(&cpu, TEXT, turn(&held["id"])).await;
        for (from, to) in [(&cpu, &other), (&other, &cpu)] {
            let bytes = from.get(&snapshot(&held["id"])).await.body;
            let moved = to.upload(bytes.clone()).await;
            assert_eq!(moved.status, StatusCode::CREATED, "{}", moved.text());
            held = moved.json();
            // The snapshot is identical, and the conversation continues.
            assert!(to.get(&snapshot(&held["id"])).await.body == bytes, "{state:?}: a bit differs");
            assert_eq!(said(to, "", turn(&held["id"])).await.len(), 4);
        }
    }
}

#[tokio::test]
async fn the_device_is_reported_and_a_mixer_without_kernels_is_refused_by_name() {
    let of = |device| open(&checkpoint(), &OpenOptions { device, slots: 1, ..OpenOptions::default() }).unwrap().0;
    let (cpu, on_gpu) = (of(DeviceChoice::Cpu), of(gpu()));
    assert_ne!(on_gpu.device, "cpu");
    assert_ne!(cpu.fingerprint, on_gpu.fingerprint, "another device gives other texts");
    let folder = written_about(0.0, &json!({"attention": "softmax", "sliding_window": 8}));
    let options = OpenOptions { device: gpu(), ..OpenOptions::default() };
    let error = open(folder.path(), &options).err().unwrap();
    assert!(matches!(error, OpenError::Device(_)), "{error}");
    assert!(error.to_string().contains("softmax"), "{error}");
    // If any device is acceptable, such a model runs on the CPU; an invalid checkpoint is refused on every device.
    let (any, opened) = (OpenOptions::default(), gpu().open().unwrap());
    assert_eq!(any.device, DeviceChoice::Auto);
    assert_eq!(open_on(folder.path(), &opened, &any).unwrap().0.device, "cpu");
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    assert!(matches!(open_on(folder.path(), &opened, &any), Err(OpenError::Load(_))));
}

#[tokio::test]
async fn the_number_of_slots_follows_the_memory_and_too_many_are_refused() {
    let folder = written_about(0.0, &json!({}));
    let of = |slots| OpenOptions { device: gpu(), slots, ..OpenOptions::default() };
    assert_eq!(open(folder.path(), &of(0)).unwrap().0.engine.slots(), 1 << 14);
    // A half-precision state is smaller on either device; the reported size is the size on the device.
    let bytes = |device, state| {
        let options = OpenOptions { device, state, slots: 1, ..OpenOptions::default() };
        open(folder.path(), &options).unwrap().0.engine.stats().slot_bytes
    };
    for device in [DeviceChoice::Cpu, gpu()] {
        assert!(bytes(device, StateType::Bf16) < bytes(device, StateType::F32), "{device:?}");
    }
    assert!(bytes(gpu(), StateType::F32) >= bytes(DeviceChoice::Cpu, StateType::F32));
    let error = open(folder.path(), &of(1 << 28)).err().unwrap();
    assert!(matches!(error, OpenError::Device(_)), "{error}");
    assert!(error.to_string().contains("free"), "{error}");
}
