//! Reads Rust as text: words, and code without comments, strings and tests.

/// Returns the identifiers and keywords of code.
pub(super) fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Returns the text without comments, string literals, and character literals that would open or close something.
pub(super) fn code(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(hashes) = raw_string(rest, &code) {
            let close = format!("\"{}", "#".repeat(hashes));
            let body = hashes + 2;
            rest[body..].find(&close).map_or(rest.len(), |end| body + end + close.len())
        } else if c == '"' {
            string_end(rest)
        } else if ["'\"'", "'{'", "'}'", "';'"].iter().any(|quoted| rest.starts_with(quoted)) {
            3
        } else {
            code.push(c);
            rest = &rest[c.len_utf8()..];
            continue;
        };
        code.push(' ');
        rest = &rest[skipped..];
    }
    code
}

/// Returns the number of `#` of a raw string that starts here, or `None` if none starts here.
fn raw_string(rest: &str, before: &str) -> Option<usize> {
    let after = rest.strip_prefix('r')?;
    let inside_word = before.ends_with(|c: char| (c.is_alphanumeric() && c != 'b') || c == '_');
    let hashes = after.len() - after.trim_start_matches('#').len();
    (!inside_word && after[hashes..].starts_with('"')).then_some(hashes)
}

fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns `code` without the items that are compiled only for tests.
pub(super) fn tests_removed(code: &str) -> String {
    const TEST: &str = "#[cfg(test)]";
    let (mut kept, mut rest) = (String::with_capacity(code.len()), code);
    while let Some(at) = rest.find(TEST) {
        kept.push_str(&rest[..at]);
        rest = &rest[at + TEST.len()..];
        let mut depth = 0;
        let end = rest.find(|c| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            depth == 0 && (c == '}' || c == ';')
        });
        rest = end.map_or("", |end| &rest[end + 1..]);
    }
    kept + rest
}
