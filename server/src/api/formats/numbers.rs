//! Integers written with a fraction of zero: `8.0` is the number 8.

use serde_json::Value;

/// Below this, every integer is a float of its own. Beyond it, the text may have meant a different integer.
const LIMIT: f64 = 9_007_199_254_740_992.0;

/// `body` with its whole floats as integers; none if it has no such floats or is not JSON.
pub(super) fn whole(body: &[u8]) -> Option<Vec<u8>> {
    let mut value = serde_json::from_slice(body).ok()?;
    make_whole(&mut value).then(|| value.to_string().into_bytes())
}

/// Returns whether anything has changed.
fn make_whole(value: &mut Value) -> bool {
    match value {
        Value::Number(number) if number.is_f64() => {
            let whole = number.as_f64().filter(|float| float.trunc() == *float && float.abs() < LIMIT);
            if let Some(float) = whole {
                *value = Value::from(float as i64);
            }
            whole.is_some()
        }
        // `|` does not stop at the first change.
        Value::Array(items) => items.iter_mut().fold(false, |changed, item| make_whole(item) | changed),
        Value::Object(fields) => fields.values_mut().fold(false, |changed, field| make_whole(field) | changed),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(body: &str) -> Option<String> {
        whole(body.as_bytes()).map(|body| String::from_utf8(body).unwrap())
    }

    #[test]
    fn whole_floats_become_integers_and_others_stay() {
        assert_eq!(
            changed(r#"{"a":[8.0,-2.0,0.5,1e3],"b":{"c":-0.0}}"#).unwrap(),
            r#"{"a":[8,-2,0.5,1000],"b":{"c":0}}"#
        );
        for unchanged in ["[8,0.5]", "[1e300]", "[9007199254740993.0]", "no JSON", r#"["8.0"]"#] {
            assert_eq!(changed(unchanged), None, "{unchanged}");
        }
    }
}
