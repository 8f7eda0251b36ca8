//! The grammars that requests specify, their limits, and why they are refused.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::calls::{Call, Calls, Instead};
use super::closing::closed;
use crate::text::reasoning::ReasoningStart;

/// Longest grammar of any kind, in bytes.
pub const MAX_GRAMMAR_BYTES: usize = 256 << 10;

/// Most levels of nesting in a grammar.
pub const MAX_GRAMMAR_DEPTH: usize = 100;

/// Most texts to choose from.
pub const MAX_CHOICES: usize = 1024;

/// How long a request waits for its grammar.
pub(super) const MAX_TIME: Duration = Duration::from_secs(2);

/// Most memory that a compilation may add to its process, in bytes. Enforced in the helper process.
pub(super) const MAX_MEMORY: u64 = 64 << 20;

/// Most grammars compiled at once, including those whose requests have stopped waiting.
pub const MAX_COMPILERS: usize = 2;

/// What a whole answer must match.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// Reasoning in any form, then what the inner grammar allows. If the prompt has not begun the reasoning, it may be
    /// left out before tool calls that may be plain text instead; otherwise it is required.
    AfterReasoning(ReasoningStart, Box<GrammarSpec>),
}

impl GrammarSpec {
    /// Whether every text that this grammar allows is JSON.
    #[must_use]
    pub fn is_json(&self) -> bool {
        match self {
            Self::JsonSchema(_) | Self::JsonObject => true,
            Self::Calls(calls) => calls.instead != Instead::Text,
            Self::Regex(_) | Self::Lark(_) | Self::Choice(_) | Self::AfterReasoning(..) => false,
        }
    }

    /// Returns the grammar with objects restricted to the properties that their schemas name, unless a schema says
    /// otherwise.
    #[must_use]
    pub fn without_additional_properties(self) -> Self {
        match self {
            Self::JsonSchema(schema) => Self::JsonSchema(closed(schema)),
            Self::Calls(Calls { tools, max, instead }) => {
                let tools = tools.into_iter().map(|tool| Call { arguments: closed(tool.arguments), ..tool });
                let instead = if let Instead::Json(schema) = instead { Instead::Json(closed(schema)) } else { instead };
                Self::Calls(Calls { tools: tools.collect(), max, instead })
            }
            other => other,
        }
    }

    /// Returns this grammar after reasoning, if reasoning is possible: the prompt has begun it, or the model may write
    /// plain text.
    #[must_use]
    pub fn after_reasoning(self, start: ReasoningStart) -> Self {
        let may_be_text = matches!(&self, Self::Calls(Calls { instead: Instead::Text, .. }));
        if start == ReasoningStart::Free && !may_be_text {
            return self;
        }
        Self::AfterReasoning(start, Box::new(self))
    }

    /// Returns the schema of the JSON that an answer may be instead of calls; `None` if this is not a grammar of JSON.
    /// An object without a schema may not have a property `arguments`, because it would look like a call.
    #[must_use]
    pub fn beside_calls(&self) -> Option<Value> {
        match self {
            Self::JsonSchema(schema) => Some(schema.clone()),
            Self::JsonObject => {
                Some(json!({"type": "object", "properties": {"arguments": false}, "additionalProperties": true}))
            }
            _ => None,
        }
    }
}

/// Why a grammar was refused. Each message continues the name of the parameter: "must …".
#[allow(missing_docs, reason = "the messages explain the fields")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The grammar has too many bytes.
    #[error("must be at most {max} bytes long, found {bytes}")]
    Long { max: usize, bytes: usize },
    /// The grammar is nested too deeply.
    #[error("must be nested at most {MAX_GRAMMAR_DEPTH} levels deep")]
    Deep,
    /// The number of texts is wrong, or a text is empty.
    #[error("must hold from 1 to {MAX_CHOICES} texts, none of them empty")]
    Choices,
    /// The grammar uses a feature that this server does not allow.
    #[error("must not have {0}")]
    Has(String),
    /// The grammar is invalid, or uses an unsupported feature.
    #[error("must be a valid and supported grammar: {0}")]
    Wrong(String),
    /// JSON that may stand instead of calls could be taken for a call of this tool.
    #[error("must not allow JSON that begins as a call of the tool {0} does: {{\"name\": {0:?}, \"arguments\": …")]
    LikeCall(String),
    /// Compilation takes too long.
    #[error("must compile within {} s, but takes longer", MAX_TIME.as_secs())]
    Slow,
    /// Compilation takes too much memory.
    #[error("must compile within {} MiB of memory, but needs more", MAX_MEMORY >> 20)]
    Memory,
    /// The vocabulary does not support grammars.
    #[error("grammars are not supported with this vocabulary: {0}")]
    Vocabulary(String),
    /// Other requests' grammars are still being compiled.
    #[error("cannot be compiled now: {MAX_COMPILERS} other grammars are being compiled")]
    Busy,
    /// The process that compiles grammars cannot be started; the log says why.
    #[error("cannot be compiled now: the process that compiles grammars does not start")]
    Unavailable,
}
