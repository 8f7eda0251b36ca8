//! Conversations in the playground: writing, rewinding, forking, downloading, uploading and reopening them.
//! Skipped without chromedriver, unless `TIDEGATE_REQUIRE_BROWSER` is 1.

use std::time::Duration;

use super::browser::{Page, with_page};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use fantoccini::key::Key;
use fantoccini::{Client, Locator};
use serde_json::{Value, json};

/// The tree as displayed: version, level, vertical position, tokens and classes of each turn.
const TREE: &str = "return [...document.querySelectorAll('#tree .node')].map(node => {
    const dot = node.querySelector('.dot');
    return {
        version: node.dataset.version, level: Number(node.getAttribute('aria-level')), y: Number(dot.getAttribute('cy')),
        tokens: Number(node.querySelector('.weight').textContent), classes: [...node.classList],
    };
});";

const EXACT_STATE: &str = "return document.getElementById('state-bytes').dataset.bytes";

pub(super) async fn tree(page: &Page) -> Vec<Value> {
    page.js(TREE).await.as_array().expect("a list").clone()
}

fn has(node: &Value, class: &str) -> bool {
    node["classes"].as_array().is_some_and(|classes| classes.contains(&json!(class)))
}

fn head(tree: &[Value]) -> &Value {
    let heads: Vec<&Value> = tree.iter().filter(|node| has(node, "head")).collect();
    assert_eq!(heads.len(), 1, "exactly one turn is the head: {tree:?}");
    heads[0]
}

pub(super) async fn address(page: &Page) -> String {
    page.js("return location.hash.slice(1)").await.as_str().expect("a text").to_owned()
}

/// Appends `text` and waits for the model's answer.
pub(super) async fn turn(page: &Page, text: &str, seed: u32) {
    let before = tree(page).await.len();
    let field = page.client.find(Locator::Id("prompt")).await.expect("the field is there");
    field.send_keys(text).await.expect("the field takes keys");
    page.js(&format!(
        "document.getElementById('max_tokens').value = 24; document.getElementById('seed').value = {seed}"
    ))
    .await;
    page.click("generate").await;
    page.until(&format!("document.querySelectorAll('#tree .node').length > {before}")).await;
    page.rest().await;
    assert_eq!(page.text("error").await, "");
}

async fn click_node(client: &Client, version: &Value) {
    let place = format!("#tree [data-version=\"{}\"] .dot", version.as_str().expect("an id"));
    client.find(Locator::Css(&place)).await.expect("the turn is drawn").click().await.expect("a click");
}

async fn tokens(page: &Page) -> u64 {
    page.text("tokens-total").await.replace([',', '.'], "").parse().expect("a count")
}

/// Waits until a conversation other than `before` is open and listed.
async fn until_opened(page: &Page, before: &str) {
    let listed = "document.querySelector('#sessions a[aria-current]')?.hash === location.hash";
    page.until(&format!("location.hash !== '#{before}' && {listed} && document.querySelector('#tree .head')")).await;
}

#[tokio::test]
async fn a_conversation_can_be_rewound_forked_downloaded_and_uploaded() {
    with_page(1280, 1000, async |page| {
        page.open("conversation").await;
        assert!(tree(page).await.is_empty(), "no session is created before something is written");
        turn(page, "Once upon a time there was a girl who lived by the sea.", 3).await;
        let id = address(page).await;
        assert!(id.starts_with("ses_"), "{id}");
        let (first, state) = (tokens(page).await, page.js(EXACT_STATE).await);
        turn(page, " A zebra sang", 4).await;
        assert!(tokens(page).await > first, "tokens grow");
        assert_eq!(page.js(EXACT_STATE).await, state, "the state does not");
        assert!(state.as_str().is_some_and(|bytes| bytes.parse::<u64>().is_ok_and(|bytes| bytes > 1000)), "{state}");
        let line = tree(page).await;
        assert_eq!(line.iter().map(|node| node["level"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(head(&line)["version"], line[2]["version"]);
        let told = page.sheet().await;

        // Text that the model has read cannot be edited.
        page.js("const field = document.getElementById('prompt'); field.value = 'Never';
            field.dispatchEvent(new Event('input', { bubbles: true }))")
            .await;
        assert_eq!(page.sheet().await, told);

        click_node(&page.client, &line[1]["version"]).await;
        assert_eq!(page.text("turn-title").await, "Turn 1");
        page.click("rewind").await;
        page.until("document.querySelector('#tree .head').getAttribute('aria-level') === '2'").await;
        page.until(&format!("document.getElementById('prompt').value.length < {}", told.chars().count())).await;
        assert_eq!(tokens(page).await, first);
        turn(page, " But her brother", 5).await;
        let forked = tree(page).await;
        assert_eq!(forked.len(), 4);
        let (left, now) = (&forked[2], &forked[3]);
        assert_eq!((head(&forked)["version"].as_str(), &left["level"]), (now["version"].as_str(), &now["level"]));
        assert_ne!(left["y"], now["y"], "branches are displayed in separate lanes");
        assert!(!has(left, "path") && has(now, "path"), "{forked:?}");
        assert!(page.sheet().await.contains(" But her brother") && !page.sheet().await.contains(" A zebra sang"));
        page.picture("tree").await;

        // A fork is a separate conversation with the same past.
        let (here, text) = (tokens(page).await, page.sheet().await);
        page.click("fork").await;
        until_opened(page, &id).await;
        let fork = address(page).await;
        assert!(fork.starts_with("ses_") && fork != id);
        assert_eq!((tokens(page).await, page.sheet().await), (here, text.clone()));
        assert_eq!(page.js("return document.querySelectorAll('#sessions li').length").await, json!(2));

        // The link downloads a snapshot file, which can be uploaded as another conversation.
        let bytes = page
            .js("return (async () => {
                const link = document.getElementById('download');
                const bytes = new Uint8Array(await (await fetch(link.href)).arrayBuffer());
                return btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join('')); })()")
            .await;
        let bytes = BASE64.decode(bytes.as_str().expect("a text")).expect("base64");
        assert!(bytes.len() as u64 > state.as_str().unwrap().parse().unwrap(), "{} bytes", bytes.len());
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("brought.tidegate");
        std::fs::write(&file, &bytes).expect("the file can be written");
        let chosen = page.client.find(Locator::Id("upload-file")).await.expect("the field is there");
        chosen.send_keys(file.to_str().expect("a plain path")).await.expect("the file is chosen");
        until_opened(page, &fork).await;
        assert_eq!((tokens(page).await, page.js(EXACT_STATE).await), (here, state.clone()));
        assert_eq!(page.sheet().await, text, "the file has the text");
        let name = "return document.getElementById('session-name').value";
        assert!(page.js(name).await.as_str().is_some_and(|name| name.ends_with("(fork)")), "the file has the name");
        turn(page, " Then", 6).await;
        assert!(tokens(page).await > here);

        // A reload returns to the same conversation.
        let brought = address(page).await;
        page.client.refresh().await.expect("the page opens again");
        page.until("document.querySelectorAll('#tree .node').length === 2").await;
        assert_eq!(address(page).await, brought);
        let link = format!("#sessions a[href=\"#{id}\"]");
        page.client.find(Locator::Css(&link)).await.expect("it is listed").click().await.expect("a click");
        page.until("document.querySelectorAll('#tree .node').length === 4").await;
        assert_eq!(page.sheet().await, text);
        assert_eq!(page.console_errors().await, Vec::<Value>::new());

        // A damaged file is refused with an explanation.
        std::fs::write(&file, &bytes[..bytes.len() / 2]).expect("the file can be written");
        let chosen = page.client.find(Locator::Id("upload-file")).await.expect("the field is there");
        chosen.send_keys(file.to_str().expect("a plain path")).await.expect("the file is chosen");
        page.until("!document.getElementById('error').hidden").await;
        assert!(page.text("error").await.contains("is not a snapshot of this model"), "{}", page.text("error").await);
    })
    .await;
}

#[tokio::test]
async fn a_stopped_turn_is_stored_and_can_be_undone_and_repeated() {
    with_page(1280, 1000, async |page| {
        page.open("conversation").await;
        let field = page.client.find(Locator::Id("prompt")).await.expect("the field is there");
        field.send_keys("Tom found a small red boat. He").await.expect("the field takes keys");
        // Sampling at a high temperature hardly ever finishes by itself.
        page.js("document.getElementById('max_tokens').value = 4000;
            document.getElementById('temperature').value = 2;
            new MutationObserver(() => document.getElementById('stop').click()).observe(
                document.getElementById('ink'), { characterData: true, subtree: true })")
            .await;
        page.click("generate").await;
        page.until("document.getElementById('status').textContent.startsWith('Stopped')").await;
        page.js("document.getElementById('temperature').value = ''").await;
        page.rest().await;
        let (kept, tokens_kept) = (page.sheet().await, tokens(page).await);
        assert!(tokens_kept < 4000 && kept.len() > 30, "{kept:?}");
        page.client.refresh().await.expect("the page opens again");
        page.until("document.querySelectorAll('#tree .node').length === 2").await;
        assert_eq!((page.sheet().await, tokens(page).await), (kept.clone(), tokens_kept));

        page.click("back").await;
        page.until("document.getElementById('prompt').value === 'Tom found a small red boat. He'").await;
        assert_eq!(tokens(page).await, 0);
        turn(page, "", 8).await;
        let first = page.sheet().await;
        page.js("document.getElementById('seed').value = 9").await;
        page.click("again").await;
        page.until("document.querySelectorAll('#tree .node').length === 4").await;
        page.rest().await;
        assert_ne!(page.sheet().await, first);
        assert!(page.sheet().await.starts_with("Tom found a small red boat. He"));
        assert_eq!(page.console_errors().await, Vec::<Value>::new());
    })
    .await;
}

#[tokio::test]
async fn a_conversation_continued_elsewhere_is_explained() {
    with_page(1280, 1000, async |page| {
        page.open("conversation").await;
        turn(page, "The old house", 1).await;
        let id = address(page).await;
        page.js(&format!(
            "return fetch('/v1/sessions/{id}/append', {{ method: 'POST',
                headers: {{ 'content-type': 'application/json' }}, body: JSON.stringify({{ text: ' stood alone.' }}) }})"
        ))
        .await;
        page.click("generate").await;
        page.until("!document.getElementById('error').hidden").await;
        page.rest().await;
        assert!(page.text("error").await.contains("continued elsewhere"), "{}", page.text("error").await);
        assert_eq!(tree(page).await.len(), 3, "the page shows the current tree");
        turn(page, " It was", 2).await;

        // Renames, then deletes after confirmation; the address then opens nothing.
        page.fill("session-name", "A house").await;
        let name = page.client.find(Locator::Id("session-name")).await.expect("the field is there");
        name.send_keys(&char::from(Key::Enter).to_string()).await.expect("the field takes keys");
        page.until("document.querySelector('#sessions .session-name').textContent === 'A house'").await;
        page.click("session-delete").await;
        page.click("delete-yes").await;
        page.until("location.hash === '#conversation' && !document.querySelector('#sessions li')").await;
        page.open(&id).await;
        page.until("!document.getElementById('error').hidden").await;
        assert!(page.text("error").await.contains("no longer exists"), "{}", page.text("error").await);
    })
    .await;
}

#[tokio::test]
async fn all_of_a_conversation_is_reachable_on_a_phone_and_with_the_keyboard() {
    with_page(360, 740, async |page| {
        page.open("conversation").await;
        page.assert_no_sideways_scroll("before a conversation").await;
        for (seed, text) in
            [(1, "The fox"), (2, " and the hare"), (3, " went out"), (4, " and"), (5, ""), (6, ""), (7, "")]
        {
            turn(page, text, seed).await;
        }
        page.assert_no_sideways_scroll("with a conversation").await;
        page.picture("phone-tree").await;
        // Left moves the focus to the previous turn, Enter to its buttons.
        page.js("document.querySelector('#tree .head').focus()").await;
        let active = page.client.active_element().await.expect("the turn has the focus");
        active.send_keys(&char::from(Key::Left).to_string()).await.expect("keys");
        assert_eq!(page.text("turn-title").await, "Turn 6");
        let active = page.client.active_element().await.expect("the turn has the focus");
        active.send_keys(&char::from(Key::Enter).to_string()).await.expect("keys");
        assert_eq!(page.js("return document.activeElement.id").await, json!("rewind"));
        let active = page.client.active_element().await.expect("the button has the focus");
        active.send_keys(&char::from(Key::Enter).to_string()).await.expect("keys");
        page.until("document.querySelector('#tree .head').getAttribute('aria-level') === '7'").await;

        // The separate sheet is unchanged, and its link leads back.
        page.client.find(Locator::Css(".modes a")).await.expect("a link").click().await.expect("a click");
        page.until("!document.body.classList.contains('talking')").await;
        assert_eq!(page.sheet().await, "");
        page.click("to-conversation").await;
        page.until("document.querySelectorAll('#tree .node').length === 8").await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(page.console_errors().await, Vec::<Value>::new());
    })
    .await;
}
