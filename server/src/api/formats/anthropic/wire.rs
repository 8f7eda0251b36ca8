//! The body of a request for a message, and its conversion.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::encoder::MessageEncoder;
use super::messages::{InputMessage, Tool, ToolChoice, messages, tools};
use super::output::{self, OutputConfigField, OutputFormatField};
use crate::api::error::ApiError;
use crate::api::formats::content::Content;
use crate::api::formats::format::{Converted, Format};
use crate::api::formats::unsupported::{self, Ignored};
use crate::api::openapi::schemas;
use crate::api::request::continuation::SessionParameters;
use crate::api::request::grammar::{GrammarParameters, GrammarRequest};
use crate::api::request::prompt::{Conversation, Ending, Prompt};
use crate::api::request::sampling::SamplingOverrides;
use crate::api::request::tools::Tools;
use crate::api::request::{MaxTokens, ParameterNames, TextRequest, ValidRequest};
use crate::api::run::encoder::EventEncoder;
use crate::api::state::Served;
use crate::text::ChatTemplate;

const NAMES: ParameterNames =
    ParameterNames { stop: "stop_sequences", ..ParameterNames::openai("messages", "max_tokens") };

/// A request for a message, as Anthropic defines it. A field that is null counts as absent.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct MessagesRequest {
    /// The model's name, as in `/v1/models`.
    #[schema(required, nullable = false)]
    model: Option<String>,
    /// The conversation. If the last message is the assistant's, the answer continues it.
    #[schema(required, nullable = false, min_items = 1, max_items = 10_000)]
    messages: Option<Vec<InputMessage>>,
    /// The system prompt.
    system: Option<Content>,
    /// Maximum number of tokens to generate.
    #[schema(required, value_type = schemas::MaxTokens)]
    max_tokens: Option<u64>,
    /// Texts that end the answer; they are not part of it.
    #[schema(max_items = 16)]
    stop_sequences: Option<Vec<String>>,
    /// Whether the answer comes as server-sent events. Default: false.
    stream: Option<bool>,
    /// Divides the logits; 0 always takes the likeliest token. Default: the model's.
    #[schema(minimum = 0, maximum = 1)]
    temperature: Option<f64>,
    /// Draw from the likeliest tokens that together have this probability. Default: the model's.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    /// Draw from this many of the likeliest tokens; 0 means all. Default: the model's.
    #[schema(value_type = Option<u64>, maximum = 4_294_967_295_u64)]
    top_k: Option<u32>,
    /// Functions that the answer may call.
    #[schema(max_items = 128)]
    tools: Option<Vec<Tool>>,
    /// Whether and which function to call. Default: `auto` if there are tools.
    tool_choice: Option<ToolChoice>,
    /// Whether a model that can reason does so before it answers. Default: what the chat template does.
    thinking: Option<Thinking>,
    /// The JSON schema that the answer must follow, in `format`. With tools, an answer is a tool call or follows the
    /// schema.
    #[schema(value_type = Option<OutputConfigField>)]
    output_config: Option<Value>,
    /// The older name of `output_config.format`.
    #[schema(value_type = Option<OutputFormatField>)]
    output_format: Option<Value>,
    /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
    #[serde(flatten)]
    #[schema(ignore)]
    rest: BTreeMap<String, Value>,
}

/// Whether the model reasons, for chat templates that read `enable_thinking`. Other fields, such as `budget_tokens`,
/// are ignored.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicThinking)]
struct Thinking {
    #[serde(rename = "type")]
    #[schema(pattern = "^(enabled|adaptive|disabled)$")]
    kind: String,
}

impl Thinking {
    /// Returns the template's variables. `has_place` says whether the answer may begin with reasoning. It may not if it
    /// must call a tool, where Anthropic's API refuses reasoning, or if it continues a text, which would follow the tag
    /// that opens the reasoning.
    fn variables(&self, served: &Served, has_place: bool) -> Result<Map<String, Value>, ApiError> {
        let wants = match self.kind.as_str() {
            "enabled" | "adaptive" => true,
            "disabled" => false,
            kind => {
                let kind: String = kind.chars().take(100).collect();
                let message = format!("thinking.type must be enabled, adaptive or disabled, found {kind:?}");
                return Err(invalid("thinking", message));
            }
        };
        let can = served.template.as_deref().is_some_and(ChatTemplate::has_reasoning);
        if wants && !can {
            return Err(invalid("thinking", "thinking.type must be disabled: this model does not reason"));
        }
        if self.kind == "enabled" && !has_place {
            let message = "thinking.type must be adaptive or disabled if the answer continues a message of the assistant's \
                           or has to call a tool";
            return Err(invalid("thinking", message));
        }
        let variable = ("enable_thinking".to_owned(), (wants && has_place).into());
        Ok(if can { Map::from_iter([variable]) } else { Map::new() })
    }
}

/// The fields of [`MessagesRequest`] that make up the prompt.
pub(in crate::api) struct CountRequest;

impl PartialSchema for CountRequest {
    fn schema() -> RefOr<Schema> {
        schemas::only::<MessagesRequest>(&[
            "model",
            "messages",
            "system",
            "tools",
            "tool_choice",
            "thinking",
            "output_config",
            "output_format",
        ])
    }
}

impl ToSchema for CountRequest {}

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

impl MessagesRequest {
    /// Returns the number of tokens that the model would read, and the fields that have no effect.
    pub(super) fn count_tokens(mut self, served: &Served) -> Result<(usize, Ignored), ApiError> {
        let ignored = self.check()?;
        served.check_name(self.model.as_deref().unwrap_or_default(), Some("model"))?;
        let (prompt, tools, _) = self.prompt(served)?;
        let prompts = prompt.encode(NAMES.prompt, tools.as_ref(), served, None)?;
        Ok((prompts.iter().map(Vec::len).sum(), ignored))
    }

    /// Returns the prompt, the tools that the answer may call, and the grammar that it must follow. The answer
    /// continues the last message if that is the assistant's.
    fn prompt(&mut self, served: &Served) -> Result<(Prompt, Option<Tools>, Option<GrammarRequest>), ApiError> {
        let tools = tools(self.tools.take().unwrap_or_default(), self.tool_choice.take())?;
        let mut messages = messages(self.system.take(), self.messages.take().unwrap_or_default())?;
        let continued = messages.pop_if(|last| last.role == "assistant" && last.more.is_empty());
        if continued.is_some() && messages.is_empty() {
            let message = "messages must hold one before the assistant's message that is to be continued";
            return Err(invalid("messages", message));
        }
        // An answer that was cut off while the model reasoned has no text to continue.
        let prefill = continued.map(|message| message.content).filter(|text| !text.is_empty());
        if prefill.is_some() && tools.is_some() {
            let message =
                "messages must not end with the assistant's if tools may be called: a call cannot be continued";
            return Err(invalid("messages", message));
        }
        let grammar = output::grammar(self.output_config.take(), self.output_format.take())?;
        let has_place = prefill.is_none() && !tools.as_ref().is_some_and(Tools::must_call);
        let variables = match self.thinking.take() {
            Some(thinking) => thinking.variables(served, has_place)?,
            None => Map::new(),
        };
        let ending = prefill.map_or(Ending::Answer, Ending::Prefill);
        Ok((Prompt::Messages(Conversation { ending, variables, ..messages.into() }), tools, grammar))
    }

    fn check(&self) -> Result<Ignored, ApiError> {
        if self.model.is_none() {
            return Err(invalid("model", "model must be given"));
        }
        unsupported::check::<Self>(&self.rest)
    }
}

impl Format for MessagesRequest {
    type Options = ();

    fn convert(mut self, served: &Served) -> Result<Converted<()>, ApiError> {
        let ignored = self.check()?;
        let Some(max_tokens) = self.max_tokens else {
            return Err(invalid("max_tokens", "max_tokens must be given"));
        };
        if let Some(temperature) = self.temperature.filter(|temperature| !(0.0..=1.0).contains(temperature)) {
            return Err(invalid("temperature", format!("temperature must be from 0 to 1, found {temperature}")));
        }
        let (prompt, tools, grammar) = self.prompt(served)?;
        let request = TextRequest {
            model: self.model,
            stop: self.stop_sequences.unwrap_or_default(),
            sampling: SamplingOverrides {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k.map(i64::from),
                ..SamplingOverrides::default()
            },
            grammar: GrammarParameters { grammar, ..GrammarParameters::default() },
            tools,
            ..TextRequest::new(NAMES, prompt, MaxTokens::Given(max_tokens))
        };
        let (session, stream) = (SessionParameters::default(), self.stream.unwrap_or(false));
        Ok(Converted { request, session, stream, ignored, options: () })
    }

    fn encoder((): (), request: &ValidRequest, _: bool) -> Box<dyn EventEncoder> {
        Box::new(MessageEncoder::new(request))
    }
}
