//! Prompts as llama.cpp takes them: one or several, each made of texts, token ids, or both.

use serde::Deserialize;
use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::openapi::schemas::json_schemas;
use crate::api::request::prompt::{self, Input};

/// One prompt, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text, an array of texts and token ids, or an array of those")]
pub(super) enum Prompts {
    Text(Text),
    List(Vec<Element>),
}

/// A text, alone or in an object. In the object, llama.cpp also takes images and audio.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Text {
    Plain(String),
    Named { prompt_string: String, multimodal_data: Option<Value> },
}

/// A piece of a prompt, or a whole prompt.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Element {
    Text(Text),
    Id(u32),
    Pieces(Vec<Piece>),
}

/// A piece of a prompt.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Piece {
    Text(String),
    Id(u32),
}

json_schemas! {
    Prompts: "LlamaPrompt" = {
        "description": "A text, or a list: texts alone are several prompts, a list with token ids is one. A text is a string, \
                        or an object with it as `prompt_string`.",
        "anyOf": [
            {"type": "string"},
            {"type": "object", "required": ["prompt_string"], "properties": {
                "prompt_string": {"type": "string"}, "multimodal_data": {"enum": [null, []]},
            }},
            {"type": "array", "minItems": 1, "maxItems": "prompts", "items": {"type": "string"}},
            {"type": "array", "minItems": 1, "items": {
                "oneOf": [{"type": "string"}, {"type": "integer", "minimum": 0, "maximum": "token_id"}],
            }},
            {"type": "array", "minItems": 1, "maxItems": "prompts", "items": {"type": "array", "minItems": 1, "items": {
                "oneOf": [{"type": "string"}, {"type": "integer", "minimum": 0, "maximum": "token_id"}],
            }}},
        ],
    };
}

impl Prompts {
    /// Converts the prompts. A list of only texts is several prompts; a list that contains a token id is one.
    pub(super) fn convert(self) -> Result<prompt::Prompt, ApiError> {
        let list = match self {
            Self::Text(text) => return Ok(prompts(vec![Input::Text(text.plain()?)])),
            Self::List(list) => list,
        };
        let lists = list.iter().any(|element| matches!(element, Element::Pieces(_)));
        let ids = list.iter().any(|element| matches!(element, Element::Id(_)));
        if lists && ids {
            let message = "prompt must hold either token ids or arrays of them, found both";
            return Err(ApiError::invalid(Some("prompt"), message));
        }
        if ids {
            let pieces = list.into_iter().map(Element::pieces).collect::<Result<Vec<_>, _>>()?;
            return Ok(prompts(vec![Input::Mixed(pieces.into_iter().flatten().collect())]));
        }
        let input = |element| match element {
            Element::Text(text) => text.plain().map(Input::Text),
            element => element.pieces().map(Input::Mixed),
        };
        Ok(prompts(list.into_iter().map(input).collect::<Result<_, _>>()?))
    }
}

impl Text {
    fn plain(self) -> Result<String, ApiError> {
        match self {
            Self::Plain(text) => Ok(text),
            Self::Named { prompt_string, multimodal_data } => {
                if multimodal_data.is_some_and(|data| data.as_array().is_none_or(|data| !data.is_empty())) {
                    let message = "prompt.multimodal_data must be absent, null or empty: the model reads text alone";
                    return Err(ApiError::invalid(Some("prompt"), message));
                }
                Ok(prompt_string)
            }
        }
    }
}

fn prompts(inputs: Vec<Input>) -> prompt::Prompt {
    prompt::Prompt::Inputs { inputs, add_special_tokens: true }
}

impl Element {
    fn pieces(self) -> Result<Vec<prompt::Piece>, ApiError> {
        Ok(match self {
            Self::Text(text) => vec![prompt::Piece::Text(text.plain()?)],
            Self::Id(id) => vec![prompt::Piece::Id(id)],
            Self::Pieces(pieces) => pieces.into_iter().map(Piece::convert).collect(),
        })
    }
}

impl Piece {
    fn convert(self) -> prompt::Piece {
        match self {
            Self::Text(text) => prompt::Piece::Text(text),
            Self::Id(id) => prompt::Piece::Id(id),
        }
    }
}
