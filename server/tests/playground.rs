//! The playground in a real browser: Chromium, headless, driven through chromedriver, on the shipped checkpoint.
//!
//! Where chromedriver is not installed the tests say so and pass, unless `TIDEGATE_REQUIRE_BROWSER` is 1.
//! The pictures they take lie in `target/tmp/playground-*.png`.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fantoccini::key::Key;
use fantoccini::{Client, ClientBuilder, Locator};
use futures_util::FutureExt;
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{Value, json};
use tokio::sync::Mutex;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);

/// Browsers are large: one at a time.
static ONE: Mutex<()> = Mutex::const_new(());

/// A process that ends with its owner.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The server as a person starts it, ready, and its address.
fn start_server(data_dir: &Path) -> (Process, String) {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../weights/checkpoints/tidegate-tiny");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--host", "127.0.0.1", "--model", model]).arg("--data-dir").arg(data_dir);
    let child = command.arg("--port").arg(free.port().to_string()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = Process(child.expect("the server starts"));
    let began = Instant::now();
    while !is_ready(free) {
        let ended = child.0.try_wait().expect("the server can be asked after");
        assert!(ended.is_none(), "the server ended: {ended:?}");
        assert!(began.elapsed() < PATIENCE, "the server does not get ready");
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

/// chromedriver on a port of its own choice; none where it is not installed.
fn start_driver() -> Option<(Process, String)> {
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
    let port = lines
        .find_map(|line| line.split_once("started successfully on port ")?.1.trim_end_matches('.').parse::<u16>().ok())
        .expect("chromedriver says its port");
    // It goes on writing: an unread pipe would fill and stop it.
    std::thread::spawn(move || lines.for_each(drop));
    Some((child, format!("http://127.0.0.1:{port}")))
}

async fn open_browser(driver: &str, width: u32, height: u32) -> Client {
    let mut options = json!({"args": [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
        "--hide-scrollbars", format!("--window-size={width},{height}"),
    ]});
    if width < 500 {
        // No window of a desktop is that narrow.
        options["mobileEmulation"] = json!({"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2.0}});
    }
    let wanted = json!({"browserName": "chrome", "goog:chromeOptions": options});
    let Value::Object(wanted) = wanted else { unreachable!("written as an object") };
    ClientBuilder::new(HttpConnector::new()).capabilities(wanted).connect(driver).await.expect("a browser session")
}

/// The open page.
struct Page {
    client: Client,
    url: String,
}

impl Page {
    async fn js(&self, script: &str) -> Value {
        self.client.execute(script, vec![]).await.unwrap_or_else(|error| panic!("{script}: {error}"))
    }

    /// Waits until the expression is true.
    async fn until(&self, expression: &str) {
        let began = Instant::now();
        while self.js(&format!("return Boolean({expression})")).await != json!(true) {
            let state = "return document.querySelector('.actions').innerText";
            assert!(began.elapsed() < PATIENCE, "never: {expression}; the page says {}", self.js(state).await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn text(&self, id: &str) -> String {
        let value = self.js(&format!("return document.getElementById('{id}').textContent")).await;
        value.as_str().expect("a text").to_owned()
    }

    async fn sheet(&self) -> String {
        self.js("return document.getElementById('prompt').value").await.as_str().expect("a text").to_owned()
    }

    async fn click(&self, id: &str) {
        let element = self.client.find(Locator::Id(id)).await.expect("the element is there");
        element.click().await.unwrap_or_else(|error| panic!("click {id}: {error}"));
    }

    /// Types over what a field holds.
    async fn fill(&self, id: &str, text: &str) {
        let element = self.client.find(Locator::Id(id)).await.expect("the field is there");
        element.clear().await.expect("the field can be cleared");
        element.send_keys(text).await.expect("the field takes keys");
    }

    /// Waits until no run is going on.
    async fn rest(&self) {
        self.until("!document.body.classList.contains('running')").await;
    }

    async fn picture(&self, name: &str) {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("playground-{name}.png"));
        let png = self.client.screenshot().await.expect("a screenshot");
        assert!(png.len() > 5_000, "the picture {name} is {} bytes, that is empty", png.len());
        fs::write(&file, png).expect("the picture can be written");
    }

    async fn assert_no_sideways_scroll(&self, when: &str) {
        let widths = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]";
        let widths = self.js(widths).await;
        assert_eq!(widths[0], widths[1], "wider than the window {when}");
    }
}

/// Runs `test` on a page of the given size; the browser is closed in any case.
async fn with_page(width: u32, height: u32, test: impl AsyncFnOnce(&Page)) {
    let _turn = ONE.lock().await;
    let Some((_driver, driver_url)) = start_driver() else { return };
    let data_dir = tempfile::tempdir().expect("a temporary folder");
    let (_server, url) = start_server(data_dir.path());
    let page = Page { client: open_browser(&driver_url, width, height).await, url };
    let steps = async {
        page.client.goto(&page.url).await.expect("the page opens");
        page.until("document.getElementById('model').dataset.state === 'ready'").await;
        test(&page).await;
    };
    let result = AssertUnwindSafe(steps).catch_unwind().await;
    let _ = page.client.close().await;
    result.unwrap_or_else(|panic| resume_unwind(panic));
}

/// Counts how often the model's text grows from now on, as `window.grown`.
const COUNT_GROWTH: &str = "
    window.grown = 0;
    new MutationObserver(() => { window.grown += 1; }).observe(
        document.getElementById('ink'), { characterData: true, childList: true, subtree: true });";

#[tokio::test]
async fn a_prompt_streams_and_can_be_continued_taken_back_and_stopped() {
    with_page(1280, 900, async |page| {
        assert_eq!(page.client.title().await.expect("a title"), "Tidegate");
        assert_eq!(page.text("model").await, "tidegate-tiny");
        let elsewhere =
            "return performance.getEntriesByType('resource').filter(e => !e.name.startsWith(location.origin)).length";
        assert_eq!(page.js(elsewhere).await, json!(0), "the page loads something from elsewhere");
        page.picture("light").await;

        let prompt = "Once upon a time there was a girl who lived by the sea. <b>She</b> & her";
        page.fill("prompt", prompt).await;
        page.fill("max_tokens", "300").await;
        page.fill("seed", "7").await;
        page.js(COUNT_GROWTH).await;
        page.click("generate").await;
        page.until("window.grown > 2").await;
        page.rest().await;
        let first = page.sheet().await;
        assert!(first.starts_with(prompt) && first.len() > prompt.len() + 20, "{first:?}");
        assert_eq!(
            page.js("return document.querySelector('#ink .made').textContent").await,
            json!(first[prompt.len()..])
        );
        assert_eq!(page.js("return document.querySelectorAll('#ink b').length").await, json!(0), "text became markup");
        assert!(page.text("rate").await.parse::<f64>().is_ok_and(|rate| rate > 0.0), "{}", page.text("rate").await);
        assert!((1..=300).contains(&page.text("count").await.parse::<u32>().expect("a count")));
        assert!(page.text("first").await.ends_with('s'));
        assert_eq!(page.text("generate").await, "Continue");

        // The same seed from the same beginning gives the same text again.
        page.click("back").await;
        assert_eq!(page.sheet().await, prompt);
        let body = page.client.find(Locator::Css("body")).await.expect("a body");
        body.send_keys(&format!("{}{}", char::from(Key::Control), char::from(Key::Enter))).await.expect("keys");
        page.until("document.getElementById('prompt').value.length > 80").await;
        page.rest().await;
        assert_eq!(page.sheet().await, first);

        // A person goes on where the model has ended, or it would have nothing to add.
        let field = page.client.find(Locator::Id("prompt")).await.expect("the field is there");
        field.send_keys(" One day, the").await.expect("the field takes keys");
        let so_far = first + " One day, the";
        assert_eq!(page.sheet().await, so_far);
        page.click("generate").await;
        page.rest().await;
        assert!(page.sheet().await.len() > so_far.len() && page.sheet().await.starts_with(&so_far));

        // Stop at the first text that comes, long before the tokens asked for.
        page.fill("max_tokens", "1000").await;
        page.js("new MutationObserver(() => document.getElementById('stop').click()).observe(
            document.getElementById('ink'), { characterData: true, subtree: true })")
            .await;
        page.click("again").await;
        page.until("document.getElementById('status').textContent === 'Stopped.'").await;
        page.rest().await;
        let stopped = page.sheet().await;
        tokio::time::sleep(Duration::from_millis(400)).await;
        assert_eq!(page.sheet().await, stopped, "text came after the stop");
        assert!(page.text("count").await.replace([',', '.'], "").parse::<u32>().expect("a count") < 1000);
        assert_eq!(page.text("error").await, "");
    })
    .await;
}

#[tokio::test]
async fn a_wrong_value_is_told_where_it_stands() {
    with_page(1280, 900, async |page| {
        page.fill("prompt", "Once").await;
        page.fill("temperature", "9").await;
        page.click("generate").await;
        page.until("!document.getElementById('error').hidden").await;
        page.rest().await;
        let error = page.text("error").await;
        assert!(error.to_lowercase().contains("temperature") && error.contains('2'), "{error}");
        assert_eq!(page.js("return document.getElementById('temperature').ariaInvalid").await, json!("true"));
        assert_eq!(page.sheet().await, "Once");
        page.picture("error").await;

        page.fill("temperature", "0.5").await;
        page.fill("max_tokens", "4").await;
        page.click("generate").await;
        page.until("document.querySelector('#ink .made')").await;
        page.rest().await;
        assert_eq!(page.text("error").await, "");
    })
    .await;
}

#[tokio::test]
async fn a_phone_shows_it_whole_and_the_chosen_colours_stay() {
    with_page(360, 740, async |page| {
        page.assert_no_sideways_scroll("at first").await;
        page.click("theme").await;
        assert_eq!(page.js("return document.documentElement.dataset.shade").await, json!("dark"));
        page.client.refresh().await.expect("the page opens again");
        assert_eq!(page.js("return document.documentElement.dataset.shade").await, json!("dark"));

        page.js("document.getElementById('seed').value = 3").await;
        page.client.find(Locator::Css("#examples button")).await.expect("an example").click().await.expect("a click");
        page.until("document.querySelector('#ink .made')?.textContent.length > 20").await;
        page.assert_no_sideways_scroll("while text comes").await;
        page.picture("phone").await;
        page.rest().await;
        page.fill("prompt", &"long".repeat(60)).await;
        page.assert_no_sideways_scroll("with a long word").await;
        let fits = "const button = document.getElementById('generate').getBoundingClientRect();
            return button.bottom <= innerHeight && button.height >= 40";
        assert_eq!(page.js(fits).await, json!(true), "the button is not within the thumb's reach");
        page.js("document.getElementById('settings').open = true").await;
        page.assert_no_sideways_scroll("with the settings open").await;
        // The tinted copy and the field over it must break their lines alike.
        let heights =
            "return document.getElementById('ink').scrollHeight - document.getElementById('prompt').scrollHeight";
        assert_eq!(page.js(heights).await, json!(0));
    })
    .await;
}

#[tokio::test]
async fn events_are_read_however_the_stream_is_cut_and_edits_keep_their_authors() {
    with_page(1280, 900, async |page| {
        let events = r#"return (async () => {
            const { EventReader } = await import("/playground/sse.js");
            const text = ": hello\n\ndata: {\"a\":\"né€😀\"}\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: cr\r\rdata: [DONE]\n\n";
            const bytes = new TextEncoder().encode(text);
            const wanted = JSON.stringify(['{"a":"né€😀"}', "two\nlines", "cr", "[DONE]"]);
            const wrong = [];
            for (let size = 1; size <= bytes.length; size += 1) {
                const reader = new EventReader();
                const got = [];
                for (let at = 0; at < bytes.length; at += size) got.push(...reader.push(bytes.slice(at, at + size)));
                if (JSON.stringify(got) !== wanted) wrong.push([size, got]);
            }
            return wrong; })()"#;
        assert_eq!(page.js(events).await, json!([]));

        let edits = r#"return (async () => {
            const { edited } = await import("/playground/sheet.js");
            const pieces = [{ text: "abc", made: false }, { text: "defg", made: true }];
            return ["abcdefg", "abXcdefg", "abcdeYfg", "bcdefg", "abcdef", "abZg", "", "new"].map(text =>
                edited(pieces, text).map(piece => (piece.made ? "*" : "") + piece.text).join("|")); })()"#;
        let wanted = ["abc|*defg", "ab|X|c|*defg", "abc|*de|Y|*fg", "bc|*defg", "abc|*def", "ab|Z|*g", "", "new"];
        assert_eq!(page.js(edits).await, json!(wanted));
    })
    .await;
}
