//! Separates a model's reasoning, which it writes in `<think>…</think>` before its answer, from the answer.

use crate::text::{REASONING_CLOSES as CLOSE, REASONING_OPENS as OPEN, ReasoningStart};

/// The last character of a tag.
const END: char = '>';
/// Longest white space, in characters, that is held back because reasoning may begin or end after it. The grammar for
/// reasoning counts characters too.
const MAX_HELD: usize = 64;

/// The splitter's position in the text.
#[derive(Clone, Copy, Debug)]
enum At {
    /// At the beginning, where reasoning may begin.
    Start,
    /// Before the end of a tag that the prompt has begun.
    Begun {
        opens: bool,
    },
    /// Before the first word of the reasoning.
    Opened,
    Reasoning,
    /// Before the first word of the answer.
    Closed,
    Answer,
}

/// A piece of text, separated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Separated {
    pub(super) reasoning: String,
    pub(super) answer: String,
}

/// Splits one answer in a conversation. White space around the reasoning belongs to neither part.
#[derive(Debug)]
pub(super) struct ReasoningSplitter {
    at: At,
    /// Text that has not been classified yet.
    held: String,
}

impl ReasoningSplitter {
    pub(super) fn new(start: ReasoningStart) -> Self {
        let at = match start {
            ReasoningStart::Free => At::Start,
            ReasoningStart::InOpeningTag => At::Begun { opens: true },
            ReasoningStart::Open => At::Opened,
            ReasoningStart::InClosingTag => At::Begun { opens: false },
        };
        Self { at, held: String::new() }
    }

    /// Whether the answer has not begun.
    pub(super) fn is_before_answer(&self) -> bool {
        !matches!(self.at, At::Answer)
    }

    /// Whether reasoning has begun and not ended.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.at, At::Begun { opens: true } | At::Opened | At::Reasoning)
    }

    /// Whether the reasoning has words and has not ended.
    pub(super) fn is_in_words(&self) -> bool {
        matches!(self.at, At::Reasoning)
    }

    /// Adds text, and returns what can be classified.
    pub(super) fn push(&mut self, text: &str) -> Separated {
        let mut out = Separated::default();
        self.held.push_str(text);
        while self.step(&mut out) {}
        out
    }

    /// Ends the text, and returns what was held back. Reasoning may be cut off.
    pub(super) fn finish(&mut self) -> Separated {
        let held = std::mem::take(&mut self.held);
        match self.at {
            At::Start => Separated { answer: held, ..Separated::default() },
            At::Opened | At::Reasoning => Separated { reasoning: held.trim_end().into(), ..Separated::default() },
            At::Begun { .. } | At::Closed | At::Answer => Separated::default(),
        }
    }

    /// Classifies the beginning of the held text; returns whether to continue with the rest.
    fn step(&mut self, out: &mut Separated) -> bool {
        match self.at {
            At::Start => {
                let text = self.held.trim_start();
                if self.held[..self.held.len() - text.len()].chars().count() > MAX_HELD {
                    self.at = At::Answer;
                } else if let Some(rest) = text.strip_prefix(OPEN) {
                    (self.held, self.at) = (rest.into(), At::Opened);
                } else if OPEN.starts_with(text) {
                    return false;
                } else {
                    self.at = At::Answer;
                }
                true
            }
            At::Begun { opens } if !self.held.is_empty() => {
                if self.held.starts_with(END) {
                    self.held.remove(0);
                    self.at = if opens { At::Opened } else { At::Closed };
                } else {
                    self.at = At::Answer;
                }
                true
            }
            At::Begun { .. } => false,
            At::Opened | At::Closed => {
                self.held = self.held.trim_start().into();
                if self.held.is_empty() {
                    return false;
                }
                self.at = if matches!(self.at, At::Opened) { At::Reasoning } else { At::Answer };
                true
            }
            At::Reasoning => {
                if let Some((reasoning, answer)) = self.held.split_once(CLOSE) {
                    out.reasoning.push_str(reasoning.trim_end());
                    (self.held, self.at) = (answer.into(), At::Closed);
                    return true;
                }
                let begun = (1..CLOSE.len()).rev().find(|length| self.held.ends_with(&CLOSE[..*length])).unwrap_or(0);
                let sure = &self.held[..self.held.len() - begun];
                let shown = sure.trim_end().len();
                let shown = if sure[shown..].chars().count() > MAX_HELD { sure.len() } else { shown };
                out.reasoning.extend(self.held.drain(..shown));
                false
            }
            At::Answer => {
                out.answer.push_str(&self.held);
                self.held.clear();
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn split(prompt: &str, pieces: &[&str]) -> (String, String) {
        let mut splitter = ReasoningSplitter::new(ReasoningStart::after(prompt.as_bytes()));
        let mut all: Vec<Separated> = pieces.iter().map(|piece| splitter.push(piece)).collect();
        all.push(splitter.finish());
        let part = |of: fn(&Separated) -> &str| all.iter().map(of).collect::<String>();
        (part(|piece| &piece.reasoning), part(|piece| &piece.answer))
    }

    #[test]
    fn reasoning_before_an_answer_is_separated() {
        let space = " ".repeat(100);
        for (prompt, text, reasoning, answer) in [
            ("Assistant:", " <think>\nIs it?\n\nYes. </think>\n\nYes.\n", "Is it?\n\nYes.", "Yes.\n"),
            ("Assistant:", " Yes. <think>no</think>", "", " Yes. <think>no</think>"),
            ("Assistant:", "<thin", "", "<thin"),
            ("Assistant:", " ", "", " "),
            ("Assistant:", &format!("{space}<think>a"), "", &format!("{space}<think>a")),
            ("Assistant:", "<think></think>Yes", "", "Yes"),
            ("Assistant:", "<think>cut off </thin", "cut off </thin", ""),
            ("Assistant:", "<think>cut off \n", "cut off", ""),
            ("Assistant:", "<think>a < b</ </think>c</think>", "a < b</", "c</think>"),
            ("Assistant:", &format!("<think>a{space}b</think>c"), &format!("a{space}b"), "c"),
            ("Assistant: <think>\n", "Is it?</think>Yes.", "Is it?", "Yes."),
            ("Assistant: <think>", "</think>Yes.", "", "Yes."),
            ("<think>Yes", "no", "", "no"),
            ("Assistant: <think", ">\nIs it?</think>Yes.", "Is it?", "Yes."),
            ("Assistant: <think", "ing", "", "ing"),
            ("Assistant: <think", "", "", ""),
            ("Assistant: <think>\n</think", ">\nYes.", "", "Yes."),
        ] {
            assert_eq!(split(prompt, &[text]), (reasoning.into(), answer.into()), "{text}");
        }
    }

    #[test]
    fn nothing_is_held_back_longer_than_needed() {
        let mut splitter = ReasoningSplitter::new(ReasoningStart::Free);
        let reasoning = |text: &str| Separated { reasoning: text.into(), ..Separated::default() };
        assert_eq!(splitter.push("<think> Is"), reasoning("Is"));
        assert_eq!(splitter.push(" it?\n"), reasoning(" it?"));
        assert_eq!(splitter.push("</"), reasoning(""));
        assert_eq!(splitter.push("b>"), reasoning("\n</b>"));
        assert_eq!(splitter.push("</think>\nNo"), Separated { answer: "No".into(), ..Separated::default() });
        assert_eq!(splitter.push(" \n").answer, " \n");
    }

    /// The limit counts characters and not bytes, both inside reasoning and before it.
    #[test]
    fn white_space_is_held_back_by_its_characters() {
        let wide = "\u{3000}".repeat(MAX_HELD);
        let text = format!("{wide}<think>a{wide}</think>b");
        assert_eq!(split("Assistant:", &[&text]), ("a".into(), "b".into()));
        let mut splitter = ReasoningSplitter::new(ReasoningStart::Open);
        assert_eq!(splitter.push(&format!("a{wide}")).reasoning, "a");
        assert_eq!(splitter.push(" ").reasoning, format!("{wide} "));
    }

    proptest! {
        #[test]
        fn any_split_gives_the_parts_of_the_whole_text(
            pieces in prop::collection::vec("(<think>|</think>|<|/|think|>| |\n|a|☃){0,3}", 0..12),
            opened: bool,
        ) {
            let prompt = if opened { OPEN } else { "" };
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(split(prompt, &pieces), split(prompt, &[&pieces.concat()]));
        }
    }
}
