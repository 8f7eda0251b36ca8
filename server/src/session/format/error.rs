//! Why the bytes of a snapshot were refused.

/// Why bytes are no snapshot that this server can go on from; each says which rule is broken and its bound.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The file ends before its fixed parts do.
    #[error("a snapshot has at least {least} bytes, found {found}")]
    TooShort {
        /// Bytes of the file.
        found: usize,
        /// The fewest that any file has.
        least: usize,
    },
    /// No snapshot of this model is as long.
    #[error("a snapshot of this model has at most {most} bytes, found {found}")]
    TooLong {
        /// Bytes of the file.
        found: usize,
        /// The most that a file of this model has.
        most: usize,
    },
    /// The file is something else.
    #[error("the file is no Tidegate snapshot: it does not begin with the magic bytes")]
    Magic,
    /// The file was written by a later server.
    #[error("format version {found} is not supported, this server reads up to {most}")]
    Version {
        /// The file's version.
        found: u32,
        /// The last version that can be read.
        most: u32,
    },
    /// The header claims more bytes than any header has.
    #[error("header length must be at most {most}, found {found}")]
    HeaderLength {
        /// Claimed length.
        found: u64,
        /// The most.
        most: usize,
    },
    /// The lengths in front do not lead to the file's end.
    #[error(
        "header and body length give {expected} bytes (32 more if signed), found {found}: cut off or trailing bytes"
    )]
    Length {
        /// Bytes of the file.
        found: usize,
        /// Bytes that the lengths give without a signature.
        expected: u64,
    },
    /// A byte of the file is not what was written.
    #[error("the digest does not match the bytes: the file is damaged")]
    Digest,
    /// This server takes its own snapshots alone.
    #[error("the signature is missing, this server takes only signed snapshots")]
    SignatureMissing,
    /// Signed with another secret, or changed since.
    #[error("the signature is wrong: not signed by this server, or changed since")]
    SignatureWrong,
    /// The header and the file's end tell two stories.
    #[error("header signed is {header}, the file ends {end} a signature")]
    Signed {
        /// What the header says.
        header: String,
        /// "with" or "without".
        end: &'static str,
    },
    /// The header is no JSON, or has a key too many, too few or of another type.
    #[error("the header cannot be read: {0}")]
    Header(String),
    /// The snapshot was made with another model.
    #[error("the snapshot is of another model: its {part} digest is {found}, expected {expected}")]
    Fingerprint {
        /// Architecture, weights or tokenizer.
        part: &'static str,
        /// The digest in the file.
        found: String,
        /// The digest of the model that is served.
        expected: String,
    },
    /// Numbers of another type.
    #[error("dtype must be {expected}, found {found}")]
    Dtype {
        /// The tensor's type, or the header's.
        found: String,
        /// The type that it must have.
        expected: &'static str,
    },
    /// A size of the state is not the model's.
    #[error("layout {part} must be {expected}, found {found}")]
    Layout {
        /// Which size.
        part: &'static str,
        /// The size in the file.
        found: usize,
        /// The model's size.
        expected: usize,
    },
    /// A count that no conversation reaches.
    #[error("{part} must be at most {most}, found {found}")]
    Count {
        /// Read or draws.
        part: &'static str,
        /// The number in the file.
        found: u64,
        /// The most.
        most: u64,
    },
    /// More tokens beside the state than a stop string can hold back.
    #[error("pending must have at most {most} tokens, found {found}")]
    PendingLength {
        /// Its tokens.
        found: usize,
        /// The most.
        most: usize,
    },
    /// A pending token that the vocabulary does not have.
    #[error("pending must have tokens below {vocab_size}, found {found}")]
    Pending {
        /// The token.
        found: u32,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// No digest, or one that does not belong to the number of tokens.
    #[error("history must be {expected}, found {found}")]
    History {
        /// What the file has.
        found: String,
        /// What it must be.
        expected: &'static str,
    },
    /// More text held back than a stop string is long.
    #[error("answer held must have at most {most} bytes, found {found}")]
    Held {
        /// Its bytes.
        found: usize,
        /// The most.
        most: usize,
    },
    /// Nothing is held back of an answer that has ended.
    #[error("answer held and bytes must be empty where open is false")]
    EndedAnswer,
    /// Bytes that no character begins with.
    #[error("answer bytes must be hexadecimal digits of the first 0 to 3 bytes of a character, found {found}")]
    Bytes {
        /// What the file has.
        found: String,
    },
    /// The tensors' own header claims more bytes than one has.
    #[error("tensor header length must be at most {most} and end in the body, found {found}")]
    TensorHeaderLength {
        /// Claimed length.
        found: u64,
        /// The most.
        most: usize,
    },
    /// The tensors' own header is no JSON, names other tensors, or its offsets do not cover the body once.
    #[error("the tensors cannot be read: {0}")]
    Tensors(String),
    /// A tensor that must be there is not, or the other way round.
    #[error("tensor {tensor} must be {expected} in a snapshot of {read} tokens of this model")]
    Presence {
        /// The tensor's name.
        tensor: &'static str,
        /// "present" or "absent".
        expected: &'static str,
        /// Tokens that the snapshot says it has read.
        read: u64,
    },
    /// A tensor of another shape.
    #[error("tensor {tensor} must have the shape {expected}, found {found}")]
    Shape {
        /// The tensor's name.
        tensor: &'static str,
        /// The shape in the file.
        found: String,
        /// The shape that it must have.
        expected: String,
    },
    /// NaN or infinite.
    #[error("tensor {tensor} must have finite numbers, found another at {at}")]
    NotFinite {
        /// The tensor's name.
        tensor: &'static str,
        /// Where the first is, counted in numbers.
        at: usize,
    },
    /// A greatest feature of keys that no keys have.
    #[error("tensor memory must have at {at} the maximum of keys, at most {most}, found {found}")]
    Maximum {
        /// Where it is, counted in numbers.
        at: usize,
        /// What keys have at most there.
        most: String,
        /// What the file has.
        found: String,
    },
    /// No number of tokens that a source can have.
    #[error("tensor source must be a number of tokens from 1 to {most}, found {found}")]
    Source {
        /// What the file has.
        found: String,
        /// The most: those that the snapshot has read, or those of the longest source.
        most: u64,
    },
    /// Counts not in the order of their tokens, or a token twice.
    #[error("tensor counts must have ascending tokens, found {found} after {before}")]
    CountsOrder {
        /// The token.
        found: u32,
        /// The token before.
        before: u32,
    },
    /// A count of a token that the vocabulary does not have.
    #[error("tensor counts must have tokens below {vocab_size}, found {found}")]
    CountsToken {
        /// The token.
        found: u32,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// Sealing needs the server's secret.
    #[error("sealed states need a secret, and this server has none")]
    NoKey,
    /// Sealed by another server or for another owner, or changed since.
    #[error("the sealed state cannot be opened: not sealed by this server for this owner, or changed since")]
    Sealed,
}

/// Text of the file as it may stand in a message: short, and without control characters.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).flat_map(char::escape_debug).collect()
}
