//! The body of a request for a response, and its conversion.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::input::{Input, messages};
use super::object::{TextFormat, Truncation};
use crate::api::error::ApiError;
use crate::api::formats::chat::DEFAULT_MAX_TOKENS;
use crate::api::formats::openai::tools::{self, FlatTool, FlatToolChoice};
use crate::api::formats::openai::{grammar, invalid, openai_request};
use crate::api::formats::unsupported::{self, Ignored};
use crate::api::formats::wording::complaint;
use crate::api::openapi::schemas::{self, json_schemas, never};
use crate::api::request::grammar::GrammarParameters;
use crate::api::request::prompt::Prompt;
use crate::api::request::{MaxTokens, ParameterNames, TextRequest};
use crate::api::sessions::{MetadataField, metadata};

/// The field `include`.
struct IncludeField;

/// Values of `include` for outputs that this server never makes.
const NEVER_MADE: [&str; 7] = [
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
];

json_schemas! {
    IncludeField: "NeverIncluded" = {"type": "array", "items": {"enum": NEVER_MADE}};
}

/// The format that the text must have. Other fields, such as `verbosity`, are ignored.
#[derive(Debug, Deserialize, ToSchema)]
pub(super) struct TextConfig {
    /// Plain text, any JSON object, or JSON with a schema. Default: plain text.
    #[schema(value_type = Option<TextFormat>)]
    format: Option<Value>,
}

/// Options of a stream; only if `stream` is true.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseStreamOptions)]
pub(super) struct StreamOptions {
    #[schema(schema_with = never)]
    include_obfuscation: Option<bool>,
}

openai_request! {
    /// A request for a response, as OpenAI defines it, with this server's additions for sampling. A field that is null
    /// counts as absent.
    ResponseRequest {
        /// The new input. Without it, a response that was cut off is continued.
        input: Option<Input>,
        /// A system prompt before the input.
        pub(super) instructions: Option<String>,
        /// The response to continue from.
        pub(super) previous_response_id: Option<String>,
        /// Whether to store the response, so that it can be retrieved and continued. Default: true, if the API key may
        /// do so.
        pub(super) store: Option<bool>,
        stream_options: Option<StreamOptions>,
        /// Maximum number of tokens to generate. Default: 1,024, or the server's limit if that is lower.
        #[schema(value_type = Option<schemas::MaxTokens>)]
        pub(super) max_output_tokens: Option<u64>,
        #[schema(value_type = Option<MetadataField>)]
        pub(super) metadata: Option<BTreeMap<String, String>>,
        /// Returned in the response; otherwise not used.
        pub(super) user: Option<String>,
        /// Functions that the answer may call.
        #[schema(value_type = Option<Vec<FlatTool>>, max_items = 128)]
        pub(super) tools: Option<Vec<Map<String, Value>>>,
        /// Whether and which function to call. Default: `auto`.
        #[schema(value_type = Option<FlatToolChoice>)]
        pub(super) tool_choice: Option<Value>,
        /// Whether the answer may make several calls. Default: true.
        pub(super) parallel_tool_calls: Option<bool>,
        pub(super) truncation: Option<Truncation>,
        text: Option<TextConfig>,
        /// Accepted only for outputs that the server never makes, so it has no effect.
        #[schema(value_type = Option<IncludeField>)]
        include: Option<Vec<String>>,
    }
}

impl ResponseRequest {
    /// Refuses what is not supported. Returns the text's format as the response shows it, the grammar, and the fields
    /// that have no effect.
    pub(super) fn check(&mut self) -> Result<(TextFormat, GrammarParameters, Ignored), ApiError> {
        let ignored = unsupported::check::<Self>(&self.rest)?;
        let (format, asked) = self.text_format()?;
        if let Some(other) = self.include.iter().flatten().find(|name| !NEVER_MADE.contains(&name.as_str())) {
            let (known, other): (_, String) = (NEVER_MADE.join(", "), other.chars().take(100).collect());
            return Err(invalid("include", format!("include must have of {known} alone, found {other:?}")));
        }
        metadata(self.metadata.clone().unwrap_or_default())?;
        if let Some(options) = &self.stream_options {
            if !self.stream.unwrap_or(false) {
                return Err(invalid("stream_options", "stream_options must be absent unless stream is true"));
            }
            if options.include_obfuscation.unwrap_or(false) {
                let message = "stream_options.include_obfuscation must be absent, null or false: it is not supported";
                return Err(invalid("stream_options", message));
            }
        }
        Ok((format, asked, ignored))
    }

    fn text_format(&mut self) -> Result<(TextFormat, GrammarParameters), ApiError> {
        let mut asked = grammar::read(self.grammars())?;
        let Some(text) = self.text.take() else { return Ok((TextFormat::default(), asked)) };
        let Some(format) = text.format.filter(|format| !format.is_null()) else {
            return Ok((TextFormat::default(), asked));
        };
        let grammar = grammar::response_format("text", "text.format", format.clone())?;
        let shown =
            serde_json::from_value(format).map_err(|error| invalid("text", complaint("text.format", &error)))?;
        if grammar.is_some() && asked.grammar.is_some() {
            return Err(invalid("text", "text.format must be of type text if there is another grammar"));
        }
        asked.grammar = grammar.or(asked.grammar);
        Ok((shown, asked))
    }

    /// Converts the body to the internal request. Call [`Self::check`] first.
    pub(super) fn convert(mut self, grammar: GrammarParameters) -> Result<TextRequest, ApiError> {
        let names = ParameterNames::openai("input", "max_output_tokens");
        let tools = tools::read_flat(
            &self.tools.take().unwrap_or_default(),
            self.tool_choice.as_ref(),
            self.parallel_tool_calls,
        )?;
        // A response that was cut off can be continued without more input.
        if self.input.is_none() && self.previous_response_id.is_none() {
            return Err(invalid("input", "input must be given without previous_response_id"));
        }
        let prompt = Prompt::Messages(messages(self.instructions.take(), self.input.take())?.into());
        let max_tokens = self.max_output_tokens.map_or(MaxTokens::Default(DEFAULT_MAX_TOKENS), MaxTokens::Given);
        Ok(TextRequest { grammar, tools, ..self.text_request(names, prompt, max_tokens)? })
    }
}
