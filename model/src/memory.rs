//! What the states of all mixers share: the type of their numbers, and the count of denominators.

/// The type of the large numbers of a state: S, keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateType {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16, which halves the bytes that a step moves. S is rounded stochastically, seeded by the text alone; keys and
    /// values, which are written once, are rounded to the nearest.
    Bf16,
}

/// Denominators (`phi_q . z`) that tokens were divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Denominators {
    /// One for each token, layer and head; for an encoder-decoder one more for cross attention.
    pub all: u64,
    /// Those that were below their floor, and clamped to it.
    pub clamped: u64,
}

impl Denominators {
    /// Adds the denominators of one layer.
    pub(crate) fn note(&mut self, all: usize, clamped: u64) {
        self.all += all as u64;
        self.clamped += clamped;
    }
}
