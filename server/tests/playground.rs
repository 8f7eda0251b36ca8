//! The playground in a real browser: Chromium, headless, driven through chromedriver, on the shipped checkpoint.
//!
//! Where chromedriver is not installed the tests say so and pass, unless `TIDEGATE_REQUIRE_BROWSER` is 1.
//! The pictures they take lie in `target/tmp/playground-*.png`.

use std::fs;
use std::future::Future;
use std::io::{BufRead, BufReader};
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
const PATIENCE: Duration = Duration::from_secs(60);

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

/// The server's process and its address.
fn start_server(data_dir: &Path) -> (Process, String) {
    todo!()
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
    let wanted = json!({"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}});
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
async fn with_page<F: Future<Output = ()>>(width: u32, height: u32, test: impl FnOnce(std::sync::Arc<Page>) -> F) {
    let _turn = ONE.lock().await;
    let Some((_driver, driver_url)) = start_driver() else { return };
    let data_dir = tempfile::tempdir().expect("a temporary folder");
    let (_server, url) = start_server(data_dir.path());
    let client = open_browser(&driver_url, width, height).await;
    let page = std::sync::Arc::new(Page { client: client.clone(), url });
    let result = AssertUnwindSafe(async {
        page.client.goto(&page.url).await.expect("the page opens");
        page.until("document.getElementById('model').dataset.state === 'ready'").await;
        test(page.clone()).await;
    })
    .catch_unwind()
    .await;
    let _ = client.close().await;
    result.unwrap_or_else(|panic| resume_unwind(panic));
}
