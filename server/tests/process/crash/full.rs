//! A full disk: requests are refused with clear messages, nothing acknowledged is lost, and the same process continues
//! once there is space again.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::FLAGS;
use crate::live::{Reply, Request, Server, get};

/// A file system in memory, small enough to fill.
struct Small(PathBuf);

impl Small {
    /// Mounts one at `folder`, which needs privileges. On failure, prints the reason and returns `None`.
    fn mount(folder: PathBuf) -> Option<Self> {
        std::fs::create_dir(&folder).unwrap();
        let options = ["-t", "tmpfs", "-o", "size=32m", "tmpfs"];
        match Command::new("mount").args(options).arg(&folder).output() {
            Ok(done) if done.status.success() => Some(Self(folder)),
            Ok(done) => {
                println!("skipped, no tmpfs: {}", String::from_utf8_lossy(&done.stderr).trim());
                None
            }
            Err(error) => {
                println!("skipped, no tmpfs: {error}");
                None
            }
        }
    }

    /// Fills all remaining space, including space freed since the last call, and returns the path of the filler.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = File::options().create(true).append(true).open(&path).unwrap();
        for size in [1 << 20, 1 << 12, 1] {
            while file.write_all(&vec![1; size]).is_ok() {}
        }
        path
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let done = Command::new("umount").arg(&self.0).status();
        if !done.is_ok_and(|status| status.success()) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
}

struct Client<'a>(&'a str);

impl Client<'_> {
    fn ask(&self, method: &str, path: &str, body: &Value) -> Reply {
        Request::json(method, path, body).send(self.0).unwrap()
    }

    fn turn(&self, session: &str, stream: bool) -> Reply {
        let body = json!({
            "session": session, "prompt": " and then", "max_tokens": 2, "temperature": 0, "stream": stream
        });
        self.ask("POST", "/v1/completions", &body)
    }

    fn head(&self, session: &str) -> String {
        let session = self.ask("GET", &format!("/v1/sessions/{session}"), &Value::Null);
        assert_eq!(session.status, 200, "{}", session.text());
        session.json()["version"].as_str().unwrap().to_owned()
    }
}

/// Checks that a refusal has a status and code that clients can act on, and returns its message.
fn refused(status: u16, error: &Value) -> String {
    assert!([503, 507].contains(&status), "{status} {error}");
    assert!(["store_full", "store_unavailable"].contains(&error["code"].as_str().unwrap()), "{error}");
    error["message"].as_str().unwrap().to_owned()
}

/// Runs turns, streamed and whole, until all are refused. Returns the last acknowledged head of each session.
fn until_full(client: &Client<'_>, ids: &[String], small: &Small) -> Vec<String> {
    let mut heads: Vec<String> = ids.iter().map(|id| client.head(id)).collect();
    let (mut turns, mut refusals) = (0, 0);
    while refusals < 2 * ids.len() {
        let (at, stream) = (refusals % ids.len(), refusals >= ids.len());
        let reply = client.turn(&ids[at], stream);
        let last = reply.chunks().pop().unwrap();
        if last["error"].is_object() {
            // A stream has already sent its status, so the error is in its last event.
            let status = if stream { 507 } else { reply.status };
            let message = refused(status, &last["error"]);
            assert!(!reply.text().contains("[DONE]"), "{}", reply.text());
            refusals += 1;
            if refusals == 2 * ids.len() {
                println!("after {turns} turns: {status} {message}");
            }
        } else {
            // Evicting older versions freed space, which the filler takes.
            small.fill();
            last["session"]["version"].as_str().unwrap().clone_into(&mut heads[at]);
            (turns, refusals) = (turns + 1, 0);
        }
        assert!(turns < 200, "turns still succeed although the disk is full");
    }
    heads
}

fn whole(client: &Client<'_>, ids: &[String], heads: &[String]) {
    for (id, head) in ids.iter().zip(heads) {
        assert_eq!(client.head(id), *head, "of {id}");
        let snapshot = get(client.0, &format!("/v1/sessions/{id}/snapshot")).unwrap();
        assert_eq!(snapshot.status, 200, "{}", snapshot.text());
    }
}

fn start(data: &Path) -> Server {
    Server::start(data, FLAGS)
}

#[test]
fn a_full_disk_refuses_turns_loses_nothing_and_recovers_without_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let Some(small) = Small::mount(folder.path().join("small")) else { return };
    let data = small.0.join("data");
    std::fs::create_dir(&data).unwrap();
    let server = start(&data);
    let client = Client(&server.address);
    let make = || server.json("POST", "/v1/sessions", &json!({"text": "Once upon a time"}));
    let ids: Vec<String> = (0..3).map(|_| make()["id"].as_str().unwrap().to_owned()).collect();
    for id in &ids {
        assert_eq!(client.turn(id, false).status, 200);
    }

    let filler = small.fill();
    let heads = until_full(&client, &ids, &small);
    whole(&client, &ids, &heads);
    // Forks write only to the index, so they succeed until it has to grow.
    let fork = |_| Some(client.ask("POST", &format!("/v1/sessions/{}/fork", ids[0]), &json!({"n": 200})));
    let forks: Vec<Reply> = (0..60).map_while(fork).take_while(|reply| reply.status == 201).collect();
    println!("{} forks of 200 sessions", forks.len());
    let more = client.ask("POST", &format!("/v1/sessions/{}/fork", ids[0]), &json!({"n": 1000}));
    if more.status != 201 {
        println!("the index: {} {}", more.status, refused(more.status, &more.json()["error"]));
    }
    whole(&client, &ids, &heads);

    std::fs::remove_file(filler).unwrap();
    for id in &ids {
        let reply = client.turn(id, false);
        assert_eq!(reply.status, 200, "there is room again: {}", reply.text());
    }
    let heads: Vec<String> = ids.iter().map(|id| client.head(id)).collect();
    let filler = small.fill();
    server.kill();
    let server = start(&data);
    let client = Client(&server.address);
    whole(&client, &ids, &heads);
    let heads = until_full(&client, &ids, &small);
    server.kill();
    std::fs::remove_file(filler).unwrap();
    let server = start(&data);
    let client = Client(&server.address);
    whole(&client, &ids, &heads);
    assert_eq!(client.turn(&ids[2], false).status, 200);
}
