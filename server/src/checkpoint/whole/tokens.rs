//! The tokens of a GGUF file, and their types.

use tidegate_model::checkpoint::{Metadata, MetadataError};

/// The key of the tokens.
pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
/// The key of the tokens' types.
pub(super) const TYPES: &str = "tokenizer.ggml.token_type";

/// The type of a token, as far as it matters to tokenizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenType {
    /// A part of a text.
    Normal,
    /// A special token.
    Control,
    /// The special token for text that no other token covers.
    Unknown,
    /// A text that is never split.
    UserDefined,
    /// Not a token: it pads the vocabulary to the model's size.
    Unused,
    /// A single byte.
    Byte,
    /// The file does not state the type.
    Undefined,
}

impl TokenType {
    /// Returns the type with llama.cpp's number.
    fn of(number: u32) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}

/// A token: its id, its text as stored in the file, and its type.
pub(super) type Token<'a> = (u32, &'a [u8], TokenType);

/// Returns every token, in the order of the ids.
pub(super) fn all(metadata: &Metadata) -> Result<Vec<Token<'_>>, String> {
    let text = |error: MetadataError| error.to_string();
    let tokens = metadata.texts(TOKENS).map_err(text)?.ok_or_else(|| format!("{TOKENS} must be given, found none"))?;
    let types: Option<Vec<u32>> = metadata.words(TYPES).map_err(text)?.map(Iterator::collect);
    if let Some(types) = types.as_ref().filter(|types| types.len() != tokens.len()) {
        return Err(format!("{TYPES} must have {} numbers, found {}", tokens.len(), types.len()));
    }
    let type_of = |id: usize| types.as_ref().map_or(TokenType::Undefined, |types| TokenType::of(types[id]));
    Ok(tokens.enumerate().map(|(id, token)| (id as u32, token, type_of(id))).collect())
}
