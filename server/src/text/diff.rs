//! Computes how one text becomes another, word by word.

use similar::{Algorithm, DiffTag, capture_diff_slices};

/// Most words of either text between the common beginning and the common end. The time for a diff grows with their
/// square.
pub const MAX_DIFF_WORDS: usize = 5000;

/// What happens to a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit {
    /// The piece is in both texts.
    Equal,
    /// The piece is only in the first text.
    Delete,
    /// The piece is only in the second text.
    Insert,
}

/// The error for texts with too many words that differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at most {MAX_DIFF_WORDS} words between the first and the last difference, found {found}")]
pub struct TooDifferent {
    /// The number of words in the differing part of the text that has more.
    pub found: usize,
}

/// Returns the pieces of both texts in order. The equal and the deleted pieces make up `one`; the equal and the
/// inserted pieces make up `other`.
///
/// # Errors
/// The texts have too many words between the common beginning and the common end.
pub fn diff(one: &str, other: &str) -> Result<Vec<(Edit, String)>, TooDifferent> {
    let (old, new) = (words(one), words(other));
    let start = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
    let rest = old.len().min(new.len()) - start;
    let backwards = old.iter().rev().zip(new.iter().rev()).take(rest);
    let end = backwards.take_while(|(old, new)| old == new).count();
    let (changed_old, changed_new) = (&old[start..old.len() - end], &new[start..new.len() - end]);
    let found = changed_old.len().max(changed_new.len());
    if found > MAX_DIFF_WORDS {
        return Err(TooDifferent { found });
    }
    let mut pieces = Vec::new();
    add(&mut pieces, Edit::Equal, &old[..start]);
    for change in capture_diff_slices(Algorithm::Myers, changed_old, changed_new) {
        let (tag, before, after) = change.as_tag_tuple();
        if tag == DiffTag::Equal {
            add(&mut pieces, Edit::Equal, &changed_old[before]);
        } else {
            add(&mut pieces, Edit::Delete, &changed_old[before]);
            add(&mut pieces, Edit::Insert, &changed_new[after]);
        }
    }
    add(&mut pieces, Edit::Equal, &old[old.len() - end..]);
    Ok(pieces)
}

/// Appends words to the last piece, or as a new piece.
fn add(pieces: &mut Vec<(Edit, String)>, edit: Edit, words: &[&str]) {
    let text = words.concat();
    match pieces.last_mut() {
        Some((last, before)) if *last == edit => before.push_str(&text),
        _ if text.is_empty() => {}
        _ => pieces.push((edit, text)),
    }
}

/// Splits a text into words, each with the white space before it. Every character that is neither a letter nor a digit
/// is a word of its own.
fn words(mut text: &str) -> Vec<&str> {
    let mut words = Vec::new();
    while !text.is_empty() {
        let (word, rest) = text.split_at(first_word(text));
        words.push(word);
        text = rest;
    }
    words
}

/// Returns the length of the first word in bytes.
fn first_word(text: &str) -> usize {
    let start = text.find(|c: char| !c.is_whitespace()).unwrap_or(text.len());
    let rest = &text[start..];
    let letters = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len());
    start + if letters > 0 { letters } else { rest.chars().next().map_or(0, char::len_utf8) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn marked(one: &str, other: &str) -> String {
        let piece = |(edit, text)| match edit {
            Edit::Equal => text,
            Edit::Delete => format!("[-{text}]"),
            Edit::Insert => format!("[+{text}]"),
        };
        diff(one, other).unwrap().into_iter().map(piece).collect()
    }

    #[test]
    fn words_are_deleted_and_inserted_whole() {
        for (one, other, expected) in [
            ("", "", ""),
            ("A fox.", "A fox.", "A fox."),
            ("", " A fox", "[+ A fox]"),
            ("A fox ran.", "A hare ran.", "A[- fox][+ hare] ran."),
            ("A fox ran home.", "A fox, an old one, ran.", "A fox[+, an old one,] ran[- home]."),
            ("the the the", "the the", "the the[- the]"),
            ("Ein Füchslein 🦊", "Ein Fuchs 🦊", "Ein[- Füchslein][+ Fuchs] 🦊"),
            ("one\n\ntwo", "one two  ", "one[-\n\ntwo][+ two  ]"),
        ] {
            assert_eq!(marked(one, other), expected);
        }
    }

    #[test]
    fn the_limit_counts_what_lies_between_the_first_and_the_last_difference() {
        let same = " same".repeat(20_000);
        let text = |word: &str, count| format!("{same}{}{same}", format!(" {word}").repeat(count));
        let pieces = diff(&text("a", MAX_DIFF_WORDS), &text("b", MAX_DIFF_WORDS)).unwrap();
        assert_eq!(
            pieces.iter().map(|piece| piece.0).collect::<Vec<_>>(),
            [Edit::Equal, Edit::Delete, Edit::Insert, Edit::Equal]
        );
        let refused = diff(&text("a", 1), &text("b", MAX_DIFF_WORDS + 1)).unwrap_err();
        assert_eq!(refused, TooDifferent { found: MAX_DIFF_WORDS + 1 });
        assert!(refused.to_string().contains("5000 words"));
    }

    proptest! {
        #[test]
        fn the_pieces_make_up_both_texts(one in "[ab é.\n]{0,40}", other in "[ab é.\n]{0,40}") {
            let pieces = diff(&one, &other).unwrap();
            let without = |edit| -> String {
                pieces.iter().filter(|piece| piece.0 != edit).map(|piece| piece.1.as_str()).collect()
            };
            prop_assert_eq!(without(Edit::Insert), one);
            prop_assert_eq!(without(Edit::Delete), other);
            prop_assert!(pieces.windows(2).all(|pair| pair[0].0 != pair[1].0));
            prop_assert!(pieces.iter().all(|piece| !piece.1.is_empty()));
        }
    }
}
