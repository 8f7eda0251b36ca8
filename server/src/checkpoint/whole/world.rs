//! RWKV's vocabulary in a GGUF file.

use tidegate_model::checkpoint::Metadata;

use super::tokens::{self, TOKENS, TokenType};
use crate::text::{WorldError, WorldTokenizer};

/// Reads the vocabulary. Padding and special tokens stand for no bytes of a text.
pub(super) fn vocabulary(metadata: &Metadata) -> Result<WorldTokenizer, String> {
    let (mut known, mut special) = (Vec::new(), Vec::new());
    for (id, token, kind) in tokens::all(metadata)? {
        match kind {
            TokenType::Unused => {}
            TokenType::Control => special.push((id, String::from_utf8_lossy(token).into_owned())),
            // Without types, the first token of such a file is the one that ends a text.
            TokenType::Undefined if id == 0 => {}
            _ => known.push((id, unescaped(token))),
        }
    }
    let ids: Vec<u32> = known.iter().map(|(id, _)| *id).collect();
    let world = WorldTokenizer::new(known).map_err(|error| match error {
        WorldError::Entry { at, reason } => {
            format!("{TOKENS}: token {}: {reason}", ids.get(at).copied().unwrap_or_default())
        }
        missing @ WorldError::Missing(_) => format!("{TOKENS}: {missing}"),
    })?;
    // This kind of tokenizer names the id 0 itself.
    Ok(special
        .into_iter()
        .filter(|(id, _)| *id != 0)
        .fold(world, |world, (id, text)| world.with_added(id, &text, true)))
}

/// Returns the bytes of a token, which is stored as a Python bytes literal.
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
