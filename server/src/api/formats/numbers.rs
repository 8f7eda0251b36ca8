//! Rewrites numbers such as `8.0` and `1e3` as the integers that they stand for.

use serde::de::IgnoredAny;

/// The limit below which floats represent all integers exactly. Beyond it, the text may have meant a different integer.
const LIMIT: f64 = 9_007_199_254_740_992.0;

/// Returns `body` with its whole floats as integers, and otherwise byte for byte; `None` if it has no such floats or is
/// not JSON.
pub(super) fn whole(body: &[u8]) -> Option<Vec<u8>> {
    serde_json::from_slice::<IgnoredAny>(body).ok()?;
    let (mut out, mut rest, mut changed) = (Vec::with_capacity(body.len()), body, false);
    while let Some(&first) = rest.first() {
        let length = match first {
            b'"' => string(rest),
            b'-' | b'0'..=b'9' => {
                rest.iter().take_while(|byte| b"+-.eE".contains(byte) || byte.is_ascii_digit()).count()
            }
            _ => 1,
        };
        let (token, after) = rest.split_at(length);
        match integer(token) {
            Some(integer) => out.extend_from_slice(integer.to_string().as_bytes()),
            None => out.extend_from_slice(token),
        }
        changed |= integer(token).is_some();
        rest = after;
    }
    changed.then_some(out)
}

/// Returns the length in bytes of the string that `text` begins with, quotes included.
fn string(text: &[u8]) -> usize {
    let mut at = 1;
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    text.len()
}

/// Returns the integer that a float stands for; `None` for all other tokens.
fn integer(token: &[u8]) -> Option<i64> {
    let text = str::from_utf8(token).ok().filter(|text| text.contains(['.', 'e', 'E']))?;
    let float: f64 = text.parse().ok()?;
    (float.trunc() == float && float.abs() < LIMIT).then_some(float as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(body: &str) -> Option<String> {
        whole(body.as_bytes()).map(|body| String::from_utf8(body).unwrap())
    }

    #[test]
    fn whole_floats_become_integers_and_all_else_stays() {
        assert_eq!(
            changed(r#"{"a": [8.0,-2.0,0.5,1e3], "b":{"c":-0.0},"b":18446744073709551616}"#).unwrap(),
            r#"{"a": [8,-2,0.5,1000], "b":{"c":0},"b":18446744073709551616}"#
        );
        assert_eq!(changed(r#"{"1.0 \\\" 2.0":"3.0\\","é":4E0}"#).unwrap(), r#"{"1.0 \\\" 2.0":"3.0\\","é":4}"#);
        for unchanged in ["[8,0.5]", "[1e300]", "[9007199254740993.0]", "no JSON", "[1.0", r#"["8.0"]"#] {
            assert_eq!(changed(unchanged), None, "{unchanged}");
        }
    }
}
