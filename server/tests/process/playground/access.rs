//! Accessibility of the pages: names of controls, contrast of colors, and the same look everywhere.
//! Skipped without chromedriver, unless `TIDEGATE_REQUIRE_BROWSER` is 1.

use super::browser::{Page, with_page};
use super::sessions::turn;
use serde_json::json;

/// Displayed controls without a name.
const UNNAMED: &str = "
    const named = (it) => it.ariaLabel || it.labels?.length || it.textContent.trim() || it.getAttribute('aria-labelledby');
    return [...document.querySelectorAll('a, button, input, select, textarea, summary, dialog, [role]')]
        .filter((it) => it.checkVisibility() && !named(it) && it.role !== 'status').map((it) => it.outerHTML.slice(0, 100));";

/// Pairs of text and background whose contrast is below 4.5 to 1.
const FAINT: &str = "
    const style = getComputedStyle(document.documentElement);
    const luminance = (name) => {
        const hex = style.getPropertyValue(name).trim().slice(1);
        const linear = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
            .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    const pairs = ['ink', 'soft', 'made', 'lead'].flatMap((text) => ['mist', 'sheet', 'wash'].map((ground) => [text, ground]));
    return [...pairs, ['lead-ink', 'lead'], ['ink', 'lead-wash'], ['sheet', 'made']].filter(([text, ground]) => {
        const [a, b] = [luminance('--' + text), luminance('--' + ground)];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
    });";

/// Colors of the page and of its header, and the links in the header.
const LOOK: &str = "
    const style = (selector) => getComputedStyle(document.querySelector(selector));
    return [style('body').backgroundColor, style('body').color, style('.top h1').fontFamily, style('.top h1').color,
        style('.modes').borderColor, style('.gate-plate').fill, [...document.querySelectorAll('.modes a')].map((it) => it.textContent)];";

async fn look(page: &Page, path: &str, shade: &str) -> serde_json::Value {
    page.client.goto(&format!("{}{path}", page.url)).await.expect("the page opens");
    page.until("document.querySelector('.top')").await;
    if page.js("return document.documentElement.dataset.shade").await != json!(shade) {
        page.click("theme").await;
    }
    page.js(LOOK).await
}

#[tokio::test]
async fn the_api_page_looks_like_the_playground_in_both_themes() {
    with_page(1280, 900, async |page| {
        let mut looks = Vec::new();
        for shade in ["light", "dark"] {
            let playground = look(page, "", shade).await;
            assert_eq!(page.js(FAINT).await, json!([]), "{shade}");
            assert_eq!(look(page, "docs", shade).await, playground, "{shade}");
            page.until("document.querySelector('.operation')").await;
            page.picture(&format!("docs-{shade}")).await;
            looks.push(playground);
        }
        assert_ne!(looks[0], looks[1]);
        // Each page leads to the others.
        page.client.goto(&page.url).await.expect("the page opens");
        let link = page.client.find(fantoccini::Locator::LinkText("API")).await.expect("a link");
        link.click().await.expect("a click");
        page.until("location.pathname === '/docs' && document.querySelector('.modes')").await;
        let link = page.client.find(fantoccini::Locator::LinkText("Conversations")).await.expect("a link");
        link.click().await.expect("a click");
        page.until("document.body.classList.contains('talking')").await;
    })
    .await;
}

#[tokio::test]
async fn every_control_has_a_name_in_every_view() {
    with_page(1280, 1000, async |page| {
        assert_eq!(page.js(UNNAMED).await, json!([]), "the sheet");
        page.open("conversation").await;
        assert_eq!(page.js(UNNAMED).await, json!([]), "a new conversation");
        turn(page, "The sea", 1).await;
        page.js("document.getElementById('settings').open = true").await;
        assert_eq!(page.js(UNNAMED).await, json!([]), "a conversation");
        page.js("document.querySelector('#views [value=chat]').click()").await;
        page.until("document.body.classList.contains('chatting')").await;
        assert_eq!(page.js(UNNAMED).await, json!([]), "a chat");
        page.click("read").await;
        page.until("document.getElementById('reader').open").await;
        assert_eq!(page.js(UNNAMED).await, json!([]), "a text");
        page.client.goto(&format!("{}docs", page.url)).await.expect("the page opens");
        page.until("document.querySelector('.operation')").await;
        page.js("for (const it of [...document.querySelectorAll('.operation')].slice(0, 8)) it.open = true").await;
        page.until("document.querySelectorAll('.try').length > 5").await;
        assert_eq!(page.js(UNNAMED).await, json!([]), "the API page");
    })
    .await;
}
