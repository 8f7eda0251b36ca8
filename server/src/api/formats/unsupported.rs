//! Handles body fields that the format does not read: those that would change the answer are refused by name, because
//! ignoring one would answer a different question; all others are ignored, and listed in the response.

use std::collections::BTreeMap;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use serde_json::Value;
use tracing::debug;
use utoipa::PartialSchema;
use utoipa::openapi::{RefOr, Schema};

use crate::api::error::ApiError;

/// Fields of OpenAI, Anthropic, vLLM, llama.cpp and this server that would change an answer, each with the values
/// besides null that have no effect. A format reads those that it supports, and refuses the others. Sorted by name.
const KNOWN: &[(&str, &str)] = &[
    ("add_generation_prompt", "[true]"),
    ("add_special_tokens", "[true]"),
    ("allowed_token_ids", "[]"),
    ("audio", "[]"),
    ("background", "[false]"),
    ("bad_words", "[[]]"),
    ("best_of", "[1]"),
    ("chat_template", "[]"),
    ("chat_template_kwargs", "[{}]"),
    ("container", "[]"),
    ("context_management", "[[]]"),
    ("continue_final_message", "[false]"),
    ("conversation", "[]"),
    ("detokenize", "[true]"),
    ("documents", "[[]]"),
    ("dry_multiplier", "[0]"),
    ("dynatemp_range", "[0]"),
    ("early_stopping", "[false]"),
    ("echo", "[false]"),
    ("frequency_penalty", "[0]"),
    ("function_call", r#"["none"]"#),
    ("functions", "[[]]"),
    ("grammar", r#"[""]"#),
    ("grammar_lazy", "[false]"),
    ("grammar_triggers", "[[]]"),
    ("guided_choice", "[]"),
    ("guided_decoding_backend", "[]"),
    ("guided_grammar", "[]"),
    ("guided_json", "[]"),
    ("guided_regex", "[]"),
    ("guided_whitespace_pattern", "[]"),
    ("history", "[]"),
    ("id_slot", "[-1]"),
    ("ignore_eos", "[false]"),
    ("include", "[[]]"),
    ("include_stop_str_in_output", "[false]"),
    ("input", "[]"),
    ("instructions", "[]"),
    ("json_schema", "[]"),
    ("keep", "[]"),
    ("label", "[]"),
    ("length_penalty", "[1]"),
    ("logit_bias", "[{}, []]"),
    ("logits_processors", "[]"),
    ("logprobs", "[false, 0]"),
    ("lora", "[[]]"),
    ("max_completion_tokens", "[]"),
    ("max_output_tokens", "[]"),
    ("max_tokens", "[]"),
    ("mcp_servers", "[[]]"),
    ("messages", "[]"),
    ("min_keep", "[0]"),
    ("min_p", "[0]"),
    ("min_tokens", "[0]"),
    ("mirostat", "[0]"),
    ("modalities", r#"[["text"]]"#),
    ("moderation", "[]"),
    ("n", "[1]"),
    ("n_cmpl", "[1]"),
    ("n_indent", "[0]"),
    ("n_predict", "[]"),
    ("n_probs", "[0]"),
    ("on_disconnect", r#"["rollback"]"#),
    ("output_config", "[{}]"),
    ("output_format", "[]"),
    ("post_sampling_probs", "[false]"),
    ("presence_penalty", "[0]"),
    ("preserved_tokens", "[[]]"),
    ("previous_response_id", "[]"),
    ("prompt", "[]"),
    ("prompt_embeds", "[]"),
    ("prompt_logprobs", "[]"),
    ("regex", "[]"),
    ("repeat_last_n", "[-1]"),
    ("repeat_penalty", "[1]"),
    ("repetition_penalty", "[1]"),
    ("response_fields", "[[]]"),
    ("response_format", r#"[{"type": "text"}]"#),
    ("return_progress", "[false]"),
    ("return_state", "[false]"),
    ("return_token_ids", "[false]"),
    ("return_tokens", "[false]"),
    ("return_tokens_as_token_ids", "[false]"),
    ("samplers", r#"[["penalties", "temperature", "top_k", "typ_p", "top_p", "min_p"]]"#),
    ("seed", "[-1]"),
    ("session", "[]"),
    ("skip_special_tokens", "[true]"),
    ("spaces_between_special_tokens", "[true]"),
    ("state", "[]"),
    ("stop", "[[]]"),
    ("stop_sequences", "[[]]"),
    ("stop_token_ids", "[[]]"),
    ("structured_outputs", "[{}]"),
    ("suffix", r#"[""]"#),
    ("system", "[]"),
    ("t_max_predict_ms", "[0, -1]"),
    ("thinking", r#"[{"type": "disabled"}]"#),
    ("timings_per_token", "[false]"),
    ("tool_choice", r#"["none", "auto"]"#),
    ("tools", "[[]]"),
    ("top_logprobs", "[0]"),
    ("top_n_sigma", "[-1, 0]"),
    ("truncate_prompt_tokens", "[]"),
    ("typ_p", "[1]"),
    ("typical_p", "[1]"),
    ("use_beam_search", "[false]"),
    ("web_search_options", "[]"),
    ("xtc_probability", "[0]"),
];

/// Names that different formats use for the same thing. An error mentions the name that the format reads.
const SAME: &[&[&str]] = &[
    &["prompt", "messages", "input"],
    &["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"],
    &["stop", "stop_sequences"],
    &["repetition_penalty", "repeat_penalty"],
    &["typical_p", "typ_p"],
    &["logprobs", "top_logprobs", "n_probs"],
    &["return_token_ids", "return_tokens"],
    &["n", "n_cmpl"],
    &["session", "previous_response_id"],
    &["instructions", "system"],
];

/// The length in bytes after which the list of ignored fields is cut off.
const MAX_LIST: usize = 1000;

/// The longest name in that list, in characters.
const MAX_NAME: usize = 64;

const HEADER: HeaderName = HeaderName::from_static("x-ignored-fields");

/// The names of fields that have no effect.
#[derive(Debug, Default)]
pub(in crate::api) struct Ignored(Vec<String>);

/// Checks `rest`, the fields of a body that its type `T` does not read: refuses those that would change the answer, and
/// returns those that have no effect.
pub(super) fn check<T: PartialSchema>(rest: &BTreeMap<String, Value>) -> Result<Ignored, ApiError> {
    check_among(rest, |_| true, |name| has_field::<T>(name))
}

/// Like [`check`], for a body that may have all fields of a text request. Only `names` are refused.
pub(super) fn check_only(rest: &BTreeMap<String, Value>, names: &[&str]) -> Result<Ignored, ApiError> {
    check_among(rest, |name| names.contains(&name), |_| false)
}

fn check_among(
    rest: &BTreeMap<String, Value>,
    concerns: impl Fn(&str) -> bool,
    reads: impl Fn(&str) -> bool,
) -> Result<Ignored, ApiError> {
    let mut ignored = Vec::new();
    for (name, value) in rest.iter().filter(|(_, value)| !value.is_null()) {
        let known = KNOWN.binary_search_by_key(&name.as_str(), |(known, _)| known).ok().filter(|_| concerns(name));
        let Some((name, neutral)) = known.map(|at| &KNOWN[at]) else {
            ignored.push(name.clone());
            continue;
        };
        let neutral: Vec<Value> = serde_json::from_str(neutral).unwrap_or_default();
        if neutral.iter().any(|neutral| is_same(value, neutral)) {
            continue;
        }
        let same = SAME.iter().filter(|names| names.contains(name)).flat_map(|names| names.iter());
        let message = if let Some(here) = same.copied().find(|other| reads(other)) {
            format!("{name} must be absent: it is {here} here")
        } else if neutral.is_empty() {
            format!("{name} is not supported and must be absent or null")
        } else {
            let allowed: Vec<String> = neutral.iter().map(ToString::to_string).collect();
            format!("{name} must be absent, null or {}: nothing else is supported", allowed.join(" or "))
        };
        return Err(ApiError::invalid(Some(name), message));
    }
    Ok(Ignored(ignored))
}

/// Whether the type reads a field of this name.
fn has_field<T: PartialSchema>(name: &str) -> bool {
    matches!(T::schema(), RefOr::T(Schema::Object(object)) if object.properties.contains_key(name))
}

/// Whether two values are the same: 1 and 1.0 are the same number.
fn is_same(value: &Value, other: &Value) -> bool {
    value == other || value.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}

impl Ignored {
    /// Lists the fields in a header of the response, and in the log.
    pub(super) fn list(&self, mut response: Response) -> Response {
        let list = self.names();
        if let Ok(value) = HeaderValue::from_str(&list)
            && !list.is_empty()
        {
            debug!("ignored fields: {list}");
            response.headers_mut().insert(HEADER, value);
        }
        response
    }

    /// Returns the names as a list. Clients choose them, so unusual characters are replaced, and long lists are cut
    /// off.
    fn names(&self) -> String {
        let shown = |name: &String| -> String {
            let shown =
                |character: char| if character.is_ascii_graphic() && character != ',' { character } else { '?' };
            name.chars().take(MAX_NAME).map(shown).collect()
        };
        let mut list = String::new();
        for name in &self.0 {
            if list.len() > MAX_LIST {
                return list + ", ...";
            }
            let separator = if list.is_empty() { "" } else { ", " };
            list = list + separator + &shown(name);
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_its_values_are_lists() {
        assert!(KNOWN.is_sorted_by(|(name, _), (next, _)| name < next));
        for (name, neutral) in KNOWN {
            assert!(serde_json::from_str::<Vec<Value>>(neutral).is_ok(), "{name}");
        }
        assert!(SAME.iter().copied().flatten().all(|name| KNOWN.iter().any(|(known, _)| known == name)));
    }

    #[test]
    fn a_list_of_ignored_fields_is_short_and_fits_a_header() {
        let names = |names: Vec<String>| Ignored(names).names();
        assert_eq!(names(vec!["a".into(), "b,\n\u{e9}c".into()]), "a, b???c");
        let many = names((0..100_000).map(|number| format!("{number}{}", "x".repeat(100))).collect());
        assert!(many.ends_with(", ...") && many.len() <= 1100, "{}", many.len());
    }
}
