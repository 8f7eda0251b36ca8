//! Fuzzes chat templates, which come from others with a checkpoint. A changed template renders or is refused within its
//! step limit, and never panics.

use std::fs;

use serde_json::json;
use tidegate_server::text::{After, ChatTemplate, Message};

use crate::common::fuzz;

const WORDS: [&str; 24] = [
    "{{",
    "}}",
    "{%",
    "%}",
    "{%-",
    "-%}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if loop.first %}",
    "{% endif %}",
    "{% set x = x ~ x %}",
    "{% macro f(a) %}",
    "{% endmacro %}",
    "{{ f(1) }}",
    "{{ range(99999999) }}",
    "{{ 'a' * 99999999 }}",
    "{{ messages[-1]['content'][9:1:-1] }}",
    "| tojson",
    "| trim",
    ".split('', -1)",
    "raise_exception('x')",
    "strftime_now('%Q')",
    "namespace(a=1)",
    "{% generation %}",
];

#[test]
fn no_template_panics_or_runs_without_end() {
    let seeds = ["alternating", "headed", "lines", "marked"].map(|name| {
        let path = format!("{}/tests/engine/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
        fs::read(path).unwrap()
    });
    let folder = tempfile::tempdir().unwrap();
    let messages = [("system", "Be <kind>."), ("user", "Hi"), ("assistant", "Hello"), ("user", "")];
    let messages =
        messages.map(|(role, content)| Message { role: role.into(), content: content.into(), ..Message::default() });
    let (mut rendered, mut refused) = (0, 0);
    for fuzz::Input { bytes: source, .. } in fuzz::inputs(&seeds, &WORDS) {
        let config =
            json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": String::from_utf8_lossy(&source)});
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let Ok(Some(template)) = ChatTemplate::load(folder.path()) else {
            refused += 1;
            continue;
        };
        let whole = template.render(&messages);
        let _ = template.render_closed(&messages[..3]);
        let _ = template.render_more(&messages[3..], After::Answer);
        *(if whole.is_ok() { &mut rendered } else { &mut refused }) += 1;
    }
    assert!(
        rendered > 0 && refused > 0,
        "the changes are too small or too large: {rendered} rendered, {refused} refused"
    );
}
