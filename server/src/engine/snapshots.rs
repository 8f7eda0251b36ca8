//! Snapshots of running requests: within the prompt, after it, and at the end of the text.

use tidegate_model::{LanguageModel, ModelError};

use super::forced::MOST;
use super::generation::Ending;
use super::rollback::{Position, Rollback};
use super::sequence::{Phase, Sequence};
use super::text_rules::TextRules;
use crate::session::{Recent, Snapshot};

/// A snapshot, and whether the slot holds exactly its state.
pub(super) struct EndSnapshot {
    pub(super) snapshot: Snapshot,
    pub(super) is_in_slot: bool,
}

/// What the snapshot at the end of a text needs.
#[expect(clippy::large_enum_variant, reason = "it is moved once, at the end of a text")]
pub(super) enum End {
    /// The snapshot itself: nothing more is needed.
    Complete(EndSnapshot),
    /// The state of the slot, to be passed to [`of_slot`]. `open` says whether the answer stays open.
    NeedsState { open: bool },
    /// That the unread tokens are read in chunks; then the state of the slot.
    ReadsBack,
}

/// Returns the snapshot after what has been read of the prompt. Other requests with the same beginning can continue
/// from it.
pub(super) fn of_prompt(state: Vec<f32>, sequence: &Sequence) -> Snapshot {
    let Position { read, history } = sequence.position;
    Snapshot { state, read, pending: sequence.pending().into_iter().collect(), history, ..Snapshot::default() }
}

fn snapshot(sequence: &Sequence, state: Vec<f32>, position: Position, pending: Vec<u32>, open: bool) -> Snapshot {
    let Position { read, history } = position;
    let (sampler, answer) = (sequence.generation.sampler.state(), sequence.answer(open));
    let recent = Recent(sequence.drafts.as_ref().map_or_else(Vec::new, |drafts| drafts.before(pending.len())));
    Snapshot { state, read, pending, history, sampler, answer, recent }
}

/// Takes the snapshot at the end of a request's text: the text that was shown, without what ended it.
pub(super) fn at_end<M: LanguageModel>(
    model: &mut M,
    slot: usize,
    sequence: &mut Sequence,
    ending: Ending,
    rules: &TextRules,
) -> Result<End, ModelError> {
    Ok(match (ending, sequence.rollback.take()) {
        (Ending::StopString, Some(rollback)) => roll_back(model, slot, sequence, rollback, rules)?,
        (Ending::Length | Ending::Interrupted, Some(Rollback { state, position, tokens, .. })) => {
            let snapshot = snapshot(sequence, state, position, tokens, true);
            End::Complete(EndSnapshot { snapshot, is_in_slot: false })
        }
        (Ending::Length | Ending::Interrupted, None) => needs_state(model, slot, sequence, true)?,
        // The last token is part of the text, and nothing is held back any more.
        (Ending::Grammar, _) => needs_state(model, slot, sequence, false)?,
        (Ending::Eos(_) | Ending::StopToken(_) | Ending::StopString, _) => {
            // The pending token has ended the text and is not part of it.
            if let Some(token) = sequence.pending() {
                sequence.phase = Phase::Decode { pending: None };
                sequence.take_back(token);
            }
            needs_state(model, slot, sequence, false)?
        }
    })
}

/// Makes the state catch up with the text.
fn needs_state<M: LanguageModel>(
    model: &mut M,
    slot: usize,
    sequence: &mut Sequence,
    open: bool,
) -> Result<End, ModelError> {
    sequence.read_unread(model, slot, usize::MAX)?;
    // A slot that has read nothing has no state.
    Ok(if sequence.position.read == 0 {
        End::Complete(of_slot(Vec::new(), sequence, open))
    } else {
        End::NeedsState { open }
    })
}

/// Returns the snapshot of a slot that holds `state`, with the pending token if there is one.
pub(super) fn of_slot(state: Vec<f32>, sequence: &Sequence, open: bool) -> EndSnapshot {
    let pending = sequence.pending().into_iter().collect();
    let snapshot = snapshot(sequence, state, sequence.position, pending, open);
    EndSnapshot { is_in_slot: snapshot.read > 0, snapshot }
}

/// Goes back to the rollback point of a text that a stop string has ended. The text shown since is read again, at once
/// or, if it is long, in chunks between the steps of other requests.
fn roll_back<M: LanguageModel>(
    model: &mut M,
    slot: usize,
    sequence: &mut Sequence,
    rollback: Rollback,
    rules: &TextRules,
) -> Result<End, ModelError> {
    let Rollback { state, position, tokens, shown } = rollback;
    for token in tokens {
        sequence.take_back(token);
    }
    if shown.is_empty() {
        let snapshot = snapshot(sequence, state, position, Vec::new(), false);
        return Ok(End::Complete(EndSnapshot { snapshot, is_in_slot: false }));
    }
    if position.read == 0 {
        model.reset(slot)?;
    } else {
        model.import(slot, &state, position.read)?;
    }
    // A stop string may begin within a token: the part of that token's text before it is read as separate tokens.
    let rest = (rules.encode)(&shown);
    sequence.replace(&rest);
    (sequence.position, sequence.phase) = (position, Phase::ReadBack);
    (sequence.unread, sequence.retokenized) = (rest.clone(), rest);
    if sequence.unread.len() > MOST {
        return Ok(End::ReadsBack);
    }
    needs_state(model, slot, sequence, false)
}
