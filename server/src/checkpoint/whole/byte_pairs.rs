//! Byte-level BPE tokenizers like GPT-2's, in a GGUF file.

use tidegate_model::checkpoint::{Metadata, MetadataError};

use super::tokens::{self, TOKENS, TokenType};
use crate::text::BytePairs;

/// The merges: pairs of tokens, each separated by a space.
const MERGES: &str = "tokenizer.ggml.merges";
/// The name of the pre-tokenizer, which splits a text into words.
const WORDS: &str = "tokenizer.ggml.pre";

/// Pre-tokenizers that split words like GPT-2's tokenizer, and whether their tokenizers first normalize texts to NFC:
/// `mpt` and `olmo` stand for GPT-NeoX's tokenizer.
const LIKE_GPT2: [(&str, bool); 3] = [("gpt-2", false), ("mpt", true), ("olmo", true)];

/// Reads the parts of the tokenizer.
pub(super) fn parts(metadata: &Metadata) -> Result<BytePairs, String> {
    let text = |error: MetadataError| error.to_string();
    let name = metadata.text(WORDS).map_err(text)?.unwrap_or("none");
    let known = LIKE_GPT2.iter().find(|(known, _)| *known == name);
    let (_, normal_form_c) = known.ok_or_else(|| {
        let names: Vec<&str> = LIKE_GPT2.iter().map(|(name, _)| *name).collect();
        format!("{WORDS} must be {}, found {}", names.join(", "), name.escape_debug())
    })?;
    let around = |what: &str| {
        if metadata.flag(&format!("tokenizer.ggml.add_{what}_token")).map_err(text)? != Some(true) {
            return Ok(None);
        }
        let key = format!("tokenizer.ggml.{what}_token_id");
        let id = metadata.number(&key).map_err(text)?.and_then(|id| u32::try_from(id).ok());
        id.map(Some).ok_or_else(|| format!("{key} must be given, because add_{what}_token is true"))
    };
    let mut parts =
        BytePairs { normal_form_c: *normal_form_c, begin: around("bos")?, end: around("eos")?, ..BytePairs::default() };
    for (id, token, kind) in tokens::all(metadata)? {
        let token = std::str::from_utf8(token).map_err(|_| format!("{TOKENS}: token {id} must be UTF-8"))?.to_owned();
        match kind {
            TokenType::Unused => {}
            TokenType::Control => parts.special.push((id, token)),
            TokenType::UserDefined => parts.added.push((id, token)),
            TokenType::Normal | TokenType::Unknown | TokenType::Byte | TokenType::Undefined => {
                parts.tokens.push((id, token));
            }
        }
    }
    let merges = metadata.texts(MERGES).map_err(text)?.ok_or_else(|| format!("{MERGES} must be given, found none"))?;
    for (at, merge) in merges.enumerate() {
        let pair = std::str::from_utf8(merge).ok().and_then(|merge| merge.split_once(' '));
        let (one, other) =
            pair.ok_or_else(|| format!("{MERGES}: merge {at} must be two tokens with a space between"))?;
        parts.merges.push((one.to_owned(), other.to_owned()));
    }
    Ok(parts)
}
