//! An abusive client. Until it is dropped, it does at the same time everything that has ever cost other clients their
//! answers.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use serde_json::{Value, json};

use super::Request;

/// Number of connections that are opened and never used.
const IDLE_SOCKETS: usize = 600;
/// How long a client waits before it disconnects in the middle of an answer.
const IMPATIENCE: Duration = Duration::from_millis(500);
/// Length of the longest prompts in bytes, just below the default of `--max-body-bytes`.
const LARGEST_PROMPT: usize = (4 << 20) - 1024;

/// Number of answers by kind of abuse and status. Status 0 is a connection that ended without an answer.
pub(crate) type Tally = BTreeMap<(&'static str, u16), usize>;

/// The running abuse. It ends when this is dropped.
pub(crate) struct Abuse {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    address: String,
    key: String,
    ended: AtomicBool,
    /// Numbers the requests, so that no two are equal.
    count: AtomicUsize,
    tally: Mutex<Tally>,
}

impl Abuse {
    /// Starts every kind of abuse against the server at `address`, all with the API key `key`.
    pub(crate) fn start(address: &str, key: &str) -> Self {
        let shared = Arc::new(Shared {
            address: address.to_owned(),
            key: key.to_owned(),
            ended: AtomicBool::new(false),
            count: AtomicUsize::new(0),
            tally: Mutex::default(),
        });
        let kinds: [fn(&Shared); 12] = [
            slow_grammars,
            slow_grammars,
            |shared| oversized(shared, "/v1/completions", |text| json!({"prompt": text, "max_tokens": 1})),
            |shared| oversized(shared, "/tokenize", |text| json!({"content": text})),
            |shared| {
                oversized(
                    shared,
                    "/v1/messages/count_tokens",
                    |text| json!({"messages": [{"role": "user", "content": text}]}),
                );
            },
            |shared| oversized(shared, "/v1/sessions", |text| json!({"text": text})),
            many_texts,
            many_texts,
            endless_turns,
            receipts,
            log_probabilities,
            idle_sockets,
        ];
        let threads = kinds.map(|kind| {
            let shared = Arc::clone(&shared);
            spawn(move || {
                while !shared.has_ended() {
                    kind(&shared);
                }
            })
        });
        Self { shared, threads: threads.into() }
    }

    /// Returns the answers so far.
    pub(crate) fn tally(&self) -> Tally {
        self.shared.tally.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Abuse {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic here would hide the failure that ended the test.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    fn next(&self) -> usize {
        self.count.fetch_add(1, Ordering::Relaxed)
    }

    fn request(&self, method: &str, path: &str, body: &Value) -> Request {
        Request::json(method, path, body).header("authorization", &format!("Bearer {}", self.key))
    }

    /// Sends a request, counts its answer, and returns the answer's body.
    fn send(&self, kind: &'static str, request: &Request) -> Value {
        let reply = request.send(&self.address).ok();
        let status = reply.as_ref().map_or(0, |reply| reply.status);
        *self.tally.lock().unwrap_or_else(PoisonError::into_inner).entry((kind, status)).or_default() += 1;
        if status != 200 {
            // Even an abusive client does not spin.
            sleep(Duration::from_millis(5));
        }
        reply.and_then(|reply| serde_json::from_slice(&reply.body).ok()).unwrap_or_default()
    }

    /// Sends a request, and disconnects after a while without reading the answer.
    fn send_and_leave(&self, kind: &'static str, request: &Request) {
        if let Ok(mut socket) = TcpStream::connect(&self.address)
            && socket.write_all(&request.bytes(&self.address)).is_ok()
        {
            *self.tally.lock().unwrap_or_else(PoisonError::into_inner).entry((kind, 0)).or_default() += 1;
            sleep(IMPATIENCE);
        }
    }
}

/// Sends a regular expression that takes minutes and gigabytes to compile.
fn slow_grammars(shared: &Shared) {
    let regex = format!("{}{}x", ".*".repeat(7900), shared.next());
    let body = json!({"prompt": "Once", "max_tokens": 4, "regex": regex});
    shared.send("grammars", &shared.request("POST", "/v1/completions", &body));
}

/// Sends a prompt of megabytes.
fn oversized(shared: &Shared, path: &'static str, body: fn(String) -> Value) {
    shared.send(path, &shared.request("POST", path, &body("1".repeat(LARGEST_PROMPT))));
}

/// Requests far more texts at once than this client's share of the slots.
fn many_texts(shared: &Shared) {
    let body = json!({"prompt": "Once", "max_tokens": 15_000, "n": 128, "ignore_eos": true});
    shared.send_and_leave("many texts", &shared.request("POST", "/v1/completions", &body));
}

/// Starts a turn that continues without its client, and deletes the session half of the time.
fn endless_turns(shared: &Shared) {
    let created = shared.send("sessions", &shared.request("POST", "/v1/sessions", &json!({"text": "Once"})));
    let Some(id) = created["id"].as_str() else { return };
    let body = json!({"session": id, "max_tokens": 1_000_000, "ignore_eos": true, "stream": true, "on_disconnect": "continue"});
    shared.send_and_leave("endless turns", &shared.request("POST", "/v1/completions", &body));
    if shared.next().is_multiple_of(2) {
        shared.send("deletions", &shared.request("DELETE", &format!("/v1/sessions/{id}"), &Value::Null));
    }
}

/// Requests large results that are stored under idempotency keys.
fn receipts(shared: &Shared) {
    let id = shared.next();
    let body = json!({"prompt": "Once upon a time ".repeat(2000), "max_tokens": 1, "echo": true});
    let request = shared.request("POST", "/v1/completions", &body).header("idempotency-key", &format!("abuse-{id}"));
    shared.send("receipts", &request);
}

/// Requests answers with 20 alternatives for every token.
fn log_probabilities(shared: &Shared) {
    let body = json!({"prompt": "Once", "max_tokens": 12_000, "ignore_eos": true, "logprobs": 20, "n": 2});
    shared.send_and_leave("log probabilities", &shared.request("POST", "/v1/completions", &body));
}

/// Opens connections that never send anything.
fn idle_sockets(shared: &Shared) {
    let sockets: Vec<_> = (0..IDLE_SOCKETS).filter_map(|_| TcpStream::connect(&shared.address).ok()).collect();
    *shared.tally.lock().unwrap_or_else(PoisonError::into_inner).entry(("idle sockets", 0)).or_default() +=
        sockets.len();
    for _ in 0..20 {
        if shared.has_ended() {
            break;
        }
        sleep(IMPATIENCE);
    }
}
