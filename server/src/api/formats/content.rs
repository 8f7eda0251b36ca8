//! The content of a message: a string, or an array of text parts.

use serde::Deserialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;

/// A string, or an array of text parts.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a string or an array of text parts")]
pub(in crate::api) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// A part of a message; only text is supported.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = TextPart)]
pub(in crate::api) struct Part {
    #[serde(rename = "type")]
    #[schema(pattern = "^(text|input_text|output_text)$")]
    kind: String,
    #[schema(required, nullable = false)]
    text: Option<String>,
}

impl Content {
    /// Joins the parts into one text. `param` is the field's name.
    pub(super) fn text(self, param: &str) -> Result<String, ApiError> {
        let text = |part: Part| match part.text {
            Some(text) if matches!(part.kind.as_str(), "text" | "input_text" | "output_text") => Ok(text),
            _ => {
                let message = format!("{param} must have parts of text alone, found one of type {:?}", part.kind);
                Err(ApiError::invalid(Some(param), message))
            }
        };
        match self {
            Self::Text(text) => Ok(text),
            Self::Parts(parts) => parts.into_iter().map(text).collect(),
        }
    }
}
