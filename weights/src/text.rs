//! Text files with `<|endoftext|>` between documents, which are read piece by piece and tokenized.
//!
//! Memory is bounded by about [`PIECE`] bytes, however large the file or a document is. The tokens equal those of whole
//! documents: a piece ends between a letter or digit and a blank, where byte-level pre-tokenizers split anyway.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

/// The mark between documents, and the token that starts and ends each.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Bytes of text that are read and tokenized together.
pub const PIECE: usize = 64 << 10;

/// Why a text could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The file cannot be opened.
    #[error("text: cannot open {path}: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file cannot be read to its end.
    #[error("text: {0}")]
    Read(#[from] std::io::Error),
    /// The file is not UTF-8.
    #[error("text: not UTF-8 at byte {offset}")]
    NotUtf8 {
        /// The offset of the first invalid byte in the file.
        offset: u64,
    },
    /// The file has no document, or only empty ones.
    #[error("text: holds no text")]
    Empty,
    /// `tokenizer.json` cannot be read.
    #[error("cannot read {path}: {message}")]
    TokenizerFile {
        /// The file.
        path: PathBuf,
        /// The tokenizer library's error.
        message: String,
    },
    /// The folder has another kind of tokenizer.
    #[error("{0} has no tokenizer.json: texts are not measured with RWKV's vocabulary file")]
    OtherTokenizer(PathBuf),
    /// The tokenizer cannot encode a text.
    #[error("tokenizer: {0}")]
    Encode(String),
    /// The tokenizer cannot decode tokens.
    #[error("tokenizer: {0}")]
    Decode(String),
    /// The tokenizer has no end-of-text token.
    #[error("tokenizer.json: has no token {END_OF_TEXT}")]
    NoEndMark,
}

/// A part of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Whether it starts the document.
    pub first: bool,
    /// The text; never empty.
    pub text: String,
}

/// The documents of a text in pieces, without the marks, the line breaks around them, and empty documents. Line endings
/// become `\n`.
#[derive(Debug)]
pub struct Documents<R> {
    reader: R,
    piece: usize,
    /// Text read but not yet returned.
    pending: String,
    /// An incomplete character, or a `\r` whose `\n` may follow.
    raw: Vec<u8>,
    /// Bytes read from the reader.
    read: u64,
    exhausted: bool,
    /// Whether a piece of the current document has been returned.
    started: bool,
    /// Whether the end or an error has been reached.
    done: bool,
}

impl Documents<File> {
    /// The documents of a file.
    ///
    /// # Errors
    /// [`TextError::Open`].
    pub fn open(path: &Path) -> Result<Self, TextError> {
        let file = File::open(path).map_err(|source| TextError::Open { path: path.into(), source })?;
        Ok(Self::new(file, PIECE))
    }
}

impl<R: Read> Documents<R> {
    /// The documents of `reader` in pieces of about `piece` bytes (at least 64).
    pub fn new(reader: R, piece: usize) -> Self {
        let (pending, raw) = (String::new(), Vec::new());
        Self { reader, piece: piece.max(64), pending, raw, read: 0, exhausted: false, started: false, done: false }
    }

    /// Bytes of the file read so far.
    pub fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Reads up to one more piece into `pending`.
    fn fill(&mut self) -> Result<(), TextError> {
        let room = self.piece as u64;
        let got = self.reader.by_ref().take(room).read_to_end(&mut self.raw)? as u64;
        self.read += got;
        self.exhausted = got < room;
        let mut whole = match std::str::from_utf8(&self.raw) {
            Ok(_) => self.raw.len(),
            Err(e) if e.error_len().is_none() && !self.exhausted => e.valid_up_to(),
            Err(e) => {
                let offset = self.read - (self.raw.len() - e.valid_up_to()) as u64;
                return Err(TextError::NotUtf8 { offset });
            }
        };
        if !self.exhausted && whole > 0 && self.raw[whole - 1] == b'\r' {
            whole -= 1;
        }
        let rest = self.raw.split_off(whole);
        let text = std::mem::replace(&mut self.raw, rest);
        let text = String::from_utf8(text).map_err(|_| TextError::NotUtf8 { offset: self.read })?;
        if text.contains('\r') {
            self.pending.push_str(&text.replace("\r\n", "\n").replace('\r', "\n"));
        } else {
            self.pending.push_str(&text);
        }
        Ok(())
    }

    /// Removes and returns the first `end` bytes of `pending`, and drops the next `skip`.
    fn take(&mut self, end: usize, skip: usize) -> String {
        let rest = self.pending.split_off(end);
        let text = std::mem::replace(&mut self.pending, rest);
        self.pending.drain(..skip);
        text
    }

    fn advance(&mut self) -> Result<Option<Piece>, TextError> {
        loop {
            if !self.started {
                let blank = self.pending.len() - self.pending.trim_start_matches('\n').len();
                self.pending.drain(..blank);
            }
            let mark = self.pending.find(END_OF_TEXT);
            if mark.is_some() || self.exhausted {
                if mark.is_none() && self.pending.is_empty() {
                    return Ok(None);
                }
                let (end, skip) = mark.map_or((self.pending.len(), 0), |at| (at, END_OF_TEXT.len()));
                let mut text = self.take(end, skip);
                text.truncate(text.trim_end_matches('\n').len());
                let first = !std::mem::replace(&mut self.started, false);
                if !text.is_empty() {
                    return Ok(Some(Piece { first, text }));
                }
            } else if let Some(end) = self.cut() {
                let text = self.take(end, 0);
                let first = !std::mem::replace(&mut self.started, true);
                return Ok(Some(Piece { first, text }));
            } else {
                self.fill()?;
            }
        }
    }

    /// Finds a position at which `pending`, which has no complete mark, can be split without changing its tokens. A
    /// partially read mark stays after it, because a mark contains no blank.
    fn cut(&self) -> Option<usize> {
        if self.pending.len() < self.piece {
            return None;
        }
        let blanks = self.pending.rmatch_indices([' ', '\n']);
        let safe = |&at: &usize| self.pending[..at].chars().next_back().is_some_and(char::is_alphanumeric);
        // No language has sixteen pieces without such a position; beyond that, splitting a token keeps memory bounded.
        let forced = || {
            let at = self.pending.floor_char_boundary(self.pending.len() - END_OF_TEXT.len());
            (self.pending.len() >= 16 * self.piece).then_some(at)
        };
        blanks.map(|(at, _)| at).find(safe).or_else(forced)
    }
}

impl<R: Read> Iterator for Documents<R> {
    type Item = Result<Piece, TextError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let item = self.advance().transpose();
        self.done = !matches!(item, Some(Ok(_)));
        item
    }
}

/// Consecutive tokens of the stream `0 document 0 document 0`, where 0 is the end-of-text token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Whether the first of `ids` starts a document or ends the stream: the state is zeroed before it.
    pub first: bool,
    /// Token ids, at least one.
    pub ids: Vec<u32>,
    /// Bytes of their text, without the mark.
    pub bytes: u64,
}

/// The tokens of a text: an end-of-text token before every document, and one at the end.
pub struct TokenStream<'a, R> {
    documents: Documents<R>,
    tokenizer: &'a Tokenizer,
    mark: u32,
    any: bool,
    done: bool,
}

impl<'a, R: Read> TokenStream<'a, R> {
    /// The tokens of `documents`.
    ///
    /// # Errors
    /// [`TextError::NoEndMark`] if the tokenizer has no end-of-text token.
    pub fn new(documents: Documents<R>, tokenizer: &'a Tokenizer) -> Result<Self, TextError> {
        let mark = tokenizer.token_to_id(END_OF_TEXT).ok_or(TextError::NoEndMark)?;
        Ok(Self { documents, tokenizer, mark, any: false, done: false })
    }

    /// Bytes of the file read so far.
    pub fn bytes_read(&self) -> u64 {
        self.documents.bytes_read()
    }

    fn advance(&mut self) -> Result<Tokens, TextError> {
        let Some(piece) = self.documents.next().transpose()? else {
            self.done = true;
            let end = Tokens { first: true, ids: vec![self.mark], bytes: 0 };
            return if self.any { Ok(end) } else { Err(TextError::Empty) };
        };
        self.any = true;
        let encoding =
            self.tokenizer.encode_fast(piece.text.as_str(), false).map_err(|e| TextError::Encode(e.to_string()))?;
        let mut ids = Vec::with_capacity(encoding.get_ids().len() + 1);
        ids.extend(piece.first.then_some(self.mark));
        ids.extend_from_slice(encoding.get_ids());
        Ok(Tokens { first: piece.first, ids, bytes: piece.text.len() as u64 })
    }
}

impl<R: Read> Iterator for TokenStream<'_, R> {
    type Item = Result<Tokens, TextError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let item = self.advance();
        self.done |= item.is_err();
        Some(item)
    }
}

/// Reads the `tokenizer.json` of a checkpoint folder.
///
/// # Errors
/// [`TextError::TokenizerFile`].
pub fn load_tokenizer(folder: &Path) -> Result<Tokenizer, TextError> {
    let path = folder.join("tokenizer.json");
    let wrong = |e: Box<dyn std::error::Error + Send + Sync>| TextError::TokenizerFile {
        path: path.clone(),
        message: e.to_string(),
    };
    let vocabulary = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("rwkv_vocab_v");
    let mut entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    if !path.exists() && entries.any(vocabulary) {
        return Err(TextError::OtherTokenizer(folder.into()));
    }
    let mut tokenizer = Tokenizer::from_file(&path).map_err(wrong)?;
    // A text must never be truncated or padded.
    tokenizer.with_truncation(None).map_err(wrong)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}
