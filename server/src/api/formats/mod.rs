//! The wire formats, one folder for each. A format converts its own request bodies to the internal request, and the
//! events of a run to its own responses.

pub(super) mod anthropic;
pub(super) mod chat;
pub(super) mod completions;
mod content;
pub(super) mod errors;
pub(super) mod format;
pub(super) mod input_tokens;
pub(super) mod json;
pub(super) mod llamacpp;
mod numbers;
pub(super) mod openai;
pub(super) mod responses;
pub(super) mod tokenizer_info;
pub(super) mod tokens;
mod unsupported;
pub(super) mod wording;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Debug;

    use serde::de::DeserializeOwned;
    use utoipa::PartialSchema;
    use utoipa::openapi::{RefOr, Schema};

    use super::openai::wire::StreamOptions;
    use super::{anthropic, chat, completions, llamacpp, responses, tokens};

    /// Returns the fields that a type is parsed into, as its debug output names them.
    fn parsed<T: DeserializeOwned + Debug>() -> BTreeSet<String> {
        let text = format!("{:#?}", serde_json::from_str::<T>("{}").unwrap());
        let field = |line: &str| Some(line.strip_prefix("    ")?.split_once(": ")?.0.to_owned());
        text.lines().filter_map(field).filter(|field| !field.starts_with(' ') && field != "rest").collect()
    }

    fn described<T: PartialSchema>() -> BTreeSet<String> {
        let RefOr::T(Schema::Object(object)) = T::schema() else { panic!("not the schema of a structure") };
        object.properties.keys().cloned().collect()
    }

    #[test]
    fn every_field_that_is_parsed_is_described() {
        fn check<T: DeserializeOwned + Debug + PartialSchema>() {
            assert!(!parsed::<T>().is_empty());
            assert_eq!(parsed::<T>(), described::<T>());
        }
        check::<anthropic::MessagesRequest>();
        check::<chat::ChatRequest>();
        check::<completions::CompletionRequest>();
        check::<llamacpp::LlamaRequest>();
        check::<responses::ResponseRequest>();
        check::<StreamOptions>();
        check::<tokens::DetokenizeRequest>();
        check::<tokens::TemplateRequest>();
        check::<tokens::TokenizeRequest>();
    }
}
