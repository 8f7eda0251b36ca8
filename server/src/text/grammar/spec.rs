//! Grammars as requests state them, their limits, and why they are refused.

use std::time::Duration;

use serde_json::Value;

use super::calls::Calls;

/// Longest grammar of any kind, in bytes.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;

/// Most levels of nesting in a grammar.
pub const MAX_GRAMMAR_DEPTH: usize = 100;

/// Most texts in a choice.
pub const MAX_CHOICES: usize = 1024;

/// How long a request waits for its grammar.
pub(super) const MAX_TIME: Duration = Duration::from_secs(2);

/// Most grammars compiled at once, including those whose requests have stopped waiting.
pub(super) const MAX_COMPILERS: usize = 2;

/// What a whole answer must match.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSpec {
    /// JSON that matches this schema.
    JsonSchema(Value),
    /// Any JSON object.
    JsonObject,
    /// A text that this regular expression matches completely.
    Regex(String),
    /// A grammar in llguidance's dialect of Lark, without tokens by name or number.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Tool calls.
    Calls(Calls),
}

/// Why a grammar was refused. Each message continues the name of the parameter: "must …".
#[allow(missing_docs, reason = "the messages explain the fields")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// Too many bytes.
    #[error("must be at most {max} bytes long, found {bytes}")]
    Long { max: usize, bytes: usize },
    /// Nested too deeply.
    #[error("must be nested at most {MAX_GRAMMAR_DEPTH} levels deep")]
    Deep,
    /// The wrong number of choices.
    #[error("must hold from 1 to {MAX_CHOICES} texts, none of them empty")]
    Choices,
    /// A feature that grammars must not use on this server.
    #[error("must not have {0}")]
    Has(String),
    /// Not a valid grammar of its kind, or one that uses an unsupported feature.
    #[error("must be a valid and supported grammar: {0}")]
    Wrong(String),
    /// Compilation takes too long.
    #[error("must compile within {} s, but takes longer", MAX_TIME.as_secs())]
    Slow,
    /// The vocabulary does not support grammars.
    #[error("grammars are not supported with this vocabulary: {0}")]
    Vocabulary(String),
    /// Other requests' grammars are still being compiled.
    #[error("cannot be compiled now: {MAX_COMPILERS} other grammars are being compiled")]
    Busy,
}
