//! The playground in headless Chromium, driven by chromedriver, with the shipped checkpoint.
//!
//! Skipped without chromedriver, unless `TIDEGATE_REQUIRE_BROWSER` is 1.
//! Screenshots are written to `playground-*.png` in Cargo's folder for temporary files.

use std::time::Duration;

use super::browser::with_page;
use fantoccini::Locator;
use fantoccini::key::Key;
use serde_json::json;

/// Counts how often the model's text grows from now on, in `window.grown`.
const COUNT_GROWTH: &str = "
    window.grown = 0;
    new MutationObserver(() => { window.grown += 1; }).observe(
        document.getElementById('ink'), { characterData: true, childList: true, subtree: true });";

#[tokio::test]
async fn a_prompt_streams_and_can_be_continued_undone_and_stopped() {
    with_page(1280, 900, async |page| {
        assert_eq!(page.client.title().await.expect("a title"), "Tidegate");
        assert_eq!(page.text("model").await, "tidegate-tiny");
        let elsewhere =
            "return performance.getEntriesByType('resource').filter(e => !e.name.startsWith(location.origin)).length";
        assert_eq!(page.js(elsewhere).await, json!(0), "the page loads an external resource");
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
        assert!(
            page.text("rate").await.replace(',', "").parse::<f64>().is_ok_and(|rate| rate > 0.0),
            "{}",
            page.text("rate").await
        );
        assert!((1..=300).contains(&page.text("count").await.parse::<u32>().expect("a count")));
        assert!(page.text("first").await.ends_with('s'));
        assert_eq!(page.text("generate").await, "Continue");

        // The same seed and beginning give the same text again.
        page.click("back").await;
        assert_eq!(page.sheet().await, prompt);
        let body = page.client.find(Locator::Css("body")).await.expect("a body");
        body.send_keys(&format!("{}{}", char::from(Key::Control), char::from(Key::Enter))).await.expect("keys");
        page.until("document.getElementById('prompt').value.length > 80").await;
        page.rest().await;
        assert_eq!(page.sheet().await, first);

        // Adds text, because the model has finished and would add nothing.
        let field = page.client.find(Locator::Id("prompt")).await.expect("the field is there");
        field.send_keys(" One day, the").await.expect("the field takes keys");
        let so_far = first + " One day, the";
        assert_eq!(page.sheet().await, so_far);
        page.click("generate").await;
        page.rest().await;
        assert!(page.sheet().await.len() > so_far.len() && page.sheet().await.starts_with(&so_far));

        // Stops at the first text, long before the token limit.
        page.fill("max_tokens", "1000").await;
        page.js("new MutationObserver(() => document.getElementById('stop').click()).observe(
            document.getElementById('ink'), { characterData: true, subtree: true })")
            .await;
        // Sampling at a high temperature hardly ever finishes by itself. If it does before the click, try again.
        page.fill("temperature", "2").await;
        for _ in 0..5 {
            page.click("again").await;
            page.until("['Stopped', 'Finished'].includes(document.getElementById('status').textContent)").await;
            page.rest().await;
            if page.text("status").await == "Stopped" {
                break;
            }
        }
        assert_eq!(page.text("status").await, "Stopped");
        let stopped = page.sheet().await;
        tokio::time::sleep(Duration::from_millis(400)).await;
        assert_eq!(page.sheet().await, stopped, "text came after the stop");
        assert!(page.text("count").await.replace([',', '.'], "").parse::<u32>().expect("a count") < 1000);
        assert_eq!(page.text("error").await, "");
    })
    .await;
}

#[tokio::test]
async fn an_invalid_value_is_marked_at_its_field() {
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
async fn the_page_fits_a_phone_and_remembers_its_theme() {
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
        assert_eq!(page.js(fits).await, json!(true), "the button is out of the thumb's reach");
        page.js("document.getElementById('settings').open = true").await;
        page.assert_no_sideways_scroll("with the settings open").await;
        // The tinted copy and the field on top of it must break lines alike.
        let heights =
            "return document.getElementById('ink').scrollHeight - document.getElementById('prompt').scrollHeight";
        assert_eq!(page.js(heights).await, json!(0));
    })
    .await;
}

#[tokio::test]
async fn events_are_parsed_however_the_stream_is_split_and_edits_keep_their_authors() {
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
