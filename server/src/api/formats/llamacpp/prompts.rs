//! Prompts as llama.cpp takes them: one or several, each of texts, token ids, or both.

use serde::Deserialize;

use crate::api::error::ApiError;
use crate::api::request::prompt::{self, Input};

/// A prompt, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, an array of strings and token ids, or an array of those")]
pub(super) enum Prompts {
    Text(String),
    List(Vec<Element>),
}

/// A piece of a prompt, or a prompt.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Element {
    Text(String),
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

impl Prompts {
    /// The prompts. A list of texts alone is several prompts; a list that contains a token id is one.
    pub(super) fn convert(self) -> Result<prompt::Prompt, ApiError> {
        let list = match self {
            Self::Text(text) => return Ok(prompts(vec![Input::Text(text)])),
            Self::List(list) => list,
        };
        let lists = list.iter().any(|element| matches!(element, Element::Pieces(_)));
        let ids = list.iter().any(|element| matches!(element, Element::Id(_)));
        if lists && ids {
            let message = "prompt must hold either token ids or arrays of them, found both";
            return Err(ApiError::invalid(Some("prompt"), message));
        }
        if ids {
            return Ok(prompts(vec![Input::Mixed(list.into_iter().flat_map(Element::pieces).collect())]));
        }
        let input = |element| match element {
            Element::Text(text) => Input::Text(text),
            element => Input::Mixed(element.pieces()),
        };
        Ok(prompts(list.into_iter().map(input).collect()))
    }
}

fn prompts(inputs: Vec<Input>) -> prompt::Prompt {
    prompt::Prompt::Inputs { inputs, add_special_tokens: true }
}

impl Element {
    fn pieces(self) -> Vec<prompt::Piece> {
        match self {
            Self::Text(text) => vec![prompt::Piece::Text(text)],
            Self::Id(id) => vec![prompt::Piece::Id(id)],
            Self::Pieces(pieces) => pieces.into_iter().map(Piece::convert).collect(),
        }
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
