//! Stop strings, found across token boundaries.
//!
//! The text ends as soon as it contains a stop string, however it is split into tokens. If the same byte completes
//! several stop strings, the longest one counts. Neither it nor anything after it is returned. Text that may be the
//! beginning of a stop string is held back.

use std::sync::Arc;

/// Most stop strings per request.
pub const MAX_STOP_STRINGS: usize = 16;

/// Longest stop string in bytes. Each prompt of a request needs a table several times this size.
const MAX_STOP_BYTES: usize = 1024;

/// Why stop strings were refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// There are too many strings.
    #[error("stop must contain at most {MAX_STOP_STRINGS} strings, found {0}")]
    TooMany(usize),
    /// A string is empty, which would stop every text at once.
    #[error("stop must not contain an empty string")]
    Empty,
    /// A string is too long.
    #[error("stop must contain strings of at most {MAX_STOP_BYTES} bytes, found one of {0}")]
    TooLong(usize),
}

/// The checked stop strings of one request.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    patterns: Arc<[Pattern]>,
    /// How many of them the request has named; the others begin a turn.
    own: usize,
}

impl StopStrings {
    /// Checks and prepares `strings`.
    ///
    /// # Errors
    /// There are more than [`MAX_STOP_STRINGS`] strings, or a string is empty or longer than 1024 bytes.
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
        let patterns = strings.iter().map(|string| Pattern::new(string.as_ref())).collect();
        Ok(Self { patterns, own: strings.len() })
    }

    /// Also ends the text where the conversation's next turn begins, with one of `turns`.
    #[must_use]
    pub fn with_turns(self, turns: &[&str]) -> Self {
        if turns.is_empty() {
            return self;
        }
        let turns = turns.iter().map(|turn| Pattern::new(turn));
        Self { patterns: self.patterns.iter().cloned().chain(turns).collect(), own: self.own }
    }
}

/// A stop string with its Knuth-Morris-Pratt table, so that each byte of text takes amortized constant time.
///
/// Comparing bytes is enough, because UTF-8 is self-synchronizing: matches start and end between characters.
#[derive(Clone, Debug)]
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

    /// Returns how many leading bytes of this string end the text after `byte` is appended, if the text ended with
    /// `matched` of them before.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && byte != self.bytes[matched] {
            matched = self.borders[matched - 1];
        }
        matched + usize::from(byte == self.bytes[matched])
    }
}

/// Searches a growing text for its stop strings.
#[derive(Debug)]
pub struct StopMatcher {
    stops: StopStrings,
    /// For each stop string, how many of its leading bytes are at the end of the text.
    matched: Vec<usize>,
    /// The end of the text, which may be the beginning of a stop string.
    held: String,
    /// The stop string that was found.
    found: Option<usize>,
}

impl StopMatcher {
    /// Creates a matcher at the start of a text.
    pub fn new(stops: StopStrings) -> Self {
        let matched = vec![0; stops.patterns.len()];
        Self { stops, matched, held: String::new(), found: None }
    }

    /// Continues where another matcher stopped with this [`Self::held`] text. With the same stop strings, no other part
    /// of the earlier text matters; with others, text that they do not hold back is appended to `out`.
    pub fn resume(stops: StopStrings, held: &str, out: &mut String) -> Self {
        let mut matcher = Self::new(stops);
        matcher.push(held, out);
        matcher
    }

    /// Whether there are any stop strings.
    pub fn has_strings(&self) -> bool {
        !self.stops.patterns.is_empty()
    }

    /// Whether a stop string has been found.
    pub fn is_stopped(&self) -> bool {
        self.found.is_some()
    }

    /// Returns the stop string that was found.
    pub fn found(&self) -> Option<&str> {
        let pattern = &self.stops.patterns[self.found?];
        std::str::from_utf8(&pattern.bytes).ok()
    }

    /// Whether the string that was found begins the next turn, and is not one that the request has named.
    pub fn found_turn(&self) -> bool {
        self.found.is_some_and(|found| found >= self.stops.own)
    }

    /// Returns the end of the text, which is held back because it may be the beginning of a stop string.
    pub fn held(&self) -> &str {
        &self.held
    }

    /// Adds `text`, and appends to `out` what cannot be part of a stop string. Returns whether a stop string has been
    /// found; after that, nothing more is appended.
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
        self.release(out);
        false
    }

    /// Adds `text` in which no stop string may end yet. A stop string that lies within it counts as ordinary text; one
    /// that only begins in it still counts.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        if self.is_stopped() {
            return;
        }
        self.held.push_str(text);
        for byte in text.bytes() {
            self.advance(byte);
        }
        self.release(out);
    }

    /// Adds one byte. Returns the longest stop string that it completes.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut longest: Option<usize> = None;
        for (index, (pattern, matched)) in self.stops.patterns.iter().zip(&mut self.matched).enumerate() {
            *matched = pattern.advance(*matched, byte);
            if *matched == pattern.bytes.len() {
                // If the text continues, its end may be the beginning of the same string again.
                *matched = pattern.borders[*matched - 1];
                longest = longest.filter(|other| self.stops.patterns[*other].bytes.len() >= pattern.bytes.len());
                longest = longest.or(Some(index));
            }
        }
        longest
    }

    /// Releases what can no longer be part of a stop string.
    fn release(&mut self, out: &mut String) {
        let hold = self.matched.iter().copied().max().unwrap_or(0);
        let free = self.held.len() - hold;
        out.extend(self.held.drain(..free));
    }

    /// Ends the text and releases all text held back.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, applied to the whole text: for each end in order, the longest stop string that ends there.
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
    fn a_stop_string_across_pieces_is_found_and_not_returned() {
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
    fn held_text_is_released_if_it_was_no_stop_string() {
        assert_eq!(run(&owned(&["a<", "/", "b>"]), &owned(&["</s>"])), ("a</b>".into(), false));
        assert_eq!(run(&owned(&["a</"]), &owned(&["</s>"])), ("a</".into(), false));
    }

    #[test]
    fn the_first_completed_stop_string_counts_and_among_those_the_longest() {
        assert_eq!(run(&owned(&["xabc"]), &owned(&["abc", "b"])), ("xa".into(), true));
        assert_eq!(run(&owned(&["xabc"]), &owned(&["bc", "abc", "c"])), ("x".into(), true));
        assert_eq!(run(&owned(&["aab", "aaac"]), &owned(&["aaac"])), ("aab".into(), true));
    }

    #[test]
    fn errors_name_the_limits() {
        assert_eq!(StopStrings::new(&["a", ""]).unwrap_err(), StopError::Empty);
        assert_eq!(StopStrings::new(&["x"; 17]).unwrap_err(), StopError::TooMany(17));
        assert!(StopStrings::new(&["x"; 16]).is_ok());
        assert_eq!(StopStrings::new(&["x".repeat(1025)]).unwrap_err(), StopError::TooLong(1025));
        assert!(StopStrings::new(&["x".repeat(1024)]).is_ok());
    }

    #[test]
    fn the_stop_string_found_is_reported() {
        for (text, found) in [("xabc", Some("abc")), ("xbc", Some("bc")), ("xb", None)] {
            let mut matcher = StopMatcher::new(StopStrings::new(&["bc", "abc", "c"]).unwrap());
            matcher.push(text, &mut String::new());
            assert_eq!(matcher.found(), found, "{text}");
        }
    }

    #[test]
    fn a_stop_string_within_passed_text_is_ignored_and_one_that_ends_later_counts() {
        let (mut matcher, mut out) = (StopMatcher::new(StopStrings::new(&["aba", "<e>"]).unwrap()), String::new());
        matcher.pass("<e>xaba", &mut out);
        assert_eq!((out.as_str(), matcher.held(), matcher.is_stopped()), ("<e>xab", "a", false));
        assert!(!matcher.push("b", &mut out), "the same bytes do not count twice");
        assert!(matcher.push("a", &mut out));
        assert_eq!((out.as_str(), matcher.found()), ("<e>xab", Some("aba")));
    }

    proptest! {
        // A small alphabet of 1-, 2-, 3- and 4-byte characters that share their first bytes makes overlaps common.
        #[test]
        fn any_split_gives_the_result_of_the_whole_text(
            pieces in prop::collection::vec("[abéê☃☄🦀🦁]{0,4}", 0..16),
            stops in prop::collection::vec("[abéê☃☄🦀🦁]{1,4}", 0..5),
        ) {
            let text = pieces.concat();
            let (expected, stopped) = reference(&text, &stops);
            prop_assert_eq!(run(&pieces, &stops), (expected.to_owned(), stopped));
        }

        #[test]
        fn a_resumed_matcher_gives_the_result_of_the_whole_text(
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
        fn returned_text_is_never_retracted(
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

    #[test]
    fn a_turn_ends_the_text_and_is_not_one_of_the_strings_of_the_request() {
        let stops = || StopStrings::new(&["END"]).unwrap().with_turns(&["\n\nUser:"]);
        for (text, shown, turn) in [("a\n\nUser: b", "a", true), ("a END\n\nUser:", "a ", false)] {
            let (mut matcher, mut out) = (StopMatcher::new(stops()), String::new());
            assert!(matcher.push(text, &mut out));
            assert_eq!((out.as_str(), matcher.found_turn()), (shown, turn), "{text}");
        }
        let (mut matcher, mut out) = (StopMatcher::new(stops()), String::new());
        assert!(!matcher.push("a\n\nUse", &mut out) && !matcher.found_turn());
        assert_eq!((out.as_str(), matcher.held()), ("a", "\n\nUse"));
    }
}
