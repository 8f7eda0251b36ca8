//! The tokenizer, the chat template and the name of a model that is one GGUF file.

use std::path::Path;

use tidegate_model::checkpoint::{self, Metadata, MetadataError};

use super::error::OpenError;
use crate::text::{ChatTemplate, GenerationDefaults, TextError, Tokenizer, WorldError, WorldTokenizer};

/// The kind of tokenizer that is supported, as llama.cpp calls it.
const KIND: &str = "rwkv";
/// What llama.cpp's converter writes in place of a template where it has none.
const NO_TEMPLATE: &str = "rwkv-world";

/// Types of tokens, as llama.cpp numbers them.
const CONTROL: u32 = 3;
const UNUSED: u32 = 5;

/// Most bytes of a name.
const MOST_NAME: usize = 128;

/// The name that a file gives its model, if it can be one.
pub(super) fn name(file: &Path) -> Option<String> {
    let metadata = checkpoint::metadata(file).ok()?;
    let name = metadata.text("general.name").ok()??.trim();
    let fits = !name.is_empty() && name.len() <= MOST_NAME && !name.contains(char::is_control);
    fits.then(|| name.to_owned())
}

/// The text side of the model in `file`. `eos` are the ids that end a text.
pub(super) fn text(
    file: &Path,
    vocab_size: usize,
    eos: &[u32],
) -> Result<(Tokenizer, Option<ChatTemplate>), OpenError> {
    let metadata = checkpoint::metadata(file)?;
    let bad = |reason: String| TextError::Contents { path: file.into(), reason };
    let world = world(&metadata).map_err(bad)?;
    let tokenizer = Tokenizer::from_world(world, vocab_size, GenerationDefaults::default());
    let mut tokenizer = tokenizer.map_err(|error| bad(error.to_string()))?;
    tokenizer.end_with(eos);
    let source = metadata.text("tokenizer.chat_template").map_err(|error| bad(error.to_string()))?;
    let source = source.filter(|source| *source != NO_TEMPLATE);
    let template = ChatTemplate::of_file(file, source, &tokenizer)?;
    Ok((tokenizer, template))
}

/// The vocabulary. Padding and special tokens have no bytes of a text.
fn world(metadata: &Metadata) -> Result<WorldTokenizer, String> {
    let text = |error: MetadataError| error.to_string();
    match metadata.text("tokenizer.ggml.model").map_err(text)? {
        Some(KIND) => {}
        found => {
            let found = found.unwrap_or("none");
            return Err(format!("tokenizer.ggml.model must be {KIND}, found {}", found.escape_debug()));
        }
    }
    let tokens = metadata.texts("tokenizer.ggml.tokens").map_err(text)?;
    let tokens = tokens.ok_or("tokenizer.ggml.tokens must be given, found none")?;
    let types: Option<Vec<u32>> = metadata.words("tokenizer.ggml.token_type").map_err(text)?.map(Iterator::collect);
    if let Some(types) = types.as_ref().filter(|types| types.len() != tokens.len()) {
        let (types, tokens) = (types.len(), tokens.len());
        return Err(format!("tokenizer.ggml.token_type must have {tokens} numbers, found {types}"));
    }
    let (mut known, mut special) = (Vec::new(), Vec::new());
    for (id, token) in (0u32..).zip(tokens) {
        match types.as_ref().and_then(|types| types.get(id as usize)) {
            Some(&UNUSED) => {}
            Some(&CONTROL) => special.push((id, String::from_utf8_lossy(token).into_owned())),
            // Without types, the token with which every file of this kind begins is the one that ends a text.
            None if id == 0 => {}
            _ => known.push((id, unescaped(token))),
        }
    }
    let ids: Vec<u32> = known.iter().map(|(id, _)| *id).collect();
    let world = WorldTokenizer::new(known).map_err(|error| match error {
        WorldError::Entry { at, reason } => {
            format!("tokenizer.ggml.tokens: token {}: {reason}", ids.get(at).copied().unwrap_or_default())
        }
        missing @ WorldError::Missing(_) => format!("tokenizer.ggml.tokens: {missing}"),
    })?;
    // The id 0 has a name of its own in this kind of tokenizer.
    Ok(special
        .into_iter()
        .filter(|(id, _)| *id != 0)
        .fold(world, |world, (id, text)| world.with_added(id, &text, true)))
}

/// The bytes of a token, which is stored as Python writes bytes.
fn unescaped(token: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    let mut rest = token;
    while let [first, after @ ..] = rest {
        rest = after;
        match (first, after) {
            (b'\\', [b'x', high, low, tail @ ..]) if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                let digit = |byte: u8| char::from(byte).to_digit(16).map_or(0, |digit| digit as u8);
                bytes.push(digit(*high) << 4 | digit(*low));
                rest = tail;
            }
            (b'\\', [escaped, tail @ ..]) => {
                bytes.push(match escaped {
                    b't' => b'\t',
                    b'n' => b'\n',
                    b'r' => b'\r',
                    other => *other,
                });
                rest = tail;
            }
            _ => bytes.push(*first),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_stored_as_python_writes_bytes() {
        for (stored, bytes) in [
            (r"plain", &b"plain"[..]),
            (r"\t\n\r\\", b"\t\n\r\\"),
            (r"\xff\x0aZ", b"\xff\nZ"),
            (r"it\'s", b"it's"),
            (r"\x4", b"x4"),
            (r"\", b"\\"),
        ] {
            assert_eq!(unescaped(stored.as_bytes()), bytes, "{stored}");
        }
    }
}
