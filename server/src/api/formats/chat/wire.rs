//! The body of a request for chat, and its conversion.

use serde_json::Value;

use super::encoder::ChatEncoder;
use crate::api::error::ApiError;
use crate::api::formats::format::{Converted, Format};
use crate::api::formats::openai::answer::{ResponseOptions, replay};
use crate::api::formats::openai::wire::{ChatMessage, messages};
use crate::api::formats::openai::{invalid, logprobs, neutral, openai_request, tools};
use crate::api::formats::unsupported;
use crate::api::request::choices::Choices;
use crate::api::request::prompt::Prompt;
use crate::api::request::{MaxTokens, ParameterNames, ValidRequest};
use crate::api::run::encoder::{EventEncoder, StreamEvent};
use crate::api::state::Served;

/// The default of `max_tokens`. OpenAI has no bound for chat, where a text ends by itself: enough for an answer.
pub(in crate::api::formats) const DEFAULT_MAX_TOKENS: usize = 1024;

openai_request! {
    /// A request for chat.
    ChatRequest {
        messages: Option<Vec<ChatMessage>>,
        max_completion_tokens: Option<u64>,
        logprobs: Option<bool>,
        top_logprobs: Option<u64>,
        tools: Option<Value>,
        tool_choice: Option<Value>,
        parallel_tool_calls: Option<bool>,
    }
}

impl Format for ChatRequest {
    type Options = ResponseOptions;

    const IDEMPOTENT_PATH: Option<&'static str> = Some("/v1/chat/completions");

    fn convert(mut self, _: &Served) -> Result<Converted<ResponseOptions>, ApiError> {
        unsupported::refuse_other_names(&self.rest, &[("prompt", "messages")])?;
        unsupported::refuse(&self.rest, neutral())?;
        let choices = Choices::new(self.n, None, false)?;
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, top) => Some(logprobs::check("top_logprobs", top.unwrap_or(0))?),
            // 0 asks for nothing.
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(invalid("top_logprobs", "top_logprobs must be absent unless logprobs is true"));
            }
        };
        let tools = tools::read(self.tools.take(), self.tool_choice.take(), self.parallel_tool_calls)?;
        let messages = messages(self.messages.take().unwrap_or_default(), "messages")?;
        let name = if self.max_completion_tokens.is_some() { "max_completion_tokens" } else { "max_tokens" };
        let max_tokens = self.max_completion_tokens.or(self.max_tokens);
        let max_tokens = max_tokens.map_or(MaxTokens::Default(DEFAULT_MAX_TOKENS), MaxTokens::Given);
        let (names, prompt) = (ParameterNames::openai("messages", name), Prompt::Messages { messages, prefill: None });
        let mut converted = self.convert_common(names, prompt, max_tokens)?;
        let request = &mut converted.request;
        (request.choices, request.logprobs, request.tools) = (choices, logprobs, tools);
        Ok(converted)
    }

    fn encoder(options: ResponseOptions, request: &ValidRequest, collect: bool) -> Box<dyn EventEncoder> {
        Box::new(ChatEncoder::new(request, options, collect))
    }

    fn replay(options: &ResponseOptions, body: &str) -> Vec<StreamEvent> {
        replay(body, options.include_usage)
    }
}
