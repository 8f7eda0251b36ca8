//! Checks the limits of grammars. This comes before compilation, because the compiler's own recursion is unbounded.

use super::calls::Instead;
use super::lark;
use super::schema::{MAX_REGEX_BYTES, check_depth_of_regex, check_schema, within};
use super::spec::{GrammarError, GrammarSpec, MAX_CHOICES, MAX_GRAMMAR_BYTES};

/// Longest Lark grammar in bytes. The cost of compiling it grows with the square of its length.
const MAX_LARK_BYTES: usize = 64 << 10;

pub(super) fn check(spec: &GrammarSpec) -> Result<(), GrammarError> {
    match spec {
        GrammarSpec::JsonObject => Ok(()),
        GrammarSpec::JsonSchema(schema) => {
            // The depth first, because writing the schema as text recurses as well.
            check_schema(schema)?;
            within(schema.to_string().len(), MAX_GRAMMAR_BYTES)
        }
        GrammarSpec::Regex(regex) => {
            within(regex.len(), MAX_REGEX_BYTES)?;
            check_regex(regex)
        }
        GrammarSpec::Lark(lark) => {
            within(lark.len(), MAX_LARK_BYTES)?;
            lark::check(lark)
        }
        GrammarSpec::Choice(texts) => {
            if texts.is_empty() || texts.len() > MAX_CHOICES || texts.iter().any(String::is_empty) {
                return Err(GrammarError::Choices);
            }
            within(texts.iter().map(String::len).sum(), MAX_GRAMMAR_BYTES)
        }
        GrammarSpec::Calls(calls) => {
            calls.tools.iter().try_for_each(|tool| check_schema(&tool.arguments))?;
            let mut bytes: usize =
                calls.tools.iter().map(|tool| tool.name.len() + tool.arguments.to_string().len()).sum();
            if let Instead::Json(schema) = &calls.instead {
                check_schema(schema)?;
                bytes += schema.to_string().len();
            }
            within(bytes, MAX_GRAMMAR_BYTES)
        }
        GrammarSpec::AfterReasoning(_, answer) => check(answer),
    }
}

fn check_regex(regex: &str) -> Result<(), GrammarError> {
    if regex.is_empty() {
        return Err(GrammarError::Wrong("an empty regular expression matches only the empty text".into()));
    }
    // The compiler would ignore the last backslash.
    if regex.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1 {
        return Err(GrammarError::Wrong("a regular expression cannot end with a backslash".into()));
    }
    check_depth_of_regex(regex)
}
