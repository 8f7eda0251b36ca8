//! Compiles checked grammars with llguidance, and shortens its error messages.

use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::{Value, json};

use super::calls::Calls;
use super::matcher::CompiledGrammar;
use super::spec::{GrammarError, GrammarSpec};

/// Longest compiler message in an error, in characters.
const MAX_REASON: usize = 300;

/// Limits per grammar: tens of milliseconds and some megabytes to compile, a few milliseconds per mask.
pub(super) fn limits() -> ParserLimits {
    ParserLimits {
        max_grammar_size: 200_000,
        max_lexer_states: 20_000,
        step_lexer_fuel: 50_000,
        step_max_items: 10_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Compiles `spec` and computes its first mask, so that a grammar whose mask is too expensive is refused before anything
/// is generated.
pub(super) fn compile(
    factory: &ParserFactory,
    eos: &Arc<[u32]>,
    spec: GrammarSpec,
) -> Result<CompiledGrammar, GrammarError> {
    let grammar = match spec {
        GrammarSpec::JsonSchema(schema) => GrammarWithLexer::from_json_schema(compact(schema)),
        GrammarSpec::JsonObject => GrammarWithLexer::from_json_schema(compact(json!({"type": "object"}))),
        GrammarSpec::Regex(regex) => GrammarWithLexer::from_regex(&regex),
        GrammarSpec::Lark(lark) => GrammarWithLexer::from_lark(lark),
        GrammarSpec::Choice(texts) => GrammarWithLexer::from_lark(choice(&texts)),
        GrammarSpec::Calls(calls) => GrammarWithLexer::from_lark(self::calls(&calls)),
    };
    let parser =
        factory.create_parser(TopLevelGrammar::from_grammar(grammar)).map_err(|error| wrong(&error.to_string()))?;
    let mut matcher = Matcher::new(Ok(parser));
    let mask = matcher.compute_mask_or_eos().map_err(|error| wrong(&error.to_string()))?;
    if mask.num_set() == 0 {
        return Err(wrong("no text of this model's tokens matches it"));
    }
    Ok(CompiledGrammar::new(matcher, Arc::clone(eos)))
}

/// `schema`, allowing at most one space where JSON allows whitespace.
fn compact(mut schema: Value) -> Value {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if schema.is_object() {
        let options = JsonCompileOptions { whitespace_pattern: Some(r"\x20".into()), ..JsonCompileOptions::default() };
        options.apply_to(&mut schema);
    }
    schema
}

/// A Lark grammar for tool calls. Each schema is separate, so that its references refer to itself.
fn calls(calls: &Calls) -> String {
    let names: Vec<String> = (0..calls.tools.len()).map(|at| format!("call_{at}")).collect();
    let plain = if calls.or_text { " | PLAIN" } else { "" };
    let more = if calls.max > 1 { format!(" (\"\\n\" call){{0,{}}}", calls.max - 1) } else { String::new() };
    let mut lines =
        vec![format!("start: calls{plain}"), format!("calls: call{more}"), format!("call: {}", names.join(" | "))];
    lines.extend(calls.tools.iter().zip(&names).map(|(tool, name)| {
        let (head, schema) = (literal(&Calls::head(&tool.name)), compact(tool.arguments.clone()));
        format!("{name}: {head} %json {schema} \"}}\"")
    }));
    if calls.or_text {
        lines.push("PLAIN: /(?s:.*)/ & ~/\\{\"name\": (?s:.*)/".into());
    }
    lines.join("\n")
}

/// One terminal for all texts, so that texts with a common beginning stay open until they differ.
fn choice(texts: &[String]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    format!("start: CHOICE\nCHOICE: {}\n", texts.join(" | "))
}

/// `text` as a Lark string, which is a JSON string with one more character escaped.
fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

fn wrong(reason: &str) -> GrammarError {
    if reason.starts_with("panic") {
        tracing::warn!("the grammar compiler panicked: {}", reason.escape_debug().take(2000).collect::<String>());
        return GrammarError::Wrong("its compiler failed".into());
    }
    let end = ["\n<state>", "\n<non-verbose/>", "\n<backtrace>"].iter().filter_map(|mark| reason.find(mark)).min();
    let reason: String = reason[..end.unwrap_or(reason.len())].trim().chars().take(MAX_REASON).collect();
    GrammarError::Wrong(reason)
}
