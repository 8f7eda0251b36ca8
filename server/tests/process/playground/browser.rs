//! Shared by the playground's tests: the server, a browser, and the open page.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::cell::RefCell;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fantoccini::{Client, ClientBuilder, Locator};
use futures_util::FutureExt;
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tokio::sync::Mutex;

/// Longer than any step takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// Browsers need much memory, so only one runs at a time.
static ONE: Mutex<()> = Mutex::const_new(());

/// A process that is killed when this is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the server, and returns it with its address once it is ready.
fn start_server(data_dir: &Path, setup: &Setup) -> (Process, String) {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../weights/checkpoints/tidegate-tiny");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--host", "127.0.0.1", "--model", model]).arg("--data-dir").arg(data_dir);
    command.args(setup.args);
    if let Some(key) = setup.key {
        command.env("TIDEGATE_API_KEY", key);
    }
    let child = command.arg("--port").arg(free.port().to_string()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = Process(child.expect("the server starts"));
    let began = Instant::now();
    while !is_ready(free) {
        let ended = child.0.try_wait().expect("the server can be asked after");
        assert!(ended.is_none(), "the server ended: {ended:?}");
        assert!(began.elapsed() < PATIENCE, "the server is not ready in time");
        std::thread::sleep(Duration::from_millis(50));
    }
    (child, format!("http://{free}/"))
}

fn is_ready(address: std::net::SocketAddr) -> bool {
    let Ok(mut stream) = TcpStream::connect(address) else { return false };
    let mut answer = String::new();
    stream.write_all(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").is_ok()
        && stream.read_to_string(&mut answer).is_ok()
        && answer.starts_with("HTTP/1.1 200 ")
}

/// Starts chromedriver on a port of its choice; `None` if it is not installed.
fn start_driver() -> Option<(Process, String)> {
    // It chooses a port that is free for IPv4, and exits if another program uses it for IPv6. Hence the attempts.
    for _ in 0..10 {
        let mut child = match Command::new("chromedriver").arg("--port=0").stdout(Stdio::piped()).spawn() {
            Ok(child) => Process(child),
            Err(error) => {
                let required = std::env::var("TIDEGATE_REQUIRE_BROWSER").is_ok_and(|value| value == "1");
                assert!(!required, "TIDEGATE_REQUIRE_BROWSER is 1 and chromedriver does not start: {error}");
                eprintln!("skipped: chromedriver does not start ({error}); Debian has it as chromium-driver");
                return None;
            }
        };
        let mut lines = BufReader::new(child.0.stdout.take().expect("stdout is piped")).lines().map_while(Result::ok);
        if let Some(port) = lines.find_map(|line| named_port(&line)) {
            // It keeps writing, and a full pipe would block it.
            std::thread::spawn(move || lines.for_each(drop));
            return Some((child, format!("127.0.0.1:{port}")));
        }
    }
    panic!("chromedriver found no port");
}

/// Returns the port from the line that chromedriver writes once it is ready.
fn named_port(line: &str) -> Option<u16> {
    line.split_once("started successfully on port ")?.1.trim_end_matches('.').parse().ok()
}

async fn open_browser(driver: &str, width: u32, height: u32) -> Client {
    let mut options = json!({"args": [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
        "--hide-scrollbars", format!("--window-size={width},{height}"),
    ]});
    if width < 500 {
        // Desktop windows cannot be that narrow.
        options["mobileEmulation"] = json!({"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2.0}});
    }
    let wanted = json!({
        "browserName": "chrome",
        "goog:chromeOptions": options,
        "goog:loggingPrefs": {"browser": "ALL"},
    });
    let Value::Object(wanted) = wanted else { unreachable!("written as an object") };
    ClientBuilder::new(HttpConnector::new())
        .capabilities(wanted)
        .connect(&format!("http://{driver}"))
        .await
        .expect("a browser session")
}

/// The server and the window of a test.
pub(crate) struct Setup {
    /// The key that the server requires.
    pub(crate) key: Option<&'static str>,
    /// Further arguments of the server.
    pub(crate) args: &'static [&'static str],
    pub(crate) width: u32,
    pub(crate) height: u32,
}

impl Setup {
    pub(crate) const DESK: Self = Self { key: None, args: &[], width: 1280, height: 1000 };
}

/// The open page.
pub(crate) struct Page {
    pub(crate) client: Client,
    pub(crate) url: String,
    /// The address of chromedriver.
    driver: String,
    server: RefCell<Option<Process>>,
}

impl Page {
    pub(crate) async fn js(&self, script: &str) -> Value {
        self.client.execute(script, vec![]).await.unwrap_or_else(|error| panic!("{script}: {error}"))
    }

    /// Waits until the JavaScript expression is true.
    pub(crate) async fn until(&self, expression: &str) {
        let began = Instant::now();
        while self.js(&format!("return Boolean({expression})")).await != json!(true) {
            let state = "return document.querySelector('.actions').innerText";
            assert!(began.elapsed() < PATIENCE, "never: {expression}; the page says {}", self.js(state).await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn text(&self, id: &str) -> String {
        let value = self.js(&format!("return document.getElementById('{id}').textContent")).await;
        value.as_str().expect("a text").to_owned()
    }

    pub(crate) async fn sheet(&self) -> String {
        self.js("return document.getElementById('prompt').value").await.as_str().expect("a text").to_owned()
    }

    pub(crate) async fn click(&self, id: &str) {
        let element = self.client.find(Locator::Id(id)).await.expect("the element is there");
        element.click().await.unwrap_or_else(|error| panic!("click {id}: {error}"));
    }

    /// Replaces the contents of a field.
    pub(crate) async fn fill(&self, id: &str, text: &str) {
        let element = self.client.find(Locator::Id(id)).await.expect("the field is there");
        element.clear().await.expect("the field can be cleared");
        element.send_keys(text).await.expect("the field takes keys");
    }

    /// Waits until the page knows the model.
    pub(crate) async fn ready(&self) {
        self.until("document.getElementById('model').dataset.state === 'ready'").await;
    }

    /// Opens `#place` and waits until it is displayed.
    pub(crate) async fn open(&self, place: &str) {
        self.client.goto(&format!("{}#{place}", self.url)).await.expect("the page opens");
        self.until("document.body.classList.contains('talking')").await;
        self.ready().await;
    }

    /// Sends a request from the page, and returns the JSON of the answer.
    pub(crate) async fn ask(&self, method: &str, path: &str, body: Value) -> Value {
        let body = if body.is_null() { String::new() } else { format!(", body: JSON.stringify({body})") };
        self.js(&format!(
            "return (async () => (await fetch('{path}', {{ method: '{method}',
                headers: {{ 'content-type': 'application/json' }}{body} }})).json())()"
        ))
        .await
    }

    /// Clears the browser's storage, as if it had never seen the page.
    pub(crate) async fn forget(&self) {
        self.js("localStorage.clear(); sessionStorage.clear()").await;
        self.client.goto("about:blank").await.expect("an empty page");
    }

    /// Kills the server.
    pub(crate) fn stop_server(&self) {
        self.server.borrow_mut().take();
    }

    /// Waits until no run is in progress.
    pub(crate) async fn rest(&self) {
        self.until("!document.body.classList.contains('running')").await;
    }

    /// Returns the errors in the browser's console since the last call.
    pub(crate) async fn console_errors(&self) -> Vec<Value> {
        let id = self.client.session_id().await.expect("a session").expect("an open session");
        let body = json!({"type": "browser"}).to_string();
        let (driver, length) = (&self.driver, body.len());
        // WebDriver has no access to the console; this is a command of chromedriver.
        let request = format!(
            "POST /session/{id}/se/log HTTP/1.1\r\nhost: {driver}\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        let mut stream = BufReader::new(TcpStream::connect(driver).expect("chromedriver listens"));
        stream.get_mut().write_all(request.as_bytes()).expect("chromedriver reads");
        let lines = stream.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty());
        let lines: Vec<String> = lines.map(|line| line.to_ascii_lowercase()).collect();
        // Chromedriver keeps the connection open, so the body is read by its length.
        let length = lines.iter().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let mut json = vec![0; length.expect("an answer has a length")];
        stream.read_exact(&mut json).expect("an answer has a body");
        let answer: Value = serde_json::from_slice(&json).expect("the body is JSON");
        let entries = answer["value"].as_array().expect("a list").clone();
        entries.into_iter().filter(|entry| entry["level"] == "SEVERE").collect()
    }

    pub(crate) async fn picture(&self, name: &str) {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("playground-{name}.png"));
        let png = self.client.screenshot().await.expect("a screenshot");
        assert!(png.len() > 5_000, "the picture {name} is {} bytes, that is empty", png.len());
        fs::write(&file, png).expect("the picture can be written");
    }

    pub(crate) async fn assert_no_sideways_scroll(&self, when: &str) {
        let widths = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]";
        let widths = self.js(widths).await;
        assert_eq!(widths[0], widths[1], "wider than the window {when}");
    }
}

/// Runs `test` on a page of the given size, and always closes the browser.
pub(crate) async fn with_page(width: u32, height: u32, test: impl AsyncFnOnce(&Page)) {
    let steps = async |page: &Page| {
        page.ready().await;
        test(page).await;
    };
    with_server(&Setup { width, height, ..Setup::DESK }, steps).await;
}

/// Runs `test` on a page of any server, and always closes the browser. The page may still be connecting.
pub(crate) async fn with_server(setup: &Setup, test: impl AsyncFnOnce(&Page)) {
    let _turn = ONE.lock().await;
    let Some((_driver, driver)) = start_driver() else { return };
    let data_dir = tempfile::tempdir().expect("a temporary folder");
    let (server, url) = start_server(data_dir.path(), setup);
    let client = open_browser(&driver, setup.width, setup.height).await;
    let page = Page { client, url, driver, server: RefCell::new(Some(server)) };
    let steps = async {
        page.client.goto(&page.url).await.expect("the page opens");
        test(&page).await;
    };
    let result = AssertUnwindSafe(steps).catch_unwind().await;
    let _ = page.client.close().await;
    result.unwrap_or_else(|panic| resume_unwind(panic));
}
