//! The cost of a turn in conversations of any length, over HTTP on the real server: with the state in memory, with the
//! state on disk, and with the history sent again; then many sessions at once. Prints tables.
//!
//! `cargo bench -p tidegate-server --bench resume -- [--quick] [--part long|many] [--out FILE.jsonl]`;
//! `tidegate-experiments plot-resume FILE.jsonl` draws it. `TIDEGATE_SESSIONS` sets the number of sessions.

#[path = "../../tests/live/mod.rs"]
mod live;

mod many;

use std::path::Path;
use std::time::{Duration, Instant};

use live::{Request, Server};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

/// Tokens of one append.
const PIECE: usize = 100_000;

/// New tokens of a turn.
const NEW: usize = 16;

/// No shared prefixes, and no limit on length.
const FLAGS: [&str; 8] = [
    "--prefix-budget",
    "0",
    "--max-prompt-tokens",
    "2000000",
    "--max-body-bytes",
    "67108864",
    "--log",
    "warn,tidegate=info",
];

/// One length, and times to the first token of a turn after it, in milliseconds.
struct Case {
    tokens: usize,
    memory: Vec<f64>,
    disk: Vec<f64>,
    again: Vec<f64>,
}

impl Case {
    /// The case as a line of JSON, for `tidegate-experiments plot-resume`.
    fn line(&self) -> String {
        let Self { tokens, memory, disk, again } = self;
        format!("{}\n", json!({"tokens": tokens, "memory": memory, "disk": disk, "again": again}))
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn percentile(times: &[f64], percent: usize) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted[(sorted.len() - 1) * percent / 100]
}

fn median(times: &[f64]) -> f64 {
    percentile(times, 50)
}

fn spread(times: &[f64]) -> String {
    format!("{:.1} ({:.1}–{:.1})", median(times), percentile(times, 0), percentile(times, 100))
}

fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or("unknown").to_owned()
}

/// Times to the first text of a turn and to its end, in milliseconds, and the session in its answer.
fn turn(server: &Server, mut body: Value) -> (f64, f64, Value) {
    for (name, value) in [("max_tokens", json!(4)), ("temperature", json!(0)), ("ignore_eos", json!(true))] {
        body[name] = value;
    }
    body["stream"] = json!(true);
    let reply = Request::json("POST", "/v1/completions", &body).send(&server.address).unwrap();
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(reply.text().ends_with("[DONE]\n\n"), "{}", reply.text());
    let session = reply.chunks().into_iter().rev().find_map(|chunk| chunk.get("session").cloned());
    (milliseconds(reply.first().unwrap()), milliseconds(reply.whole), session.unwrap_or_default())
}

/// Times of turns on forks of `session`, so that each starts from the same version, restored from `tier`.
fn resumed(server: &Server, session: &str, new: &[u32], tier: &str, times: usize) -> Vec<f64> {
    let one = || {
        let fork = server.json("POST", &format!("/v1/sessions/{session}/fork"), &json!({}));
        let id = fork["data"][0]["id"].as_str().unwrap();
        let (first, _, info) = turn(server, json!({"session": id, "prompt": new}));
        assert_eq!((&info["tier"], &info["recomputed_tokens"]), (&json!(tier), &json!(0)), "{info}");
        server.json("DELETE", &format!("/v1/sessions/{id}"), &Value::Null);
        first
    };
    one(); // warms the caches
    (0..times).map(|_| one()).collect()
}

fn measure(data: &Path, lengths: &[usize]) -> Vec<Case> {
    let mut random = StdRng::seed_from_u64(1);
    let longest = lengths.iter().max().copied().unwrap_or(0);
    // Any tokens but special ones: the text does not change the cost.
    let text: Vec<u32> = (0..longest + NEW).map(|_| random.random_range(300..2000)).collect();
    let server = Server::start(data, &FLAGS);
    let id = |session: &Value| session["id"].as_str().unwrap().to_owned();
    let grown = id(&server.json("POST", "/v1/sessions", &json!({"seed": 1})));
    let (mut sessions, mut cases, mut read) = (Vec::new(), Vec::new(), 0);
    let began = Instant::now();
    for tokens in lengths {
        while read < *tokens {
            let piece = &text[read..(read + PIECE).min(*tokens)];
            server.json("POST", &format!("/v1/sessions/{grown}/append"), &json!({"tokens": piece}));
            read += piece.len();
        }
        let fork = server.json("POST", &format!("/v1/sessions/{grown}/fork"), &json!({}));
        sessions.push(id(&fork["data"][0]));
    }
    eprintln!("{read} tokens appended in {:.1?}", began.elapsed());
    for (tokens, session) in lengths.iter().zip(&sessions) {
        let memory = resumed(&server, session, &text[..NEW], "memory", 15);
        // Long texts take minutes and are measured once.
        let times = [5, 1][usize::from(*tokens > 100_000)];
        let again = (0..times).map(|_| turn(&server, json!({"prompt": &text[..tokens + NEW]})).0).collect();
        cases.push(Case { tokens: *tokens, memory, disk: Vec::new(), again });
        eprintln!("{tokens} tokens resent, {:.1?}", began.elapsed());
    }
    server.kill();
    // Without memory for states every turn restores from disk.
    let server = Server::start(data, &[&FLAGS[..], &["--ram-budget", "0"]].concat());
    for (case, session) in cases.iter_mut().zip(&sessions) {
        case.disk = resumed(&server, session, &text[..NEW], "disk", 15);
    }
    cases
}

fn table(cases: &[Case]) {
    println!("\nTime to the first token of a turn of {NEW} new tokens, ms: median (min–max)\n");
    println!("| tokens before it | from memory | from disk | history sent again | again : disk |");
    println!("| ---: | ---: | ---: | ---: | ---: |");
    for Case { tokens, memory, disk, again } in cases {
        let ratio = median(again) / median(disk);
        println!("| {tokens} | {} | {} | {} | {ratio:.0} |", spread(memory), spread(disk), spread(again));
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |flag: &str| arguments.iter().skip_while(|argument| *argument != flag).nth(1);
    let quick = arguments.iter().any(|argument| argument == "--quick");
    let wanted = |part: &str| given("--part").is_none_or(|given| given == part);
    let lengths: &[usize] = if quick { &[1_000, 8_000] } else { &[1_000, 8_000, 32_000, 128_000, 1_000_000] };
    let folder = tempfile::tempdir().unwrap();
    let data = |name: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path
    };
    if wanted("long") {
        println!("load: {}", load());
        let cases = measure(&data("long"), lengths);
        table(&cases);
        if let Some(out) = given("--out") {
            std::fs::write(out, cases.iter().map(Case::line).collect::<String>()).unwrap();
            println!("\nwritten to {out}");
        }
    }
    if wanted("many") {
        let sessions = std::env::var("TIDEGATE_SESSIONS").ok().map(|count| count.parse().unwrap());
        println!("\nload: {}", load());
        many::measure(&data("many"), sessions.unwrap_or(if quick { 200 } else { 10_000 }));
    }
    println!("load at the end: {}", load());
}
