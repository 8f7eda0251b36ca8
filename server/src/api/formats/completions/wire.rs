//! The body of a request for completions, and its conversion.

use serde::Deserialize;

use super::echo::Echo;
use super::encoder::CompletionEncoder;
use crate::api::error::ApiError;
use crate::api::formats::format::{Converted, Format};
use crate::api::formats::openai::answer::{ResponseOptions, replay};
use crate::api::formats::openai::{invalid, logprobs, openai_turn};
use crate::api::openapi::schemas::{self, json_schemas};
use crate::api::request::choices::Choices;
use crate::api::request::prompt::{Input, Prompt};
use crate::api::request::{MaxTokens, ParameterNames, ValidRequest};
use crate::api::run::encoder::{EventEncoder, StreamEvent};
use crate::api::state::Served;

/// OpenAI's default for `max_tokens`.
const DEFAULT_MAX_TOKENS: usize = 16;

/// One prompt, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, an array of strings, an array of token ids, or an array of those")]
pub(in crate::api) enum PromptField {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}

json_schemas! {
    PromptField: "Prompt" = {
        "oneOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "maxItems": "prompts", "items": {"type": "string"}},
            {"$ref": "#/components/schemas/TokenIds"},
            {"type": "array", "minItems": 1, "maxItems": "prompts", "items": {"$ref": "#/components/schemas/TokenIds"}},
        ],
    };
}

openai_turn! {
    /// A request for completions. A field that is null counts as absent.
    CompletionRequest {
        /// A string, token ids, or a list of either. Without it, `session` or `state` continues without new text. An
        /// encoder-decoder model translates the prompt.
        prompt: Option<PromptField>,
        /// Maximum number of tokens to generate. Default: 16, or the server's limit if that is lower.
        #[schema(value_type = Option<schemas::MaxTokens>)]
        max_tokens: Option<u64>,
        /// How many texts to generate for each prompt; the `n` likeliest are returned. Default: `n`.
        #[schema(minimum = 1, maximum = 128)]
        best_of: Option<u64>,
        /// Whether the text begins with the prompt; not for translations. Default: false.
        echo: Option<bool>,
        /// How many of the likeliest tokens to list with each token. Default: no log probabilities.
        #[schema(maximum = 20)]
        logprobs: Option<u64>,
        /// Whether to add the special tokens that begin every text before the prompt. Default: true.
        add_special_tokens: Option<bool>,
    }
}

/// What the encoder needs to know about a request.
pub(in crate::api) struct Options {
    response: ResponseOptions,
    /// The prompts' texts, if they are echoed; empty if the prompts came as token ids.
    echo: Option<Vec<String>>,
}

impl CompletionRequest {
    fn prompt(&mut self) -> Result<Prompt, ApiError> {
        let continues = self.session.is_some() || self.state.is_some() || self.return_state.unwrap_or(false);
        let add_special_tokens = self.add_special_tokens.unwrap_or(true);
        let inputs = match self.prompt.take() {
            None => return Ok(Prompt::Missing),
            Some(PromptField::Texts(_) | PromptField::IdLists(_)) if continues => {
                return Err(invalid("prompt", "prompt must be a single one if it continues a conversation"));
            }
            Some(PromptField::Text(text)) => vec![Input::Text(text)],
            Some(PromptField::Texts(texts)) => texts.into_iter().map(Input::Text).collect(),
            Some(PromptField::Ids(ids)) => vec![Input::Ids(ids)],
            Some(PromptField::IdLists(lists)) => lists.into_iter().map(Input::Ids).collect(),
        };
        Ok(Prompt::Inputs { inputs, add_special_tokens })
    }
}

impl Format for CompletionRequest {
    type Options = Options;

    const IDEMPOTENT_PATH: Option<&'static str> = Some("/v1/completions");

    fn convert(mut self, _: &Served) -> Result<Converted<Options>, ApiError> {
        let choices = Choices::new(self.n, self.best_of, self.stream.unwrap_or(false))?;
        let logprobs = self.logprobs.map(|count| logprobs::check("logprobs", count)).transpose()?;
        let echo = self.echo.unwrap_or(false).then(|| match &self.prompt {
            Some(PromptField::Text(text)) => vec![text.clone()],
            Some(PromptField::Texts(texts)) => texts.clone(),
            Some(PromptField::Ids(_) | PromptField::IdLists(_)) | None => Vec::new(),
        });
        let prompt = self.prompt()?;
        let max_tokens = self.max_tokens.map_or(MaxTokens::Default(DEFAULT_MAX_TOKENS), MaxTokens::Given);
        let names = ParameterNames::openai("prompt", "max_tokens");
        let Converted { mut request, session, stream, ignored, options } =
            self.convert_common(names, prompt, max_tokens)?;
        (request.choices, request.logprobs, request.echo) = (choices, logprobs, echo.is_some());
        Ok(Converted { request, session, stream, ignored, options: Options { response: options, echo } })
    }

    fn encoder(options: Options, request: &ValidRequest, collect: bool) -> Box<dyn EventEncoder> {
        let echoes = options.echo.map(|texts| Echo::all(texts, request)).unwrap_or_default();
        Box::new(CompletionEncoder::new(request, options.response, echoes, collect))
    }

    fn replay(options: &Options, body: &str) -> Vec<StreamEvent> {
        replay(body, options.response.usage.is_on())
    }
}
