//! The playground on a server that requires an API key.
//! Skipped without chromedriver, unless `TIDEGATE_REQUIRE_BROWSER` is 1.

use super::browser::{Setup, with_server};
use fantoccini::Locator;
use fantoccini::key::Key;
use serde_json::json;

const KEY: &str = "sk-playground-0123456789";

#[tokio::test]
async fn a_key_is_requested_once_and_sent_with_every_request() {
    with_server(&Setup { key: Some(KEY), ..Setup::DESK }, async |page| {
        page.until("!document.getElementById('key-field').hidden").await;
        page.until("document.getElementById('model').dataset.state === 'lost'").await;
        assert_eq!(page.js("return document.activeElement.id").await, json!("api_key"), "the key can be typed at once");
        page.picture("key").await;
        assert!(page.text("model").await.contains("API key"), "{}", page.text("model").await);
        let field = page.client.find(Locator::Id("api_key")).await.expect("the field is there");
        field.send_keys(&format!("{KEY}{}", char::from(Key::Tab))).await.expect("keys");
        page.until("document.getElementById('model').dataset.state === 'ready'").await;
        page.fill("prompt", "Once upon a time there was").await;
        page.fill("max_tokens", "8").await;
        page.click("generate").await;
        page.until("document.querySelector('#ink .made')").await;
        page.rest().await;

        // A conversation, and the download of its snapshot, for which a plain link could not send the key.
        page.js("location.hash = '#conversation'").await;
        page.until("document.body.classList.contains('talking')").await;
        page.fill("prompt", "The old lighthouse").await;
        page.click("generate").await;
        page.until("document.querySelectorAll('#tree .node').length === 2").await;
        page.rest().await;
        page.js("
            window.saved = null;
            HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; };
            document.querySelector('#tree .head').dispatchEvent(new MouseEvent('click', { bubbles: true }));")
            .await;
        page.until("document.getElementById('download').href").await;
        page.js("document.getElementById('download').dispatchEvent(new MouseEvent('click', { cancelable: true }))")
            .await;
        page.until("window.saved").await;
        let saved = page.js("return window.saved").await;
        assert_eq!(saved[0], json!("The-old-lighthouse-Turn-1.tidegate"));
        assert!(saved[1].as_str().is_some_and(|link| link.starts_with("blob:")), "{saved}");

        // Reloading the tab does not ask for the key again.
        page.client.refresh().await.expect("the page opens again");
        page.until("document.querySelectorAll('#tree .node').length === 2").await;
        assert_eq!(page.js("return document.getElementById('model').dataset.state").await, json!("ready"));
    })
    .await;
}
