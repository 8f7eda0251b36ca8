//! Many sessions on one server, each with its own snapshot, far more than fit in memory.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

use super::{FLAGS, load, median, milliseconds, percentile, turn};
use crate::live::{Request, Server};

/// Timed turns and forks.
const TIMES: usize = 500;

/// Sessions made by one fork request.
const BATCH: usize = 1000;

/// Clients that make the sessions.
const CLIENTS: usize = 8;

const MEMORY: [&str; 2] = ["--ram-budget", "1GiB"];

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Resident memory of the server, now and at its peak.
fn resident(server: &Server) -> String {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.process())).unwrap_or_default();
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0 kB");
        line.trim().trim_end_matches(" kB").parse().unwrap_or(0.0) / 1024.0
    };
    format!("{:.0} MiB resident, {:.0} MiB peak", of("VmRSS:"), of("VmHWM:"))
}

/// Bytes of the files below `folder`.
fn size(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let about = entry.metadata().ok()?;
            Some(if about.is_dir() { size(&entry.path()) } else { about.len() })
        })
        .sum()
}

fn row(name: &str, times: &[f64]) {
    println!("| {name} | {:.1} | {:.1} | {:.1} |", median(times), percentile(times, 99), percentile(times, 100));
}

/// Makes `count` sessions and measures turns and forks on random ones.
pub(crate) fn measure(data: &Path, count: usize) {
    let flags = [&FLAGS[..], &MEMORY].concat();
    let server = Server::start(data, &flags);
    let (empty, began) = (server.start_up, Instant::now());
    println!("memory of the empty server: {}", resident(&server));
    let base = server.json("POST", "/v1/sessions", &json!({"text": "Once upon a time there was a fox."}));
    let fork = format!("/v1/sessions/{}/fork", base["id"].as_str().unwrap());
    let mut ids: Vec<String> = Vec::new();
    while ids.len() < count {
        let batch = server.json("POST", &fork, &json!({"n": BATCH.min(count - ids.len())}));
        ids.extend(batch["data"].as_array().unwrap().iter().map(|made| made["id"].as_str().unwrap().to_owned()));
    }
    eprintln!("{count} forks in {:.1?}", began.elapsed());
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                while let Some(id) = ids.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let body = json!({"session": id, "prompt": " It", "max_tokens": 1, "temperature": 1});
                    server.json("POST", "/v1/completions", &body);
                }
            });
        }
    });
    let made = began.elapsed();
    println!("\n{count} sessions, each with a turn of its own, made in {made:.1?} by {CLIENTS} clients");
    println!("memory with {}: {}", MEMORY.join(" "), resident(&server));
    let all = size(data);
    println!("on disk: {:.0} MiB, {} bytes a session", mebibytes(all), all / count as u64);

    let mut random = StdRng::seed_from_u64(2);
    let (mut first, mut whole, mut forks, mut disk) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for _ in 0..TIMES {
        let id = &ids[random.random_range(0..ids.len())];
        let (to_first, to_end, info) = turn(&server, json!({"session": id, "prompt": " And"}));
        disk += usize::from(info["tier"] == "disk");
        first.push(to_first);
        whole.push(to_end);
        let id = &ids[random.random_range(0..ids.len())];
        let path = format!("/v1/sessions/{id}/fork");
        let reply = Request::json("POST", &path, &json!({})).send(&server.address).unwrap();
        assert_eq!(reply.status, 201, "{}", reply.text());
        forks.push(milliseconds(reply.whole));
    }
    println!("\n{TIMES} turns on random sessions, {disk} of them read from disk; load {}\n", load());
    println!("| ms | p50 | p99 | max |\n| --- | ---: | ---: | ---: |");
    row("turn: first token", &first);
    row("turn: acknowledged, durable", &whole);
    row("fork", &forks);
    println!("\nmemory after them: {}", resident(&server));
    server.kill();
    let starts: Vec<f64> = (0..5).map(|_| milliseconds(Server::start(data, &flags).start_up)).collect();
    println!(
        "start after a kill, to ready: {:.0} ms (median of 5), empty: {:.0} ms",
        median(&starts),
        milliseconds(empty)
    );
}
