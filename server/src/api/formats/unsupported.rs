//! Fields of other servers that this one does not have.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::api::error::ApiError;
use crate::api::formats::openai::wire::Format;

/// Fields of OpenAI and vLLM that would change the answer and that this server does not have, each with the value
/// that asks for nothing. To ignore one silently would be to answer another question.
fn all() -> [(&'static str, Value); 33] {
    [
        ("n", json!(1)),
        ("best_of", json!(1)),
        ("echo", json!(false)),
        ("suffix", json!("")),
        ("logprobs", Value::Null),
        ("prompt_logprobs", Value::Null),
        ("stop_token_ids", json!([])),
        ("min_tokens", json!(0)),
        ("top_logprobs", Value::Null),
        ("functions", json!([])),
        ("function_call", json!("none")),
        ("chat_template", Value::Null),
        ("chat_template_kwargs", json!({})),
        ("documents", json!([])),
        ("audio", Value::Null),
        ("modalities", json!(["text"])),
        ("web_search_options", Value::Null),
        ("bad_words", json!([])),
        ("allowed_token_ids", Value::Null),
        ("truncate_prompt_tokens", Value::Null),
        ("prompt_embeds", Value::Null),
        ("guided_whitespace_pattern", Value::Null),
        ("guided_decoding_backend", Value::Null),
        ("logits_processors", Value::Null),
        ("use_beam_search", json!(false)),
        ("length_penalty", json!(1.0)),
        ("early_stopping", json!(false)),
        ("include_stop_str_in_output", json!(false)),
        ("skip_special_tokens", json!(true)),
        ("spaces_between_special_tokens", json!(true)),
        ("detokenize", json!(true)),
        ("return_tokens_as_token_ids", json!(false)),
        ("add_special_tokens", json!(true)),
    ]
}

/// Whether two values say the same: 1 and 1.0 are one number.
pub(in crate::api) fn is_same(value: &Value, other: &Value) -> bool {
    value == other || value.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}

/// Refuses the first of these fields that asks for something.
pub(in crate::api) fn refuse(format: Format, fields: &BTreeMap<String, Value>) -> Result<(), ApiError> {
    for (name, neutral) in all() {
        match fields.get(name) {
            None | Some(Value::Null) => {}
            Some(value) if is_same(value, &neutral) => {}
            // In chat it is a switch.
            Some(Value::Bool(false)) if format == Format::Chat && name == "logprobs" => {}
            Some(_) => {
                let message = match neutral {
                    Value::Null => format!("{name} is not supported and must be absent or null"),
                    neutral => format!("{name} must be absent, null or {neutral}: nothing else is supported"),
                };
                return Err(ApiError::invalid(Some(name), message));
            }
        }
    }
    Ok(())
}
