//! Errors of snapshot files.

/// Why a file is not a usable snapshot: the rule that it breaks, with the limit.
#[allow(missing_docs, reason = "the messages explain the variants and their fields")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    #[error("a snapshot must have at least {min} bytes, found {found}")]
    TooShort { found: usize, min: usize },
    #[error("a snapshot of this model must have at most {max} bytes, found {found}")]
    TooLong { found: usize, max: usize },
    #[error("not a Tidegate snapshot: the file does not begin with the magic bytes")]
    Magic,
    #[error(
        "the snapshot has format version {found}; this server reads versions up to {max}, so a later version of Tidegate wrote it"
    )]
    Version { found: u32, max: u32 },
    #[error("header length must be at most {max}, found {found}")]
    HeaderLength { found: u64, max: usize },
    #[error(
        "header and body length give {expected} bytes (32 more if signed), found {found}: the file is truncated or has trailing bytes"
    )]
    Length { found: usize, expected: u64 },
    #[error("the digest does not match the bytes: the file is damaged")]
    Digest,
    #[error("the signature is missing: this server accepts only signed snapshots")]
    SignatureMissing,
    #[error("the signature is wrong: not signed by this server, or changed since")]
    SignatureWrong,
    #[error("header signed is {header}, but the file ends {end} a signature")]
    Signed { header: String, end: &'static str },
    #[error("the header cannot be read: {0}")]
    Header(String),
    #[error("the snapshot is of another model: its {part} digest must be {expected}, found {found}")]
    Fingerprint { part: &'static str, found: String, expected: String },
    #[error("dtype must be {expected}, found {found}")]
    Dtype { found: String, expected: &'static str },
    #[error("layout {part} must be {expected}, found {found}")]
    Layout { part: &'static str, found: usize, expected: usize },
    #[error("{part} must be at most {max}, found {found}")]
    Count { part: &'static str, found: u64, max: u64 },
    #[error("pending must have at most {max} tokens, found {found}")]
    PendingLength { found: usize, max: usize },
    #[error("pending must have tokens below {vocab_size}, found {found}")]
    Pending { found: u32, vocab_size: usize },
    #[error("history must be {expected}, found {found}")]
    History { found: String, expected: &'static str },
    #[error("answer held must have at most {max} bytes, found {found}")]
    HeldLength { found: usize, max: usize },
    #[error("answer held and bytes must be empty if open is false")]
    EndedAnswer,
    #[error("answer bytes must be hexadecimal digits of the first 0 to 3 bytes of a character, found {found}")]
    Bytes { found: String },
    #[error("tensor header length must be at most {max} and end in the body, found {found}")]
    TensorHeaderLength { found: u64, max: usize },
    #[error("the tensors cannot be read: {0}")]
    Tensors(String),
    #[error("tensor {tensor} must be {expected} in a snapshot of {read} tokens of this model")]
    Presence { tensor: &'static str, expected: &'static str, read: u64 },
    #[error("tensor {tensor} must have the shape {expected}, found {found}")]
    Shape { tensor: &'static str, found: String, expected: String },
    #[error("tensor {tensor} must have finite numbers, but number {at} is not")]
    NotFinite { tensor: &'static str, at: usize },
    #[error("tensor memory must have a key maximum of at most {max} at {at}, found {found}")]
    Maximum { at: usize, max: String, found: String },
    #[error("tensor source must be a number of tokens from 1 to {max}, found {found}")]
    Source { found: String, max: u64 },
    #[error("tensor counts must have ascending tokens, found {found} after {before}")]
    CountsOrder { found: u32, before: u32 },
    #[error("tensor counts must have tokens below {vocab_size}, found {found}")]
    CountsToken { found: u32, vocab_size: usize },
    #[error("description and text must have at most {max} bytes, found {description} and {text}")]
    Lengths { description: u64, text: u64, max: String },
    #[error("the description cannot be read: {0}")]
    Description(String),
    #[error("the text {reason}")]
    Text { reason: &'static str },
    #[error("sealed states require a secret, and this server has none")]
    NoKey,
    #[error("the sealed state cannot be opened: not sealed by this server for this owner, or changed since")]
    Sealed,
}

/// Prepares text from the file for a message: shortened and without control characters.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}
