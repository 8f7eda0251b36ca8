//! Fairness on the real server with default settings: one key abuses it in every known way at once, while another sends
//! short requests.

use std::path::Path;

use serde_json::{Value, json};

use crate::live::abuse::Abuse;
use crate::live::{Reply, Request, Server};

const POLITE: &str = "polite-key-0123456789";
const ABUSIVE: &str = "abusive-key-0123456789";

/// Minimum number of requests of the polite key.
const REQUESTS: usize = 40;

/// Maximum number of requests of the polite key.
const MOST_REQUESTS: usize = 50 * REQUESTS;

/// Bound on resident memory with default settings, as documented in docs/operations.md.
const MEMORY_KIB: u64 = 1 << 20;

#[test]
fn an_abusive_key_costs_others_nothing_and_the_server_no_more_than_its_bound() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.json");
    let file = json!({"keys": [
        {"name": "polite", "key": POLITE, "scopes": ["generate", "sessions", "metrics"]},
        {"name": "abusive", "key": ABUSIVE},
    ]});
    std::fs::write(&keys, file.to_string()).unwrap();
    let server = Server::start(&folder.path().join("data"), &["--api-keys-file", keys.to_str().unwrap()]);
    let abuse = Abuse::start(&server.address, ABUSIVE);
    let kinds = ["grammars", "/v1/completions", "/tokenize", "many texts", "endless turns", "receipts", "idle sockets"];
    let unseen = || {
        let tally = abuse.tally();
        kinds.into_iter().filter(|kind| !tally.keys().any(|(name, _)| name == kind)).collect::<Vec<_>>()
    };
    // The polite key is served so much faster that it may need more requests until all kinds of abuse have an answer.
    for n in (0..MOST_REQUESTS).take_while(|n| *n < REQUESTS || !unseen().is_empty()) {
        let reply = polite(&server, n);
        assert_eq!(reply.status, 200, "request {n}: {}", reply.text());
        assert_eq!(reply.json()["usage"]["completion_tokens"], 8, "request {n}: {}", reply.text());
    }
    assert_eq!(unseen(), [""; 0], "no request of these kinds has ended");
    let tally = abuse.tally();
    let served: Vec<_> = tally.iter().filter(|((_, status), _)| *status >= 500).collect();
    drop(abuse);
    let peak = peak_memory(server.process());
    println!("{tally:?}; {peak} KiB at most");
    assert!(peak < MEMORY_KIB, "{peak} KiB were resident");
    assert!(served.iter().all(|((_, status), _)| *status == 503), "an error of the server: {tally:?}");
}

/// Sends a short request; every fourth has a grammar that the server has not seen.
fn polite(server: &Server, n: usize) -> Reply {
    let mut body = json!({"prompt": format!("Once upon a time, {n}"), "max_tokens": 8, "seed": n});
    // Neither text can end before its eighth token.
    if n.is_multiple_of(4) {
        body["regex"] = Value::from(format!("[a-z ]{{200}}{n}"));
    } else {
        body["ignore_eos"] = Value::from(true);
    }
    let request = Request::json("POST", "/v1/completions", &body).header("authorization", &format!("Bearer {POLITE}"));
    request.send(&server.address).unwrap()
}

/// Returns the peak resident memory of a process, in KiB.
fn peak_memory(process: u32) -> u64 {
    let status = std::fs::read_to_string(Path::new("/proc").join(process.to_string()).join("status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
