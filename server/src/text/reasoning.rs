//! Where a prompt leaves a model's reasoning, which the model writes in `<think>…</think>` before its answer.

use serde::{Deserialize, Serialize};

/// What begins the reasoning.
pub const REASONING_OPENS: &str = "<think>";
/// What ends it.
pub const REASONING_CLOSES: &str = "</think>";
/// What tags end with. RWKV's prompts end before it, because it is one token with what follows it.
const END: char = '>';

/// What the text after a prompt has to begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReasoningStart {
    /// The answer, or a tag and the reasoning.
    Free,
    /// The end of the tag that begins the reasoning.
    InOpeningTag,
    /// The reasoning.
    Open,
    /// The end of the tag that ends the reasoning.
    InClosingTag,
}

impl ReasoningStart {
    /// After a prompt that ends with `prompt`.
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
