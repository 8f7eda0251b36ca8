//! The drafters of an engine.

use super::draft_model::DraftModel;
use super::drafter::Drafter;
use super::lookup::Lookup;
use super::row_drafts::RowDrafts;

/// The drafters of an engine; by default, none.
#[derive(Default)]
pub struct Drafters {
    /// Looks up draft tokens in the text itself.
    pub lookup: Option<Box<dyn Drafter>>,
    /// Proposes tokens where the lookup finds none, or is right less often.
    pub model: Option<DraftModel>,
}

impl Drafters {
    /// Prompt lookup, and a draft model if there is one. Prompt lookup proposes what followed the last tokens of a text
    /// where they occurred in it before.
    pub fn by_lookup(model: Option<DraftModel>) -> Self {
        Self { lookup: Some(Box::new(Lookup::default())), model }
    }
}

/// The drafters, and how many draft tokens they may propose for each row of a step.
pub(super) struct Speculation {
    pub(super) drafters: Drafters,
    pub(super) most: usize,
    /// Texts so far, used to number them.
    texts: u64,
}

impl Speculation {
    pub(super) fn new(drafters: Drafters, most: usize) -> Self {
        Self { drafters, most, texts: 0 }
    }

    /// Starts the draft state of a new text whose prompt ends with these tokens.
    pub(super) fn row(&mut self, prompt: &[u32]) -> RowDrafts {
        self.texts += 1;
        RowDrafts::new(self.texts, prompt)
    }
}
