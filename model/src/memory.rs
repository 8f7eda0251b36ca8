//! What the states of all mixers share: the element type, and the count of denominators.

/// The element type of the large parts of a state: S, keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateType {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16, which halves the bytes that a step moves. S is rounded stochastically, with a seed that depends only
    /// on the text; keys and values, which are written once, are rounded to nearest.
    Bf16,
}

/// Counts of the denominators (`phi_q . z`) that outputs were divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Denominators {
    /// One per token, layer and head; an encoder-decoder has one more for cross attention.
    pub all: u64,
    /// Denominators that were below their floor and clamped to it.
    pub clamped: u64,
}

impl Denominators {
    /// Adds the counts of one layer.
    pub(crate) fn note(&mut self, all: usize, clamped: u64) {
        self.all += all as u64;
        self.clamped += clamped;
    }
}
