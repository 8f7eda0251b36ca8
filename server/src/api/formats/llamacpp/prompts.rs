//! Prompts as llama.cpp takes them: texts, token ids, or both in turn; one of them or several.

use serde::Deserialize;

use crate::api::error::ApiError;
use crate::api::state::Served;

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

fn invalid(message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some("prompt"), message)
}

impl Prompts {
    /// The ids of each prompt. A list of texts alone is several prompts; one with an id among them is one.
    pub(super) fn ids(self, served: &Served) -> Result<Vec<Vec<u32>>, ApiError> {
        let list = match self {
            Self::Text(text) => return Ok(vec![whole(&text, served)?]),
            Self::List(list) => list,
        };
        let lists = list.iter().any(|element| matches!(element, Element::Pieces(_)));
        let ids = list.iter().any(|element| matches!(element, Element::Id(_)));
        let most = served.engine.queue_capacity();
        if !ids && (list.is_empty() || list.len() > most) {
            return Err(invalid(format!("prompt must hold from 1 to {most} prompts, found {}", list.len())));
        }
        if lists && ids {
            return Err(invalid("prompt must hold token ids, or arrays of them, and not both"));
        }
        if !ids {
            let prompt = |element| match element {
                Element::Text(text) => whole(&text, served),
                Element::Pieces(pieces) => mixed(pieces, served),
                Element::Id(id) => Ok(vec![id]),
            };
            return list.into_iter().map(prompt).collect();
        }
        let piece = |element| match element {
            Element::Text(text) => Some(Piece::Text(text)),
            Element::Id(id) => Some(Piece::Id(id)),
            Element::Pieces(_) => None,
        };
        Ok(vec![mixed(list.into_iter().filter_map(piece).collect(), served)?])
    }
}

/// A text that is the whole prompt: the same ids as anywhere else.
fn whole(text: &str, served: &Served) -> Result<Vec<u32>, ApiError> {
    served.tokenizer.encode(text).map_err(|error| invalid(format!("prompt: {error}")))
}

/// Pieces one after the other. What begins every text comes first where a text does; who begins with ids has it.
fn mixed(pieces: Vec<Piece>, served: &Served) -> Result<Vec<u32>, ApiError> {
    let mut ids = Vec::new();
    for (at, piece) in pieces.into_iter().enumerate() {
        match piece {
            Piece::Id(id) => ids.push(id),
            Piece::Text(text) => {
                let tokenizer = &served.tokenizer;
                let more = if at == 0 { tokenizer.encode_chat(&text) } else { tokenizer.encode_more(&text) };
                ids.extend(more.map_err(|error| invalid(format!("prompt: {error}")))?);
            }
        }
    }
    Ok(ids)
}
