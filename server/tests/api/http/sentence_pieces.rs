//! A Mamba-2 model whose tokenizer works like SentencePiece, as that of Codestral-Mamba does.

use safetensors::SafeTensors;
use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_model::DecoderConfig;
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::session::Location;

use crate::common::pieces::{SPACES, Space, VOCABULARY, tokenizer};
use crate::common::random::written_about;
use crate::common::sessions::{App, app_on, ok, prompt, session};
use crate::llamacpp::Value::{Bool, Floats, U32, Words};
use crate::llamacpp::{self, Gguf, Tensor, text};

const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}\
    {{ '[INST] ' + message['content'] + '[/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}";

/// How a model is stored.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// A folder with `tokenizer.json`.
    Folder(Space),
    /// A GGUF file with scores, and whether its tokenizer puts a space before texts.
    Gguf(bool),
}

fn forms() -> impl Iterator<Item = Form> {
    SPACES.map(Form::Folder).into_iter().chain([true, false].map(Form::Gguf))
}

async fn served(form: Form) -> (TempDir, App) {
    let keys = json!({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "attention": "mamba2",
        "intermediate_size": 64, "head_dim": 32, "state_size": 16, "n_groups": 2,
        "time_step_limit": [0.0, {"__float__": "Infinity"}], "output_norm": false, "vocab_size": VOCABULARY,
        "bos_token_id": 1, "eos_token_id": 2});
    let folder = written_about(0.0, &keys);
    let write = |name: &str, json: Value| std::fs::write(folder.path().join(name), json.to_string()).unwrap();
    let model = match form {
        Form::Folder(space) => {
            write("tokenizer.json", tokenizer(space));
            write("tokenizer_config.json", json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}));
            write("generation_config.json", json!({"eos_token_id": 2}));
            folder.path().to_owned()
        }
        Form::Gguf(space) => {
            let path = folder.path().join("tiny.gguf");
            let file = file_of(&folder).with("tokenizer.ggml.add_space_prefix", Bool(space));
            std::fs::write(&path, file.bytes()).unwrap();
            path
        }
    };
    let app = app_on(&model, OpenOptions { slots: 4, ..OpenOptions::default() }, Location::Memory).await;
    (folder, app)
}

/// Converts the weights of a folder to a GGUF file with scores.
fn file_of(folder: &TempDir) -> Gguf {
    let config = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
    let bytes = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(|(name, view)| {
        (name, Tensor { shape: view.shape().to_vec(), kind: llamacpp::F32, bytes: view.data().to_vec() })
    });
    let config = DecoderConfig::from_json(&config).unwrap();
    llamacpp::mamba2_scored(&config, tensors.collect(), &tokenizer(Space::Never))
        .with("tokenizer.chat_template", text(TEMPLATE))
}

async fn tokens(app: &App, content: &str, special: bool) -> Value {
    ok(app, "/tokenize", json!({"content": content, "add_special": special})).await["tokens"].take()
}

#[tokio::test]
async fn texts_are_read_with_the_space_and_shown_without_it() {
    for form in forms() {
        let (_folder, app) = served(form).await;
        for text in ["the river", "Hello \u{1f980} \u{65e5}\u{672c}\n\n123  the", "\u{e9}t\u{e9}[", ""] {
            let bare = tokens(&app, text, false).await;
            let shown = ok(&app, "/detokenize", json!({"tokens": bare})).await;
            assert_eq!(shown["content"], text, "{form:?}");
            let whole = tokens(&app, text, true).await;
            assert_eq!(whole[0], 1);
            let body = json!({"prompt": whole, "max_tokens": 0, "echo": true});
            assert_eq!(ok(&app, "/v1/completions", body).await["choices"][0]["text"], text, "{form:?}");
            if !text.is_empty() {
                let body = json!({"prompt": text, "max_tokens": 1, "logprobs": 1, "echo": true, "ignore_eos": true});
                let answer = ok(&app, "/v1/completions", body).await;
                let offsets = answer["choices"][0]["logprobs"]["text_offset"].as_array().unwrap();
                assert_eq!(*offsets.last().unwrap(), text.chars().count(), "{form:?} {text:?}: {answer}");
                if text == "the river" {
                    assert_eq!(*offsets, [0, 0, 3, 9], "{form:?}: {answer}");
                }
            }
        }
    }
}

#[tokio::test]
async fn two_turns_are_the_whole_text_in_one() {
    for form in forms() {
        let (_folder, app) = served(form).await;
        let made = session(&app, json!({"text": "the river"})).await;
        let more = json!({"session": made["id"], "ignore_eos": true});
        let first = ok(&app, "/v1/completions", prompt(" and the fox said", more.clone())).await;
        let second = ok(&app, "/v1/completions", prompt("", more)).await;
        let more = json!({"ignore_eos": true, "max_tokens": 16});
        let whole = ok(&app, "/v1/completions", prompt("the river and the fox said", more)).await;
        let ids = |answer: &Value| answer["choices"][0]["token_ids"].as_array().unwrap().clone();
        assert_eq!([ids(&first), ids(&second)].concat(), ids(&whole), "{form:?}");
        let text = app.get(&format!("/v1/sessions/{}/text", made["id"].as_str().unwrap())).await.json();
        let answer = whole["choices"][0]["text"].as_str().unwrap();
        assert_eq!(text["text"], format!("the river and the fox said{answer}"), "{form:?}");

        let made = session(&app, json!({})).await;
        let more = json!({"session": made["id"], "ignore_eos": true});
        let answer = ok(&app, "/v1/completions", prompt("the river", more)).await["choices"][0]["text"].take();
        let messages = app.get(&format!("/v1/sessions/{}/messages", made["id"].as_str().unwrap())).await.json();
        let contents: Vec<_> = messages["data"].as_array().unwrap().iter().map(|message| &message["content"]).collect();
        assert_eq!(contents, [&json!("the river"), &answer], "{form:?}");
    }
}

#[tokio::test]
async fn a_conversation_is_read_like_its_whole_text() {
    for form in forms() {
        let (_folder, app) = served(form).await;
        let made = session(&app, json!({})).await;
        let asked = |content: &str, more: Value| {
            let mut body = json!({"messages": [{"role": "user", "content": content}], "session": made["id"], "max_tokens": 6,
                "temperature": 0, "return_token_ids": true});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body
        };
        // The first answer is empty, so that the conversation consists of the template's text alone.
        let bias = json!({"logit_bias": {"2": 100}});
        let first = ok(&app, "/v1/chat/completions", asked("the fox", bias)).await;
        assert_eq!(first["choices"][0]["message"]["content"], "", "{first}");
        let second = ok(&app, "/v1/chat/completions", asked("Hello 123", json!({"ignore_eos": true}))).await;
        let body = json!({"prompt": "<s>[INST] the fox[/INST]</s>[INST] Hello 123[/INST]", "add_special_tokens": false,
            "max_tokens": 6, "temperature": 0, "ignore_eos": true, "return_token_ids": true});
        let whole = ok(&app, "/v1/completions", body).await;
        assert_eq!(second["choices"][0]["token_ids"].as_array().map(Vec::len), Some(6), "{second}");
        assert_eq!(second["choices"][0]["token_ids"], whole["choices"][0]["token_ids"], "{form:?}: {second} {whole}");
    }
}

#[tokio::test]
async fn an_answer_follows_a_schema_and_a_stream_shows_the_same() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["the fox", "n"], "properties": {
        "the fox": {"enum": ["\u{1f980} \u{e9}t\u{e9}", "b\"c"]}, "n": {"type": "integer", "minimum": 0, "maximum": 999}}});
    for form in forms() {
        let (_folder, app) = served(form).await;
        for seed in 1..5 {
            let format =
                json!({"type": "json_schema", "json_schema": {"name": "fox", "strict": true, "schema": schema}});
            let body = json!({"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 400, "temperature": 1,
                "seed": seed, "response_format": format});
            let answer = ok(&app, "/v1/chat/completions", body.clone()).await;
            let choice = &answer["choices"][0];
            assert_eq!(choice["finish_reason"], "stop", "{form:?}: {answer}");
            let text = choice["message"]["content"].as_str().unwrap();
            let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
            assert!(value["n"].is_u64() && value["the fox"].is_string(), "{text}");

            let mut body = body;
            body["stream"] = true.into();
            let stream = app.post("/v1/chat/completions", body).await.text();
            let pieces = crate::common::events(&stream).into_iter().filter_map(|data| {
                let chunk: Value = serde_json::from_str(data).ok()?;
                Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned())
            });
            assert_eq!(pieces.collect::<String>(), text, "{form:?}");
        }
    }
}

#[tokio::test]
async fn a_text_that_begins_with_the_answer_has_no_added_space() {
    for form in [Form::Folder(Space::First), Form::Gguf(true)] {
        let (_folder, app) = served(form).await;
        let the = tokens(&app, "the", false).await[0].as_u64().unwrap();
        let body = json!({"prompt": [1], "max_tokens": 2, "temperature": 0, "logit_bias": {the.to_string(): 100}, "logprobs": 1});
        let answer = ok(&app, "/v1/completions", body).await;
        let choice = &answer["choices"][0];
        assert_eq!(
            (&choice["text"], &choice["logprobs"]["text_offset"]),
            (&json!("the the"), &json!([0, 3])),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn what_a_file_leaves_out_is_as_in_llama_cpp() {
    let (folder, _) = served(Form::Gguf(true)).await;
    let file = ["bos_token_id", "eos_token_id", "add_space_prefix"]
        .iter()
        .fold(file_of(&folder), |file, key| file.without(&format!("tokenizer.ggml.{key}")));
    let ids = |file: Gguf| {
        let path = folder.path().join("tiny.gguf");
        std::fs::write(&path, file.bytes()).unwrap();
        let (served, thread) = open(&path, &OpenOptions::default()).unwrap();
        let ids = (served.tokenizer.encode("the[INST]the").unwrap(), served.tokenizer.eos().to_vec());
        served.engine.abort();
        thread.join();
        ids
    };
    let add = |file: Gguf, what: &str, add: bool| file.with(&format!("tokenizer.ggml.add_{what}_token"), Bool(add));
    let (given, eos) = ids(file.clone());
    assert_eq!((given[0], given[2], given[1], &eos[..]), (1, 3, given[3], &[2][..]));
    assert_eq!(ids(add(file.clone(), "bos", false)).0, given[1..]);
    assert_eq!(ids(add(file.clone(), "eos", true)).0, [&given[..], &[2]].concat());
    let (bare, _) = ids(file.with("tokenizer.ggml.add_space_prefix", Bool(false)));
    assert_eq!((bare[0], bare[2], bare[1] == bare[3], bare[1] == given[1]), (1, 3, true, false));
}

#[tokio::test]
async fn a_wrong_vocabulary_is_refused_with_its_key() {
    let (folder, _) = served(Form::Gguf(true)).await;
    let file = file_of(&folder);
    let changed = |key: &str, change: &dyn Fn(&mut llamacpp::Value)| {
        let mut file = file.clone();
        let mut values = file.metadata.iter_mut();
        change(&mut values.find(|(known, _)| known == key).unwrap().1);
        file
    };
    let token = |id: usize, token: &[u8]| {
        changed("tokenizer.ggml.tokens", &|value| {
            if let llamacpp::Value::Texts(tokens) = value {
                tokens[id] = token.to_vec();
            }
        })
    };
    let kind = |id: usize, kind: i32| {
        changed("tokenizer.ggml.token_type", &|value| {
            if let Words(kinds) = value {
                kinds[id] = kind;
            }
        })
    };
    let scores = |change: &dyn Fn(&mut Vec<f32>)| {
        changed("tokenizer.ggml.scores", &|value| {
            if let Floats(scores) = value {
                change(scores);
            }
        })
    };
    let served = |file: &Gguf| {
        let path = folder.path().join("tiny.gguf");
        std::fs::write(&path, file.bytes()).unwrap();
        open(&path, &OpenOptions::default())
    };
    assert!(served(&token(300, b"")).is_ok());
    let with = |key: &str, value: llamacpp::Value| file.clone().with(&format!("tokenizer.ggml.{key}"), value);
    for (file, reason) in [
        (file.clone().without("tokenizer.ggml.scores"), "tokenizer.ggml.scores must be given, found none"),
        (
            with("scores", Words(vec![0])),
            "tokenizer.ggml.scores must be a list of 32-bit floats, found a list of numbers",
        ),
        (scores(&|all| all.truncate(419)), "tokenizer.ggml.scores must have 420 numbers, found 419"),
        (scores(&|all| all[300] = f32::NAN), "the score of token 300 must be a finite number, found NaN"),
        (file.clone().without("tokenizer.ggml.token_type"), "tokenizer.ggml.token_type must be given, found none"),
        (with("token_type", Words(vec![1; 3])), "tokenizer.ggml.token_type must have 420 numbers, found 3"),
        (with("token_type", Words(vec![1; 420])), "tokenizer.ggml.tokens: token 1 must be a special token"),
        (kind(15, 1), "must have a token for every byte of a text, and has no <0x0A>"),
        (kind(300, 6), "tokenizer.ggml.tokens: token 300 must be <0x00> to <0xFF>, because it is a byte"),
        (token(300, b"!"), "tokenizer.ggml.tokens: tokens 261 and 300 have the same text"),
        (kind(355, 5), "must have a token for a space, and has no \u{2581}"),
        (token(300, b"\xff"), "tokenizer.ggml.tokens: token 300 must be UTF-8"),
        (with("bos_token_id", U32(300)), "tokenizer.ggml.tokens: token 300 must be a special token"),
        (with("bos_token_id", U32(u32::MAX)), "bos_token_id must be"),
        (with("eos_token_id", U32(420)), "eos_token_id must be"),
        (with("add_space_prefix", U32(1)), "tokenizer.ggml.add_space_prefix must be true or false, found 1"),
    ] {
        let found = served(&file).err().unwrap().to_string();
        assert!(found.contains("tiny.gguf") && found.contains(reason), "{found}\nexpected: {reason}");
    }
}
