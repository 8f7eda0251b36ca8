//! Conversations that this browser has not seen before: their texts, names and branches come from the server.
//! Skipped without chromedriver, unless `TIDEGATE_REQUIRE_BROWSER` is 1.

use super::browser::{Page, Setup, with_page, with_server};
use super::sessions::{address, tree, turn};
use fantoccini::Locator;
use serde_json::{Value, json};

fn id_of(object: &Value, field: &str) -> String {
    object[field].as_str().unwrap_or_else(|| panic!("no {field} in {object}")).to_owned()
}

async fn note(page: &Page) -> String {
    let hidden = page.js("return document.getElementById('missing').hidden").await;
    if hidden == json!(true) { String::new() } else { page.text("missing-text").await }
}

/// Returns the displayed text written by the model, and that written by a person.
async fn by_author(page: &Page) -> (String, String) {
    let text = async |selector: &str| {
        let script =
            format!("return [...document.querySelectorAll('#ink > {selector}')].map(it => it.textContent).join('')");
        page.js(&script).await.as_str().expect("a text").to_owned()
    };
    (text(".made").await, text("span:not(.made)").await)
}

#[tokio::test]
async fn a_conversation_made_elsewhere_has_its_text_tree_names_and_forks() {
    with_page(1280, 1000, async |page| {
        // Another program's conversation: a beginning, two turns from it, an older version, names and a fork.
        let metadata = json!({"metadata": {"name": "The harbour"}, "text": "The harbour was empty."});
        let id = id_of(&page.ask("POST", "/v1/sessions", metadata).await, "id");
        let take = async |prompt: &str| {
            let body = json!({"session": id, "prompt": prompt, "max_tokens": 12, "temperature": 0});
            page.ask("POST", "/v1/completions", body).await
        };
        let first = take(" One ship").await;
        let root = id_of(&first["session"], "parent");
        let left = id_of(&first["session"], "version");
        page.ask("POST", &format!("/v1/sessions/{id}/rewind"), json!({"version": root})).await;
        let second = take(" Two boats").await;
        let now = id_of(&second["session"], "version");
        let label = json!({"label": "the calm ending"});
        page.ask("PATCH", &format!("/v1/sessions/{id}/turns/{now}"), label).await;
        page.ask("PUT", &format!("/v1/sessions/{id}/tags/best"), json!({})).await;
        let fork = page.ask("POST", &format!("/v1/sessions/{id}/fork"), json!({"metadata": {"name": "A fork"}})).await;
        let fork = id_of(&fork["data"][0], "id");

        page.open(&format!("session={id}")).await;
        page.until("document.querySelectorAll('#tree .node').length === 3").await;
        assert_eq!(address(page).await, id);
        let made = second["choices"][0]["text"].as_str().unwrap();
        assert_eq!(page.sheet().await, format!("The harbour was empty. Two boats{made}"));
        assert_eq!(by_author(page).await, (made.to_owned(), "The harbour was empty. Two boats".to_owned()));
        assert_eq!(note(page).await, "");
        let names = page.text("turn-names").await;
        for name in ["Label the calm ending", "Tag best", "Fork A fork"] {
            assert!(names.contains(name), "{name} is not in {names}");
        }
        assert_eq!(page.js("return document.querySelectorAll('#tree .flag').length").await, json!(1));
        page.picture("elsewhere").await;

        // A version that is not the current one.
        let mark = format!("#tree [data-version=\"{left}\"] .dot");
        page.client.find(Locator::Css(&mark)).await.expect("it is drawn").click().await.expect("a click");
        page.until("document.getElementById('turn-text').textContent.startsWith(' One ship')").await;
        page.click("read").await;
        page.until("document.getElementById('reader').open").await;
        let made = first["choices"][0]["text"].as_str().unwrap();
        assert_eq!(page.text("reader-text").await, format!("The harbour was empty. One ship{made}"));
        page.picture("reader").await;
        page.js("document.getElementById('reader').close()").await;

        // A pasted link opens the fork, which leads back.
        page.fill("open-id", &format!("{}#session={fork}\u{e007}", page.url)).await;
        page.until(&format!("location.hash === '#{fork}' && document.querySelector('#tree .head')")).await;
        let back = format!("#turn-names a[href=\"#{id}\"]");
        page.client.find(Locator::Css(&back)).await.expect("a link to the origin").click().await.expect("a click");
        page.until(&format!("location.hash === '#{id}'")).await;
        assert_eq!(page.console_errors().await, Vec::<Value>::new());
    })
    .await;
}

#[tokio::test]
async fn a_new_session_at_a_version_has_the_tree_before_it() {
    with_page(1280, 1000, async |page| {
        let id = id_of(&page.ask("POST", "/v1/sessions", json!({"text": "The well"})).await, "id");
        let body = json!({"session": id, "prompt": " was", "max_tokens": 4});
        let version = id_of(&page.ask("POST", "/v1/completions", body).await["session"], "version");
        let new = id_of(&page.ask("POST", "/v1/sessions", json!({"version": version})).await, "id");
        page.open(&new).await;
        page.until("document.querySelectorAll('#tree .node').length === 2").await;
        let first = page.client.find(Locator::Css("#tree .node .dot")).await.expect("it is drawn");
        first.click().await.expect("a click");
        page.until("document.getElementById('turn-text').textContent === 'The well'").await;
        let link = format!("#turn-names a[href=\"#{id}\"]");
        page.client.find(Locator::Css(&link)).await.expect("a link to the session that made it");
        page.click("rewind").await;
        page.until("document.getElementById('prompt').value === 'The well'").await;
    })
    .await;
}

#[tokio::test]
async fn a_conversation_reopened_by_another_browser_is_the_same() {
    with_page(1280, 1000, async |page| {
        page.open("conversation").await;
        for (seed, text) in [(1, "The old mill"), (2, " turned"), (3, "")] {
            turn(page, text, seed).await;
        }
        let (id, text, authors) = (address(page).await, page.sheet().await, by_author(page).await);
        assert_eq!(page.js("return Object.keys(localStorage).filter(key => key.includes('text'))").await, json!([]));
        page.forget().await;
        page.open(&id).await;
        page.until("document.querySelectorAll('#tree .node').length === 4").await;
        assert_eq!((page.sheet().await, by_author(page).await), (text, authors));
        // Undoing needs what was typed, which only the server knows.
        page.click("back").await;
        page.until("document.querySelector('#tree .head').getAttribute('aria-level') === '3'").await;
        page.until("document.getElementById('status').textContent.startsWith('Undone')").await;
        page.click("back").await;
        page.until("document.getElementById('prompt').value.endsWith(' turned')").await;
    })
    .await;
}

#[tokio::test]
async fn a_server_without_texts_is_named_and_this_browser_has_a_copy() {
    let setup = Setup { args: &["--keep-text", "off"], ..Setup::DESK };
    with_server(&setup, async |page| {
        page.open("conversation").await;
        turn(page, "The lamp", 1).await;
        assert!(note(page).await.contains("keeps no text"), "{}", note(page).await);
        turn(page, " went out", 2).await;
        let (id, text) = (address(page).await, page.sheet().await);
        page.client.refresh().await.expect("the page opens again");
        page.until("document.querySelectorAll('#tree .node').length === 3").await;
        assert_eq!(page.sheet().await, text);
        assert!(note(page).await.contains("this browser’s copy"), "{}", note(page).await);
        assert_eq!(tree(page).await.len(), 3);

        page.forget().await;
        page.open(&id).await;
        page.until("document.querySelectorAll('#tree .node').length === 3").await;
        assert_eq!(page.sheet().await, "");
        assert!(note(page).await.contains("this browser has no copy"), "{}", note(page).await);
        page.until("document.getElementById('turn-text').textContent.includes('has not kept the text')").await;
    })
    .await;
}

#[tokio::test]
async fn a_text_is_split_by_its_messages_even_from_its_middle() {
    with_page(1280, 1000, async |page| {
        let split = r#"return (async () => {
            const { authored } = await import("/playground/story.js");
            const said = (role, content) => ({ role, content });
            const shown = (text, messages) => authored(text, messages).map(piece => (piece.made ? "*" : "") + piece.text).join("|");
            return [
                shown("a b c", [said("user", "a"), said("assistant", " b"), said("user", " c")]),
                shown("Hello\n\nHi\n\n", [said("user", " Hello "), said("assistant", "Hi")]),
                shown("iddle end", [said("user", "a long middle"), said("assistant", " end")]),
                shown("a a a", [said("user", "a a"), said("assistant", " a")]),
                shown("changed", [said("user", "other"), said("assistant", null)]),
                shown("", []),
            ]; })()"#;
        let wanted = ["a|* b| c", "Hello|\n\n|*Hi|\n\n", "iddle|* end", "a a|* a", "changed", ""];
        assert_eq!(page.js(split).await, json!(wanted));
    })
    .await;
}
