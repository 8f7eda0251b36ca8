//! A server with several models: its flags, SIGHUP, and sessions after a restart.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::live::{Server, get};

/// Writes a copy of the shipped checkpoint. Text in `more` changes its config's bytes, which makes it another model.
fn write(folder: &Path, more: &str) {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/checkpoints/tidegate-tiny");
    std::fs::create_dir_all(folder).unwrap();
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::os::unix::fs::symlink(shipped.join(name).canonicalize().unwrap(), folder.join(name)).unwrap();
    }
    let config = std::fs::read_to_string(shipped.join("config.json")).unwrap();
    std::fs::write(folder.join("config.json"), config + more).unwrap();
}

fn names(server: &Server) -> Vec<String> {
    let models = get(&server.address, "/v1/models").unwrap().json();
    let name = |model: &Value| format!("{} {}", model["id"].as_str().unwrap(), model["state"].as_str().unwrap());
    models["data"].as_array().unwrap().iter().map(name).collect()
}

fn signal(server: &Server, name: &str) {
    let sent = Command::new("kill").args([name, &server.process().to_string()]).status();
    assert!(sent.unwrap().success());
}

#[test]
fn several_models_are_listed_again_on_sighup_and_their_sessions_outlast_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (data, models) = (folder.path().join("data"), folder.path().join("models"));
    write(&folder.path().join("one"), "");
    write(&models.join("x"), "\n");
    let given = format!("{}=org/given", folder.path().join("one").display());
    let flags = ["--device", "cpu", "--model", &given, "--models-dir", models.to_str().unwrap(), "--any-model-name"];
    let mut server = Server::start(&data, &flags);
    assert_eq!(names(&server), ["org/given loaded", "x loaded"]);
    let body = json!({"prompt": "Once", "max_tokens": 1, "model": "tgi"});
    assert_eq!(server.json("POST", "/v1/completions", &body)["model"], "org/given");
    let session = server.json("POST", "/v1/sessions", &json!({"model": "x", "text": "Once"}));
    let path = format!("/v1/sessions/{}", session["id"].as_str().unwrap());

    write(&models.join("y"), "\n\n");
    signal(&server, "-HUP");
    for _ in 0..3000 {
        if names(&server).len() == 3 {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(names(&server), ["org/given loaded", "x loaded", "y loaded"]);
    signal(&server, "-TERM");
    server.wait();

    let server = Server::start(&data, &flags);
    assert_eq!(get(&server.address, &path).unwrap().json()["version"], session["version"]);
    let body = json!({"prompt": " more", "max_tokens": 1, "session": session["id"]});
    assert_eq!(server.json("POST", "/v1/completions", &body)["model"], "x");
}

#[test]
fn models_with_the_same_name_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("one"), "");
    let path = folder.path().join("one");
    let ran = Command::new(env!("CARGO_BIN_EXE_tidegate")).arg("--model").arg(&path).arg("--model").arg(&path).output();
    let ran = ran.unwrap();
    let error = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(!ran.status.success() && error.contains("two models are named one"), "{error}");
}
