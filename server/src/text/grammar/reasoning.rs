//! Grammars for reasoning in front of the answer.

use crate::text::reasoning::{REASONING_CLOSES, REASONING_OPENS, ReasoningStart};

/// Most white space between reasoning and answer. The answer's own grammar may allow more at its beginning.
const MAX_SPACE: usize = 8;

/// Most white space before reasoning that the prompt has not begun: as much as the code that separates reasoning from
/// the answer holds back.
const MAX_SPACE_BEFORE: usize = 64;

/// Returns a regular expression, in Lark, for the text before the answer: the reasoning, those of its tags that the
/// prompt does not contain, and white space. It ends at the first closing tag.
pub(super) fn section(start: ReasoningStart) -> String {
    let close = REASONING_CLOSES.replace('/', "\\/");
    let inside = format!("(/(?s:.*)/ & ~/(?s:.*){close}(?s:.*)/) /{close}\\s{{0,{MAX_SPACE}}}/");
    match start {
        ReasoningStart::Free => format!("/\\s{{0,{MAX_SPACE_BEFORE}}}{REASONING_OPENS}/ {inside}"),
        ReasoningStart::InOpeningTag => format!("\">\" {inside}"),
        ReasoningStart::Open => inside,
        ReasoningStart::InClosingTag => format!("/>\\s{{0,{MAX_SPACE}}}/"),
    }
}

/// Returns a regular expression, in Lark, for a text that begins with reasoning which the prompt has not begun.
pub(super) fn begins() -> String {
    format!("/\\s{{0,{MAX_SPACE_BEFORE}}}{REASONING_OPENS}(?s:.*)/")
}
