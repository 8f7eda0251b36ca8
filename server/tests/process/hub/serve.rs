//! A server whose model is on a hub.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::json;

use super::server::{COMMIT, Files, Hub};
use super::{Place, WEIGHTS, text};
use crate::live::{Request, get};

/// After which a test fails instead of waiting for ever.
const PATIENCE: Duration = Duration::from_mins(2);

/// A server that is killed at the end of its test, and its log.
struct Serving {
    child: Child,
    lines: Box<dyn Iterator<Item = String>>,
}

impl Serving {
    fn start(place: &Place, args: &[&str]) -> Self {
        let mut command = place.command();
        command
            .args(["serve", "--port", "0", "--device", "cpu"])
            .args(args)
            .arg("--data-dir")
            .arg(place.home.path().join("data"));
        let mut child = command.env("TIDEGATE_LOG", "debug").stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        Self { child, lines: Box::new(lines) }
    }

    /// What the log says between these words.
    fn logged(&mut self, start: &str, end: char) -> String {
        let mut log = Vec::new();
        for line in self.lines.by_ref() {
            if let Some((_, rest)) = line.split_once(start) {
                return rest.split(end).next().unwrap().to_owned();
            }
            log.push(line);
        }
        panic!("no {start} in {log:#?}");
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A hub that says when it is asked for the weights, and sends them when it is told to.
fn slow() -> (Hub, Receiver<()>, Sender<()>) {
    let ((asked, is_asked), (go, may_go)) = (channel(), channel());
    let gate = Arc::new(Mutex::new((asked, may_go)));
    let hub = Hub::changed(Files::tiny(), move |request, reply| {
        if request.path.ends_with(WEIGHTS) {
            let gate = gate.lock().unwrap();
            gate.0.send(()).unwrap();
            // The test may have ended.
            let _ = gate.1.recv();
        }
        reply
    });
    (hub, is_asked, go)
}

#[test]
fn a_server_answers_while_it_downloads_its_model_and_then_serves_it() {
    let (hub, asked, go) = slow();
    let place = Place::new(hub);
    let mut server = Serving::start(&place, &["--model", "org/tiny"]);
    let address = server.logged("bound to ", ';');
    asked.recv_timeout(PATIENCE).unwrap();
    let health = get(&address, "/health").unwrap();
    assert!(health.status == 503 && health.text().contains("loading"), "{}", health.text());
    go.send(()).unwrap();
    server.logged("listening on ", ',');
    let models = get(&address, "/v1/models").unwrap().json();
    assert_eq!(models["data"][0]["id"], "org/tiny");
    let body = json!({"model": "org/tiny", "prompt": "Once", "max_tokens": 3});
    let reply = Request::json("POST", "/v1/completions", &body).send(&address).unwrap();
    assert_eq!((reply.status, reply.json()["model"].as_str()), (200, Some("org/tiny")), "{}", reply.text());
    server.signal("-TERM");
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn a_signal_ends_a_download_at_once_and_the_next_start_goes_on() {
    let (hub, asked, go) = slow();
    let place = Place::new(hub);
    let mut server = Serving::start(&place, &["--model", "org/tiny"]);
    server.logged("bound to ", ';');
    asked.recv_timeout(PATIENCE).unwrap();
    server.signal("-INT");
    // The hub still waits, so nothing but the signal ends the server.
    server.logged("received SIGINT while loading", '.');
    assert!(server.child.wait().unwrap().success());
    let before = place.hub.asked().len();
    go.send(()).unwrap();
    go.send(()).unwrap();
    place.pulled("org/tiny");
    let more: Vec<String> = place.hub.asked()[before..].iter().map(|asked| asked.path.clone()).collect();
    assert_eq!(more.len(), 2, "the small files are there: {more:?}");
}

#[test]
fn names_on_a_hub_are_taken_where_paths_are() {
    let place = Place::new(Hub::start(Files::tiny()));
    let mut server = Serving::start(&place, &["--model", "org/tiny=mine", "--model", &format!("org/tiny@{COMMIT}")]);
    let address = server.logged("listening on http://", ',');
    let models = get(&address, "/v1/models").unwrap().json();
    let names: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["mine", "org/tiny"]);
    drop(server);

    let mut command = place.command();
    command.args(["generate", "Once", "--model", "org/tiny", "--device", "cpu", "--max-tokens", "2", "--ignore-eos"]);
    let output = command.output().unwrap();
    assert!(text(&output.stdout).starts_with("Once"), "{}", text(&output.stderr));

    // A path that exists is meant, whatever the hub has.
    let asked = place.hub.asked().len();
    std::fs::create_dir_all(place.home.path().join("org/tiny")).unwrap();
    let mut command = place.command();
    let output = command.args(["generate", "Once", "--model", "org/tiny", "--device", "cpu"]).output().unwrap();
    assert!(text(&output.stderr).contains("error: org/tiny/config.json: "), "{}", text(&output.stderr));
    assert_eq!(place.hub.asked().len(), asked);
}

#[test]
fn two_processes_download_a_file_once() {
    let (hub, asked, go) = slow();
    let place = Place::new(hub);
    let pull =
        || place.command().args(["pull", "org/tiny"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = pull();
    asked.recv_timeout(PATIENCE).unwrap();
    let mut second = pull();
    let lines = BufReader::new(second.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut lines = lines.skip_while(|line| !line.contains("waiting for another process"));
    assert!(lines.next().is_some(), "the second process does not wait");
    go.send(()).unwrap();
    assert!(first.wait().unwrap().success() && second.wait().unwrap().success());
    assert_eq!(place.hub.asked_for(WEIGHTS).len(), 1);
}
