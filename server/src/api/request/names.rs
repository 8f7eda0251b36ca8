//! The names of parameters in each format.

use crate::api::error::ApiError;
use crate::engine::RequestError;

/// A format's names for the parameters that are named differently in other formats, so that errors name what the client
/// sent.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct ParameterNames {
    pub(in crate::api) prompt: &'static str,
    pub(in crate::api) max_tokens: &'static str,
    pub(in crate::api) stop: &'static str,
    pub(in crate::api) repetition_penalty: &'static str,
    /// The field that asks for the request's grammar.
    pub(in crate::api) grammar: &'static str,
}

impl ParameterNames {
    /// Returns OpenAI's names.
    pub(in crate::api) const fn openai(prompt: &'static str, max_tokens: &'static str) -> Self {
        Self { prompt, max_tokens, stop: "stop", repetition_penalty: "repetition_penalty", grammar: "grammar" }
    }

    /// Converts the engine's refusal of a text, with the parameter's name that the client knows.
    pub(in crate::api) fn error(&self, error: &RequestError) -> ApiError {
        let parameter = error.parameter();
        let name = match parameter {
            "prompt" => self.prompt,
            "max_tokens" => self.max_tokens,
            "stop" => self.stop,
            "repetition_penalty" => self.repetition_penalty,
            "grammar" => self.grammar,
            parameter => parameter,
        };
        let message = error.to_string();
        // The engine's messages begin with the parameter.
        let problem = message.strip_prefix(parameter).unwrap_or(&message);
        ApiError::about_text(error, name, format!("{name}{problem}"))
    }
}
