//! A server whose model comes from a hub.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::native::{beside, pth};
use super::server::{COMMIT, Files, Hub};
use super::{Place, WEIGHTS, text};
use crate::live::{Request, get};

/// How long a test waits before it fails.
const PATIENCE: Duration = Duration::from_mins(2);

/// A process that is killed at the end of its test, and its log. A thread reads the log, so that a full pipe does not
/// block the process.
struct Running {
    child: Child,
    lines: Receiver<String>,
    log: Vec<String>,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let (sender, receiver) = channel();
        // Sending fails if the test has ended.
        thread::spawn(move || lines.for_each(|line| drop(sender.send(line))));
        Self { child, lines: receiver, log: Vec::new() }
    }

    fn serve(place: &Place, args: &[&str]) -> Self {
        let mut command = place.command();
        command.args(["serve", "--port", "0", "--device", "cpu"]).args(args);
        command.arg("--data-dir").arg(place.home.path().join("data")).env("TIDEGATE_LOG", "debug");
        Self::start(&mut command)
    }

    /// Waits for a log line with `start`, and returns what follows, up to `end`.
    fn logged(&mut self, start: &str, end: char) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let Ok(line) = self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) else {
                panic!("no {start} in {:#?}", self.log);
            };
            self.log.push(line.clone());
            if let Some((_, rest)) = line.split_once(start) {
                return rest.split(end).next().unwrap().to_owned();
            }
        }
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }

    /// Waits until the process ends, and returns its status.
    fn ended(&mut self) -> ExitStatus {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            if Instant::now() > until {
                self.log.extend(self.lines.try_iter());
                panic!("the process does not end: {:#?}", self.log);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Holds requests until it is opened. It stays open, because a process may repeat a request.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn wait(&self) {
        drop(self.0.1.wait_while(self.0.0.lock().unwrap(), |open| !*open).unwrap());
    }
}

/// Starts a hub that reports when the weights are requested, and sends them once its gate is open.
fn slow() -> (Hub, Receiver<()>, Gate) {
    let ((asked, is_asked), gate) = (channel(), Gate::default());
    let its_gate = gate.clone();
    let hub = Hub::changed(Files::tiny(), move |request, reply| {
        if request.path.ends_with(WEIGHTS) {
            // Sending fails if the test has ended.
            let _ = asked.send(());
            its_gate.wait();
        }
        reply
    });
    (hub, is_asked, gate)
}

#[test]
fn a_server_answers_while_it_downloads_its_model_and_then_serves_it() {
    let (hub, asked, gate) = slow();
    let place = Place::new(hub);
    let mut server = Running::serve(&place, &["--model", "org/tiny"]);
    let address = server.logged("bound to ", ';');
    asked.recv_timeout(PATIENCE).unwrap();
    let health = get(&address, "/health").unwrap();
    assert!(health.status == 503 && health.text().contains("loading"), "{}", health.text());
    gate.open();
    server.logged("listening on ", ',');
    let models = get(&address, "/v1/models").unwrap().json();
    assert_eq!(models["data"][0]["id"], "org/tiny");
    // The server keeps its own files private, but not what it downloads.
    let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode();
    let (file, folder) = (place.home.path().join("a file"), place.home.path().join("a folder"));
    std::fs::write(&file, "").unwrap();
    std::fs::create_dir(&folder).unwrap();
    let (file, folder, blobs) = (mode(file), mode(folder), place.model().join("blobs"));
    for path in [place.home.path().join("hub"), place.model().join("refs"), blobs.clone()] {
        assert_eq!(mode(path), folder);
    }
    for path in [place.model().join("refs/main"), blobs.join(Files::tiny().id(WEIGHTS))] {
        assert_eq!(mode(path), file);
    }
    assert_eq!(mode(lock_path(place.home.path(), &Files::tiny().id(WEIGHTS))) & 0o777, 0o664);
    let body = json!({"model": "org/tiny", "prompt": "Once", "max_tokens": 3});
    let reply = Request::json("POST", "/v1/completions", &body).send(&address).unwrap();
    assert_eq!((reply.status, reply.json()["model"].as_str()), (200, Some("org/tiny")), "{}", reply.text());
    server.signal("-TERM");
    assert!(server.ended().success());
}

#[test]
fn a_signal_ends_a_download_at_once_and_the_next_start_goes_on() {
    let (hub, asked, gate) = slow();
    let place = Place::new(hub);
    let mut server = Running::serve(&place, &["--model", "org/tiny"]);
    server.logged("bound to ", ';');
    asked.recv_timeout(PATIENCE).unwrap();
    server.signal("-INT");
    // The gate is still closed, so only the signal can end the server.
    server.logged("received SIGINT while loading", '.');
    assert!(server.ended().success());
    let before = place.hub.asked().len();
    gate.open();
    place.pulled("org/tiny");
    let more: Vec<String> = place.hub.asked()[before..].iter().map(|asked| asked.path.clone()).collect();
    let needed = |path: &String| path.starts_with("/api/") || path.ends_with(WEIGHTS);
    assert!(more.iter().all(needed), "the small files are there: {more:?}");
}

#[test]
fn names_on_a_hub_are_taken_where_paths_are() {
    let place = Place::new(Hub::start(Files::tiny()));
    let mut server = Running::serve(&place, &["--model", "org/tiny=mine", "--model", &format!("org/tiny@{COMMIT}")]);
    let address = server.logged("listening on http://", ',');
    let models = get(&address, "/v1/models").unwrap().json();
    let names: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["mine", "org/tiny"]);
    drop(server);

    let mut command = place.command();
    command.args(["generate", "Once", "--model", "org/tiny", "--device", "cpu", "--max-tokens", "2", "--ignore-eos"]);
    let output = command.output().unwrap();
    assert!(text(&output.stdout).starts_with("Once"), "{}", text(&output.stderr));

    // A path that exists takes precedence over a name on the hub.
    let asked = place.hub.asked().len();
    std::fs::create_dir_all(place.home.path().join("org/tiny")).unwrap();
    let mut command = place.command();
    let output = command.args(["generate", "Once", "--model", "org/tiny", "--device", "cpu"]).output().unwrap();
    assert!(text(&output.stderr).contains("error: org/tiny/config.json: "), "{}", text(&output.stderr));
    assert_eq!(place.hub.asked().len(), asked);
}

#[test]
fn a_pth_of_a_hub_is_served_with_the_vocabulary_of_another_model_alone_and_as_one_of_several() {
    let place = Place::new(beside(pth(), Files::vocabulary()));
    for args in [&["--model", "org/tiny:a.pth"][..], &["--model", "org/tiny", "--model", "org/tiny:a.pth=b"]] {
        let mut server = Running::serve(&place, args);
        let address = server.logged("listening on http://", ',');
        let body = json!({"prompt": " the fox said:", "max_tokens": 3, "temperature": 0, "ignore_eos": true});
        let reply = Request::json("POST", "/v1/completions", &body).send(&address).unwrap();
        assert_eq!((reply.status, reply.json()["model"].as_str()), (200, Some("org/tiny")), "{}", reply.text());
        assert_eq!(reply.json()["usage"]["completion_tokens"], 3);
    }
}

#[test]
fn a_process_waits_for_another_that_downloads_the_same_file() {
    let (files, place) = (Files::tiny(), Place::new(Hub::start(Files::tiny())));
    let id = files.id(WEIGHTS);
    let locked = lock_file(&place, &id);
    locked.lock().unwrap();
    let mut pull = Running::start(place.command().args(["pull", "org/tiny"]).stdout(Stdio::null()));
    pull.logged("waiting for another process", ',');
    std::fs::write(place.model().join("blobs").join(&id), &files.0[WEIGHTS]).unwrap();
    drop(locked);
    assert!(pull.ended().success());
    assert!(place.hub.asked_for(WEIGHTS).is_empty(), "the file is downloaded twice");
}

#[test]
fn a_file_is_locked_while_it_is_downloaded() {
    let home = tempfile::tempdir().unwrap();
    let (id, folder) = (Files::tiny().id(WEIGHTS), home.path().to_owned());
    let hub = Hub::changed(Files::tiny(), move |request, reply| {
        if request.path.ends_with(WEIGHTS) {
            let other = File::open(lock_path(&folder, &id)).unwrap();
            assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)), "it is not locked");
        }
        reply
    });
    let place = Place { home, hub };
    place.pulled("org/tiny");
    assert_eq!(place.hub.asked_for(WEIGHTS).len(), 1);
    lock_file(&place, &Files::tiny().id(WEIGHTS)).try_lock().unwrap();
}

/// Returns the file that a process locks while it downloads these contents, the same as in Python's `huggingface_hub`.
fn lock_path(home: &Path, id: &str) -> PathBuf {
    home.join("hub/.locks/models--org--tiny").join(format!("{id}.lock"))
}

fn lock_file(place: &Place, id: &str) -> File {
    let path = lock_path(place.home.path(), id);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    OpenOptions::new().create(true).truncate(false).write(true).open(path).unwrap()
}
