//! Hostile grammars. Each one is refused, or compiled and followed within the limits.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tidegate_server::text::{GrammarError, GrammarSpec, Grammars};

use super::drawn::{GRAMMARS, TOKENIZER, draw, encode};

fn nested(open: &str, inner: &str, close: &str, count: usize) -> String {
    open.repeat(count) + inner + &close.repeat(count)
}

fn arrays(levels: usize) -> GrammarSpec {
    let around = |inner: Value| {
        // `json!` would copy `inner` recursively.
        let fields = [("type".to_owned(), Value::from("array")), ("items".to_owned(), inner)];
        Value::Object(fields.into_iter().collect())
    };
    GrammarSpec::JsonSchema((0..levels).fold(json!({"type": "integer"}), |inner, _| around(inner)))
}

/// Returns a grammar of `count` rules or terminals, each of which names the next one `more` times.
fn chain(name: &str, count: usize, more: usize) -> GrammarSpec {
    let line = |n: usize| format!("{name}{n}: {}\n", vec![format!("{name}{}", n + 1); more].join(" "));
    let lines: String = (0..count).map(line).collect();
    GrammarSpec::Lark(format!("start: {name}0\n{lines}{name}{count}: \"x\"\n"))
}

fn fields(count: usize, field: impl Fn(usize) -> (String, Value)) -> Value {
    Value::Object((0..count).map(field).collect::<Map<_, _>>())
}

fn regex(regex: impl Into<String>) -> GrammarSpec {
    GrammarSpec::Regex(regex.into())
}

fn lark(lark: impl Into<String>) -> GrammarSpec {
    GrammarSpec::Lark(lark.into())
}

pub(super) fn bombs() -> Vec<(&'static str, GrammarSpec)> {
    let words = |count: usize| (0..count).map(|n| format!("x{n}")).collect::<Vec<_>>();
    let options = |at: usize| json!({"type": "object", "properties": {format!("a{at}"): {"type": "integer"}}});
    let any_of = json!({"anyOf": (0..4).map(options).collect::<Vec<_>>()});
    vec![
        ("nested groups", regex(nested("(", "a", ")", 99))),
        ("long literal", regex("a".repeat(16_000))),
        ("many words", regex(words(2_500).join("|"))),
        ("many options", regex("a?".repeat(8_000))),
        ("nested counts", regex("((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}")),
        ("nested stars", regex("((a*)*)*b")),
        ("catastrophic", regex("(x+x+)+y")),
        ("exponential states", regex("(.|\n)*a.{1000}")),
        ("many exponential states", regex((0..50).map(|n| format!(".*a.{{{n}0}}b")).collect::<Vec<_>>().join("|"))),
        ("classes", regex(r"(\p{L}|\p{N}|\w|\s){1,5000}")),
        ("count", regex("[a-z]{0,100000}x")),
        ("intersection", lark("start: A\nA: /(.*a.{50})*/ & /(.*b.{50})*/ & ~/(.*c.{50})*/")),
        ("ambiguous", lark("start: s\ns: s s s | s s | \"a\" | ")),
        ("ambiguous counts", lark("start: s+\ns: s* | \"a\"* | \"a\"+ ")),
        ("itself", lark("start: start")),
        ("nested rules", lark(format!("start: {}", nested("(", "\"a\"", ")", 99)))),
        ("chain of rules", chain("a", 5000, 1)),
        ("chain of terminals", chain("A", 5000, 1)),
        ("doubling rules", chain("a", 60, 2)),
        ("doubling terminals", chain("A", 17, 2)),
        ("counted rules", lark("start: a{1,100000}\na: \"x\" b{1,100000}\nb: \"y\"{1,1000000}")),
        ("long rule", lark(format!("start: {}", "\"a\"? ".repeat(10_000)))),
        ("nested arrays", arrays(99)),
        ("long enum", GrammarSpec::JsonSchema(json!({"enum": words(20_000)}))),
        (
            "many fields",
            GrammarSpec::JsonSchema(json!({"type": "object",
            "properties": fields(5000, |n| (format!("p{n}"), json!({"type": "string"})))})),
        ),
        ("product", GrammarSpec::JsonSchema(json!({"allOf": vec![any_of; 12]}))),
        ("many items", GrammarSpec::JsonSchema(json!({"type": "array", "minItems": 1_000_000, "maxItems": 2_000_000}))),
        ("long string", GrammarSpec::JsonSchema(json!({"type": "string", "minLength": 1_000_000_000}))),
        ("multiples", GrammarSpec::JsonSchema(json!({"type": "integer", "multipleOf": 997}))),
        ("small multiples", GrammarSpec::JsonSchema(json!({"type": "number", "multipleOf": 0.0997}))),
        ("reference to itself", GrammarSpec::JsonSchema(json!({"$ref": "#"}))),
        (
            "chain of references",
            GrammarSpec::JsonSchema(json!({"$ref": "#/$defs/d0",
            "$defs": fields(4000, |n| (format!("d{n}"), json!({"$ref": format!("#/$defs/d{}", (n + 1) % 4000)})))})),
        ),
        ("pattern", GrammarSpec::JsonSchema(json!({"type": "string", "pattern": "^(a{1,1000}){1,1000}(b|bb)*$"}))),
        (
            "patterns",
            GrammarSpec::JsonSchema(json!({"type": "object",
            "patternProperties": fields(40, |n| (format!("^.*{n}.{{100}}$"), json!({})))})),
        ),
    ]
}

#[test]
fn no_grammar_takes_long() {
    let mut followed = 0;
    for (name, spec) in bombs() {
        // Each grammar has its own compiler, so that an abandoned compilation does not slow down the next.
        let grammars = Grammars::new(TOKENIZER.vocabulary(), TOKENIZER.eos(), &encode()).unwrap();
        let start = Instant::now();
        let compiled = grammars.compile(&spec);
        assert!(start.elapsed() < Duration::from_secs(30), "{name} took {:?}", start.elapsed());
        let Ok(compiled) = compiled else { continue };
        followed += 1;
        let mut matcher = compiled.start();
        for _ in 0..50 {
            if matcher.is_complete() {
                break;
            }
            let start = Instant::now();
            // A mask that exceeds its limits ends the text.
            let Ok(mask) = matcher.mask() else { break };
            let is_allowed = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
            let Some(token) = (1..4096).rev().find(is_allowed) else { break };
            if matcher.accept(token).is_err() {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "{name}: a mask took {:?}", start.elapsed());
        }
    }
    assert!(followed > 15, "{followed} were compiled");
}

fn refusal(spec: &GrammarSpec) -> GrammarError {
    match GRAMMARS.compile(spec) {
        Ok(_) => panic!("{} is compiled", format!("{spec:?}").chars().take(200).collect::<String>()),
        Err(error) => error,
    }
}

fn huge() -> Value {
    json!({"type": "integer", "multipleOf": 99_999_989})
}

/// Returns a schema with a required property of this name, which may be that of a keyword.
fn in_property(name: &str) -> GrammarSpec {
    let object = json!({"type": "object", "properties": {name: huge()}, "required": [name]});
    GrammarSpec::JsonSchema(object)
}

#[test]
fn property_names_are_not_keywords_and_values_are_not_schemas() {
    let named = |name: &str| json!({"type": "integer", "const": 3, "default": {name: 99_999_989}});
    for schema in [
        json!({"type": "object", "properties": {"multipleOf": named("multipleOf"), "$ref": named("$ref")}}),
        json!({"$ref": "#/%24defs/enum", "$defs": {"enum": {"type": "integer"}}}),
    ] {
        let compiled = GRAMMARS.compile(&GrammarSpec::JsonSchema(schema.clone()));
        assert!(compiled.is_ok(), "{schema}: {compiled:?}");
    }
}

#[test]
fn grammars_over_the_limits_are_refused_before_compilation() {
    let deep = [
        regex(nested("(", "a", ")", 8_000)),
        regex(nested("(?:", "a", ")*", 101)),
        lark(format!("start: {}", nested("(", "\"a\"", ")", 30_000))),
        lark(format!("start: {}", nested("[", "\"a\"", "]", 101))),
        lark(format!("start: /{}/", nested("(", "a", ")", 30_000))),
        arrays(3000),
        arrays(101),
    ];
    for spec in deep {
        assert_eq!(refusal(&spec), GrammarError::Deep);
    }
    let parentheses = regex(nested("(", "a", ")", 60_000));
    assert_eq!(refusal(&parentheses), GrammarError::Long { max: 16_384, bytes: 120_001 });
    assert_eq!(refusal(&regex("a".repeat(16_385))), GrammarError::Long { max: 16_384, bytes: 16_385 });
    assert_eq!(refusal(&lark("a".repeat(65_537))), GrammarError::Long { max: 65_536, bytes: 65_537 });
    let schema = json!({"description": "a".repeat(262_144)});
    assert!(matches!(refusal(&GrammarSpec::JsonSchema(schema)), GrammarError::Long { max: 262_144, .. }));
    for texts in [vec![], vec![String::new()], vec!["a".to_owned(); 1025]] {
        assert_eq!(refusal(&GrammarSpec::Choice(texts)), GrammarError::Choices);
    }
    for (spec, part) in [
        (GrammarSpec::JsonSchema(json!({"properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}})), "another document"),
        (GrammarSpec::JsonSchema(json!({"type": "object", "x-guidance": {"lenient": true}})), "x-guidance"),
        (GrammarSpec::JsonSchema(json!({"type": "integer", "multipleOf": 99_999_989})), "multipleOf"),
        (
            GrammarSpec::JsonSchema(
                json!([{"multipleOf": 997}, {"multipleOf": 0.7}]).as_array().map(|all| json!({"allOf": all})).unwrap(),
            ),
            "multipleOf",
        ),
        (in_property("default"), "multipleOf"),
        (in_property("const"), "multipleOf"),
        (in_property("properties"), "multipleOf"),
        (GrammarSpec::JsonSchema(json!({"$ref": "#/default", "default": huge()})), "not a schema"),
        (GrammarSpec::JsonSchema(json!({"$ref": "#/%64efault", "default": huge()})), "not a schema"),
        (GrammarSpec::JsonSchema(json!({"$ref": "#/$defs/enum", "$defs": {"enum": huge()}})), "multipleOf"),
        (lark("start: twice{\"a\"}\ntwice{x}: x x"), "parameters"),
        (lark("start: a\na[temperature=0.5]: /[a-z]/"), "a temperature"),
        (lark("start: <[0]>"), "tokens by name"),
        (lark("start: \"a\" <|endoftext|>"), "tokens by name"),
        (lark("start: %json {\"x-guidance\": {\"lenient\": true}}"), "x-guidance"),
        (lark(r#"start: %json {"x\u002dguidance":{"lenient":true},"type":"array","uniqueItems":true}"#), "x-guidance"),
        (lark(r#"start: "a" %json {"type":"integer","multipleOf":99999989}"#), "multipleOf"),
        (
            lark(
                r#"start: "%json" | a # %json
a:%json{"properties":{"default":{"multipleOf":99999989}}}"#,
            ),
            "multipleOf",
        ),
        (lark(r#"start: %json {"$ref":"http://127.0.0.1:9/x"}"#), "another document"),
    ] {
        let error = refusal(&spec).to_string();
        assert!(error.starts_with("must not have ") && error.contains(part), "{error}");
    }
}

#[test]
fn unsupported_grammars_are_refused_and_not_ignored() {
    for spec in [
        regex(""),
        regex("a("),
        regex("a\\"),
        regex("a(?=b)"),
        regex(r"(a)\1"),
        lark(""),
        lark("begin: \"a\""),
        lark("start: missing"),
        lark("start: \"a"),
        lark("start: %json"),
        lark("start: %json {\"type\": "),
        lark("start: %json [1]"),
        lark("start: %json {\"type\": \"array\", \"uniqueItems\": true}"),
        lark("start: A\nA: /(/"),
        chain("A", 60, 2),
        GrammarSpec::JsonSchema(json!({"not": {"type": "integer"}})),
        GrammarSpec::JsonSchema(json!({"type": "array", "uniqueItems": true})),
        GrammarSpec::JsonSchema(json!({"if": {"type": "integer"}, "then": {"minimum": 3}})),
        GrammarSpec::JsonSchema(json!({"type": "strange"})),
        GrammarSpec::JsonSchema(json!({"type": "string", "format": "strange"})),
        GrammarSpec::JsonSchema(json!({"type": "integer", "minimum": 3, "maximum": 2})),
        GrammarSpec::JsonSchema(json!({"$ref": "#/$defs/missing"})),
        GrammarSpec::JsonSchema(json!({"$schema": "http://127.0.0.1:9/x.json", "type": "integer"})),
        GrammarSpec::JsonSchema(json!(false)),
        GrammarSpec::JsonSchema(json!([1])),
        GrammarSpec::JsonSchema(json!("text")),
    ] {
        let error = refusal(&spec).to_string();
        assert!(error.starts_with("must be a valid and supported grammar: "), "{spec:?}: {error}");
        assert!(!error.contains('<') && error.len() < 500, "{error}");
    }
}

#[test]
fn texts_of_one_grammar_are_independent() {
    let spec = regex("[a-z]{1,40}");
    let first = draw(&spec, 1, 600);
    for seed in 0..20 {
        draw(&spec, seed, 600);
    }
    assert_eq!(draw(&spec, 1, 600), first);
}
