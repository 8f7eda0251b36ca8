//! Stop strings, found across token boundaries.
//!
//! The text ends at the first moment at which it contains a stop string, wherever its tokens are cut; of several
//! that are completed by the same byte, the longest counts, and neither it nor anything after it is shown. Text
//! that may yet turn out to be the beginning of a stop string is held back.

use std::sync::Arc;

/// How many stop strings a request may have.
pub const MAX_STOP_STRINGS: usize = 16;

/// Longest stop string. Its table takes several times its length, for each prompt of a request.
const MAX_STOP_BYTES: usize = 1024;

/// Why stop strings were refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// Too many.
    #[error("stop must hold at most {MAX_STOP_STRINGS} strings, found {0}")]
    TooMany(usize),
    /// An empty string stops everything at once.
    #[error("stop must hold no empty string")]
    Empty,
    /// Too long.
    #[error("stop must hold strings of at most {MAX_STOP_BYTES} bytes, found one of {0}")]
    TooLong(usize),
}

/// The stop strings of one request, at most [`MAX_STOP_STRINGS`], none empty, none long.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    patterns: Arc<[Pattern]>,
}

impl StopStrings {
    /// Checks and prepares `strings`.
    ///
    /// # Errors
    /// More than [`MAX_STOP_STRINGS`], an empty string, or one of more than 1024 bytes.
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Result<Self, StopError> {
        if strings.len() > MAX_STOP_STRINGS {
            return Err(StopError::TooMany(strings.len()));
        }
        if strings.iter().any(|string| string.as_ref().is_empty()) {
            return Err(StopError::Empty);
        }
        let longest = strings.iter().map(|string| string.as_ref().len()).max().unwrap_or(0);
        if longest > MAX_STOP_BYTES {
            return Err(StopError::TooLong(longest));
        }
        Ok(Self { patterns: strings.iter().map(|string| Pattern::new(string.as_ref())).collect() })
    }
}

/// A stop string with its Knuth-Morris-Pratt table: a byte of text costs constant time, however long the strings.
///
/// Bytes are enough: UTF-8 synchronises itself, so a match of whole strings starts and ends between characters,
/// and so does a match of a string's beginning with the end of a text.
#[derive(Debug)]
struct Pattern {
    bytes: Box<[u8]>,
    /// `borders[i]`: length of the longest proper prefix of `bytes[..=i]` that is also its suffix.
    borders: Box<[usize]>,
}

impl Pattern {
    fn new(string: &str) -> Self {
        let bytes: Box<[u8]> = string.as_bytes().into();
        let mut borders = vec![0; bytes.len()].into_boxed_slice();
        let mut matched = 0;
        for i in 1..bytes.len() {
            while matched > 0 && bytes[i] != bytes[matched] {
                matched = borders[matched - 1];
            }
            matched += usize::from(bytes[i] == bytes[matched]);
            borders[i] = matched;
        }
        Self { bytes, borders }
    }

    /// Bytes of this string that the text ends with, after `byte` was appended to a text that ended with `matched`.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && byte != self.bytes[matched] {
            matched = self.borders[matched - 1];
        }
        matched + usize::from(byte == self.bytes[matched])
    }
}

/// Follows one growing text and watches for its stop strings.
#[derive(Debug)]
pub struct StopMatcher {
    stops: StopStrings,
    /// Per stop string, how many of its bytes the text ends with.
    matched: Vec<usize>,
    /// The end of the text that may be the beginning of a stop string.
    held: String,
    /// The stop string that was found.
    found: Option<usize>,
}

impl StopMatcher {
    /// A matcher at the start of a text.
    pub fn new(stops: StopStrings) -> Self {
        let matched = vec![0; stops.patterns.len()];
        Self { stops, matched, held: String::new(), found: None }
    }

    /// A matcher that goes on where another with this [`Self::held`] text was. With the same stop strings nothing
    /// else of the text before matters; with others, what they do not hold back comes out with the next text.
    pub fn resume(stops: StopStrings, held: &str, out: &mut String) -> Self {
        let mut matcher = Self::new(stops);
        matcher.push(held, out);
        matcher
    }

    /// Whether there is any string to watch for.
    pub fn has_strings(&self) -> bool {
        !self.stops.patterns.is_empty()
    }

    /// Whether a stop string has been found.
    pub fn is_stopped(&self) -> bool {
        self.found.is_some()
    }

    /// The stop string that was found.
    pub fn found(&self) -> Option<&str> {
        let pattern = &self.stops.patterns[self.found?];
        // Made of a string, byte for byte.
        std::str::from_utf8(&pattern.bytes).ok()
    }

    /// The end of the text that is held back, since it may be the beginning of a stop string.
    pub fn held(&self) -> &str {
        &self.held
    }

    /// Takes the next `text`, appends to `out` what can no longer be part of a stop string, and returns whether
    /// a stop string has been found; from then on nothing comes out.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.is_stopped() {
            return true;
        }
        let scanned = self.held.len();
        self.held.push_str(text);
        for (offset, byte) in text.bytes().enumerate() {
            if let Some(found) = self.advance(byte) {
                let length = self.stops.patterns[found].bytes.len();
                out.push_str(&self.held[..scanned + offset + 1 - length]);
                self.held.clear();
                self.found = Some(found);
                return true;
            }
        }
        self.let_out(out);
        false
    }

    /// Takes the next `text` where no stop string may end yet: one that is whole within it is text like any other,
    /// one that only begins in it still counts.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        if self.is_stopped() {
            return;
        }
        self.held.push_str(text);
        for byte in text.bytes() {
            self.advance(byte);
        }
        self.let_out(out);
    }

    /// Takes one byte of the text; the longest of the stop strings that it completes.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut longest: Option<usize> = None;
        for (index, (pattern, matched)) in self.stops.patterns.iter().zip(&mut self.matched).enumerate() {
            *matched = pattern.advance(*matched, byte);
            if *matched == pattern.bytes.len() {
                // Where the text goes on, its end may be the string's beginning again.
                *matched = pattern.borders[*matched - 1];
                longest = longest.filter(|other| self.stops.patterns[*other].bytes.len() >= pattern.bytes.len());
                longest = longest.or(Some(index));
            }
        }
        longest
    }

    /// Lets out what can no longer be part of a stop string.
    fn let_out(&mut self, out: &mut String) {
        let hold = self.matched.iter().copied().max().unwrap_or(0);
        let free = self.held.len() - hold;
        out.extend(self.held.drain(..free));
    }

    /// Ends the text: what was held back was no stop string after all.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, on the whole text: for each end in order, the longest stop string that ends there.
    fn reference<'a>(text: &'a str, stops: &[String]) -> (&'a str, bool) {
        for end in 0..=text.len() {
            let Some(so_far) = text.get(..end) else { continue };
            if let Some(stop) = stops.iter().filter(|stop| so_far.ends_with(*stop)).max_by_key(|stop| stop.len()) {
                return (&so_far[..end - stop.len()], true);
            }
        }
        (text, false)
    }

    fn run(pieces: &[String], stops: &[String]) -> (String, bool) {
        let mut matcher = StopMatcher::new(StopStrings::new(stops).unwrap());
        let mut out = String::new();
        for piece in pieces {
            if matcher.push(piece, &mut out) {
                return (out, true);
            }
        }
        matcher.finish(&mut out);
        (out, false)
    }

    fn owned(strings: &[&str]) -> Vec<String> {
        strings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_stop_string_across_pieces_is_found_and_never_shown() {
        let mut matcher = StopMatcher::new(StopStrings::new(&["\n\nEnd"]).unwrap());
        let mut out = String::new();
        assert!(!matcher.push("one\n", &mut out));
        assert_eq!(out, "one", "the line feed may begin the stop string");
        assert!(!matcher.push("\nE", &mut out));
        assert_eq!(out, "one");
        assert!(matcher.push("nd and more", &mut out));
        assert_eq!(out, "one");
        assert!(matcher.push("again", &mut out));
        assert_eq!(out, "one");
    }

    #[test]
    fn held_text_comes_out_when_it_was_no_stop_string() {
        assert_eq!(run(&owned(&["a<", "/", "b>"]), &owned(&["</s>"])), ("a</b>".into(), false));
        assert_eq!(run(&owned(&["a</"]), &owned(&["</s>"])), ("a</".into(), false));
    }

    #[test]
    fn the_first_to_be_completed_wins_and_of_those_the_longest() {
        assert_eq!(run(&owned(&["xabc"]), &owned(&["abc", "b"])), ("xa".into(), true));
        assert_eq!(run(&owned(&["xabc"]), &owned(&["bc", "abc", "c"])), ("x".into(), true));
        assert_eq!(run(&owned(&["aab", "aaac"]), &owned(&["aaac"])), ("aab".into(), true));
    }

    #[test]
    fn bounds_are_named() {
        assert_eq!(StopStrings::new(&["a", ""]).unwrap_err(), StopError::Empty);
        assert_eq!(StopStrings::new(&["x"; 17]).unwrap_err(), StopError::TooMany(17));
        assert!(StopStrings::new(&["x"; 16]).is_ok());
        assert_eq!(StopStrings::new(&["x".repeat(1025)]).unwrap_err(), StopError::TooLong(1025));
        assert!(StopStrings::new(&["x".repeat(1024)]).is_ok());
    }

    #[test]
    fn the_string_that_was_found_is_told() {
        for (text, found) in [("xabc", Some("abc")), ("xbc", Some("bc")), ("xb", None)] {
            let mut matcher = StopMatcher::new(StopStrings::new(&["bc", "abc", "c"]).unwrap());
            matcher.push(text, &mut String::new());
            assert_eq!(matcher.found(), found, "{text}");
        }
    }

    #[test]
    fn a_string_that_is_passed_is_text_and_one_that_ends_later_still_counts() {
        let (mut matcher, mut out) = (StopMatcher::new(StopStrings::new(&["aba", "<e>"]).unwrap()), String::new());
        matcher.pass("<e>xaba", &mut out);
        assert_eq!((out.as_str(), matcher.held(), matcher.is_stopped()), ("<e>xab", "a", false));
        assert!(!matcher.push("b", &mut out), "nor does it end twice");
        assert!(matcher.push("a", &mut out));
        assert_eq!((out.as_str(), matcher.found()), ("<e>xab", Some("aba")));
    }

    proptest! {
        // A small alphabet of 1-, 2-, 3- and 4-byte characters that share their first bytes makes overlaps common.
        #[test]
        fn any_split_gives_what_the_whole_text_gives(
            pieces in prop::collection::vec("[abéê☃☄🦀🦁]{0,4}", 0..16),
            stops in prop::collection::vec("[abéê☃☄🦀🦁]{1,4}", 0..5),
        ) {
            let text = pieces.concat();
            let (expected, stopped) = reference(&text, &stops);
            prop_assert_eq!(run(&pieces, &stops), (expected.to_owned(), stopped));
        }

        #[test]
        fn a_matcher_resumed_anywhere_gives_what_the_whole_text_gives(
            pieces in prop::collection::vec("[abé☃]{0,3}", 0..12),
            stops in prop::collection::vec("[abé☃]{1,5}", 1..4),
        ) {
            let mut out = String::new();
            let mut matcher = StopMatcher::new(StopStrings::new(&stops).unwrap());
            let mut stopped = false;
            for piece in &pieces {
                let held = matcher.held().to_owned();
                matcher = StopMatcher::resume(StopStrings::new(&stops).unwrap(), &held, &mut out);
                stopped = matcher.push(piece, &mut out);
                if stopped {
                    break;
                }
            }
            matcher.finish(&mut out);
            prop_assert_eq!((out, stopped), run(&pieces, &stops));
        }

        #[test]
        fn what_has_been_shown_is_never_taken_back(
            pieces in prop::collection::vec("[abé☃]{0,3}", 0..16),
            stops in prop::collection::vec("[abé☃]{1,5}", 1..4),
        ) {
            let text = pieces.concat();
            let (expected, _) = reference(&text, &stops);
            let mut matcher = StopMatcher::new(StopStrings::new(&stops).unwrap());
            let mut out = String::new();
            for piece in &pieces {
                let stopped = matcher.push(piece, &mut out);
                prop_assert!(expected.starts_with(&out));
                if stopped {
                    break;
                }
            }
        }
    }
}
