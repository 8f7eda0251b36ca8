//! Checks the limits of Lark grammars. The text is split as the compiler does it, but only as far as needed to tell
//! apart strings, regular expressions, comments and names.

use std::collections::{HashMap, HashSet};

use serde_json::{Deserializer, Value};

use super::schema::{check_depth_of_regex, check_schema, deeper};
use super::spec::GrammarError;

/// Introduces a JSON schema.
const JSON: &str = "%json";

/// Largest total size of all terminals in bytes, after terminal names within them are replaced with their definitions.
/// The compiler does this replacement, and sixty lines are enough to exceed any memory.
const MAX_EXPANDED_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lexeme<'a> {
    /// A name, a keyword or a number.
    Word(&'a str),
    /// A string or a regular expression with its delimiters, or a schema.
    Text(&'a str),
    /// Any other character.
    Mark(u8),
}

pub(super) fn check(lark: &str) -> Result<(), GrammarError> {
    if lark.trim().is_empty() {
        return Err(GrammarError::Wrong("an empty grammar has no rule named start".into()));
    }
    let (lexemes, mut depth) = (lexemes(lark)?, 0);
    for (at, lexeme) in lexemes.iter().enumerate() {
        let next = lexemes.get(at + 1);
        match lexeme {
            Lexeme::Mark(b'<') => return Err(GrammarError::Has("tokens by name or number (<…>)".into())),
            Lexeme::Mark(b'(' | b'[' | b'{') => depth = deeper(depth)?,
            Lexeme::Mark(b'}') if next == Some(&Lexeme::Mark(b':')) => {
                return Err(GrammarError::Has("rules or terminals with parameters".into()));
            }
            Lexeme::Mark(b')' | b']' | b'}') => depth = depth.saturating_sub(1),
            // This would have no effect, because the request sets the temperature.
            Lexeme::Word("temperature") if next == Some(&Lexeme::Mark(b'=')) => {
                return Err(GrammarError::Has("a temperature".into()));
            }
            Lexeme::Text(text) if text.starts_with('/') => check_depth_of_regex(text)?,
            _ => {}
        }
    }
    check_terminals(&lexemes)
}

/// Splits the text into lexemes. Schemas are checked as soon as they are found: their strings may be escaped, so only
/// their parsed values show what they contain.
fn lexemes(lark: &str) -> Result<Vec<Lexeme<'_>>, GrammarError> {
    let (bytes, mut at, mut lexemes) = (lark.as_bytes(), 0, Vec::new());
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_' || *byte == b'-';
    while let Some(byte) = bytes.get(at) {
        let end = match byte {
            b'#' => end_of_line(bytes, at),
            b'/' if bytes.get(at + 1) == Some(&b'/') => end_of_line(bytes, at),
            b'%' if bytes[at..].starts_with(JSON.as_bytes()) => {
                let begin = at + JSON.len();
                let end = begin + checked_schema(lark.get(begin..).unwrap_or_default())?;
                lexemes.push(Lexeme::Text(lark.get(begin..end).unwrap_or_default()));
                end
            }
            b'"' | b'/' => {
                let end = closing(bytes, at);
                lexemes.push(Lexeme::Text(lark.get(at..end).unwrap_or_default()));
                end
            }
            byte if is_word(byte) => {
                let end = bytes[at..].iter().position(|byte| !is_word(byte)).map_or(bytes.len(), |length| at + length);
                lexemes.push(Lexeme::Word(lark.get(at..end).unwrap_or_default()));
                end
            }
            byte => {
                if !byte.is_ascii_whitespace() {
                    lexemes.push(Lexeme::Mark(*byte));
                }
                at + 1
            }
        };
        at = end;
    }
    Ok(lexemes)
}

/// Checks the schema at the beginning of `text` and returns its length in bytes.
fn checked_schema(text: &str) -> Result<usize, GrammarError> {
    let mut values = Deserializer::from_str(text).into_iter::<Value>();
    let wrong = |error: String| GrammarError::Wrong(format!("{JSON} must be followed by a JSON schema: {error}"));
    let schema = values.next().ok_or_else(|| wrong("there is none".into()))?;
    check_schema(&schema.map_err(|error| wrong(error.to_string()))?)?;
    Ok(values.byte_offset())
}

fn end_of_line(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |length| at + length)
}

/// Returns the end of the string or regular expression that begins at `at`. Escaped delimiters do not end it.
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

/// A terminal: its own size plus the sizes of the terminals it names, and how many of those are not added yet.
#[derive(Default)]
struct Terminal<'a> {
    bytes: u64,
    names: Vec<&'a str>,
    waiting: usize,
}

fn check_terminals(lexemes: &[Lexeme]) -> Result<(), GrammarError> {
    let mut terminals = terminals(lexemes);
    // Repeatedly adds up the terminals whose names are all resolved. Cycles are left to the compiler.
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
    if all > MAX_EXPANDED_BYTES {
        return Err(GrammarError::Wrong(format!(
            "its expanded terminals must be at most {MAX_EXPANDED_BYTES} bytes long in all"
        )));
    }
    Ok(())
}

fn terminals<'a>(lexemes: &[Lexeme<'a>]) -> HashMap<&'a str, Terminal<'a>> {
    let mut terminals: HashMap<&str, Terminal> = HashMap::new();
    let mut current = None;
    for (at, lexeme) in lexemes.iter().enumerate() {
        match lexeme {
            Lexeme::Word(name) if defines(&lexemes[at + 1..]) => {
                current = is_terminal(name).then_some(*name);
                if let Some(name) = current {
                    terminals.entry(name).or_default();
                }
            }
            Lexeme::Word(name) if is_terminal(name) => {
                if let Some(terminal) = current.and_then(|current| terminals.get_mut(current)) {
                    terminal.names.push(name);
                }
            }
            Lexeme::Text(text) => {
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

/// Whether the lexemes after a name make it a definition: a colon, or a priority and a colon.
fn defines(rest: &[Lexeme]) -> bool {
    matches!(rest, [Lexeme::Mark(b':'), ..] | [Lexeme::Mark(b'.'), Lexeme::Word(_), Lexeme::Mark(b':'), ..])
}

fn is_terminal(name: &str) -> bool {
    name.trim_start_matches('_').starts_with(|first: char| first.is_ascii_uppercase())
}
