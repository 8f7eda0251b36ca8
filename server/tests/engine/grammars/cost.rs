//! Measures the time of a mask. `cargo test -p tidegate-server --test engine cost -- --ignored --nocapture` prints it.

use std::time::{Duration, Instant};

use serde_json::json;
use tidegate_server::text::GrammarSpec;

use super::drawn::{GRAMMARS, TOKENIZER};

/// Returns a schema such as agents send: an order with several articles.
fn order() -> GrammarSpec {
    let article = json!({"type": "object", "required": ["name", "count", "price"], "additionalProperties": false,
        "properties": {"name": {"type": "string"}, "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "price": {"type": "number"}, "colour": {"enum": ["red", "green", "blue"]}}});
    GrammarSpec::JsonSchema(json!({"type": "object", "required": ["customer", "articles", "paid"],
        "additionalProperties": false, "properties": {"customer": {"type": "string"},
        "articles": {"type": "array", "items": article, "minItems": 1}, "paid": {"type": "boolean"}}}))
}

#[test]
#[ignore = "a measurement"]
fn masks_of_a_schema_that_agents_send() {
    let text = r#"{"customer": "Once upon a time there was a little girl", "articles": [{"name": "a red ball",
        "count": 12, "price": 3.25, "colour": "red"}, {"name": "a big dog", "count": 1, "price": 100}], "paid": true}"#;
    let text = text.replace("\n       ", "");
    let ids = TOKENIZER.encode_more(&text).unwrap();
    let start = Instant::now();
    let grammar = GRAMMARS.compile(&order()).unwrap();
    let compiled = start.elapsed();
    let (mut starts, mut costs) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        let start = Instant::now();
        let mut matcher = grammar.start();
        starts.push(start.elapsed());
        for id in &ids {
            let start = Instant::now();
            let mask = matcher.mask().unwrap();
            matcher.accept(*id).unwrap();
            costs.push(start.elapsed());
            assert!(mask[*id as usize / 32] >> (id % 32) & 1 == 1);
        }
        assert!(matcher.is_complete());
    }
    starts.sort_unstable();
    costs.sort_unstable();
    let at = |of: &[Duration], share: f64| of[(of.len() as f64 * share) as usize];
    println!(
        "compiled in {compiled:?}; a start {:?}; a mask and its token: median {:?}, 99 of 100 below {:?}, most {:?} ({} tokens)",
        at(&starts, 0.5),
        at(&costs, 0.5),
        at(&costs, 0.99),
        costs[costs.len() - 1],
        ids.len(),
    );
}
