//! The real server as a process that can be killed, and a small HTTP client. Tests and benchmarks use it.
#![allow(dead_code, reason = "each program uses its own part")]

pub(crate) mod abuse;

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longest time to wait for an answer, including reading a very long text.
const PATIENCE: Duration = Duration::from_mins(15);

/// A running server, killed when this is dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    /// Time from the start of the process to the first successful `GET /ready`.
    pub(crate) start_up: Duration,
}

impl Server {
    /// Starts a server with the data folder `data` and waits until it is ready. Its log is a file next to the folder.
    pub(crate) fn start(data: &Path, flags: &[&str]) -> Self {
        let (began, log) = (Instant::now(), data.with_extension("log"));
        // From now on, the process is killed no matter how this function ends.
        let mut server = Self { child: spawn(data, flags), address: String::new(), start_up: Duration::ZERO };
        let logged = || std::fs::read_to_string(&log).unwrap_or_default();
        while began.elapsed() < Duration::from_mins(2) {
            if let Some(status) = server.child.try_wait().unwrap() {
                panic!("the server ended ({status}): {}", logged());
            }
            // The comma shows that the line is complete.
            let found = || Some(logged().split_once("listening on http://")?.1.split_once(',')?.0.to_owned());
            if server.address.is_empty() {
                server.address = found().unwrap_or_default();
            }
            if !server.address.is_empty() && get(&server.address, "/ready").is_ok_and(|ready| ready.status == 200) {
                server.start_up = began.elapsed();
                return server;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("the server is not ready after two minutes: {}", logged());
    }

    /// Kills the server with SIGKILL.
    pub(crate) fn kill(mut self) {
        self.end();
    }

    /// Waits until the server exits by itself.
    pub(crate) fn wait(&mut self) {
        assert!(self.child.wait().unwrap().success());
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Returns the process id.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request with a JSON body and checks that it succeeds.
    pub(crate) fn json(&self, method: &str, path: &str, body: &Value) -> Value {
        let reply = Request::json(method, path, body).send(&self.address).unwrap();
        assert!(reply.status < 300, "{method} {path}: {} {}", reply.status, reply.text());
        reply.json()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts a server without waiting for it. `TIDEGATE_BINARY` names another program than the one just built.
pub(crate) fn spawn(data: &Path, flags: &[&str]) -> Child {
    let built = || env!("CARGO_BIN_EXE_tidegate").into();
    Command::new(std::env::var_os("TIDEGATE_BINARY").unwrap_or_else(built))
        .current_dir(std::env::temp_dir())
        .args(["serve", "--port", "0", "--data-dir"])
        .arg(data)
        .args(flags)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(data.with_extension("log")).unwrap())
        .spawn()
        .unwrap()
}

/// A request.
pub(crate) struct Request {
    method: String,
    path: String,
    headers: Vec<String>,
    body: Vec<u8>,
}

impl Request {
    pub(crate) fn json(method: &str, path: &str, body: &Value) -> Self {
        let (body, headers) = match body {
            Value::Null => (Vec::new(), Vec::new()),
            body => (body.to_string().into_bytes(), vec!["content-type: application/json\r\n".to_owned()]),
        };
        Self { method: method.to_owned(), path: path.to_owned(), headers, body }
    }

    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push(format!("{name}: {value}\r\n"));
        self
    }

    pub(crate) fn body(mut self, body: Vec<u8>) -> Self {
        self.body = body;
        self
    }

    /// Returns the head and the body as they are sent.
    pub(crate) fn bytes(&self, address: &str) -> Vec<u8> {
        let Self { method, path, headers, body } = self;
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {length}\r\n\
             {}\r\n",
            headers.concat()
        );
        [head.as_bytes(), body].concat()
    }

    /// Sends the request on a new connection.
    ///
    /// # Errors
    /// The server cannot be reached, or the answer is incomplete.
    pub(crate) fn send(&self, address: &str) -> Result<Reply> {
        let began = Instant::now();
        let mut socket = TcpStream::connect(address)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.write_all(&self.bytes(address))?;
        let (mut raw, mut arrivals, mut piece) = (Vec::new(), Vec::new(), vec![0; 1 << 16]);
        loop {
            let count = socket.read(&mut piece)?;
            if count == 0 {
                break;
            }
            let seen = raw.len().saturating_sub("data:".len() - 1);
            raw.extend_from_slice(&piece[..count]);
            let events = raw[seen..].windows("data:".len()).filter(|window| *window == b"data:").count();
            arrivals.extend(std::iter::repeat_n(began.elapsed(), events));
        }
        Reply::read(&raw, arrivals, began.elapsed())
            .ok_or_else(|| Error::new(ErrorKind::UnexpectedEof, "incomplete answer"))
    }
}

/// Sends a `GET` request.
///
/// # Errors
/// As [`Request::send`].
pub(crate) fn get(address: &str, path: &str) -> Result<Reply> {
    Request::json("GET", path, &Value::Null).send(address)
}

/// A complete answer.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    /// Time to each event of a stream.
    pub(crate) arrivals: Vec<Duration>,
    /// Time to the end of the answer.
    pub(crate) whole: Duration,
}

impl Reply {
    fn read(raw: &[u8], arrivals: Vec<Duration>, whole: Duration) -> Option<Self> {
        let end = find(raw, b"\r\n\r\n")?;
        let head = std::str::from_utf8(&raw[..end]).ok()?.to_ascii_lowercase();
        let status = head.split(' ').nth(1)?.parse().ok()?;
        let mut rest = &raw[end + 4..];
        if let Some(length) = head.lines().find_map(|line| line.strip_prefix("content-length:")) {
            let whole_body = rest.len() == length.trim().parse::<usize>().ok()?;
            return whole_body.then(|| Self { status, body: rest.to_vec(), arrivals, whole });
        }
        let mut body = Vec::new();
        loop {
            let line = find(rest, b"\r\n")?;
            let length = usize::from_str_radix(std::str::from_utf8(&rest[..line]).ok()?, 16).ok()?;
            rest = &rest[line + 2..];
            if length == 0 {
                return Some(Self { status, body, arrivals, whole });
            }
            body.extend_from_slice(rest.get(..length)?);
            rest = rest.get(length + 2..)?;
        }
    }

    /// Returns the time to the first event of a stream.
    pub(crate) fn first(&self) -> Option<Duration> {
        self.arrivals.first().copied()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.text()))
    }

    /// Returns the JSON objects of an answer, whether it was streamed or not.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        let text = self.text();
        if text.starts_with('{') {
            return vec![self.json()];
        }
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter_map(|data| serde_json::from_str(data).ok()).collect()
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}
