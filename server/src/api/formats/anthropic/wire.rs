//! The body of a request for a message, and its conversion.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::encoder::MessageEncoder;
use super::messages::{InputMessage, Tool, ToolChoice, messages, tools};
use crate::api::error::ApiError;
use crate::api::formats::content::Content;
use crate::api::formats::format::{Converted, Format};
use crate::api::formats::unsupported::{self, Neutral};
use crate::api::request::continuation::SessionParameters;
use crate::api::request::prompt::Prompt;
use crate::api::request::sampling::SamplingOverrides;
use crate::api::request::tools::Tools;
use crate::api::request::{MaxTokens, ParameterNames, TextRequest, ValidRequest};
use crate::api::run::encoder::EventEncoder;
use crate::api::state::Served;

const NAMES: ParameterNames = ParameterNames {
    prompt: "messages",
    max_tokens: "max_tokens",
    stop: "stop_sequences",
    repetition_penalty: "repetition_penalty",
};

/// A request for a message as Anthropic defines it. A field that is null counts as absent.
#[derive(Debug, Deserialize)]
pub(in crate::api) struct MessagesRequest {
    model: Option<String>,
    messages: Option<Vec<InputMessage>>,
    system: Option<Content>,
    max_tokens: Option<u64>,
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<u32>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<ToolChoice>,
    /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

fn neutral() -> [Neutral; 5] {
    [
        ("container", vec![]),
        ("mcp_servers", vec![json!([])]),
        ("output_config", vec![json!({})]),
        ("output_format", vec![]),
        ("thinking", vec![json!({"type": "disabled"})]),
    ]
}

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

impl MessagesRequest {
    /// How many tokens the model would read.
    pub(super) fn count_tokens(mut self, served: &Served) -> Result<usize, ApiError> {
        self.check()?;
        served.check_name(self.model.as_deref().unwrap_or_default(), Some("model"))?;
        let (prompt, tools) = self.prompt()?;
        Ok(prompt.encode(NAMES.prompt, tools.as_ref(), served, None)?.iter().map(Vec::len).sum())
    }

    /// The messages, and the tools that the answer may call. The answer continues the last message if that is the
    /// assistant's.
    fn prompt(&mut self) -> Result<(Prompt, Option<Tools>), ApiError> {
        let tools = tools(self.tools.take().unwrap_or_default(), self.tool_choice.take())?;
        let mut messages = messages(self.system.take(), self.messages.take().unwrap_or_default())?;
        let continued = messages.pop_if(|last| last.role == "assistant" && last.more.is_empty());
        let prefill = continued.map(|message| message.content);
        if prefill.is_some() && messages.is_empty() {
            let message = "messages must hold one before the assistant's message that is to be continued";
            return Err(invalid("messages", message));
        }
        if prefill.is_some() && tools.is_some() {
            let message =
                "messages must not end with the assistant's if tools may be called: a call cannot be continued";
            return Err(invalid("messages", message));
        }
        Ok((Prompt::Messages { messages, prefill }, tools))
    }

    fn check(&self) -> Result<(), ApiError> {
        if self.model.is_none() {
            return Err(invalid("model", "model must be given"));
        }
        unsupported::refuse(&self.rest, neutral())
    }
}

impl Format for MessagesRequest {
    type Options = ();

    fn convert(mut self, _: &Served) -> Result<Converted<()>, ApiError> {
        self.check()?;
        let Some(max_tokens) = self.max_tokens else {
            return Err(invalid("max_tokens", "max_tokens must be given"));
        };
        if let Some(temperature) = self.temperature.filter(|temperature| !(0.0..=1.0).contains(temperature)) {
            return Err(invalid("temperature", format!("temperature must be from 0 to 1, found {temperature}")));
        }
        let (prompt, tools) = self.prompt()?;
        let request = TextRequest {
            model: self.model,
            stop: self.stop_sequences.unwrap_or_default(),
            sampling: SamplingOverrides {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k.map(i64::from),
                ..SamplingOverrides::default()
            },
            tools,
            ..TextRequest::new(NAMES, prompt, MaxTokens::Given(max_tokens))
        };
        let (session, stream) = (SessionParameters::default(), self.stream.unwrap_or(false));
        Ok(Converted { request, session, stream, options: () })
    }

    fn encoder((): (), request: &ValidRequest, _: bool) -> Box<dyn EventEncoder> {
        Box::new(MessageEncoder::new(request))
    }
}
