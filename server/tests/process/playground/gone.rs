//! What the page reports about the server and its runs.
//! Skipped without chromedriver, unless `TIDEGATE_REQUIRE_BROWSER` is 1.

use super::browser::with_page;
use super::sessions::turn;
use serde_json::{Value, json};

#[tokio::test]
async fn the_page_notices_that_the_server_is_gone() {
    with_page(1280, 900, async |page| {
        page.stop_server();
        // No input: the page must find out by itself.
        page.until("document.getElementById('model').dataset.state === 'lost'").await;
        assert_eq!(page.text("model").await, "The server does not respond");
    })
    .await;
}

#[tokio::test]
async fn the_speed_is_the_servers_and_statuses_are_plain_words() {
    with_page(1280, 900, async |page| {
        assert_eq!(page.text("status").await, "Ready");
        // Records the last timings and all statuses.
        page.js("
            const plain = window.fetch;
            window.fetch = async (path, request) => {
                const response = await plain(path, request);
                if (String(path).includes('completions')) {
                    response.clone().text().then((text) => { window.answer = text; });
                }
                return response;
            };
            window.said = [];
            new MutationObserver(() => window.said.push(document.getElementById('status').textContent))
                .observe(document.getElementById('status'), { childList: true });")
            .await;
        page.fill("prompt", "Once upon a time").await;
        page.fill("max_tokens", "24").await;
        page.fill("seed", "3").await;
        page.click("generate").await;
        page.until("window.answer").await;
        page.rest().await;
        let expected = page
            .js(r#"
                const parts = window.answer.split("\n").filter(line => line.startsWith("data: {")).map(line => JSON.parse(line.slice(6)));
                const { decode_ms: ms } = parts.map(part => part.choices[0]?.timings).find(Boolean);
                const count = parts.map(part => part.usage?.completion_tokens).find(Boolean);
                const rate = (count - 1) * 1000 / ms;
                return [rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString(), String(count)]"#)
            .await;
        assert_eq!(json!([page.text("rate").await, page.text("count").await]), expected);
        let said = page.js("return window.said").await;
        let said: Vec<&str> = said.as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
        assert!(matches!(said[..], ["Writing", "Finished" | "Reached the token limit"]), "{said:?}");

        // If all tokens arrive at once, their arrival times say nothing about the speed.
        let rates = "return (async () => {
            const { Gauge } = await import('/playground/gauge.js');
            const [gauge, rates] = [new Gauge(), []];
            for (const timings of [null, { decode_ms: 250 }]) {
                gauge.start();
                for (let i = 0; i < 24; i += 1) gauge.add(1);
                if (timings) gauge.time(timings);
                gauge.finish();
                rates.push(document.getElementById('rate').textContent);
            }
            return rates; })()";
        assert_eq!(page.js(rates).await, json!(["–", "92"]));
    })
    .await;
}

/// Clicks Stop at the first text, and records what the page shows at that moment.
const STOP_AT_FIRST_TEXT: &str = "
    window.shown = null;
    const watch = new MutationObserver(() => {
        if (window.shown !== null) return;
        window.shown = document.getElementById('prompt').value;
        document.getElementById('stop').click();
    });
    watch.observe(document.getElementById('ink'), { characterData: true, subtree: true });
    document.getElementById('max_tokens').value = 2000;
    document.getElementById('temperature').value = 2;";

#[tokio::test]
async fn stop_keeps_exactly_what_was_shown() {
    with_page(1280, 1000, async |page| {
        page.fill("prompt", "The tide").await;
        page.js(STOP_AT_FIRST_TEXT).await;
        page.click("generate").await;
        page.until("window.shown !== null").await;
        page.rest().await;
        assert_eq!(page.js("return window.shown").await, json!(page.sheet().await));
        assert_eq!(page.text("status").await, "Stopped");

        page.open("conversation").await;
        page.fill("prompt", "The tide").await;
        page.js(STOP_AT_FIRST_TEXT).await;
        page.click("generate").await;
        page.until("window.shown !== null").await;
        page.rest().await;
        assert_eq!(page.text("error").await, "");
        let shown = page.js("return window.shown").await;
        assert_eq!(shown, json!(page.sheet().await));
        let id = super::sessions::address(page).await;
        let text = page.ask("GET", &format!("/v1/sessions/{id}/text"), Value::Null).await;
        assert_eq!(text["text"], shown, "the server has the same");
        let kept = page.ask("GET", &format!("/v1/sessions/{id}/messages"), Value::Null).await;
        let roles: Vec<&Value> = kept["data"].as_array().unwrap().iter().map(|message| &message["role"]).collect();
        assert_eq!(roles, ["user", "assistant"]);
        page.js("document.getElementById('temperature').value = 0.8").await;
        turn(page, " and then", 4).await;
    })
    .await;
}
