//! Conversations shown as chat messages. Skipped without chromedriver, unless `TIDEGATE_REQUIRE_BROWSER` is 1.

use super::browser::{Page, with_page};
use super::sessions::{address, turn};
use fantoccini::Locator;
use serde_json::{Value, json};

/// Returns the role and text of each displayed message.
async fn messages(page: &Page) -> Vec<(String, String)> {
    let script = "return [...document.querySelectorAll('#messages .message')].map(item =>
        [item.classList[1], item.querySelector('.said').textContent])";
    serde_json::from_value(page.js(script).await).expect("pairs")
}

async fn view(page: &Page, name: &str) {
    let button = format!("#views button[value={name}]");
    page.client.find(Locator::Css(&button)).await.expect("the model has a template").click().await.expect("a click");
    page.until(&format!("document.body.classList.contains('chatting') === {}", name == "chat")).await;
}

#[tokio::test]
async fn messages_are_sent_as_chat_and_shown_as_messages_again() {
    with_page(1280, 1000, async |page| {
        page.open("conversation").await;
        view(page, "chat").await;
        assert_eq!(page.text("generate").await, "Send");
        page.js("
            window.bodies = [];
            const plain = window.fetch;
            window.fetch = (path, request) => {
                if (request?.method === 'POST' && String(path).includes('completions')) window.bodies.push([path, request.body]);
                return plain(path, request);
            };")
            .await;
        turn(page, "Who lives by the sea?", 1).await;
        turn(page, "And who else?", 2).await;
        let bodies = page.js("return window.bodies").await;
        for (body, question) in bodies.as_array().unwrap().iter().zip(["Who lives by the sea?", "And who else?"]) {
            assert_eq!(body[0], "/v1/chat/completions");
            let body: Value = serde_json::from_str(body[1].as_str().unwrap()).unwrap();
            assert_eq!(body["messages"], json!([{"role": "user", "content": question}]));
        }
        let shown = messages(page).await;
        let roles: Vec<&str> = shown.iter().map(|(role, _)| &**role).collect();
        assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
        assert_eq!((&*shown[0].1, &*shown[2].1), ("Who lives by the sea?", "And who else?"));
        assert_eq!(page.sheet().await, "", "the next message is empty");
        assert!(page.text("rate").await.replace(',', "").parse::<f64>().is_ok(), "{}", page.text("rate").await);
        page.picture("chat").await;

        // Another browser shows the same messages, because the conversation was begun as a chat.
        let id = address(page).await;
        page.forget().await;
        page.open(&id).await;
        page.until("document.body.classList.contains('chatting') && document.querySelector('#tree .head')").await;
        assert_eq!(messages(page).await, shown);
        let kept = page.ask("GET", &format!("/v1/sessions/{id}/messages"), Value::Null).await;
        let contents: Vec<&str> = kept["data"].as_array().unwrap().iter().map(|it| it["content"].as_str().unwrap()).collect();
        assert_eq!(contents, shown.iter().map(|(_, text)| &**text).collect::<Vec<_>>());

        // The text view includes what the template wrote between the messages.
        view(page, "text").await;
        let text = page.ask("GET", &format!("/v1/sessions/{id}/text"), Value::Null).await;
        assert_eq!(page.sheet().await, text["text"].as_str().unwrap());
        view(page, "chat").await;
        page.click("back").await;
        page.until("document.getElementById('prompt').value === 'And who else?'").await;
        assert_eq!(messages(page).await, shown[..2]);
        assert_eq!(page.console_errors().await, Vec::<Value>::new());
    })
    .await;
}

#[tokio::test]
async fn a_chat_fits_a_phone() {
    with_page(390, 844, async |page| {
        page.open("conversation").await;
        view(page, "chat").await;
        for seed in 1..6 {
            turn(page, "Tell me more about the sea, and about all the ships that are on it.", seed).await;
        }
        page.assert_no_sideways_scroll("with a chat").await;
        let visible = "const field = document.getElementById('prompt').getBoundingClientRect();
            const sheet = document.getElementById('sheet').getBoundingClientRect();
            return field.height > 20 && field.bottom <= sheet.bottom + 1 && field.top >= sheet.top";
        assert_eq!(page.js(visible).await, json!(true), "the next message is written in view");
        page.picture("phone-chat").await;
    })
    .await;
}
