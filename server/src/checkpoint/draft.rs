//! The draft model: another checkpoint with the same tokens, which runs on the CPU.

use super::choice::DeviceChoice;
use super::error::OpenError;
use super::load::Files;
use super::model::{Model, open_model};
use super::options::OpenOptions;
use crate::engine::{DRAFT_SLOTS, DraftModel};
use crate::text::Vocabulary;

/// Loads the draft model for a model with this vocabulary and `vocab_size` logits. Returns it with the bytes that it
/// takes.
///
/// # Errors
/// The draft model cannot be loaded, or its tokens differ.
pub fn open_draft_model(
    files: &Files,
    vocabulary: &Vocabulary,
    vocab_size: usize,
) -> Result<(DraftModel, u64), OpenError> {
    let unsupported = |reason: String| OpenError::Unsupported { path: files.path.clone(), reason };
    let options = OpenOptions {
        vocabulary: files.vocabulary.clone(),
        device: DeviceChoice::Cpu,
        slots: DRAFT_SLOTS,
        ..OpenOptions::default()
    };
    let Model { model, text, weights } = open_model(&files.path, &options)?;
    if let Some(different) = first_difference(text.tokenizer.vocabulary(), vocabulary) {
        return Err(unsupported(format!("a draft model needs the tokens of the served model: {different}")));
    }
    // Each slot has its state, and a copy of the state from before the drafts.
    let bytes = weights + (2 * model.slots() * model.slot_bytes()) as u64;
    let model = DraftModel::new(model, vocab_size).map_err(|error| unsupported(error.to_string()))?;
    Ok((model, bytes))
}

/// Returns the first token that differs. Ids that only one vocabulary has do not count, because vocabularies are padded
/// to different sizes.
fn first_difference(draft: &Vocabulary, served: &Vocabulary) -> Option<String> {
    let quoted = |bytes: &[u8]| format!("\"{}\"", bytes.escape_ascii());
    let mut pairs = draft.tokens().zip(served.tokens()).enumerate();
    let different = pairs.find(|(_, (draft, served))| draft != served);
    different.map(|(id, (draft, served))| format!("token {id} is {} instead of {}", quoted(draft), quoted(served)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tokens: &[&[u8]]) -> Vocabulary {
        Vocabulary::new(tokens.iter().map(|token| (*token).into()).collect())
    }

    #[test]
    fn the_first_token_that_differs_is_named() {
        let served = of(&[b"a", b"b\xff", b""]);
        assert_eq!(first_difference(&of(&[b"a", b"b\xff"]), &served), None);
        assert_eq!(first_difference(&of(&[b"a", b"b\xff", b"", b""]), &served), None);
        let found = first_difference(&of(&[b"a", b"c"]), &served);
        assert_eq!(found.as_deref(), Some(r#"token 1 is "c" instead of "b\xff""#));
    }
}
