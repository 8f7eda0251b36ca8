//! The fields that requests for completions and for chat have in common, and those that neither supports.

use serde_json::{Value, json};

use crate::api::error::ApiError;
use crate::api::formats::unsupported::Neutral;

pub(in crate::api::formats) fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

/// Fields of OpenAI and vLLM that would change the answer. A request type that supports one of them has it as a field.
pub(in crate::api::formats) fn neutral() -> Vec<Neutral> {
    vec![
        ("n", vec![json!(1)]),
        ("best_of", vec![json!(1)]),
        ("echo", vec![json!(false)]),
        ("suffix", vec![json!("")]),
        ("logprobs", vec![]),
        ("prompt_logprobs", vec![]),
        ("stop_token_ids", vec![json!([])]),
        ("min_tokens", vec![json!(0)]),
        ("top_logprobs", vec![]),
        ("functions", vec![json!([])]),
        ("function_call", vec![json!("none")]),
        ("chat_template", vec![]),
        ("chat_template_kwargs", vec![json!({})]),
        ("documents", vec![json!([])]),
        ("audio", vec![]),
        ("modalities", vec![json!(["text"])]),
        ("web_search_options", vec![]),
        ("bad_words", vec![json!([])]),
        ("allowed_token_ids", vec![]),
        ("truncate_prompt_tokens", vec![]),
        ("prompt_embeds", vec![]),
        ("guided_whitespace_pattern", vec![]),
        ("guided_decoding_backend", vec![]),
        ("logits_processors", vec![]),
        ("use_beam_search", vec![json!(false)]),
        ("length_penalty", vec![json!(1.0)]),
        ("early_stopping", vec![json!(false)]),
        ("include_stop_str_in_output", vec![json!(false)]),
        ("skip_special_tokens", vec![json!(true)]),
        ("spaces_between_special_tokens", vec![json!(true)]),
        ("detokenize", vec![json!(true)]),
        ("return_tokens_as_token_ids", vec![json!(false)]),
        ("add_special_tokens", vec![json!(true)]),
        ("tools", vec![Value::Array(Vec::new())]),
        ("tool_choice", vec![json!("none"), json!("auto")]),
    ]
}

/// Defines a request body with its own fields and those that OpenAI's completions and chat have in common, with vLLM's
/// additions and this server's. A field that is null counts as absent. The common fields are no struct of their own:
/// serde would lose the field's name in errors of a flattened one.
macro_rules! openai_request {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, serde::Deserialize)]
        pub(in crate::api) struct $name {
            $($(#[$field_meta])* $field: $type,)*
            model: Option<String>,
            max_tokens: Option<u64>,
            stop: Option<$crate::api::formats::openai::wire::Stop>,
            stream: Option<bool>,
            stream_options: Option<$crate::api::formats::openai::wire::StreamOptions>,
            temperature: Option<f64>,
            top_p: Option<f64>,
            top_k: Option<i64>,
            min_p: Option<f64>,
            typical_p: Option<f64>,
            repetition_penalty: Option<f64>,
            frequency_penalty: Option<f64>,
            presence_penalty: Option<f64>,
            logit_bias: Option<std::collections::BTreeMap<String, f64>>,
            seed: Option<$crate::api::formats::openai::wire::Seed>,
            n: Option<u64>,
            min_tokens: Option<u64>,
            stop_token_ids: Option<Vec<u32>>,
            ignore_eos: Option<bool>,
            return_token_ids: Option<bool>,
            return_tokens_as_token_ids: Option<bool>,
            response_format: Option<serde_json::Value>,
            json_schema: Option<serde_json::Value>,
            regex: Option<serde_json::Value>,
            grammar: Option<serde_json::Value>,
            structured_outputs: Option<serde_json::Value>,
            guided_json: Option<serde_json::Value>,
            guided_regex: Option<serde_json::Value>,
            guided_choice: Option<serde_json::Value>,
            guided_grammar: Option<serde_json::Value>,
            session: Option<String>,
            label: Option<String>,
            on_disconnect: Option<$crate::api::request::continuation::OnDisconnect>,
            state: Option<String>,
            return_state: Option<bool>,
            /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
            #[serde(flatten)]
            rest: std::collections::BTreeMap<String, serde_json::Value>,
        }

        impl $name {
            /// Converts the common fields. `logprobs` and `choices` are checked by the format.
            fn convert_common(
                self,
                names: $crate::api::request::ParameterNames,
                prompt: $crate::api::request::prompt::Prompt,
                max_tokens: $crate::api::request::MaxTokens,
            ) -> Result<
                $crate::api::formats::format::Converted<$crate::api::formats::openai::answer::ResponseOptions>,
                $crate::api::error::ApiError,
            > {
                use $crate::api::formats::openai::{answer, grammar, wire};
                use $crate::api::request::{TextRequest, continuation, sampling};
                let stream = self.stream.unwrap_or(false);
                let include_usage = answer::include_usage(self.stream_options.as_ref(), stream)?;
                let request = TextRequest {
                    model: self.model,
                    min_tokens: self.min_tokens.unwrap_or(0),
                    stop: wire::Stop::all(self.stop),
                    stop_token_ids: self.stop_token_ids.unwrap_or_default(),
                    ignore_eos: self.ignore_eos.unwrap_or(false),
                    sampling: sampling::SamplingOverrides {
                        temperature: self.temperature,
                        top_p: self.top_p,
                        top_k: self.top_k,
                        min_p: self.min_p,
                        typical_p: self.typical_p,
                        repetition_penalty: self.repetition_penalty,
                        frequency_penalty: self.frequency_penalty,
                        presence_penalty: self.presence_penalty,
                        logit_bias: wire::logit_bias(self.logit_bias)?,
                        seed: self.seed.map(wire::Seed::bits),
                    },
                    grammar: grammar::read([
                        ("response_format", self.response_format),
                        ("json_schema", self.json_schema),
                        ("regex", self.regex),
                        ("grammar", self.grammar),
                        ("structured_outputs", self.structured_outputs),
                        ("guided_json", self.guided_json),
                        ("guided_regex", self.guided_regex),
                        ("guided_choice", self.guided_choice),
                        ("guided_grammar", self.guided_grammar),
                    ])?,
                    ..TextRequest::new(names, prompt, max_tokens)
                };
                let session = continuation::SessionParameters {
                    session: self.session,
                    label: $crate::api::sessions::label(self.label)?,
                    on_disconnect: self.on_disconnect,
                    state: self.state,
                    return_state: self.return_state.unwrap_or(false),
                };
                let options = answer::ResponseOptions {
                    include_usage,
                    token_ids: self.return_token_ids.unwrap_or(false),
                    tokens_as_ids: self.return_tokens_as_token_ids.unwrap_or(false),
                };
                Ok($crate::api::formats::format::Converted { request, session, stream, options })
            }
        }
    };
}
pub(in crate::api::formats) use openai_request;
