//! How states are held, and what steps count: what every mixer's memory shares.

/// How S is held in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateType {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16, rounded by chance (of the text alone): half the bytes of each step of many conversations. Keys and
    /// values, which are written once, are rounded to the nearest.
    Bf16,
}

impl Denominators {
    pub(crate) fn note(&mut self, all: usize, clamped: u64) {
        self.all += all as u64;
        self.clamped += clamped;
    }
}

/// Denominators (`phi_q . z`) that were divided by while texts were read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Denominators {
    /// One for each token, layer and head, and of an encoder-decoder another for cross attention.
    pub all: u64,
    /// Those of them that were below their floor, and were held there.
    pub clamped: u64,
}
