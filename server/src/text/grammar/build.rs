//! From a grammar within its bounds to llguidance's parser, and what is said where it refuses.

use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::{Value, json};

use super::{CompiledGrammar, GrammarError, GrammarSpec};

/// Longest words of a compiler that are repeated, in characters.
const MAX_REASON: usize = 300;

/// What one grammar may cost: to compile it, tens of milliseconds and some megabytes; a mask, a few milliseconds.
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

/// Compiles `spec`, and follows it from its beginning to its first mask: what is more than a mask may cost there is
/// refused before anything is generated.
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
        GrammarSpec::Calls(calls) => GrammarWithLexer::from_lark(calls.lark()),
    };
    let parser =
        factory.create_parser(TopLevelGrammar::from_grammar(grammar)).map_err(|error| wrong(&error.to_string()))?;
    let mut matcher = Matcher::new(Ok(parser));
    let begun = matcher.compute_mask_or_eos().map_err(|error| wrong(&error.to_string()))?;
    if begun.num_set() == 0 {
        return Err(wrong("no text of this model's tokens follows it"));
    }
    Ok(CompiledGrammar::new(matcher, Arc::clone(eos)))
}

/// `schema` with at most one blank where whitespace may stand.
pub(super) fn compact(mut schema: Value) -> Value {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if schema.is_object() {
        let options = JsonCompileOptions { whitespace_pattern: Some(r"\x20".into()), ..JsonCompileOptions::default() };
        options.apply_to(&mut schema);
    }
    schema
}

/// One terminal of all texts: which of them it is shows only at the end.
fn choice(texts: &[String]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    format!("start: CHOICE\nCHOICE: {}\n", texts.join(" | "))
}

/// `text` as a string of Lark, which is one of JSON but for one more character that must be escaped.
pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

fn wrong(reason: &str) -> GrammarError {
    if reason.starts_with("panic") {
        tracing::warn!(
            "the compiler of grammars has panicked: {}",
            reason.escape_debug().take(2000).collect::<String>()
        );
        return GrammarError::Wrong("its compiler failed".into());
    }
    let end = ["\n<state>", "\n<non-verbose/>", "\n<backtrace>"].iter().filter_map(|mark| reason.find(mark)).min();
    let reason: String = reason[..end.unwrap_or(reason.len())].trim().chars().take(MAX_REASON).collect();
    GrammarError::Wrong(reason)
}
