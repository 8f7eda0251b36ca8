//! Errors of tokenizers.

use std::path::PathBuf;

/// Why a tokenizer could not be loaded or a text could not be encoded.
#[allow(missing_docs, reason = "the messages explain the fields")]
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file cannot be read.
    #[error("{path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    /// A file has unexpected contents.
    #[error("{path}: {reason}")]
    Contents { path: PathBuf, reason: String },
    /// The text has more tokens than allowed.
    #[error("must be at most {most} tokens long, found more")]
    Tokens { most: usize, read: usize },
    /// The text has too many bytes, for a tokenizer whose texts cannot be cut.
    #[error("must be at most {most} bytes long, found {found}")]
    Bytes { most: usize, found: usize },
    /// The text has too many bytes without a place where it can be cut.
    #[error("must have a space or punctuation between words, found more than {most} bytes without")]
    Uncut { most: usize },
    /// The tokenizer refused a text.
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
}
