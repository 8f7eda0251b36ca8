//! `--ram-budget` divides the memory of the process: what the model and requests leave is for cached states.

use serde_json::{Value, json};

use crate::live::{Server, get};

const SESSIONS: usize = 45;

/// Returns the value of a metric.
fn metric(server: &Server, name: &str) -> u64 {
    let text = get(&server.address, "/metrics").unwrap().text();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

/// The memory of a server that has created [`SESSIONS`] sessions.
struct Found {
    /// Number of states in memory.
    states: u64,
    /// Bytes of these states.
    bytes: u64,
    /// Resident memory of the process, in bytes; only on Linux.
    resident: Option<u64>,
    log: String,
}

fn cached(flags: &[&str]) -> Found {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let server = Server::start(&data, flags);
    for _ in 0..SESSIONS {
        let session: Value = server.json("POST", "/v1/sessions", &json!({"text": "Once"}));
        assert!(session["id"].is_string());
    }
    Found {
        states: metric(&server, "tidegate_snapshots_in_memory"),
        bytes: metric(&server, "tidegate_state_bytes{tier=\"memory\"}"),
        resident: std::fs::read_to_string(format!("/proc/{}/status", server.process())).ok().map(|status| {
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
        }),
        log: std::fs::read_to_string(data.with_extension("log")).unwrap(),
    }
}

#[test]
fn a_small_budget_caches_fewer_states_and_says_so() {
    let device = ["--device", "cpu", "--log", "info"];
    let small = cached(&[&device[..], &["--ram-budget", "512MiB"]].concat());
    let Found { states, bytes, log, .. } = &small;
    // Caches get at least 64 MiB, half of it for prefixes.
    assert!(*bytes <= 32 << 20 && *bytes > 31 << 20, "{states} states of {bytes} bytes");
    assert!(log.contains("--ram-budget 512 MiB is too small") && log.contains("64 MiB more"), "{log}");

    let enough = cached(&[&device[..], &["--ram-budget", "1GiB"]].concat());
    assert_eq!(enough.states, SESSIONS as u64);
    assert!(!enough.log.contains("too small") && enough.log.contains("memory up to 1024 MiB"), "{}", enough.log);

    for (found, budget) in [(&small, 512 << 20), (&enough, 1 << 30)] {
        let resident = found.resident;
        assert!(resident.is_none_or(|bytes| bytes > found.bytes && bytes < budget), "{resident:?} bytes of {budget}");
    }

    let none = cached(&[&device[..], &["--ram-budget", "0"]].concat());
    assert_eq!(none.states, 0);
    assert!(!none.log.contains("too small") && none.log.contains("states_mib=0"), "{}", none.log);
}
