//! Detects where a prompt leaves the model's reasoning, which the model writes in `<think>…</think>` before its answer.

use serde::{Deserialize, Serialize};

/// The tag that begins the reasoning.
pub const REASONING_OPENS: &str = "<think>";
/// The tag that ends the reasoning.
pub const REASONING_CLOSES: &str = "</think>";
/// The last character of a tag. RWKV's prompts end before it, because it forms one token with what follows it.
const END: char = '>';

/// What the text after a prompt must begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReasoningStart {
    /// The answer, or the opening tag and the reasoning.
    Free,
    /// The end of the opening tag.
    InOpeningTag,
    /// The reasoning.
    Open,
    /// The end of the closing tag.
    InClosingTag,
}

impl ReasoningStart {
    /// Returns the start for a text that follows `prompt`, the end of a prompt.
    #[must_use]
    pub fn after(prompt: &[u8]) -> Self {
        let begins = |tag: &str| prompt.ends_with(tag.trim_end_matches(END).as_bytes());
        if prompt.trim_ascii_end().ends_with(REASONING_OPENS.as_bytes()) {
            Self::Open
        } else if begins(REASONING_OPENS) {
            Self::InOpeningTag
        } else if begins(REASONING_CLOSES) {
            Self::InClosingTag
        } else {
            Self::Free
        }
    }
}
