//! llama.cpp's own routes as its clients use them.

use crate::common::fake::{Fake, POISON};
use crate::common::{checkpoint, events, get, scripted, send, shipped, text, with};
use axum::body::Body;
use axum::http::{Request, Response, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{EngineOptions, PassCost, PassCosts};
use tidegate_server::{ApiOptions, AppState};

const PATH: &str = "/completion";

async fn ask(state: &AppState, path: &str, body: &Value) -> Response<Body> {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    send(state, request.body(Body::from(body.to_string())).unwrap()).await
}

async fn answered(path: &str, body: Value) -> Value {
    let response = ask(&shipped(), path, &body).await;
    let (status, answer) = (response.status(), text(response).await);
    assert_eq!(status, StatusCode::OK, "{body}: {answer}");
    serde_json::from_str(&answer).unwrap()
}

/// Returns a greedy request, so that the text is the same however it is requested.
fn asking(prompt: impl Into<Value>, more: Value) -> Value {
    with(json!({"prompt": prompt.into(), "n_predict": 12, "temperature": 0}), more)
}

async fn completion(prompt: impl Into<Value>, more: Value) -> Value {
    let body = with(json!({"prompt": prompt.into(), "max_tokens": 12, "temperature": 0}), more);
    answered("/v1/completions", body).await
}

#[tokio::test]
async fn a_completion_equals_that_of_the_openai_route() {
    let whole = answered(PATH, asking("The king", json!({"return_tokens": true}))).await;
    let same = completion("The king", json!({"return_token_ids": true})).await;
    assert_eq!(whole["content"], same["choices"][0]["text"]);
    assert_eq!(whole["tokens"], same["choices"][0]["token_ids"]);
    let expected = json!({"index": 0, "stop": true, "stop_type": "limit", "stopping_word": "", "truncated": false,
        "model": "tidegate-tiny", "prompt": "<|endoftext|>The king", "tokens_predicted": 12, "id_slot": -1,
        "tokens_evaluated": same["usage"]["prompt_tokens"]});
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(whole[name], *value, "{name}");
    }
    let (settings, timings) = (&whole["generation_settings"], &whole["timings"]);
    assert_eq!((&settings["n_predict"], &settings["temperature"]), (&json!(12), &json!(0.0)));
    assert_eq!(timings["predicted_n"], 12);
    let sum = timings["cache_n"].as_u64().unwrap() + timings["prompt_n"].as_u64().unwrap();
    assert_eq!((sum, &timings["cache_n"]), (same["usage"]["prompt_tokens"].as_u64().unwrap(), &whole["tokens_cached"]));
    assert!(timings["predicted_per_second"].as_f64() > Some(0.0), "{timings}");
    assert_eq!(answered("/completions", asking("The king", json!({}))).await["content"], whole["content"]);
}

#[tokio::test]
async fn timings_count_drafts_where_there_are_any() {
    let prompt = "one two three four five. ".repeat(12);
    let body = asking(prompt, json!({"n_predict": 100, "ignore_eos": true}));
    let cost = PassCost { base: 1.0, each: 0.0 };
    let mut texts = Vec::new();
    for draft_max in [0, 8] {
        let engine = EngineOptions {
            draft_max,
            pass_costs: Some(PassCosts { step: cost, chunk: cost }),
            ..EngineOptions::default()
        };
        let (served, _thread) = open(&checkpoint(), &OpenOptions { engine, ..OpenOptions::default() }).unwrap();
        let state = AppState::new(ApiOptions::default());
        state.serve(served);
        let answer: Value = serde_json::from_str(&text(ask(&state, PATH, &body).await).await).unwrap();
        let timings = &answer["timings"];
        let (drafted, accepted) = (timings["draft_n"].as_u64(), timings["draft_n_accepted"].as_u64());
        assert_eq!((drafted.is_some(), accepted.is_some()), (draft_max > 0, draft_max > 0), "{timings}");
        assert!(draft_max == 0 || (accepted > Some(20) && accepted <= drafted), "{timings}");
        texts.push(answer["content"].clone());
    }
    assert_eq!(texts[0], texts[1]);
}

#[tokio::test]
async fn sampled_texts_are_the_same_with_the_same_seed_and_samplers() {
    let more = json!({"temperature": 0.9, "seed": 7, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repeat_penalty": 1.2,
        "repeat_last_n": -1, "frequency_penalty": 0.1, "presence_penalty": 0.2, "typical_p": 0.9});
    let whole = answered(PATH, asking("The king", more.clone())).await;
    let mut same = more;
    let fields = same.as_object_mut().unwrap();
    fields.remove("repeat_last_n");
    let penalty = fields.remove("repeat_penalty").unwrap();
    fields.insert("repetition_penalty".into(), penalty);
    assert_eq!(whole["content"], completion("The king", same).await["choices"][0]["text"]);
    assert_eq!(whole["generation_settings"]["seed"], 7);
    let drawn = answered(PATH, asking("The king", json!({"temperature": 1, "seed": -1}))).await;
    let seed = drawn["generation_settings"]["seed"].clone();
    let again = answered(PATH, asking("The king", json!({"temperature": 1, "seed": seed}))).await;
    assert_eq!(drawn["content"], again["content"], "the seed that was drawn is told");
}

#[tokio::test]
async fn a_stream_contains_the_same_and_ends_with_its_outcome() {
    let whole = answered(PATH, asking("The king", json!({"return_tokens": true}))).await;
    let response = ask(&shipped(), PATH, &asking("The king", json!({"stream": true}))).await;
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    let stream = text(response).await;
    let chunks: Vec<Value> = events(&stream).iter().map(|data| serde_json::from_str(data).unwrap()).collect();
    let (last, pieces) = chunks.split_last().unwrap();
    assert!(pieces.len() > 4, "the text came in {} pieces", pieces.len());
    assert!(pieces.iter().all(|piece| piece["stop"] == false && piece["index"] == 0));
    let content: String = pieces.iter().map(|piece| piece["content"].as_str().unwrap()).collect();
    let tokens: Vec<&Value> = pieces.iter().flat_map(|piece| piece["tokens"].as_array().unwrap()).collect();
    assert_eq!((json!(content), json!(tokens)), (whole["content"].clone(), whole["tokens"].clone()));
    assert_eq!((&last["stop"], &last["content"], &last["tokens"]), (&json!(true), &json!(""), &json!([])));
    for name in ["stop_type", "tokens_predicted", "tokens_evaluated", "prompt", "model"] {
        assert_eq!(last[name], whole[name], "{name}");
    }
}

#[tokio::test]
async fn prompts_can_be_texts_ids_both_or_several() {
    let tokenized = answered("/tokenize", json!({"prompt": "The king said"})).await["tokens"].clone();
    let whole = answered(PATH, asking("The king said", json!({}))).await["content"].clone();
    assert_eq!(answered(PATH, asking(tokenized.clone(), json!({}))).await["content"], whole);
    let said = tokenized.as_array().unwrap().last().unwrap();
    assert_eq!(answered(PATH, asking(json!(["The king", said]), json!({}))).await["content"], whole);
    let other = answered(PATH, asking("A fox", json!({}))).await["content"].clone();
    let several =
        answered(PATH, asking(json!(["The king said", tokenized, ["The king", said], "A fox"]), json!({}))).await;
    let several: Vec<(&Value, &Value)> =
        several.as_array().unwrap().iter().map(|one| (&one["index"], &one["content"])).collect();
    assert_eq!(several, [(&json!(0), &whole), (&json!(1), &whole), (&json!(2), &whole), (&json!(3), &other)]);
    let one = answered(PATH, asking(json!(["A fox"]), json!({}))).await;
    assert_eq!(one["content"], other, "one prompt in a list is answered as one");
}

#[tokio::test]
async fn a_text_may_be_in_an_object_without_images() {
    let plain = answered(PATH, asking("The king said", json!({}))).await["content"].clone();
    let named = |data: Value| json!({"prompt_string": "The king said", "multimodal_data": data});
    for prompt in [json!({"prompt_string": "The king said"}), named(json!(null)), named(json!([]))] {
        assert_eq!(answered(PATH, asking(prompt, json!({}))).await["content"], plain);
    }
    let several = answered(PATH, asking(json!([named(json!([])), "The king said"]), json!({}))).await;
    assert_eq!((&several[0]["content"], &several[1]["content"]), (&plain, &plain));
    for data in [json!(["iVBORw0"]), json!("iVBORw0")] {
        for prompt in [named(data.clone()), json!([named(data.clone()), "A fox"])] {
            let response = ask(&shipped(), PATH, &asking(prompt, json!({}))).await;
            let (status, answer) = (response.status(), text(response).await);
            assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
            assert!(answer.contains("multimodal_data"), "{answer}");
        }
    }
}

#[tokio::test]
async fn openai_routes_answer_without_v1_too() {
    let chat = json!({"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4, "temperature": 0});
    let said = |answer: Value| answer["choices"][0]["message"]["content"].clone();
    let whole = said(answered("/v1/chat/completions", chat.clone()).await);
    assert_eq!(said(answered("/chat/completions", chat).await), whole);
    let response = json!({"input": "Hello.", "max_output_tokens": 4, "temperature": 0, "store": false});
    let said = |answer: Value| answer["output"][0]["content"].clone();
    let whole = said(answered("/v1/responses", response.clone()).await);
    assert_eq!(said(answered("/responses", response).await), whole);
    let models = text(send(&shipped(), get("/v1/models")).await).await;
    assert_eq!(text(send(&shipped(), get("/models")).await).await, models);
}

#[tokio::test]
async fn biases_are_given_by_id_or_text_false_forbids_and_the_last_of_several_counts() {
    let first = answered(PATH, asking("The king", json!({"n_predict": 1, "return_tokens": true}))).await;
    let (id, said) = (first["tokens"][0].clone(), first["content"].as_str().unwrap());
    let by_key = |key: &str| serde_json::Map::from_iter([(key.to_owned(), json!(false))]);
    for bias in [json!([[id, false]]), json!([[said, -100]]), json!(by_key(&id.to_string())), json!(by_key(said))] {
        let without = json!({"n_predict": 1, "return_tokens": true, "logit_bias": bias});
        let without = answered(PATH, asking("The king", without)).await;
        assert_ne!(without["tokens"][0], id, "{bias}");
    }
    let forced = json!({"n_predict": 3, "return_tokens": true, "logit_bias": [[77, -100], [77, 100]]});
    assert_eq!(answered(PATH, asking("The king", forced)).await["tokens"], json!([77, 77, 77]));
}

#[tokio::test]
async fn an_end_is_named() {
    let ended = answered(PATH, asking("Once", json!({"logit_bias": [[0, 100]]}))).await;
    assert_eq!((&ended["stop_type"], &ended["content"]), (&json!("eos"), &json!("")));
    let on = json!({"logit_bias": [[0, 100]], "ignore_eos": true, "n_predict": 3});
    assert_eq!(answered(PATH, asking("Once", on)).await["stop_type"], "limit");
    let whole = answered(PATH, asking("The king", json!({}))).await;
    let said = whole["content"].as_str().unwrap();
    let word = said.split_whitespace().nth(2).unwrap();
    let stopped = answered(PATH, asking("The king", json!({"stop": [word]}))).await;
    assert_eq!((&stopped["stop_type"], &stopped["stopping_word"]), (&json!("word"), &json!(word)));
    assert_eq!(stopped["content"], said.split_once(word).unwrap().0);
}

#[tokio::test]
async fn probabilities_equal_those_of_the_openai_route() {
    // The model's default repetition penalty would choose tokens other than the likeliest.
    let whole = answered(PATH, asking("The king", json!({"n_probs": 3, "repeat_penalty": 1}))).await;
    let more = json!({"logprobs": 3, "return_token_ids": true, "repetition_penalty": 1});
    let same = completion("The king", more).await;
    let (listed, same) = (whole["completion_probabilities"].as_array().unwrap(), &same["choices"][0]);
    let of = |name: &str| json!(listed.iter().map(|token| &token[name]).collect::<Vec<_>>());
    assert_eq!((of("id"), of("logprob")), (same["token_ids"].clone(), same["logprobs"]["token_logprobs"].clone()));
    for token in listed {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["id"]), (3, &token["id"]), "greedy sampling takes the likeliest token");
        assert_eq!(token["bytes"], json!(token["token"].as_str().unwrap().as_bytes()));
    }
    let streaming = asking("The king", json!({"n_probs": 3, "repeat_penalty": 1, "stream": true}));
    let stream = text(ask(&shipped(), PATH, &streaming).await).await;
    let chunks: Vec<Value> = events(&stream).iter().map(|data| serde_json::from_str(data).unwrap()).collect();
    let streamed = chunks.iter().flat_map(|chunk| chunk["completion_probabilities"].as_array().into_iter().flatten());
    assert_eq!(streamed.collect::<Vec<_>>(), listed.iter().collect::<Vec<_>>());
}

#[tokio::test]
async fn a_schema_is_followed() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
        "additionalProperties": false});
    let whole = answered(PATH, asking("x", json!({"json_schema": schema, "n_predict": 60}))).await;
    let made: Value = serde_json::from_str(whole["content"].as_str().unwrap()).unwrap();
    assert!(made["a"].is_boolean(), "{whole}");
}

#[tokio::test]
async fn default_values_of_unsupported_fields_are_accepted() {
    let body = asking(
        "x",
        json!({"cache_prompt": true, "id_slot": -1, "n_keep": -1, "grammar": "", "mirostat": 0,
        "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dynatemp_range": 0.0, "xtc_probability": 0, "dry_multiplier": 0.0,
        "repeat_last_n": 64, "repeat_penalty": 1.0, "min_keep": 0, "json_schema": null, "n_probs": 0, "lora": [],
        "samplers": ["penalties", "temperature", "top_k", "typ_p", "top_p", "min_p"], "timings_per_token": false}),
    );
    answered(PATH, body).await;
}

#[tokio::test]
async fn invalid_requests_are_refused_by_name_in_the_formats_shape() {
    for (param, more) in [
        ("prompt", json!({"prompt": null})),
        ("prompt", json!({"prompt": 1})),
        ("prompt", json!({"prompt": []})),
        ("prompt", json!({"prompt": [1, [2]]})),
        ("prompt", json!({"prompt": [-1]})),
        ("prompt", json!({"prompt": [4096]})),
        ("prompt", json!({"prompt": [[1], []]})),
        ("prompt", json!({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}})),
        ("n_predict", json!({"n_predict": 0})),
        ("n_predict", json!({"n_predict": -2})),
        ("n_predict", json!({"n_predict": i64::MIN})),
        ("n_predict", json!({"n_predict": i64::MAX})),
        ("n_predict", json!({"n_predict": u64::MAX})),
        ("temperature", json!({"temperature": -1})),
        ("top_p", json!({"top_p": 0})),
        ("repeat_penalty", json!({"repeat_penalty": 0})),
        ("repeat_last_n", json!({"repeat_penalty": 1.1, "repeat_last_n": 64})),
        ("seed", json!({"seed": 0.5})),
        ("stop", json!({"stop": [""]})),
        ("logit_bias", json!({"logit_bias": [[1, true]]})),
        ("logit_bias", json!({"logit_bias": [[1]]})),
        ("logit_bias", json!({"logit_bias": [[4096, 1]]})),
        ("logit_bias", json!({"logit_bias": [[1, 101]]})),
        ("n_probs", json!({"n_probs": 21})),
        ("n_probs", json!({"n_probs": -1})),
        ("grammar", json!({"grammar": "root ::= \"x\""})),
        ("json_schema", json!({"json_schema": {"type": "nothing"}})),
        ("json_schema", json!({"json_schema": 1})),
        ("mirostat", json!({"mirostat": 2})),
        ("dry_multiplier", json!({"dry_multiplier": 0.8})),
        ("xtc_probability", json!({"xtc_probability": 0.5})),
        ("dynatemp_range", json!({"dynatemp_range": 0.5})),
        ("samplers", json!({"samplers": ["top_k"]})),
        ("id_slot", json!({"id_slot": 65_536})),
        ("n_cmpl", json!({"n_cmpl": 2})),
    ] {
        let body = asking("x", more.clone());
        let response = ask(&shipped(), PATH, &body).await;
        let (status, answer) = (response.status(), text(response).await);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let error = &answer["error"];
        assert_eq!((status, error["param"].as_str()), (StatusCode::BAD_REQUEST, Some(param)), "{more}: {answer}");
        assert_eq!((&error["code"], &error["type"]), (&json!(400), &json!("invalid_request_error")));
        assert!(error["message"].as_str().unwrap().contains(param), "{more}: {answer}");
    }
    let response = ask(&shipped(), PATH, &asking("x", json!({"model": "llama"}))).await;
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
    assert!(text(response).await.contains(r#""type":"not_found_error""#));
    let response = ask(&shipped(), "/infill", &json!({"input_prefix": "x"})).await;
    assert_eq!(response.status(), StatusCode::NOT_IMPLEMENTED);
    assert!(text(response).await.contains(r#""type":"not_supported_error""#));
}

#[tokio::test]
async fn a_failure_within_a_stream_is_its_last_event() {
    let (state, ..) = scripted(Fake::new(1), 1);
    let body = json!({"prompt": [1, POISON, 2], "n_predict": 4, "stream": true});
    let stream = text(ask(&state, PATH, &body).await).await;
    let last: Value = serde_json::from_str(events(&stream).last().unwrap()).unwrap();
    assert_eq!((&last["error"]["code"], &last["error"]["type"]), (&json!(500), &json!("server_error")));
}

#[tokio::test]
async fn props_and_slots_describe_the_server_without_revealing_texts() {
    let read = |path: &'static str| async move {
        let response = send(&shipped(), get(path)).await;
        assert_eq!(response.status(), StatusCode::OK);
        serde_json::from_str::<Value>(&text(response).await).unwrap()
    };
    let props = read("/props").await;
    assert_eq!((&props["total_slots"], &props["model_path"]), (&json!(64), &json!("tidegate-tiny")));
    assert!(props["chat_template"].as_str().unwrap().contains("add_generation_prompt"), "{props}");
    assert_eq!((&props["bos_token"], &props["eos_token"]), (&json!("<|endoftext|>"), &json!("<|endoftext|>")));
    let settings = &props["default_generation_settings"];
    assert_eq!((&settings["n_ctx"], &settings["params"]["n_predict"]), (&json!(1_000_000), &json!(1_000_000)));
    assert!((settings["params"]["temperature"].as_f64().unwrap() - 0.7).abs() < 1e-6);
    let slots = read("/slots").await;
    assert_eq!(slots.as_array().unwrap().len(), 64);
    for (id, slot) in slots.as_array().unwrap().iter().enumerate() {
        let mut names: Vec<&str> = slot.as_object().unwrap().keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            (&slot["id"], names),
            (&json!(id), vec!["id", "is_processing", "n_ctx", "speculative", "state_bytes"])
        );
    }
}
