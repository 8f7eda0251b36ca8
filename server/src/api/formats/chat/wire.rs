//! The body of a chat request, and its conversion.

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::encoder::ChatEncoder;
use crate::api::error::ApiError;
use crate::api::formats::format::{Converted, Format};
use crate::api::formats::openai::answer::{ResponseOptions, replay};
use crate::api::formats::openai::wire::{ChatMessage, messages};
use crate::api::formats::openai::{TemplateFields, invalid, logprobs, openai_turn, tools};
use crate::api::openapi::schemas;
use crate::api::request::choices::Choices;
use crate::api::request::prompt::Prompt;
use crate::api::request::{MaxTokens, ParameterNames, ValidRequest};
use crate::api::run::encoder::{EventEncoder, StreamEvent};
use crate::api::state::Served;

/// The default for `max_tokens`. OpenAI sets no limit for chat, where a text ends by itself; this is enough for an
/// answer.
pub(in crate::api::formats) const DEFAULT_MAX_TOKENS: usize = 1024;

/// How the messages of a turn are read. By default, only new messages are allowed.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::api) enum History {
    /// The messages are appended as they are.
    Append,
}

openai_turn! {
    /// A chat request. A field that is null counts as absent.
    ChatRequest {
        /// The conversation; with `session` or `state`, only the new messages: answers among them are refused.
        #[schema(min_items = 1, max_items = 10_000)]
        messages: Option<Vec<ChatMessage>>,
        /// `append`: with `session` or `state`, append the messages as they are, even if there are answers among them.
        history: Option<History>,
        /// Maximum number of tokens to generate. Default: 1,024, or the server's limit if that is lower.
        #[schema(value_type = Option<schemas::MaxTokens>)]
        max_tokens: Option<u64>,
        /// Whether the prompt ends with the beginning of an answer. Default: true, unless `continue_final_message` is
        /// true.
        add_generation_prompt: Option<bool>,
        /// Whether the answer continues the last message, which must be a text from the assistant. Default: false.
        continue_final_message: Option<bool>,
        /// Additional variables for the checkpoint's chat template.
        #[schema(value_type = Option<Object>)]
        chat_template_kwargs: Option<Map<String, Value>>,
        /// The newer name of `max_tokens`, which it overrides.
        #[schema(value_type = Option<schemas::MaxTokens>)]
        max_completion_tokens: Option<u64>,
        /// Whether to return the log probability of each token. Default: false.
        logprobs: Option<bool>,
        /// How many of the likeliest tokens to list with each token; only with `logprobs`. Default: 0.
        #[schema(maximum = 20)]
        top_logprobs: Option<u64>,
        /// Functions that the answer may call.
        #[schema(value_type = Option<tools::ToolsField>)]
        tools: Option<Value>,
        /// Whether and which function to call. Default: `auto` if there are tools.
        #[schema(value_type = Option<tools::ToolChoiceField>)]
        tool_choice: Option<Value>,
        /// Whether the answer may make several calls. Default: false.
        parallel_tool_calls: Option<bool>,
    }
}

impl Format for ChatRequest {
    type Options = ResponseOptions;

    const IDEMPOTENT_PATH: Option<&'static str> = Some("/v1/chat/completions");

    fn convert(mut self, _: &Served) -> Result<Converted<ResponseOptions>, ApiError> {
        let choices = Choices::new(self.n, None, false)?;
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, top) => Some(logprobs::check("top_logprobs", top.unwrap_or(0))?),
            // 0 means the same as no field.
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(invalid("top_logprobs", "top_logprobs must be absent unless logprobs is true"));
            }
        };
        let tools = tools::read(self.tools.take(), self.tool_choice.take(), self.parallel_tool_calls)?;
        let messages = messages(self.messages.take().unwrap_or_default(), "messages")?;
        let template = TemplateFields {
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            chat_template_kwargs: self.chat_template_kwargs.take(),
        };
        let mut conversation = template.apply(messages, tools.is_some())?;
        conversation.only_new = self.history.is_none();
        let continues = self.session.is_some() || self.state.is_some() || self.return_state.unwrap_or(false);
        if self.history.is_some() && !continues {
            return Err(invalid("history", "history must be absent without a session or state"));
        }
        let prompt = Prompt::Messages(conversation);
        let name = if self.max_completion_tokens.is_some() { "max_completion_tokens" } else { "max_tokens" };
        let max_tokens = self.max_completion_tokens.or(self.max_tokens);
        let max_tokens = max_tokens.map_or(MaxTokens::Default(DEFAULT_MAX_TOKENS), MaxTokens::Given);
        let mut converted = self.convert_common(ParameterNames::openai("messages", name), prompt, max_tokens)?;
        let request = &mut converted.request;
        (request.choices, request.logprobs, request.tools) = (choices, logprobs, tools);
        Ok(converted)
    }

    fn encoder(options: ResponseOptions, request: &ValidRequest, collect: bool) -> Box<dyn EventEncoder> {
        Box::new(ChatEncoder::new(request, options, collect))
    }

    fn replay(options: &ResponseOptions, body: &str) -> Vec<StreamEvent> {
        replay(body, options.usage.is_on())
    }
}
