//! The `tidegate` command with API keys and a certificate: its startup messages, what it must not reveal, and
//! reloading on SIGHUP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const OLD: &str = "sk-old-0123456789";
const NEW: &str = "sk-new-0123456789";

fn tidegate(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(args).current_dir(std::env::temp_dir()).env("XDG_DATA_HOME", "/dev/null").stdin(Stdio::null());
    command
}

/// A server that is killed with its test, and its log.
struct Server {
    child: Child,
    lines: Receiver<String>,
    log: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        // Read continuously, because a full pipe would block the server.
        let (sender, lines) = channel();
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok()));
        Self { child, lines, log: String::new() }
    }

    /// Waits for a log line that contains `words`, and returns it.
    fn until(&mut self, words: &str) -> String {
        while let Ok(line) = self.lines.recv_timeout(Duration::from_mins(1)) {
            self.log.push_str(&line);
            self.log.push('\n');
            if line.contains(words) {
                return line;
            }
        }
        panic!("the log does not contain {words:?}:\n{}", self.log);
    }

    fn hang_up(&self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-HUP", &pid]).status().unwrap().success());
    }
}

/// Returns the status of a request with this key.
fn status(address: &str, key: &str) -> String {
    let mut socket = TcpStream::connect(address).unwrap();
    let head =
        format!("GET /v1/sessions HTTP/1.1\r\nhost: t\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n");
    socket.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().to_owned()
}

fn address(line: &str) -> String {
    line.split("://").nth(1).unwrap().split(',').next().unwrap().to_owned()
}

#[test]
fn keys_are_reloaded_on_sighup_and_an_invalid_file_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.json");
    let write = |text: &str| std::fs::write(&path, text).unwrap();
    let file = |key: &str| format!(r#"{{"keys": [{{"name": "ann", "key": "{key}"}}]}}"#);
    write(&file(OLD));
    let mut command = tidegate(&["--port", "0", "--log", "info,tidegate=debug,tidegate_server=trace"]);
    command.env("TIDEGATE_API_KEYS_FILE", &path).env("TIDEGATE_API_KEY", "sk-given-0123456789");
    let mut server = Server::start(command);
    let address = address(&server.until("listening on http://"));
    assert!(server.log.contains("requests require an API key"), "{}", server.log);
    assert_eq!((status(&address, OLD).as_str(), status(&address, NEW).as_str()), ("200", "401"));
    assert_eq!(status(&address, "sk-given-0123456789"), "200");

    write(&file(NEW));
    assert_eq!(status(&address, NEW), "401", "the new key is not loaded yet");
    server.hang_up();
    server.until("reloaded the API keys");
    assert_eq!((status(&address, OLD).as_str(), status(&address, NEW).as_str()), ("401", "200"));

    for bad in ["", r#"{"keys": []}"#, r#"{"keys": [{"name": "ann", "key": "sk-0123456789"}]}"#] {
        write(bad);
        server.hang_up();
        server.until("kept the previous API keys");
        assert_eq!((status(&address, OLD).as_str(), status(&address, NEW).as_str()), ("401", "200"));
    }
    std::fs::remove_file(&path).unwrap();
    server.hang_up();
    server.until("kept the previous API keys");
    assert_eq!(status(&address, NEW), "200");
    assert!(server.log.contains("key=\"ann\"") || server.log.contains("key=ann"), "the log names keys: {}", server.log);
    assert!(!server.log.contains("0123456789"), "the log has a key: {}", server.log);
}

#[test]
fn invalid_keys_and_certificates_are_reported_without_revealing_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys.json");
    std::fs::write(&path, r#"{"keys": [{"name": "ann", "key": "sk-0123456789abcdef", "colour": "blue"}]}"#).unwrap();
    let file = path.to_str().unwrap();
    for (args, words) in [
        (&["--api-keys-file", file][..], "keys[0].colour: unknown field `colour`"),
        (&["--api-keys-file", "/nothing/here"], "cannot read the keys file /nothing/here"),
        (&["--api-key", "sk-0123456789"], "key must have at least 16 characters"),
        (&["--api-key", ""], "key must have at least 16 characters"),
        (&["--tls-cert", file, "--tls-key", file], "certificate"),
        (&["--tls-cert", file], "--tls-key"),
        (&["--cors-origin", "example.org"], "must be * or an origin"),
        (&["--max-connections", "0"], "must be at least 1"),
    ] {
        let output = tidegate(args).args(["--port", "0"]).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(words), "{args:?}: {error}");
        assert!(!error.contains("0123456789"), "{error}");
    }
    let help = tidegate(&["serve", "--help"]).env("TIDEGATE_API_KEY", OLD).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(help.contains("--api-key") && !help.contains(OLD));
}

#[test]
fn an_unprotected_server_on_the_network_logs_a_warning() {
    let mut open = Server::start(tidegate(&["--port", "0", "--host", "0.0.0.0"]));
    open.until("listening");
    assert!(open.log.contains("no API keys are set"), "{}", open.log);
    let mut locked = Server::start(tidegate(&["--port", "0", "--host", "0.0.0.0", "--api-key", OLD]));
    locked.until("listening");
    let mut alone = Server::start(tidegate(&["--port", "0"]));
    alone.until("listening");
    for server in [&locked, &alone] {
        assert!(!server.log.contains("no API keys are set") && !server.log.contains(OLD), "{}", server.log);
    }
}
