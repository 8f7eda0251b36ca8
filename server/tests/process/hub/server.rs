//! A hub on this machine: it serves a few files, records the requests it gets, and lets a test replace its answers.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use tidegate_server::session::hex;

use crate::random::write_vocabulary;

/// The name of RWKV's vocabulary file.
pub(super) const VOCABULARY: &str = "rwkv_vocab_v20230424.txt";
/// The commit that every branch points to.
pub(super) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request that the hub got.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) path: String,
    /// With names in lower case.
    pub(super) headers: BTreeMap<String, String>,
}

impl Asked {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// An answer. Its `content-length` is that of the whole body, but only the first `cut` bytes are sent, if set.
#[derive(Clone, Debug, Default)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: Vec<u8>,
    pub(super) cut: Option<usize>,
}

impl Reply {
    pub(super) fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub(super) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

/// Replaces an answer; receives the request and the hub's own answer.
type Change = dyn Fn(&Asked, Reply) -> Reply + Send + Sync;

/// A running hub. Its threads end with the test's process.
pub(super) struct Hub {
    pub(super) address: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Hub {
    /// Starts a hub with these files in each of its models.
    pub(super) fn start(files: Files) -> Self {
        Self::changed(files, |_, reply| reply)
    }

    pub(super) fn changed(files: Files, change: impl Fn(&Asked, Reply) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (asked, files, change) = (Arc::default(), Arc::new(files), Arc::new(change));
        let hub = Self { address, asked: Arc::clone(&asked) };
        thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let (asked, files, change) = (Arc::clone(&asked), Arc::clone(&files), Arc::clone(&change));
                thread::spawn(move || answer(&socket, &asked, &files, &*change));
            }
        });
        hub
    }

    /// Returns the requests so far.
    pub(super) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    /// Returns the requests for a file.
    pub(super) fn asked_for(&self, file: &str) -> Vec<Asked> {
        let mut asked = self.asked();
        asked.retain(|asked| asked.path.ends_with(file));
        asked
    }
}

fn answer(mut socket: &TcpStream, asked: &Mutex<Vec<Asked>>, files: &Files, change: &Change) {
    let mut lines = BufReader::new(socket).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
    // The client disconnected without a request.
    let Some(first) = lines.next() else { return };
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let headers = lines.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_lowercase(), value.trim().to_owned()))
    });
    let request = Asked { path, headers: headers.collect() };
    asked.lock().unwrap().push(request.clone());
    let Reply { status, headers, body, cut } = change(&request, files.answer(&request));
    let headers: Vec<String> = headers.into_iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let head = format!(
        "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n{}\r\n",
        body.len(),
        headers.concat()
    );
    let body = &body[..cut.unwrap_or(body.len())];
    // Sending fails if the client has read enough and disconnected.
    let _ = socket.write_all(&[head.as_bytes(), body].concat());
}

/// The files of a model.
#[derive(Clone, Debug, Default)]
pub(super) struct Files(pub(super) BTreeMap<String, Vec<u8>>);

impl Files {
    /// Returns the files of the pinned checkpoint.
    pub(super) fn tiny() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/tests/fixtures/tiny");
        let names =
            ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
        let read = |name: &str| (name.to_owned(), std::fs::read(folder.join(name)).unwrap());
        Self(names.into_iter().map(read).collect())
    }

    /// Returns RWKV's vocabulary alone.
    pub(super) fn vocabulary() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_vocabulary(folder.path());
        Self::default().with(VOCABULARY, std::fs::read(folder.path().join(VOCABULARY)).unwrap())
    }

    pub(super) fn with(mut self, name: &str, contents: impl Into<Vec<u8>>) -> Self {
        self.0.insert(name.into(), contents.into());
        self
    }

    /// Returns the digest that names a file's contents: SHA-256 for weights, which count as large files whatever their
    /// length, and git's for others.
    pub(super) fn id(&self, name: &str) -> String {
        let contents = &self.0[name];
        if is_large(name) {
            return hex(&Sha256::digest(contents));
        }
        let head = format!("blob {}\0", contents.len());
        hex(&Sha1::new().chain_update(head).chain_update(contents).finalize())
    }

    /// Returns the hub's description of the model.
    pub(super) fn listing(&self) -> Value {
        let file = |name: &String| {
            let size = self.0[name].len();
            if is_large(name) {
                let lfs = json!({"sha256": self.id(name), "size": size, "pointerSize": 130});
                return json!({"rfilename": name, "size": size, "blobId": "e".repeat(40), "lfs": lfs});
            }
            json!({"rfilename": name, "size": size, "blobId": self.id(name)})
        };
        json!({"id": "org/tiny", "sha": COMMIT, "private": false, "siblings": self.0.keys().map(file).collect::<Vec<_>>()})
    }

    pub(super) fn answer(&self, asked: &Asked) -> Reply {
        if asked.path.starts_with("/api/models/") {
            return Reply { body: self.listing().to_string().into_bytes(), ..Reply::status(200) };
        }
        let path = asked.path.split('?').next().unwrap_or_default();
        let file = path.split_once(&format!("/resolve/{COMMIT}/")).and_then(|(_, file)| self.0.get(file));
        let Some(contents) = file else { return Reply::status(404).with("x-error-code", "RepoNotFound") };
        let Some(range) = asked.header("range").and_then(|range| range.strip_prefix("bytes=")) else {
            return Reply { body: contents.clone(), ..Reply::status(200) };
        };
        let (first, last) = range.split_once('-').unwrap();
        let first: usize = first.parse().unwrap();
        let last = last.parse().unwrap_or(contents.len() - 1).min(contents.len() - 1);
        let part = Reply { body: contents[first..=last].to_vec(), ..Reply::status(206) };
        part.with("content-range", &format!("bytes {first}-{last}/{}", contents.len()))
    }
}

fn is_large(name: &str) -> bool {
    [".safetensors", ".gguf", ".pth"].iter().any(|end| name.ends_with(end))
}
