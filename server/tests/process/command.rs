//! The `tidegate` command as a process: serving, draining on SIGTERM, generating, and its error messages.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

fn tidegate() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    // Outside the source tree, because the shipped model needs no files.
    command.current_dir(std::env::temp_dir()).env("TIDEGATE_LOG_FORMAT", "json").stdin(Stdio::null());
    command
}

/// A server that is killed at the end of its test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the log lines up to and including the first whose message begins with `start`.
fn log_until(lines: &mut impl Iterator<Item = std::io::Result<String>>, start: &str) -> Vec<Value> {
    let mut log: Vec<Value> = Vec::new();
    for line in lines {
        log.push(serde_json::from_str(&line.unwrap()).unwrap());
        if message(&log[log.len() - 1]).starts_with(start) {
            return log;
        }
    }
    panic!("no line {start:?} in {log:?}");
}

fn message(line: &Value) -> &str {
    line["message"].as_str().unwrap_or_default()
}

/// Requests a stream of `max_tokens` tokens, with the request id `mine`, at the address in the last line of `log`.
fn start_stream(log: &[Value], max_tokens: usize) -> TcpStream {
    let address = message(&log[log.len() - 1]).split("http://").nth(1).unwrap().split(',').next().unwrap();
    let body = format!(r#"{{"prompt": "Once", "max_tokens": {max_tokens}, "ignore_eos": true, "stream": true}}"#);
    let mut socket = TcpStream::connect(address).unwrap();
    write!(
        socket,
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-request-id: mine\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    socket
}

#[test]
fn sigterm_lets_a_running_stream_finish() {
    let data = tempfile::tempdir().unwrap();
    let folder = data.path().join("new/folder");
    let child = tidegate()
        .args(["serve", "--device", "cpu", "--port", "0", "--data-dir"])
        .arg(&folder)
        .env("TIDEGATE_MODEL_NAME", "from-the-environment")
        .env("TIDEGATE_LOG", "info,tidegate=debug")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut server = Server(child);
    let mut lines = BufReader::new(server.0.stderr.take().unwrap()).lines();
    let log = log_until(&mut lines, "listening on ");
    let settings = log.iter().find(|line| message(line) == "settings").unwrap();
    assert_eq!((&settings["level"], &settings["device"]), (&"DEBUG".into(), &"cpu".into()));
    assert!(folder.is_dir(), "the server creates the data folder");
    let defaults = log.iter().find(|line| message(line) == "model defaults").unwrap();
    assert_eq!((&defaults["temperature"], &defaults["min_p"]), (&0.7.into(), &0.02.into()), "numbers are numbers");
    let info: Vec<_> = log.iter().filter(|line| line["level"] == "INFO").collect();
    let [model, sessions, address] = info[..] else { panic!("three lines at info, found {info:?}") };
    assert_eq!((message(model), &model["slots"]), ("model from-the-environment on cpu", &64.into()));
    let place = format!("sessions in {}, memory up to 1024 MiB", folder.display());
    assert_eq!((message(sessions), &sessions["prefixes_mib"]), (place.as_str(), &256.into()));
    assert!(message(address).contains("/docs"), "{address}");

    let mut socket = start_stream(&log, 300);
    let mut first = [0; 64];
    socket.read_exact(&mut first).unwrap();
    assert!(first.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&first));
    let pid = server.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let mut rest = String::new();
    socket.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "the stream was cut off: {rest}");
    let log = log_until(&mut lines, "shutdown complete");
    let finished = log.iter().find(|line| message(line) == "completion finished").unwrap();
    assert_eq!((&finished["span"]["id"], &finished["span"]["completion_tokens"]), (&"mine".into(), &300.into()));
    assert!(finished["span"]["decode_ms"].as_f64().unwrap() > 0.0);
    assert!(server.0.wait().unwrap().success());
}

#[test]
fn without_a_data_folder_the_server_serves_and_logs_cancelled_requests() {
    let mut command = tidegate();
    command.args(["--host", "localhost", "--port", "0"]).env("XDG_DATA_HOME", "/dev/null").stderr(Stdio::piped());
    let mut server = Server(command.spawn().unwrap());
    let mut lines = BufReader::new(server.0.stderr.take().unwrap()).lines();
    let log = log_until(&mut lines, "listening on ");
    let warned = |line: &Value| line["level"] == "WARN" && message(line).contains("/dev/null/tidegate");
    assert!(log.iter().any(warned), "{log:?}");

    let mut socket = start_stream(&log, 1_000_000);
    let mut some = [0; 2000];
    socket.read_exact(&mut some).unwrap();
    drop(socket);
    let cancelled = log_until(&mut lines, "completion cancelled").pop().unwrap();
    assert!(cancelled["span"]["prompt_tokens"].as_u64().unwrap() > 1, "{cancelled}");
    assert!(cancelled["span"]["completion_tokens"].as_u64().unwrap() > 1, "{cancelled}");
}

fn generate(args: &[&str]) -> Output {
    // An invalid variable of `serve` does not affect this command.
    tidegate().arg("generate").args(args).env("TIDEGATE_SLOTS", "none").output().unwrap()
}

#[test]
fn generate_continues_a_prompt() {
    let args = ["Once upon a time", "--max-tokens", "20", "--seed", "5", "--ignore-eos"];
    let one = generate(&args);
    let (text, account) = (String::from_utf8(one.stdout.clone()).unwrap(), String::from_utf8(one.stderr).unwrap());
    assert!(one.status.success(), "{account}");
    assert!(text.starts_with("Once upon a time") && text.len() > "Once upon a time\n".len() + 5, "{text}");
    assert!(account.contains("generated: 20 tokens at") && account.contains("tokens/s; seed 5"), "{account}");
    assert_eq!(generate(&args).stdout, one.stdout, "the same seed");
}

#[test]
fn generate_reads_its_prompt_from_standard_input() {
    let options = ["--max-tokens", "5", "--seed", "5", "--ignore-eos"];
    let mut child = tidegate()
        .args(["generate", "-"])
        .args(options)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"Once upon a time\n").unwrap();
    let read = child.wait_with_output().unwrap();
    assert_eq!(read.stdout, generate(&[&["Once upon a time"], &options[..]].concat()).stdout);
}

#[test]
fn completions_and_man_pages_are_printed() {
    for (args, word) in [
        (&["completions", "bash"][..], "complete -F _tidegate"),
        (&["man"], ".TH tidegate 1"),
        (&["man", "serve"], "TOML file"),
    ] {
        let output = tidegate().args(args).output().unwrap();
        assert!(output.status.success() && String::from_utf8(output.stdout).unwrap().contains(word), "{args:?}");
    }
}

#[test]
fn flags_come_from_a_file_unless_they_are_given() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tidegate.toml");
    let serve = |text: &str, args: &[&str]| {
        std::fs::write(&file, text).unwrap();
        let output = tidegate().arg("--config").arg(&file).args(args).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    // The model named in the file does not exist, so the server stops.
    let (code, error) = serve("model = \"/nowhere\"\nport = 0\ndata-dir = \"/dev/null/x\"", &[]);
    assert!(code == Some(1) && error.contains("error: --data-dir /dev/null/x must be"), "{error}");
    let data = folder.path().display().to_string();
    let (code, error) = serve("model = \"/nowhere\"\nport = 0\ndata-dir = \"/dev/null/x\"", &["--data-dir", &data]);
    assert!(code == Some(1) && error.contains("error: /nowhere: there is no such file or folder"), "{error}");
    let (code, error) = serve("ports = 1", &[]);
    assert!(code == Some(2) && error.contains("there is no flag ports; the nearest is port"), "{error}");
    let (code, error) = serve("port = 70000", &[]);
    assert!(code == Some(2) && error.contains("--port") && error.contains("tidegate.toml"), "{error}");
}

#[test]
fn errors_are_reported_without_a_backtrace() {
    for (args, words) in [
        (["x", "--temperature", "9"], "error: temperature must be between 0 and 2, found 9"),
        (["x", "--stop", ""], "error: stop must not contain an empty string"),
        (["x", "--model", "/nowhere"], "error: /nowhere: there is no such file or folder"),
        (["x", "--max-tokens", "0"], "must be at least 1"),
    ] {
        let output = generate(&args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(words), "{args:?}: {error}");
        assert!(!error.contains("backtrace"), "{error}");
    }
    if cfg!(not(feature = "otlp")) {
        let output = tidegate().args(["--otlp-endpoint", "http://localhost:4318"]).output().unwrap();
        assert!(String::from_utf8(output.stderr).unwrap().contains("built without the feature `otlp`"));
    }
    let output = tidegate().args(["--data-dir", "/dev/null/x"]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("error: --data-dir /dev/null/x must be a writable"));
}
