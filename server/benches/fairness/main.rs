//! What one API key's abuse costs another key: latencies of short streamed requests beside another polite key, and
//! beside a key that does at once everything in `tests/live/abuse.rs`. The two neighbours alternate, on one server with
//! default settings; then the server's peak of resident memory. Prints a table.
//!
//! `cargo bench -p tidegate-server --bench fairness -- [--rounds N] [--requests N] [--abuse-nice N]`. The clients run on the
//! same cores. Those of the abuse have the lowest priority, since others would have machines of their own; with `--abuse-nice
//! 0` they compete with the server.

#[path = "../../tests/live/mod.rs"]
mod live;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep, spawn};
use std::time::Duration;

use live::abuse::{Abuse, Tally};
use live::{Request, Server};
use serde_json::json;

const POLITE: &str = "polite-key-0123456789";
const NEIGHBOUR: &str = "neighbour-key-0123456789";
const ABUSIVE: &str = "abusive-key-0123456789";

/// The number of the neighbour's first request, for each round.
const NEIGHBOURS: usize = 1 << 20;

/// Tokens of an answer.
const TOKENS: usize = 32;

/// Highest acceptable ratio of the 99th percentiles.
const TARGET: f64 = 2.0;

/// Times in milliseconds.
#[derive(Default)]
struct Latencies {
    first: Vec<f64>,
    between: Vec<f64>,
    refused: usize,
}

impl Latencies {
    /// Sends one streamed request with the key `key`. A quarter of them, with even numbers as with odd ones, have a grammar that
    /// the server has not seen.
    fn request(&mut self, server: &Server, key: &str, n: usize) {
        let mut body = json!({"prompt": format!("Once upon a time, {n}"), "max_tokens": TOKENS, "stream": true});
        // Neither text can end before its last token.
        if (n / 2).is_multiple_of(4) {
            body["regex"] = json!(format!("[a-z ]{{500}}{n}"));
        } else {
            body["ignore_eos"] = json!(true);
        }
        let request = Request::json("POST", "/v1/completions", &body).header("authorization", &format!("Bearer {key}"));
        let reply = request.send(&server.address).expect("the server answers");
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        match reply.arrivals.split_first() {
            Some((first, _)) if reply.status == 200 => {
                self.first.push(milliseconds(*first));
                self.between
                    .extend(reply.arrivals.windows(2).map(|pair| milliseconds(pair[1].saturating_sub(pair[0]))));
            }
            _ => self.refused += 1,
        }
    }
}

fn percentile(times: &[f64], percent: usize) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get((sorted.len().max(1) - 1) * percent / 100).copied().unwrap_or(f64::NAN)
}

/// A number after its flag; flags that Cargo passes are ignored.
fn flag(name: &str, default: usize) -> usize {
    let mut args = std::env::args().skip_while(|arg| arg != name);
    args.nth(1).map_or(default, |value| value.parse().expect("a number after the flag"))
}

/// Starts the abuse with clients that are so `nice` to others.
fn start_abuse(address: &str, nice: i32) -> Abuse {
    let address = address.to_owned();
    // New threads get the priority of the one that starts them.
    let starting = spawn(move || {
        rustix::process::nice(nice).expect("a priority can be lowered");
        Abuse::start(&address, ABUSIVE)
    });
    starting.join().expect("the abuse starts")
}

/// A value of /proc/PID/status in MiB.
fn memory(server: &Server, name: &str) -> u64 {
    let path = Path::new("/proc").join(server.process().to_string()).join("status");
    let status = std::fs::read_to_string(path).unwrap_or_default();
    let value =
        status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    value.unwrap_or(0) / 1024
}

fn main() {
    let (rounds, requests, nice) = (flag("--rounds", 5), flag("--requests", 100), flag("--abuse-nice", 19));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let keys = folder.path().join("keys.json");
    let named = [("polite", POLITE), ("neighbour", NEIGHBOUR), ("abusive", ABUSIVE)];
    let named = named.map(|(name, key)| json!({"name": name, "key": key}));
    std::fs::write(&keys, json!({"keys": named}).to_string()).expect("the keys file can be written");
    let keys = keys.to_str().expect("a path in UTF-8");
    let server = Server::start(&folder.path().join("data"), &["--api-keys-file", keys, "--log", "warn,tidegate=info"]);
    println!(
        "{rounds} rounds of {requests} requests of {TOKENS} tokens; {} MiB after the start",
        memory(&server, "VmRSS:")
    );

    let (mut beside_polite, mut beside_abuse, mut tally) = (Latencies::default(), Latencies::default(), Tally::new());
    for round in 1..=rounds {
        let ended = AtomicBool::new(false);
        scope(|threads| {
            threads.spawn(|| {
                let mut neighbour = Latencies::default();
                // Numbers that the polite key does not use, so that the grammars differ.
                for n in round * NEIGHBOURS.. {
                    if ended.load(Ordering::Relaxed) {
                        break;
                    }
                    neighbour.request(&server, NEIGHBOUR, n);
                }
            });
            (0..requests).for_each(|n| beside_polite.request(&server, POLITE, (round * requests + n) * 2));
            ended.store(true, Ordering::Relaxed);
        });
        let calm = memory(&server, "VmHWM:");
        let abuse = start_abuse(&server.address, nice as i32);
        // Until every kind of abuse runs.
        sleep(Duration::from_secs(2));
        (0..requests).for_each(|n| beside_abuse.request(&server, POLITE, (round * requests + n) * 2 + 1));
        abuse.tally().into_iter().for_each(|(kind, count)| *tally.entry(kind).or_default() += count);
        drop(abuse);
        println!("round {round}: peak {calm} MiB before the abuse, {} MiB after it", memory(&server, "VmHWM:"));
        // Requests that the abuse has left behind end.
        sleep(Duration::from_secs(2));
    }

    println!("\n| polite key, ms | beside a polite key | beside the abuse | ratio |\n| --- | --- | --- | --- |");
    let mut worst: f64 = 0.0;
    for (name, a, b) in [
        ("time to first token", &beside_polite.first, &beside_abuse.first),
        ("inter-token latency", &beside_polite.between, &beside_abuse.between),
    ] {
        for percent in [50, 99] {
            let (a, b) = (percentile(a, percent), percentile(b, percent));
            println!("| {name}, p{percent} | {a:.1} | {b:.1} | {:.2} |", b / a);
            worst = if percent == 99 { worst.max(b / a) } else { worst };
        }
    }
    println!("\nrefused: {} beside the polite key, {} beside the abuse", beside_polite.refused, beside_abuse.refused);
    println!("answers to the abuse, by kind and status (0: disconnected): {tally:?}");
    println!("peak of resident memory: {} MiB", memory(&server, "VmHWM:"));
    println!("the target of {TARGET} is {}", if worst <= TARGET { "reached" } else { "missed" });
}
