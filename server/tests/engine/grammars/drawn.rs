//! Draws random texts from the tokens that a grammar allows, and checks that they follow the grammar.

use std::sync::{Arc, LazyLock};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use regex::Regex;
use serde_json::{Value, json};
use tidegate_server::text::{
    Call, Calls, Encode, GrammarError, GrammarSpec, Grammars, Instead, ReasoningStart, Tokenizer,
};

use super::schema::allows;
use crate::common::checkpoint;

/// The model's vocabulary size. It is larger than the tokenizer's, because a model may pad its vocabulary.
const VOCABULARY: usize = 4200;

pub(crate) static TOKENIZER: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::load(&checkpoint(), VOCABULARY, &[]).unwrap());
pub(crate) static GRAMMARS: LazyLock<Grammars> =
    LazyLock::new(|| Grammars::new(TOKENIZER.vocabulary(), TOKENIZER.eos(), &encode()).unwrap());

/// Returns the encoding function of [`TOKENIZER`].
pub(crate) fn encode() -> Encode {
    Arc::new(|text| TOKENIZER.encode_more(text).unwrap())
}

/// Draws a text of random tokens that `spec` allows; returns `None` if the text does not end within `most` tokens. The
/// end is chosen more often than other tokens, because few texts would end otherwise.
pub(crate) fn draw(spec: &GrammarSpec, seed: u64, most: usize) -> Option<String> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut matcher = GRAMMARS.compile(spec).unwrap_or_else(|error| panic!("{spec:?} {error}")).start();
    let (mut bytes, eos) = (Vec::new(), TOKENIZER.eos()[0]);
    for _ in 0..most {
        if matcher.is_complete() {
            return Some(String::from_utf8(bytes).expect("a complete text is UTF-8"));
        }
        let mask = matcher.mask().unwrap();
        let is_allowed = |id: &u32| mask.get(*id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1);
        let allowed: Vec<u32> = (0..VOCABULARY as u32).filter(is_allowed).collect();
        assert!(!allowed.is_empty(), "nothing may follow {:?}", String::from_utf8_lossy(&bytes));
        for id in &allowed {
            let text = !TOKENIZER.vocabulary().bytes(*id).is_empty();
            assert!(text || *id == eos, "token {id} has no text and is allowed");
        }
        let closing = |id: &&u32| matches!(TOKENIZER.vocabulary().bytes(**id), b"\"" | b"}" | b"]");
        let token = match allowed.iter().find(closing) {
            _ if is_allowed(&eos) && rng.random_bool(0.3) => eos,
            Some(close) if rng.random_bool(0.3) => *close,
            _ => allowed[rng.random_range(0..allowed.len())],
        };
        bytes.extend(TOKENIZER.vocabulary().bytes(token));
        matcher.accept(token).unwrap();
    }
    None
}

/// Draws complete texts of `spec` from 40 seeds, at least half of which must give one.
fn texts(spec: &GrammarSpec) -> Vec<String> {
    let texts: Vec<String> = (0..40).filter_map(|seed| draw(spec, seed, 600)).collect();
    assert!(texts.len() >= 20, "{spec:?}: {} of 40 texts came to an end", texts.len());
    texts
}

fn schemas() -> Vec<Value> {
    let person = json!({"type": "object", "additionalProperties": false, "required": ["name", "age"], "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mail": {"type": ["string", "null"], "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.org$"}}});
    vec![
        person.clone(),
        json!({"type": "array", "minItems": 1, "maxItems": 3, "items": person}),
        json!({"enum": ["é🦀", "👩‍👩‍👧", "a\"b\\c\n", "\u{7f}\u{0}", 7, null, {"a": [1]}]}),
        json!({"const": "tab\there"}),
        json!({"type": "number", "minimum": -2.5, "maximum": 1000}),
        json!({"type": "integer", "minimum": -17, "maximum": 4_000_000_000_000_000_u64}),
        json!({"anyOf": [{"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 3}]}),
        json!({"type": "object", "properties": {"ключ": {"type": "boolean"}, "a b": {"const": 1}},
            "required": ["ключ"], "additionalProperties": {"type": "integer"}}),
        json!({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "required": ["value"],
            "properties": {"value": {"type": "integer"}, "children": {"type": "array", "maxItems": 2,
            "items": {"$ref": "#/$defs/tree"}}}, "additionalProperties": false}}}),
        json!({"type": "array", "items": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}}}),
    ]
}

#[test]
fn random_texts_follow_their_schema() {
    for schema in schemas() {
        for text in texts(&GrammarSpec::JsonSchema(schema.clone())) {
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
            assert!(allows(&schema, &schema, &value), "{schema} does not allow {text}");
        }
    }
}

#[test]
fn the_plain_check_refuses_values_that_break_the_schema() {
    let schema = &schemas()[0];
    let refused = |value: Value| assert!(!allows(schema, schema, &value), "{value}");
    refused(json!({"name": "a"}));
    refused(json!({"name": "", "age": 3}));
    refused(json!({"name": "a", "age": 3.5}));
    refused(json!({"name": "a", "age": 131}));
    refused(json!({"name": "a", "age": 3, "mail": "A@b.org"}));
    refused(json!({"name": "a", "age": 3, "more": 1}));
    assert!(allows(schema, schema, &json!({"name": "a", "age": 3, "mail": null})));
}

#[test]
fn any_object_is_an_object() {
    for spec in [GrammarSpec::JsonObject, GrammarSpec::JsonSchema(json!({"type": "object"}))] {
        for text in texts(&spec) {
            assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
        }
    }
    for text in texts(&GrammarSpec::JsonSchema(json!(true))) {
        serde_json::from_str::<Value>(&text).unwrap();
    }
}

#[test]
fn whitespace_is_one_space_after_each_colon_and_comma() {
    let flags = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["a"], "additionalProperties": false});
    let texts = texts(&GrammarSpec::JsonSchema(flags));
    assert!(texts.iter().any(|text| text.contains(", ")), "{texts:?}");
    for text in texts {
        let compact = text.replace(' ', "");
        assert_eq!(compact.replace(':', ": ").replace(',', ", "), text);
    }
}

#[test]
fn random_texts_match_their_whole_regular_expression() {
    for regex in
        [r"[a-c]+\d{2,4}", "a*", "(yes|no|yes and no)", r"\d{4}-\d{2}/\d{2}", "[🦀-🦔é]{1,3}", r"\p{Lu}\w{0,5}\n", "."]
    {
        let whole = Regex::new(&format!("^(?:{regex})$")).unwrap();
        for text in texts(&GrammarSpec::Regex(regex.into())) {
            assert!(whole.is_match(&text), "{regex} does not match {text:?}");
        }
    }
}

#[test]
fn random_texts_are_choices_and_most_choices_occur() {
    let choices = ["a", "ab", "a\n\u{7f}🦀", "\"\\", "{}", " "].map(String::from);
    let mut texts = texts(&GrammarSpec::Choice(choices.to_vec()));
    texts.sort();
    texts.dedup();
    assert!(texts.iter().all(|text| choices.contains(text)), "{texts:?}");
    assert!(texts.len() >= 4, "{texts:?}");
}

#[test]
fn random_texts_follow_their_lark_grammar() {
    let lark = "start: sum\nsum: term (\"+\" term)*\nterm: NUMBER | \"(\" sum \")\"\nNUMBER: /[0-9]{1,3}/\n%ignore / /";
    for text in texts(&GrammarSpec::Lark(lark.into())) {
        let mut open = 0;
        for character in text.chars() {
            open += i32::from(character == '(') - i32::from(character == ')');
            assert!(open >= 0 && "0123456789+() ".contains(character), "{text}");
        }
        assert_eq!(open, 0, "{text}");
    }
}

#[test]
fn calls_name_the_tools_and_other_texts_do_not_begin_like_a_call() {
    let arguments = json!({"type": "object", "required": ["x"], "additionalProperties": false,
        "properties": {"x": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"type": "integer"}}});
    let tools: Vec<Call> =
        ["f", "g-2"].map(|name| Call { name: name.into(), arguments: arguments.clone(), strict: true }).into();
    let json = json!({"type": "object", "required": ["name"], "properties": {"name": {"enum": ["f", "h"]}}});
    for (most, instead) in
        [(1, Instead::Nothing), (3, Instead::Nothing), (1, Instead::Text), (2, Instead::Json(json.clone()))]
    {
        let calls = Calls { tools: tools.clone(), max: most, instead: instead.clone() };
        let texts = texts(&GrammarSpec::Calls(calls).without_additional_properties());
        for text in &texts {
            if instead == Instead::Text && !text.starts_with(Calls::OPENING) {
                continue;
            }
            if instead != Instead::Nothing && allows(&json, &json, &serde_json::from_str(text).unwrap_or_default()) {
                continue;
            }
            let lines: Vec<&str> = text.split('\n').collect();
            assert!(lines.len() <= most, "{text}");
            for line in lines {
                let call: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{text:?}: {error}"));
                assert!(call["name"] == "f" || call["name"] == "g-2", "{text}");
                assert!(allows(&arguments, &arguments, &call["arguments"]), "{text}");
            }
        }
    }
}

#[test]
fn a_plain_text_may_begin_almost_like_a_call() {
    let arguments = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let tools = vec![Call { name: "f".into(), arguments, strict: true }];
    let grammar = GrammarSpec::Calls(Calls { tools, max: 1, instead: Instead::Text });
    let follows = |text: &str| follows(&grammar, text);
    for text in
        ["", "Hello", "{", "{\"name", "{\"name\":\"f\"}", " {\"name\": \"f\"}", "{\"name\": \"f\", \"arguments\": {}}"]
    {
        assert!(follows(text), "{text:?}");
    }
    for text in ["{\"name\": ", "{\"name\": \"g\", \"arguments\": {}}", "{\"name\": \"f\", \"arguments\": {}} and more"]
    {
        assert!(!follows(text), "{text:?}");
    }
}

/// Returns whether a text follows a grammar from beginning to end.
fn follows(spec: &GrammarSpec, text: &str) -> bool {
    let mut matcher = GRAMMARS.compile(spec).unwrap().start();
    let accepted = TOKENIZER.encode_more(text).unwrap().iter().all(|id| matcher.accept(*id).is_ok());
    accepted && (matcher.is_complete() || matcher.accept(TOKENIZER.eos()[0]).is_ok())
}

#[test]
fn a_grammar_begins_after_the_first_end_of_the_reasoning() {
    let arguments = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let tools = vec![Call { name: "f".into(), arguments, strict: true }];
    let calls = |instead| GrammarSpec::Calls(Calls { tools: tools.clone(), max: 2, instead });
    let call = r#"{"name": "f", "arguments": {}}"#;
    let two = format!("{call}\n{call}");
    let other = r#"{"name": "g", "arguments": {}}"#;
    let schema = json!({"enum": [[1, 2], {"name": "g"}]});
    for (spec, right, wrong) in [
        (calls(Instead::Nothing), vec![call, &two], vec!["", "text", other]),
        (calls(Instead::Text), vec!["", "text", "a</think>b", call, &two, "{\"name"], vec![other, "{\"name\": "]),
        (calls(Instead::Json(schema.clone())), vec![call, &two, "[1, 2]", r#"{"name": "g"}"#], vec!["", "text", other]),
        (GrammarSpec::JsonSchema(schema), vec!["[1, 2]"], vec!["", "[1]", call]),
        (GrammarSpec::JsonObject, vec!["{}", call], vec!["", "text", "{"]),
        (GrammarSpec::Regex("a+/b".into()), vec!["aa/b"], vec!["", "b"]),
        (GrammarSpec::Lark("start: A \",\" A\nA: /[a-c]+/".into()), vec!["ab,c"], vec!["", "ab"]),
        (GrammarSpec::Choice(vec!["yes".into(), "no".into()]), vec!["yes", "no"], vec!["", "maybe"]),
    ] {
        for (start, before) in [
            (ReasoningStart::Free, "\n<think>"),
            (ReasoningStart::InOpeningTag, ">"),
            (ReasoningStart::Open, ""),
            (ReasoningStart::InClosingTag, ""),
        ] {
            let after = spec.clone().after_reasoning(start);
            if start == ReasoningStart::Free {
                for answer in &right {
                    assert!(follows(&after, answer), "{after:?} {answer}");
                }
                if after == spec {
                    assert!(!follows(&after, &format!("{before}x</think>{}", right[0])), "{after:?}");
                    continue;
                }
            }
            for reasoning in ["", "a < b\n</thin", "{\"name\": \"x\"", "\u{1f980}\n"] {
                for space in ["", " ", "\n\n"] {
                    let close = if start == ReasoningStart::InClosingTag { ">" } else { "</think>" };
                    let reasoning = if start == ReasoningStart::InClosingTag { "" } else { reasoning };
                    let section = format!("{before}{reasoning}{close}{space}");
                    for answer in &right {
                        assert!(follows(&after, &format!("{section}{answer}")), "{after:?} {section}{answer}");
                    }
                    for answer in &wrong {
                        assert!(!follows(&after, &format!("{section}{answer}")), "{after:?} {section}{answer}");
                    }
                }
            }
            assert!(!follows(&after, &format!("{before}a")), "{after:?}: it has to end");
        }
    }
}

#[test]
fn what_is_refused_alone_is_refused_after_reasoning() {
    for spec in [
        GrammarSpec::Lark("start: \"a\" | \"a\" @answer".into()),
        GrammarSpec::Lark("start: missing".into()),
        GrammarSpec::JsonSchema(json!({"type": "integer", "minimum": 3, "maximum": 2})),
        GrammarSpec::JsonSchema(json!(false)),
    ] {
        let alone = GRAMMARS.compile(&spec).err();
        assert!(alone.is_some(), "{spec:?}");
        assert_eq!(GRAMMARS.compile(&spec.clone().after_reasoning(ReasoningStart::Open)).err(), alone, "{spec:?}");
    }
}

#[test]
fn json_beside_calls_may_begin_as_a_call_does_up_to_a_tools_name() {
    let arguments = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": false});
    let tools = vec![Call { name: "f".into(), arguments, strict: true }];
    let spec = |schema: Value| {
        let calls = Calls { tools: tools.clone(), max: 2, instead: Instead::Json(schema) };
        GrammarSpec::Calls(calls).without_additional_properties()
    };
    let grammar = |schema: Value| GRAMMARS.compile(&spec(schema));
    let follows = |schema: &Value, text: &str| follows(&spec(schema.clone()), text);
    let call = r#"{"name": "f", "arguments": {"x": 1}}"#;
    let calls = format!("{call}\n{call}");
    let person = json!({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"]});
    let any = GrammarSpec::JsonObject.beside_calls().unwrap();
    for (schema, texts) in [
        (&person, vec![call, &calls, r#"{"name": "f", "age": 3}"#, r#"{"name": "Eve", "age": 3}"#]),
        (
            &any,
            vec![
                call,
                &calls,
                "{}",
                r#"{"name": "f"}"#,
                r#"{"name": "f", "a": {"arguments": 1}}"#,
                r#"{"z": [1, {}]}"#,
            ],
        ),
        (&json!({"enum": ["yes", {"name": "f"}]}), vec![call, "\"yes\"", r#"{"name": "f"}"#]),
    ] {
        for text in texts {
            assert!(follows(schema, text), "{schema} {text}");
        }
        for text in ["", "plain", r#"{"name": "f", "arguments": {"y": 1}}"#, r#"{"name": "g", "arguments": {"x": 1}}"#]
        {
            assert!(!follows(schema, text), "{schema} {text}");
        }
    }
    let like_a_call =
        json!({"type": "object", "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}}});
    assert_eq!(grammar(like_a_call).err(), Some(GrammarError::LikeCall("f".into())));
    assert_eq!(grammar(json!({"type": "object"})).err(), Some(GrammarError::LikeCall("f".into())));
    let other_order = json!({"type": "object", "required": ["arguments"],
        "properties": {"arguments": {"type": "object"}, "name": {"type": "string"}}});
    assert!(grammar(other_order).is_ok());
}
