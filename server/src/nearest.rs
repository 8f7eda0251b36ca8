//! Guesses the name that a wrong name of a route or flag was meant to be.

use std::mem;

/// Maximum length of names that are compared, in bytes.
const MAX_NAME: usize = 100;

/// Maximum number of differences between a name and the one that it may mean.
const MAX_DIFFERENCES: usize = 4;

/// Returns the name in `known` that is most similar to `name`, if any is similar enough.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > MAX_NAME {
        return None;
    }
    let (differences, found) = known.map(|known| (differences(name, known), known)).min()?;
    (differences <= MAX_DIFFERENCES && 2 * differences < name.len()).then_some(found)
}

/// Returns the Levenshtein distance.
fn differences(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, byte) in one.bytes().enumerate() {
        let mut diagonal = mem::replace(&mut row[0], at + 1);
        for (column, wanted) in other.bytes().enumerate() {
            let changed = diagonal + usize::from(byte != wanted);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_counted() {
        for (one, other, count) in [("", "", 0), ("a", "", 1), ("", "ab", 2), ("kitten", "sitting", 3), ("ab", "ba", 2)]
        {
            assert_eq!((differences(one, other), differences(other, one)), (count, count), "{one} {other}");
        }
    }

    #[test]
    fn only_similar_paths_are_suggested() {
        let found =
            |path: &str| nearest(path, ["/", "/v1/chat/completions", "/v1/completions", "/v1/models"].into_iter());
        assert_eq!(found("/v1/chat/completion"), Some("/v1/chat/completions"));
        assert_eq!(found("/chat/completions"), Some("/v1/chat/completions"));
        assert_eq!(found("/v1/v1/chat/completions"), Some("/v1/chat/completions"));
        assert_eq!(found("/models"), Some("/v1/models"));
        for path in ["/v2", "/generate", "/x", &format!("/v1/models{}", "/".repeat(100))] {
            assert_eq!(found(path), None, "{path}");
        }
    }
}
