//! Reasoning in front of what a grammar describes.

use crate::text::reasoning::{REASONING_CLOSES, REASONING_OPENS, ReasoningStart};

/// Most white space between the reasoning and the answer. An answer may need more at its own beginning.
const MAX_SPACE: usize = 8;

/// Most white space before reasoning that the prompt has not begun: as much as whoever separates it from the answer holds back.
const MAX_SPACE_BEFORE: usize = 64;

/// The regular expression, in Lark, of a text up to the beginning of the answer: the reasoning, its tags as far as the prompt
/// does not have them, and white space. It ends at the first closing tag.
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

/// The regular expression, in Lark, of a text that begins with reasoning which the prompt has not begun.
pub(super) fn begins() -> String {
    format!("/\\s{{0,{MAX_SPACE_BEFORE}}}{REASONING_OPENS}(?s:.*)/")
}
