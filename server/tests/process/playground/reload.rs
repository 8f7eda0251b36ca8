//! What a reload keeps, what an opened conversation shows, and requests copied as code.
//! Skipped without chromedriver, unless `TIDEGATE_REQUIRE_BROWSER` is 1.

use super::browser::with_page;
use super::sessions::{address, turn};
use serde_json::{Value, json};

const AUTHORS: &str = "return [...document.querySelectorAll('#ink > span')].map(it => [it.className, it.textContent])";

#[tokio::test]
async fn settings_sheet_and_drafts_survive_a_reload() {
    with_page(1280, 1000, async |page| {
        page.fill("prompt", "The lighthouse").await;
        page.fill("max_tokens", "12").await;
        page.fill("temperature", "0.4").await;
        page.fill("stop_strings", "END").await;
        page.fill("seed", "5").await;
        page.click("generate").await;
        page.until("document.querySelector('#ink .made')").await;
        page.rest().await;
        let (text, authors) = (page.sheet().await, page.js(AUTHORS).await);
        page.client.refresh().await.expect("the page opens again");
        page.ready().await;
        assert_eq!((page.sheet().await, page.js(AUTHORS).await), (text.clone(), authors));
        let values =
            "return ['max_tokens', 'temperature', 'stop_strings', 'seed'].map(id => document.getElementById(id).value)";
        assert_eq!(page.js(values).await, json!(["12", "0.4", "END", "5"]));
        assert_eq!(page.js("return document.querySelector('[data-for=temperature]').value").await, json!("0.4"));

        // An unsent text stays with its conversation.
        page.open("conversation").await;
        turn(page, "The fox", 1).await;
        let told = page.sheet().await;
        let field = page.client.find(fantoccini::Locator::Id("prompt")).await.expect("the field is there");
        field.send_keys(" unsent").await.expect("the field takes keys");
        page.client.refresh().await.expect("the page opens again");
        page.until("document.querySelectorAll('#tree .node').length === 2").await;
        assert_eq!(page.sheet().await, format!("{told} unsent"));
        page.click("clear").await;
        assert_eq!(page.sheet().await, told);
        page.js("location.hash = ''").await;
        page.until("!document.body.classList.contains('talking')").await;
        assert_eq!(page.sheet().await, text, "the separate sheet is unchanged");
    })
    .await;
}

#[tokio::test]
async fn a_long_conversation_opens_at_its_current_turn() {
    with_page(390, 844, async |page| {
        let id = page.ask("POST", "/v1/sessions", json!({"text": "One"})).await["id"].as_str().unwrap().to_owned();
        for _ in 0..60 {
            page.ask("POST", &format!("/v1/sessions/{id}/append"), json!({"text": " and one more"})).await;
        }
        page.open(&id).await;
        page.until("document.querySelectorAll('#tree .node').length === 61").await;
        let inside = "const strip = document.querySelector('.strip').getBoundingClientRect();
            const head = document.querySelector('#tree .head .dot').getBoundingClientRect();
            return [head.left >= strip.left, head.right <= strip.right, head.top >= strip.top, head.bottom <= strip.bottom]";
        assert_eq!(page.js(inside).await, json!([true, true, true, true]), "the current turn is in view");
        let end = "const sheet = document.getElementById('sheet');
            return sheet.scrollHeight - sheet.scrollTop - sheet.clientHeight < 4";
        assert_eq!(page.js(end).await, json!(true), "the end of the text is in view");
        page.assert_no_sideways_scroll("with a long tree").await;
        page.picture("long-tree").await;
        assert_eq!(page.console_errors().await, Vec::<Value>::new());
    })
    .await;
}

#[tokio::test]
async fn a_request_is_copied_as_code() {
    with_page(1280, 1000, async |page| {
        page.js("Object.defineProperty(navigator, 'clipboard', { configurable: true, value: { writeText: async (text) => { window.copied = text; } } })").await;
        page.fill("prompt", "It's \"late\"\nand").await;
        page.fill("seed", "7").await;
        // The model's defaults are shown but not sent.
        page.until("document.getElementById('temperature').placeholder === '0.7'").await;
        assert_eq!(page.js("return document.querySelector('[data-for=repetition_penalty]').value").await, json!("1.2"));
        page.fill("top_p", "0.9").await;
        page.fill("repetition_penalty", "1.3").await;
        page.click("copy-curl").await;
        page.until("window.copied").await;
        let curl = page.js("return window.copied").await.as_str().unwrap().to_owned();
        assert!(curl.starts_with(&format!("curl -X POST '{}v1/completions' \\\n", page.url)), "{curl}");
        let body = curl.split_once("-d '").expect("a body").1.trim_end_matches('\'').replace("'\\''", "'");
        let body: Value = serde_json::from_str(&body).expect("the body is JSON");
        assert_eq!((&body["prompt"], &body["seed"]), (&json!("It's \"late\"\nand"), &json!(7)));
        assert_eq!((&body["temperature"], &body["top_k"], &body["top_p"]), (&json!(null), &json!(null), &json!(0.9)));
        // The server accepts the copied body.
        let answer = page.ask("POST", "/v1/completions", body).await;
        assert!(answer["choices"][0]["text"].is_string(), "{answer}");

        page.click("copy-python").await;
        page.until("window.copied.startsWith('from openai')").await;
        let python = page.js("return window.copied").await.as_str().unwrap().to_owned();
        let lines = [
            format!("client = OpenAI(base_url=\"{}v1\", api_key=\"none\")", page.url),
            "answer = client.completions.create(".to_owned(),
            r#"    prompt="It's \"late\"\nand","#.to_owned(),
            r#"    extra_body={"repetition_penalty": 1.3},"#.to_owned(),
            "print(answer.choices[0].text)".to_owned(),
        ];
        for line in lines {
            assert!(python.lines().any(|it| it == line), "{line} is not in\n{python}");
        }
        assert_eq!(page.text("status").await, "Copied as Python");

        // A turn of a conversation names its session; a browser without a clipboard shows the code.
        page.open("conversation").await;
        turn(page, "The fox", 1).await;
        page.js("Object.defineProperty(navigator, 'clipboard', { value: undefined })").await;
        page.click("copy-curl").await;
        page.until("document.getElementById('reader').open").await;
        let id = address(page).await;
        assert!(page.text("reader-text").await.contains(&format!("\"session\": \"{id}\"")));
    })
    .await;
}
