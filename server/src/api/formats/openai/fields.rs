//! The fields that requests in OpenAI's formats have in common.

use crate::api::error::ApiError;

pub(in crate::api::formats) fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

/// Defines a request body with its own fields and those that all of OpenAI's formats have in common, with the additions
/// of vLLM and of this server. A field that is null counts as absent. The common fields are not a flattened struct,
/// because serde would then lose a field's name in errors.
macro_rules! openai_request {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $vis:vis $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Default, serde::Deserialize, utoipa::ToSchema)]
        pub(in crate::api) struct $name {
            $($(#[$field_meta])* $vis $field: $type,)*
            /// The model's name, as in `/v1/models`. Default: the one that is served.
            pub(in crate::api::formats) model: Option<String>,
            pub(in crate::api::formats) stop: Option<$crate::api::formats::openai::wire::Stop>,
            /// Whether the answer comes as server-sent events. Default: false.
            pub(in crate::api::formats) stream: Option<bool>,
            /// Divides the logits; 0 always takes the likeliest token. Default: the model's.
            #[schema(minimum = 0, maximum = 2)]
            pub(in crate::api::formats) temperature: Option<f64>,
            /// Draw from the likeliest tokens that together have this probability. Default: the model's.
            #[schema(exclusive_minimum = 0, maximum = 1)]
            pub(in crate::api::formats) top_p: Option<f64>,
            /// Draw from this many of the likeliest tokens; 0 and -1 mean all. Default: the model's.
            #[schema(minimum = -1)]
            pub(in crate::api::formats) top_k: Option<i64>,
            /// Draw from tokens with at least this share of the likeliest one's probability. Default: the model's.
            #[schema(minimum = 0, maximum = 1)]
            pub(in crate::api::formats) min_p: Option<f64>,
            /// Draw from the most typical tokens that together have this probability. Default: the model's.
            #[schema(exclusive_minimum = 0, maximum = 1)]
            pub(in crate::api::formats) typical_p: Option<f64>,
            /// Values above 1 make tokens that were seen less likely. Default: the model's.
            #[schema(exclusive_minimum = 0, maximum = 10)]
            pub(in crate::api::formats) repetition_penalty: Option<f64>,
            /// Subtracted from a token's logit for each time that it was generated. Default: the model's.
            #[schema(minimum = -2, maximum = 2)]
            pub(in crate::api::formats) frequency_penalty: Option<f64>,
            /// Subtracted from the logit of each token that was generated. Default: the model's.
            #[schema(minimum = -2, maximum = 2)]
            pub(in crate::api::formats) presence_penalty: Option<f64>,
            #[schema(value_type = Option<$crate::api::formats::openai::wire::LogitBias>)]
            pub(in crate::api::formats) logit_bias: Option<std::collections::BTreeMap<String, f64>>,
            /// The same seed and prompt give the same text. Default: random.
            pub(in crate::api::formats) seed: Option<$crate::api::formats::openai::wire::Seed>,
            /// Whether to continue past the end of the text. Default: false.
            pub(in crate::api::formats) ignore_eos: Option<bool>,
            /// A JSON schema that the text must follow, as an object or as text. At most one grammar may be given.
            pub(in crate::api::formats) json_schema: Option<serde_json::Value>,
            /// A regular expression that the whole text must match.
            #[schema(value_type = Option<String>)]
            pub(in crate::api::formats) regex: Option<serde_json::Value>,
            /// A grammar in Lark's form that the whole text must follow.
            #[schema(value_type = Option<String>)]
            pub(in crate::api::formats) grammar: Option<serde_json::Value>,
            /// vLLM's form of a grammar: one of `json`, `json_object`, `regex`, `choice` and `grammar`. By default, or
            /// with `disable_additional_properties: true`, an object whose schema has no `additionalProperties` has
            /// only the properties that its schema names; `false` allows others, in tools and in all other schemas of
            /// the request.
            #[schema(value_type = Option<Object>)]
            pub(in crate::api::formats) structured_outputs: Option<serde_json::Value>,
            /// The same as `json_schema`.
            pub(in crate::api::formats) guided_json: Option<serde_json::Value>,
            /// The same as `regex`.
            #[schema(value_type = Option<String>)]
            pub(in crate::api::formats) guided_regex: Option<serde_json::Value>,
            /// A list of texts; the answer must be one of them.
            #[schema(value_type = Option<Vec<String>>, min_items = 1)]
            pub(in crate::api::formats) guided_choice: Option<serde_json::Value>,
            /// The same as `grammar`.
            #[schema(value_type = Option<String>)]
            pub(in crate::api::formats) guided_grammar: Option<serde_json::Value>,
            /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
            #[serde(flatten)]
            #[schema(ignore)]
            rest: std::collections::BTreeMap<String, serde_json::Value>,
        }

        impl $name {
            /// Takes the fields that ask for a grammar.
            fn grammars(&mut self) -> [(&'static str, Option<serde_json::Value>); 8] {
                [
                    ("json_schema", self.json_schema.take()),
                    ("regex", self.regex.take()),
                    ("grammar", self.grammar.take()),
                    ("structured_outputs", self.structured_outputs.take()),
                    ("guided_json", self.guided_json.take()),
                    ("guided_regex", self.guided_regex.take()),
                    ("guided_choice", self.guided_choice.take()),
                    ("guided_grammar", self.guided_grammar.take()),
                ]
            }

            /// Takes and converts the other common fields.
            fn text_request(
                &mut self,
                names: $crate::api::request::ParameterNames,
                prompt: $crate::api::request::prompt::Prompt,
                max_tokens: $crate::api::request::MaxTokens,
            ) -> Result<$crate::api::request::TextRequest, $crate::api::error::ApiError> {
                use $crate::api::formats::openai::wire;
                Ok($crate::api::request::TextRequest {
                    model: self.model.take(),
                    stop: wire::Stop::all(self.stop.take()),
                    ignore_eos: self.ignore_eos.unwrap_or(false),
                    sampling: $crate::api::request::sampling::SamplingOverrides {
                        temperature: self.temperature,
                        top_p: self.top_p,
                        top_k: self.top_k,
                        min_p: self.min_p,
                        typical_p: self.typical_p,
                        repetition_penalty: self.repetition_penalty,
                        frequency_penalty: self.frequency_penalty,
                        presence_penalty: self.presence_penalty,
                        logit_bias: wire::logit_bias(self.logit_bias.take())?,
                        seed: self.seed.map(wire::Seed::bits),
                    },
                    ..$crate::api::request::TextRequest::new(names, prompt, max_tokens)
                })
            }
        }
    };
}
pub(in crate::api::formats) use openai_request;

/// Defines a request body as [`openai_request`] does, and adds the fields that completions and chat have in common.
macro_rules! openai_turn {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $crate::api::formats::openai::openai_request! {
            $(#[$meta])*
            $name {
                $($(#[$field_meta])* $field: $type,)*
                stream_options: Option<$crate::api::formats::openai::wire::StreamOptions>,
                /// How many texts to return for each prompt; text i has the seed plus i. Default: 1.
                #[schema(minimum = 1, maximum = 128)]
                n: Option<u64>,
                /// Minimum number of tokens before the text can end by itself. Default: 0.
                min_tokens: Option<u64>,
                /// Tokens that end the text.
                #[schema(value_type = Option<Vec<$crate::api::openapi::schemas::TokenId>>, max_items = 64)]
                stop_token_ids: Option<Vec<u32>>,
                /// Whether to return the token ids of the prompt and of the answer. Default: false.
                return_token_ids: Option<bool>,
                /// Whether log probabilities name tokens by their ids, as `token_id:7`. Default: false.
                return_tokens_as_token_ids: Option<bool>,
                /// The format of the answer: plain text, any JSON object, or JSON with a schema. Default: plain text.
                #[schema(value_type = Option<$crate::api::formats::openai::grammar::ResponseFormat>)]
                response_format: Option<serde_json::Value>,
                /// The session that the request is a turn of; the rest of the body then has only what is new.
                session: Option<String>,
                /// A name for the version that the turn makes; only with `session`.
                #[schema(max_length = 256)]
                label: Option<String>,
                on_disconnect: Option<$crate::api::request::continuation::OnDisconnect>,
                /// Which of the `n` texts of a session's turn are kept; only with `session`, where it is required if
                /// `n` is above 1.
                keep: Option<$crate::api::request::continuation::Keep>,
                /// The state from an earlier response with `return_state`, to continue from. Needs a server with a
                /// secret.
                #[schema(content_encoding = "base64")]
                state: Option<String>,
                /// Whether to return the conversation's state, for the client to keep. Needs a server with a secret.
                return_state: Option<bool>,
            }
        }

        impl $name {
            /// Converts the common fields. The format itself checks `logprobs` and `choices`.
            fn convert_common(
                mut self,
                names: $crate::api::request::ParameterNames,
                prompt: $crate::api::request::prompt::Prompt,
                max_tokens: $crate::api::request::MaxTokens,
            ) -> Result<
                $crate::api::formats::format::Converted<$crate::api::formats::openai::answer::ResponseOptions>,
                $crate::api::error::ApiError,
            > {
                use $crate::api::formats::openai::{answer, grammar};
                let ignored = $crate::api::formats::unsupported::check::<Self>(&self.rest)?;
                let stream = self.stream.unwrap_or(false);
                let usage = answer::stream_usage(self.stream_options.as_ref(), stream)?;
                let mut request = self.text_request(names, prompt, max_tokens)?;
                let format = ("response_format", self.response_format.take());
                request.grammar = grammar::read([format].into_iter().chain(self.grammars()))?;
                request.min_tokens = self.min_tokens.unwrap_or(0);
                request.stop_token_ids = self.stop_token_ids.unwrap_or_default();
                let session = $crate::api::request::continuation::SessionParameters {
                    session: self.session,
                    label: $crate::api::sessions::label(self.label)?,
                    on_disconnect: self.on_disconnect,
                    state: self.state,
                    return_state: self.return_state.unwrap_or(false),
                    keep: self.keep,
                    ..Default::default()
                };
                let options = answer::ResponseOptions {
                    usage,
                    token_ids: self.return_token_ids.unwrap_or(false),
                    tokens_as_ids: self.return_tokens_as_token_ids.unwrap_or(false),
                };
                Ok($crate::api::formats::format::Converted { request, session, stream, ignored, options })
            }
        }
    };
}
pub(in crate::api::formats) use openai_turn;
