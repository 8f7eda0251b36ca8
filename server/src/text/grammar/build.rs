//! Compiles checked grammars with llguidance, and shortens llguidance's error messages.

use std::panic::AssertUnwindSafe;

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::panic_utils::catch_unwind;
use llguidance::{JsonCompileOptions, ParserFactory, TokenParser};
use serde_json::{Value, json};

use super::calls::{Calls, Instead};
use super::reasoning;
use super::spec::{GrammarError, GrammarSpec};
use super::tokens;
use crate::text::encoder::Encode;
use crate::text::reasoning::ReasoningStart;
use crate::text::vocabulary::Vocabulary;

/// Longest compiler message in an error, in characters.
const MAX_REASON: usize = 300;

/// Stack of a compiling thread. Only the part in use takes memory.
pub(super) const STACK_BYTES: usize = 256 << 20;

/// Keeps a Lark grammar from forcing tokens.
const UNFORCED: &str = r#"%llguidance {"no_forcing": true}"#;

/// Limits per grammar, which allow a few milliseconds per mask. They do not bound the time and memory that the compiler
/// takes until it has a first state.
fn limits() -> ParserLimits {
    ParserLimits {
        max_grammar_size: 200_000,
        max_lexer_states: 20_000,
        step_lexer_fuel: 50_000,
        step_max_items: 10_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Compiles `spec` and computes its first mask. So a grammar whose mask is too expensive, or which forces too long a
/// beginning, is refused before anything is generated.
pub(super) fn compile(factory: &ParserFactory, spec: &GrammarSpec) -> Result<TokenParser, GrammarError> {
    match spec {
        GrammarSpec::Calls(calls) => check_distinct(factory, calls)?,
        // Checks the beginning of the answer by itself: the first mask below is that of the reasoning.
        GrammarSpec::AfterReasoning(_, answer) => drop(compile(factory, answer)?),
        _ => {}
    }
    let compiling = || {
        let grammars = TopLevelGrammar { grammars: grammars(spec), max_tokens: None };
        let mut parser = factory.create_parser(grammars)?;
        parser.start_without_prompt();
        let allowed = parser.compute_mask()?.num_set();
        // Set, but not returned as an error, if the forced beginning exceeds the limits.
        match parser.parser.get_error() {
            Some(error) => Err(anyhow::anyhow!(error.message())),
            None => Ok((parser, allowed)),
        }
    };
    let failed = |error: anyhow::Error| match spec {
        GrammarSpec::Calls(calls) => wrong_tool(factory, calls).unwrap_or_else(|| wrong(&error.to_string())),
        _ => wrong(&error.to_string()),
    };
    let (parser, allowed) = catch_unwind(AssertUnwindSafe(compiling)).map_err(failed)?;
    if allowed == 0 {
        return Err(wrong("no text of this model's tokens matches it"));
    }
    Ok(parser)
}

/// Returns a grammar in the library's form: the grammar that a text follows, and then a grammar that the first one
/// refers to, if any.
fn grammars(spec: &GrammarSpec) -> Vec<GrammarWithLexer> {
    let grammar = match spec {
        GrammarSpec::JsonSchema(schema) => GrammarWithLexer::from_json_schema(spaced(schema.clone(), true)),
        GrammarSpec::JsonObject => GrammarWithLexer::from_json_schema(spaced(json!({"type": "object"}), true)),
        GrammarSpec::Regex(regex) => GrammarWithLexer::from_regex(regex),
        // A rule may hide the text that ends it (`stop=`), which the library cannot force.
        GrammarSpec::Lark(lark) => GrammarWithLexer::from_lark(format!("{UNFORCED}\n{lark}")),
        GrammarSpec::Choice(texts) => GrammarWithLexer::from_lark(choice(texts)),
        GrammarSpec::Calls(calls) => GrammarWithLexer::from_lark(self::calls(calls, None)),
        GrammarSpec::AfterReasoning(start, answer) => match &**answer {
            GrammarSpec::Calls(calls) => GrammarWithLexer::from_lark(self::calls(calls, Some(*start))),
            answer => {
                let section = format!("start: SECTION @answer\nSECTION: {}", reasoning::section(*start));
                let mut all = grammars(answer);
                all.iter_mut().take(1).for_each(|answer| answer.name = Some("answer".into()));
                all.insert(0, GrammarWithLexer::from_lark(section));
                return all;
            }
        },
    };
    vec![grammar]
}

/// Returns the error of the first tool whose parameters cannot be compiled, in terms of that tool: an error of the
/// whole grammar would quote text that the client has not written.
fn wrong_tool(factory: &ParserFactory, calls: &Calls) -> Option<GrammarError> {
    calls.tools.iter().find_map(|tool| {
        let compiling = || {
            let grammar = GrammarWithLexer::from_json_schema(spaced(tool.arguments.clone(), tool.strict));
            factory.create_parser(TopLevelGrammar::from_grammar(grammar)).map(drop)
        };
        let error = catch_unwind(AssertUnwindSafe(compiling)).err()?;
        Some(match wrong(&error.to_string()) {
            GrammarError::Wrong(reason) => GrammarError::Wrong(format!("the parameters of {}: {reason}", tool.name)),
            other => other,
        })
    })
}

/// Refuses JSON that may stand instead of calls but could be taken for a call. The two must differ by the end of the
/// text before a call's arguments.
fn check_distinct(factory: &ParserFactory, calls: &Calls) -> Result<(), GrammarError> {
    let Instead::Json(schema) = &calls.instead else { return Ok(()) };
    let like_call = || {
        let grammar = GrammarWithLexer::from_json_schema(spaced(schema.clone(), true));
        let mut parser = factory.create_parser(TopLevelGrammar::from_grammar(grammar))?;
        parser.start_without_prompt();
        for tool in &calls.tools {
            let head = factory.tok_env().tok_trie().greedy_tokenize(Calls::head(&tool.name).as_bytes());
            if parser.validate_tokens_raw(&head)? == head.len() {
                return Ok(Some(tool.name.clone()));
            }
        }
        Ok(None)
    };
    match catch_unwind(AssertUnwindSafe(like_call)).map_err(|error| wrong(&error.to_string()))? {
        Some(name) => Err(GrammarError::LikeCall(name)),
        None => Ok(()),
    }
}

/// Creates the compiler for one vocabulary.
pub(super) fn factory(vocabulary: &Vocabulary, eos: &[u32], encode: Encode) -> Result<ParserFactory, GrammarError> {
    let environment = tokens::environment(vocabulary, eos, encode)?;
    let factory = ParserFactory::new_simple(&environment);
    let mut factory = factory.map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
    factory.quiet();
    *factory.limits_mut() = limits();
    Ok(factory)
}

/// Returns `schema` with exactly one space after each colon and comma and no other whitespace. If whitespace were
/// flexible, nothing between two values would be forced, and in JSON that may stand instead of a call, the lexer could
/// not tell a call's spaces from whitespace that is skipped. `strict` says whether a part that the compiler does not
/// support is an error or is ignored.
fn spaced(mut schema: Value, strict: bool) -> Value {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if schema.is_object() {
        let (item_separator, key_separator) = (", ".into(), ": ".into());
        let defaults = JsonCompileOptions::default();
        let lenient = !strict;
        JsonCompileOptions { item_separator, key_separator, whitespace_flexible: false, lenient, ..defaults }
            .apply_to(&mut schema);
    }
    schema
}

/// Returns a Lark grammar for tool calls, after reasoning if the text may begin with it. Each schema is embedded
/// separately, so that its references refer to itself.
fn calls(calls: &Calls, start: Option<ReasoningStart>) -> String {
    let names: Vec<String> = (0..calls.tools.len()).map(|at| format!("call_{at}")).collect();
    let plain = |space: &str| format!("/(?s:.*)/ & ~/{space}\\{{\"name\": (?s:.*)/");
    // The white space after reasoning is not part of the answer.
    let space = if start.is_some() { "\\s*" } else { "" };
    let (instead, rule) = match &calls.instead {
        Instead::Nothing => ("", None),
        Instead::Text => (" | PLAIN", Some(format!("PLAIN: {}", plain(space)))),
        Instead::Json(schema) => (" | json", Some(format!("json: %json {}", spaced(schema.clone(), true)))),
    };
    let mut lines = match start {
        None => vec!["start: answer".to_owned()],
        Some(ReasoningStart::Free) => vec![
            "start: calls | FIRST | SECTION answer".to_owned(),
            format!("FIRST: {} & ~{}", plain(""), reasoning::begins()),
            format!("SECTION: {}", reasoning::section(ReasoningStart::Free)),
        ],
        Some(start) => vec!["start: SECTION answer".to_owned(), format!("SECTION: {}", reasoning::section(start))],
    };
    let more = if calls.max > 1 { format!(" (\"\\n\" call){{0,{}}}", calls.max - 1) } else { String::new() };
    lines.push(format!("answer: calls{instead}"));
    lines.push(format!("calls: call{more}"));
    lines.push(format!("call: {}", names.join(" | ")));
    lines.extend(calls.tools.iter().zip(&names).map(|(tool, name)| {
        let head = head(&Calls::head(&tool.name), &calls.instead);
        let schema = spaced(tool.arguments.clone(), tool.strict);
        format!("{name}: {head} %json {schema} \"}}\"")
    }));
    lines.extend(rule);
    lines.join("\n")
}

/// Returns the beginning of a call. If JSON may stand instead, it consists of the lexemes of JSON: the lexer takes the
/// longest lexeme, and would otherwise read the beginning of other JSON as an unfinished call.
fn head(text: &str, instead: &Instead) -> String {
    if !matches!(instead, Instead::Json(_)) {
        return literal(text);
    }
    let (mut lexemes, mut rest): (Vec<String>, &str) = (Vec::new(), text);
    while !rest.is_empty() {
        let length = match rest.strip_prefix('"') {
            Some(string) => string.find('"').map(|quote| quote + 2),
            None => rest.find('"'),
        };
        let (lexeme, more) = rest.split_at(length.unwrap_or(rest.len()));
        lexemes.push(literal(lexeme));
        rest = more;
    }
    lexemes.join(" ")
}

/// Returns a grammar with one terminal for all texts, so that texts with a common beginning stay possible until they
/// differ.
fn choice(texts: &[String]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    format!("start: CHOICE\nCHOICE: {}\n", texts.join(" | "))
}

/// Returns `text` as a Lark string, which is a JSON string with one more character escaped.
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
