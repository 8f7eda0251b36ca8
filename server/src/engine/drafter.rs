//! Drafters: they propose tokens that may follow a text. The model then reads all of these draft tokens in one step.

/// The number of kinds of proposals.
pub const PROPOSAL_KINDS: usize = 24;

/// A token that may follow a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// The token.
    pub token: u32,
    /// The kind of evidence for it; the engine panics if it is not less than [`PROPOSAL_KINDS`]. For each text, the
    /// engine measures how often proposals of a kind are right.
    pub kind: usize,
}

/// Proposes draft tokens. They change how many steps a text takes, but never the text.
pub trait Drafter: Send {
    /// Appends at most `most` tokens that may follow `recent`, the last tokens of a text, to `draft`, which is empty.
    fn draft(&mut self, recent: &[u32], most: usize, draft: &mut Vec<Proposal>);
}
