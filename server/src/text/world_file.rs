//! Reads RWKV's vocabulary file, `rwkv_vocab_v20230424.txt`. Each line has an id, a token as Python writes a `str` or
//! `bytes`, and the number of its bytes.

use std::path::{Path, PathBuf};

use super::error::TextError;
use super::world::{EntryError, WorldError, WorldTokenizer};

/// How the names of these files begin and end. Between the two is the date of the vocabulary.
const NAME: (&str, &str) = ("rwkv_vocab_v", ".txt");

/// Why a line is not a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum LineError {
    #[error("must be an id, a token and the number of its bytes, with spaces between them")]
    Parts,
    #[error("the id must be a whole number below 2^32")]
    Id,
    #[error("the number of bytes must be a whole number")]
    Length,
    #[error("the token has {found} bytes, and the line says {said}")]
    OtherLength { found: usize, said: usize },
    #[error("the token must be a Python literal: '…', \"…\", b'…' or b\"…\"")]
    Literal,
    #[error("the token has an escape that is not supported: {0}")]
    Escape(String),
    #[error("a token of bytes must be ASCII, found {0:?}")]
    NotAscii(char),
    #[error(transparent)]
    Entry(#[from] EntryError),
}

/// Returns the vocabulary file in a checkpoint's folder; the newest, if there are several.
pub(super) fn find(folder: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let named = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(NAME.0) && name.ends_with(NAME.1))
    };
    files.filter(named).max()
}

/// Returns RWKV's vocabulary file for the model file `model`: the one in its folder, or else `elsewhere`.
pub fn of_file(model: &Path, elsewhere: Option<&Path>) -> Option<PathBuf> {
    // For a bare file name, `parent` is an empty path, which means the current folder.
    let folder = model.parent().filter(|folder| !folder.as_os_str().is_empty());
    find(folder.unwrap_or(Path::new("."))).or_else(|| elsewhere.map(Into::into))
}

/// Reads the vocabulary file `path`.
pub(super) fn load(path: &Path) -> Result<WorldTokenizer, TextError> {
    let text = std::fs::read_to_string(path).map_err(|source| TextError::Read { path: path.into(), source })?;
    let tokens = text.lines().enumerate().map(|(at, line)| token(line).map_err(|error| wrong_line(path, at, &error)));
    let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
    WorldTokenizer::new(tokens).map_err(|error| wrong(path, error))
}

/// Returns the error of a vocabulary that was read from the file `path`.
pub(super) fn wrong(path: &Path, error: WorldError) -> TextError {
    match error {
        WorldError::Entry { at, reason } => wrong_line(path, at, &reason.into()),
        error @ WorldError::Missing(_) => TextError::Contents { path: path.into(), reason: error.to_string() },
    }
}

/// Every line has one entry, so the index of an entry is that of its line.
fn wrong_line(path: &Path, at: usize, error: &LineError) -> TextError {
    TextError::Contents { path: path.into(), reason: format!("line {}: {error}", at + 1) }
}

/// Parses the token of one line.
fn token(line: &str) -> Result<(u32, Vec<u8>), LineError> {
    let (id, rest) = line.split_once(' ').ok_or(LineError::Parts)?;
    let (literal, said) = rest.rsplit_once(' ').ok_or(LineError::Parts)?;
    let id = id.parse().map_err(|_| LineError::Id)?;
    let said = said.parse().map_err(|_| LineError::Length)?;
    let bytes = literal_bytes(literal.trim())?;
    if bytes.len() != said {
        return Err(LineError::OtherLength { found: bytes.len(), said });
    }
    Ok((id, bytes))
}

/// Returns the bytes of a Python literal: those of a `bytes` literal, or the UTF-8 bytes of a `str`.
fn literal_bytes(literal: &str) -> Result<Vec<u8>, LineError> {
    let (is_bytes, quoted) = literal.strip_prefix('b').map_or((false, literal), |quoted| (true, quoted));
    let quote = quoted.chars().next().filter(|quote| "'\"".contains(*quote)).ok_or(LineError::Literal)?;
    let inner = quoted[1..].strip_suffix(quote).ok_or(LineError::Literal)?;
    let (mut bytes, mut rest) = (Vec::new(), inner.chars());
    while let Some(next) = rest.next() {
        let character = match next {
            '\\' => match escape(&mut rest, is_bytes)? {
                Escaped::Byte(byte) => {
                    bytes.push(byte);
                    continue;
                }
                Escaped::Character(character) => character,
            },
            next if next == quote => return Err(LineError::Literal),
            next if is_bytes && !next.is_ascii() => return Err(LineError::NotAscii(next)),
            next => next,
        };
        bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
    }
    Ok(bytes)
}

/// What an escape sequence stands for.
enum Escaped {
    Byte(u8),
    Character(char),
}

/// Parses the escape sequence after a backslash.
fn escape(rest: &mut std::str::Chars<'_>, is_bytes: bool) -> Result<Escaped, LineError> {
    let start = rest.as_str();
    let unknown = || LineError::Escape(format!("\\{}", start.chars().take(9).collect::<String>()));
    let kind = rest.next().ok_or(LineError::Literal)?;
    let digits = match kind {
        '\\' | '\'' | '"' => return Ok(Escaped::Character(kind)),
        'a' => return Ok(Escaped::Byte(7)),
        'b' => return Ok(Escaped::Byte(8)),
        't' => return Ok(Escaped::Byte(9)),
        'n' => return Ok(Escaped::Byte(10)),
        'v' => return Ok(Escaped::Byte(11)),
        'f' => return Ok(Escaped::Byte(12)),
        'r' => return Ok(Escaped::Byte(13)),
        'x' => 2,
        'u' if !is_bytes => 4,
        'U' if !is_bytes => 8,
        _ => return Err(unknown()),
    };
    let hex = rest.as_str().get(..digits).filter(|hex| hex.bytes().all(|digit| digit.is_ascii_hexdigit()));
    let hex = hex.ok_or_else(unknown)?;
    let code = u32::from_str_radix(hex, 16).map_err(|_| unknown())?;
    *rest = rest.as_str()[digits..].chars();
    if is_bytes {
        return u8::try_from(code).map(Escaped::Byte).map_err(|_| unknown());
    }
    char::from_u32(code).map(Escaped::Character).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;
    use crate::text::encoder::Encoder;
    use crate::text::tokenizer::{Tokenizer, tokenizer_file};

    /// Writes a vocabulary of all single bytes in 256 lines, followed by the given lines.
    fn written(folder: &Path, lines: &[&str]) -> PathBuf {
        let mut text = String::new();
        for byte in 0..=u8::MAX {
            writeln!(text, "{} b'\\x{byte:02x}' 1", u32::from(byte) + 1).unwrap();
        }
        let path = folder.join("rwkv_vocab_v20230424.txt");
        std::fs::write(&path, text + &lines.join("\n")).unwrap();
        path
    }

    #[test]
    fn tokens_are_read_as_python_writes_them() {
        for (line, id, bytes) in [
            ("1 '\\x00' 1", 1, b"\0".as_slice()),
            ("5 'a b' 3", 5, b"a b"),
            ("5 '   ' 3", 5, b"   "),
            ("6 \"it's\" 4", 6, b"it's"),
            (r#"7 'say "it\'s"' 10"#, 7, b"say \"it's\""),
            (r"8 '\t\n\r\\' 4", 8, b"\t\n\r\\"),
            (r"9 '\x80\xff' 4", 9, b"\xc2\x80\xc3\xbf"),
            (r"10 b'\x80\xff' 2", 10, b"\x80\xff"),
            (r#"11 b"it's \xe2" 6"#, 11, b"it's \xe2"),
            (r"12 '\u200b\U0001f980' 7", 12, "\u{200b}\u{1f980}".as_bytes()),
            ("13 '☃' 3", 13, "☃".as_bytes()),
            (r"14 '\x7f' 1", 14, b"\x7f"),
        ] {
            assert_eq!(token(line), Ok((id, bytes.to_vec())), "{line}");
        }
    }

    #[test]
    fn lines_that_are_no_token_are_refused() {
        for (line, reason) in [
            ("", "must be an id, a token and the number of its bytes"),
            ("7", "must be an id, a token"),
            ("7 'a'", "must be an id, a token"),
            ("-1 'a' 1", "the id must be a whole number below 2^32"),
            ("4294967296 'a' 1", "the id must be a whole number"),
            ("7 'a' x", "the number of bytes must be a whole number"),
            ("7 'a' 2", "the token has 1 bytes, and the line says 2"),
            ("7 a 1", "must be a Python literal"),
            ("7 ' 1", "must be a Python literal"),
            ("7 'a\" 1", "must be a Python literal"),
            ("7 'a'b' 3", "must be a Python literal"),
            (r"7 'a\' 2", "must be a Python literal"),
            ("7 r'a' 1", "must be a Python literal"),
            ("7 b'☃' 3", "a token of bytes must be ASCII, found '☃'"),
            (r"7 '\N{SNOWMAN}' 3", r"an escape that is not supported: \N{SNOWMAN"),
            (r"7 '\ud800' 3", r"an escape that is not supported: \ud800"),
            (r"7 '\x+1' 1", r"an escape that is not supported: \x+1"),
            (r"7 '\x1' 1", r"an escape that is not supported: \x1"),
            (r"7 b'\u0041' 1", r"an escape that is not supported: \u0041"),
            (r"7 '\x☃' 1", "an escape that is not supported"),
        ] {
            let error = token(line).unwrap_err().to_string();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }

    #[test]
    fn files_that_are_no_vocabulary_are_refused_with_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rwkv_vocab_v20230424.txt");
        let reason = |lines: &[&str]| load(&written(folder.path(), lines)).err().unwrap().to_string();
        let place = path.display();
        assert_eq!(
            reason(&["257 'ab' 2", "258 'ab' 2"]),
            format!("{place}: line 258: the bytes are those of token 257")
        );
        assert_eq!(reason(&["7 'ab' 2"]), format!("{place}: line 257: the id 7 is that of an earlier token"));
        assert_eq!(reason(&["257 '' 0"]), format!("{place}: line 257: a token must have at least one byte"));
        assert!(reason(&["", "257 'ab' 2"]).contains("line 257: must be an id, a token"));
        std::fs::write(&path, "1 'a' 1\n").unwrap();
        let error = load(&path).err().unwrap().to_string();
        assert_eq!(error, format!("{place}: must have a token for every single byte, and has none for 0x00"));
        std::fs::write(&path, b"1 '\xff' 1\n").unwrap();
        assert!(load(&path).err().unwrap().to_string().contains("UTF-8"));
        assert!(load(&folder.path().join("none")).is_err());
    }

    #[test]
    fn the_newest_vocabulary_of_a_folder_is_found_and_read() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(find(folder.path()), None);
        let path = written(folder.path(), &["257 'ab' 2", "300 b'\\xe2\\x98' 2"]);
        std::fs::write(folder.path().join("rwkv_vocab_v20220101.txt"), "").unwrap();
        std::fs::write(folder.path().join("vocab.txt"), "").unwrap();
        assert_eq!(find(folder.path()).as_ref(), Some(&path));
        let world = load(&path).unwrap();
        assert_eq!(world.encode("ab☄", false, false).unwrap(), [257, 300, 0x85]);
    }

    #[test]
    fn a_folder_without_a_tokenizer_json_has_the_tokenizer_of_its_vocabulary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path(), &["257 '\\n\\n' 2", "258 b'\\xe2\\x98' 2"]);
        assert_eq!(tokenizer_file(folder.path()), path);
        let config = |config: &str| std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        let open = |eos: &[u32]| Tokenizer::load(folder.path(), 300, eos);
        let tokenizer = open(&[2]).unwrap();
        assert_eq!((tokenizer.begin(), tokenizer.eos().as_ref()), (&[][..], &[2, 0][..]));
        assert_eq!(tokenizer.encode_chat("<|rwkv_tokenizer_end_of_text|>\n\n").unwrap(), [0, 257]);
        assert_eq!(tokenizer.encode_plain("\n\n☄", true).unwrap(), [257, 258, 0x85]);
        assert_eq!(tokenizer.special(0), Some("<|rwkv_tokenizer_end_of_text|>"));
        assert_eq!((tokenizer.piece(258), tokenizer.name(98)), (&[0xe2, 0x98][..], "a".to_owned()));
        // As published: the id of "\n\n" stays the one that models are trained with.
        config(
            r#"{"eos_token": "\n\n", "bos_token": "<s>", "add_bos_token": true, "added_tokens_decoder":
            {"0": {"content": "<s>", "special": true}, "299": {"content": "\n\n", "special": true}}}"#,
        );
        let tokenizer = open(&[]).unwrap();
        assert_eq!((tokenizer.begin(), tokenizer.eos().as_ref()), (&[0][..], &[257, 0][..]));
        assert_eq!(tokenizer.encode("\n\n").unwrap(), [0, 257]);
        assert_eq!(tokenizer.encode_chat("<s>\n\n").unwrap(), [0, 257]);
        for (text, reason) in [
            (
                r#"{"added_tokens_decoder": {"300": {"content": "<a>"}}}"#,
                "ids must be below vocab_size (300), found 300",
            ),
            (r#"{"added_tokens_decoder": {"x": {"content": "<a>"}}}"#, "tokenizer_config.json: added_tokens_decoder: "),
            (r#"{"bos_token": "<s>", "add_bos_token": true}"#, "bos_token: \"<s>\" is no token"),
        ] {
            config(text);
            let error = open(&[]).err().unwrap().to_string();
            assert!(error.contains(reason), "{error}");
        }
        let error = Tokenizer::load(folder.path(), 258, &[]).err().unwrap().to_string();
        assert!(error.contains("bos_token"), "{error}");
        config("{}");
        let error = Tokenizer::load(folder.path(), 258, &[]).err().unwrap().to_string();
        assert!(
            error.ends_with("line 258: token ids must be below the model's vocab_size (258), found 258"),
            "{error}"
        );
    }
}
