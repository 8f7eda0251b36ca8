//! The bounds of grammars in Lark, which is read as its compiler reads it, as far as to know strings, regular
//! expressions, comments and names from each other.

use std::collections::{HashMap, HashSet};

use serde_json::{Deserializer, Value};

use super::{check_depth_of_regex, check_schema, deeper};
use crate::text::grammar::GrammarError;

/// What a JSON schema stands behind.
const JSON: &str = "%json";

/// Most bytes of all terminals with the terminals that they name written out in their place: the compiler does that, and
/// sixty lines are enough for more than any memory holds.
const MAX_WRITTEN_OUT: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece<'a> {
    /// A name, a keyword or a number.
    Word(&'a str),
    /// A string or a regular expression, with its marks; or a schema.
    Text(&'a str),
    /// Any other character.
    Mark(u8),
}

pub(super) fn check(lark: &str) -> Result<(), GrammarError> {
    if lark.trim().is_empty() {
        return Err(GrammarError::Wrong("an empty grammar has no rule named start".into()));
    }
    let (pieces, mut depth) = (pieces(lark)?, 0);
    for (at, piece) in pieces.iter().enumerate() {
        let next = pieces.get(at + 1);
        match piece {
            Piece::Mark(b'<') => return Err(GrammarError::Has("tokens by name or number (<…>)".into())),
            Piece::Mark(b'(' | b'[' | b'{') => depth = deeper(depth)?,
            Piece::Mark(b'}') if next == Some(&Piece::Mark(b':')) => {
                return Err(GrammarError::Has("rules or terminals with parameters".into()));
            }
            Piece::Mark(b')' | b']' | b'}') => depth = depth.saturating_sub(1),
            // It would be left out: a temperature is the request's.
            Piece::Word("temperature") if next == Some(&Piece::Mark(b'=')) => {
                return Err(GrammarError::Has("a temperature".into()));
            }
            Piece::Text(text) if text.starts_with('/') => check_depth_of_regex(text)?,
            _ => {}
        }
    }
    check_terminals(&pieces)
}

/// In pieces. A schema is checked where it is found: its strings may be escaped, so that only its values tell what it has.
fn pieces(lark: &str) -> Result<Vec<Piece<'_>>, GrammarError> {
    let (bytes, mut at, mut pieces) = (lark.as_bytes(), 0, Vec::new());
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_' || *byte == b'-';
    while let Some(byte) = bytes.get(at) {
        let end = match byte {
            b'#' => end_of_line(bytes, at),
            b'/' if bytes.get(at + 1) == Some(&b'/') => end_of_line(bytes, at),
            b'%' if bytes[at..].starts_with(JSON.as_bytes()) => {
                let begin = at + JSON.len();
                let end = begin + checked_schema(lark.get(begin..).unwrap_or_default())?;
                pieces.push(Piece::Text(lark.get(begin..end).unwrap_or_default()));
                end
            }
            b'"' | b'/' => {
                let end = closing(bytes, at);
                pieces.push(Piece::Text(lark.get(at..end).unwrap_or_default()));
                end
            }
            byte if is_word(byte) => {
                let end = bytes[at..].iter().position(|byte| !is_word(byte)).map_or(bytes.len(), |length| at + length);
                pieces.push(Piece::Word(lark.get(at..end).unwrap_or_default()));
                end
            }
            byte => {
                if !byte.is_ascii_whitespace() {
                    pieces.push(Piece::Mark(*byte));
                }
                at + 1
            }
        };
        at = end;
    }
    Ok(pieces)
}

/// The bytes of the schema that `text` begins with, and that keeps to the bounds of schemas.
fn checked_schema(text: &str) -> Result<usize, GrammarError> {
    let mut values = Deserializer::from_str(text).into_iter::<Value>();
    let wrong = |error: String| GrammarError::Wrong(format!("{JSON} stands before a JSON schema: {error}"));
    let schema = values.next().ok_or_else(|| wrong("there is none".into()))?;
    check_schema(&schema.map_err(|error| wrong(error.to_string()))?)?;
    Ok(values.byte_offset())
}

fn end_of_line(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |length| at + length)
}

/// Behind what begins at `at` with the mark that also ends it; a backslash before that mark is passed over.
fn closing(bytes: &[u8], at: usize) -> usize {
    let mut end = at + 1;
    while let Some(byte) = bytes.get(end) {
        match byte {
            b'\\' => end += 1,
            byte if *byte == bytes[at] => return end + 1,
            _ => {}
        }
        end += 1;
    }
    bytes.len()
}

/// A terminal: its own bytes, those of what it names, and how many that name it have not been added up.
#[derive(Default)]
struct Terminal<'a> {
    bytes: u64,
    names: Vec<&'a str>,
    waiting: usize,
}

fn check_terminals(pieces: &[Piece]) -> Result<(), GrammarError> {
    let mut terminals = terminals(pieces);
    // Those that name nothing that is not added up, over and over; what goes in circles is left for the compiler.
    let mut named_by: HashMap<&str, Vec<&str>> = HashMap::new();
    for (name, terminal) in &terminals {
        for named in &terminal.names {
            named_by.entry(named).or_default().push(name);
        }
    }
    let mut ready: Vec<&str> =
        terminals.iter().filter(|(_, terminal)| terminal.waiting == 0).map(|(name, _)| *name).collect();
    let mut all = 0_u64;
    while let Some(name) = ready.pop() {
        let bytes = terminals.get(name).map_or(0, |terminal| terminal.bytes);
        all = all.saturating_add(bytes);
        for user in named_by.get(name).into_iter().flatten() {
            let Some(user_of) = terminals.get_mut(user) else { continue };
            user_of.bytes = user_of.bytes.saturating_add(bytes);
            user_of.waiting -= 1;
            if user_of.waiting == 0 {
                ready.push(user);
            }
        }
    }
    if all > MAX_WRITTEN_OUT {
        return Err(GrammarError::Wrong(format!(
            "its terminals come to more than {MAX_WRITTEN_OUT} bytes, written out"
        )));
    }
    Ok(())
}

fn terminals<'a>(pieces: &[Piece<'a>]) -> HashMap<&'a str, Terminal<'a>> {
    let mut terminals: HashMap<&str, Terminal> = HashMap::new();
    let mut current = None;
    for (at, piece) in pieces.iter().enumerate() {
        match piece {
            Piece::Word(name) if defines(&pieces[at + 1..]) => {
                current = is_terminal(name).then_some(*name);
                if let Some(name) = current {
                    terminals.entry(name).or_default();
                }
            }
            Piece::Word(name) if is_terminal(name) => {
                if let Some(terminal) = current.and_then(|current| terminals.get_mut(current)) {
                    terminal.names.push(name);
                }
            }
            Piece::Text(text) => {
                if let Some(terminal) = current.and_then(|current| terminals.get_mut(current)) {
                    terminal.bytes += text.len() as u64;
                }
            }
            _ => {}
        }
    }
    let known: HashSet<&str> = terminals.keys().copied().collect();
    for terminal in terminals.values_mut() {
        terminal.names.retain(|name| known.contains(name));
        terminal.waiting = terminal.names.len();
    }
    terminals
}

/// Whether a name is defined by what follows it: a colon, or a priority and a colon.
fn defines(rest: &[Piece]) -> bool {
    matches!(rest, [Piece::Mark(b':'), ..] | [Piece::Mark(b'.'), Piece::Word(_), Piece::Mark(b':'), ..])
}

fn is_terminal(name: &str) -> bool {
    name.trim_start_matches('_').starts_with(|first: char| first.is_ascii_uppercase())
}
