//! SentencePiece-like tokenizers in a GGUF file, which llama.cpp calls `llama`.

use std::collections::HashMap;

use tidegate_model::checkpoint::{Metadata, MetadataError};

use super::tokens::{self, TOKENS, TYPES, TokenType};
use crate::text::{ScoredPiece, ScoredPieces};

/// The key of the tokens' scores.
const SCORES: &str = "tokenizer.ggml.scores";

/// The ids that llama.cpp assumes if a file has none.
const BEGIN: u32 = 1;
const END: u32 = 2;

/// Reads the parts of the tokenizer, and the special token that ends a text, if there is one.
pub(super) fn parts(metadata: &Metadata) -> Result<(ScoredPieces, Option<u32>), String> {
    let text = |error: MetadataError| error.to_string();
    let flag = |name: &str| metadata.flag(&format!("tokenizer.ggml.{name}")).map_err(text);
    let tokens = tokens::all(metadata)?;
    if tokens.iter().any(|(.., kind)| *kind == TokenType::Undefined) {
        return Err(format!("{TYPES} must be given, found none"));
    }
    let scores = metadata.floats(SCORES).map_err(text)?.ok_or_else(|| format!("{SCORES} must be given, found none"))?;
    if scores.len() != tokens.len() {
        return Err(format!("{SCORES} must have {} numbers, found {}", tokens.len(), scores.len()));
    }
    let bytes: HashMap<String, u8> = (0..=u8::MAX).map(|byte| (format!("<0x{byte:02X}>"), byte)).collect();
    let mut parts = ScoredPieces { adds_space: flag("add_space_prefix")?.unwrap_or(true), ..ScoredPieces::default() };
    for ((id, token, kind), score) in tokens.into_iter().zip(scores) {
        let text = std::str::from_utf8(token).map_err(|_| format!("{TOKENS}: token {id} must be UTF-8"))?.to_owned();
        match kind {
            TokenType::Unused => {}
            // llama.cpp gives such a token a name that no text contains.
            _ if text.is_empty() => {}
            TokenType::Control | TokenType::Unknown => parts.special.push((id, text)),
            TokenType::UserDefined => parts.added.push(ScoredPiece { id, text, score }),
            TokenType::Byte => match bytes.get(&text) {
                Some(byte) => parts.bytes.push((id, *byte)),
                None => return Err(format!("{TOKENS}: token {id} must be <0x00> to <0xFF>, because it is a byte")),
            },
            TokenType::Normal | TokenType::Undefined => parts.pieces.push(ScoredPiece { id, text, score }),
        }
    }
    let id_of = |what: &str, default: u32| {
        let key = format!("tokenizer.ggml.{what}_token_id");
        let id = metadata.number(&key).map_err(text)?.unwrap_or(default.into());
        u32::try_from(id).map_err(|_| format!("{key} must be the id of a token, found {id}"))
    };
    let (begin, end) = (id_of("bos", BEGIN)?, id_of("eos", END)?);
    let ends = parts.special.iter().any(|(id, _)| *id == end).then_some(end);
    parts.begin = flag("add_bos_token")?.unwrap_or(true).then_some(begin);
    parts.end = flag("add_eos_token")?.unwrap_or(false).then_some(end);
    Ok((parts, ends))
}
