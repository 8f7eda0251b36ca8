//! Errors of snapshot files.

/// Why a file is not a usable snapshot: the rule that is broken, with its limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The file is shorter than its fixed parts.
    #[error("a snapshot has at least {min} bytes, found {found}")]
    TooShort {
        /// Bytes of the file.
        found: usize,
        /// Bytes of the shortest possible file.
        min: usize,
    },
    /// The file is longer than any snapshot of this model.
    #[error("a snapshot of this model has at most {max} bytes, found {found}")]
    TooLong {
        /// Bytes of the file.
        found: usize,
        /// Bytes of the longest possible file of this model.
        max: usize,
    },
    /// The file is not a snapshot.
    #[error("not a Tidegate snapshot: the file does not begin with the magic bytes")]
    Magic,
    /// The file was written by a newer server.
    #[error("format version must be at most {max}, found {found}")]
    Version {
        /// The file's version.
        found: u32,
        /// The newest version that can be read.
        max: u32,
    },
    /// The stated header length is too large.
    #[error("header length must be at most {max}, found {found}")]
    HeaderLength {
        /// The stated length.
        found: u64,
        /// The limit.
        max: usize,
    },
    /// The stated lengths do not add up to the file's length.
    #[error(
        "header and body length give {expected} bytes (32 more if signed), found {found}: the file is truncated or has trailing bytes"
    )]
    Length {
        /// Bytes of the file.
        found: usize,
        /// Bytes according to the stated lengths, without a signature.
        expected: u64,
    },
    /// The file is damaged.
    #[error("the digest does not match the bytes: the file is damaged")]
    Digest,
    /// The file is not signed, but this server requires signatures.
    #[error("the signature is missing: this server accepts only signed snapshots")]
    SignatureMissing,
    /// The file was signed with another secret, or changed since.
    #[error("the signature is wrong: not signed by this server, or changed since")]
    SignatureWrong,
    /// The header contradicts the presence of a signature.
    #[error("header signed is {header}, but the file ends {end} a signature")]
    Signed {
        /// The header's value.
        header: String,
        /// "with" or "without".
        end: &'static str,
    },
    /// The header is not valid JSON, or has a missing, unknown or wrongly typed key.
    #[error("the header cannot be read: {0}")]
    Header(String),
    /// The snapshot was made with another model.
    #[error("the snapshot is of another model: its {part} digest must be {expected}, found {found}")]
    Fingerprint {
        /// "architecture", "weights" or "tokenizer".
        part: &'static str,
        /// The digest in the file.
        found: String,
        /// The digest of the served model.
        expected: String,
    },
    /// The numbers have the wrong type.
    #[error("dtype must be {expected}, found {found}")]
    Dtype {
        /// The type in the file.
        found: String,
        /// The required type.
        expected: &'static str,
    },
    /// A size of the state differs from the model's.
    #[error("layout {part} must be {expected}, found {found}")]
    Layout {
        /// The name of the size.
        part: &'static str,
        /// The size in the file.
        found: usize,
        /// The model's size.
        expected: usize,
    },
    /// A count is larger than any conversation can reach.
    #[error("{part} must be at most {max}, found {found}")]
    Count {
        /// "read" or "sampler draws".
        part: &'static str,
        /// The number in the file.
        found: u64,
        /// The limit.
        max: u64,
    },
    /// There are more pending tokens than a stop string can hold back.
    #[error("pending must have at most {max} tokens, found {found}")]
    PendingLength {
        /// Number of pending tokens.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// A pending token is not in the vocabulary.
    #[error("pending must have tokens below {vocab_size}, found {found}")]
    Pending {
        /// The token.
        found: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// The history is not a digest, or contradicts the number of tokens.
    #[error("history must be {expected}, found {found}")]
    History {
        /// The value in the file.
        found: String,
        /// What is accepted.
        expected: &'static str,
    },
    /// The text held back is longer than any stop string.
    #[error("answer held must have at most {max} bytes, found {found}")]
    HeldLength {
        /// Bytes of the text.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// A finished answer holds text back.
    #[error("answer held and bytes must be empty if open is false")]
    EndedAnswer,
    /// The bytes are not the beginning of a character.
    #[error("answer bytes must be hexadecimal digits of the first 0 to 3 bytes of a character, found {found}")]
    Bytes {
        /// The value in the file.
        found: String,
    },
    /// The stated length of the tensor header is too large.
    #[error("tensor header length must be at most {max} and end in the body, found {found}")]
    TensorHeaderLength {
        /// The stated length.
        found: u64,
        /// The limit.
        max: usize,
    },
    /// The tensor header is not valid JSON, names unknown tensors, or has offsets that do not cover the body exactly.
    #[error("the tensors cannot be read: {0}")]
    Tensors(String),
    /// A required tensor is missing, or an unexpected one is present.
    #[error("tensor {tensor} must be {expected} in a snapshot of {read} tokens of this model")]
    Presence {
        /// The tensor's name.
        tensor: &'static str,
        /// "present" or "absent".
        expected: &'static str,
        /// Tokens in the state, according to the header.
        read: u64,
    },
    /// A tensor has the wrong shape.
    #[error("tensor {tensor} must have the shape {expected}, found {found}")]
    Shape {
        /// The tensor's name.
        tensor: &'static str,
        /// The shape in the file.
        found: String,
        /// The required shape.
        expected: String,
    },
    /// A number is NaN or infinite.
    #[error("tensor {tensor} must have finite numbers, but number {at} is not")]
    NotFinite {
        /// The tensor's name.
        tensor: &'static str,
        /// Index of the first such number.
        at: usize,
    },
    /// A key maximum is larger than any keys can produce.
    #[error("tensor memory must have a key maximum of at most {max} at {at}, found {found}")]
    Maximum {
        /// Index of the number.
        at: usize,
        /// The largest possible value there.
        max: String,
        /// The value in the file.
        found: String,
    },
    /// The source's length is not a possible number of tokens.
    #[error("tensor source must be a number of tokens from 1 to {max}, found {found}")]
    Source {
        /// The value in the file.
        found: String,
        /// The smaller of the tokens in the state and the longest source.
        max: u64,
    },
    /// The counts are not in ascending order of tokens.
    #[error("tensor counts must have ascending tokens, found {found} after {before}")]
    CountsOrder {
        /// The token.
        found: u32,
        /// The token before.
        before: u32,
    },
    /// A count is for a token that is not in the vocabulary.
    #[error("tensor counts must have tokens below {vocab_size}, found {found}")]
    CountsToken {
        /// The token.
        found: u32,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// Sealing requires a secret.
    #[error("sealed states require a secret, and this server has none")]
    NoKey,
    /// The state was sealed by another server or for another owner, or changed since.
    #[error("the sealed state cannot be opened: not sealed by this server for this owner, or changed since")]
    Sealed,
}

/// Text from the file for use in a message: shortened, and without control characters.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}
