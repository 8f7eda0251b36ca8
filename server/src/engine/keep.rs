//! Snapshots of running requests: what is kept where a prompt ends, and where an answer does.

use tidegate_model::{LanguageModel, ModelError};

use super::ends::Ending;
use super::sequence::{Mark, Sequence, TextRules};
use crate::session::Snapshot;

/// A snapshot, and whether the slot holds just its state.
pub(super) struct Kept {
    pub(super) snapshot: Snapshot,
    pub(super) lies_in_slot: bool,
}

/// What the end of a text takes.
pub(super) enum End {
    /// Nothing more.
    There(Kept),
    /// The state of the slot, for [`whole`]; whether the answer is open.
    InSlot(bool),
}

/// The prompt's end, from which other requests with the same beginning can go on: the slot has `state`.
pub(super) fn prompt_end(state: Vec<f32>, sequence: &Sequence) -> Snapshot {
    Snapshot {
        state,
        read: sequence.read,
        pending: sequence.pending_token.into_iter().collect(),
        history: sequence.history,
        ..Snapshot::default()
    }
}

/// The end of a request's text: the text that was shown, with nothing of what ended it.
pub(super) fn end<M: LanguageModel>(
    model: &mut M,
    slot: usize,
    sequence: &mut Sequence,
    ending: Ending,
    rules: &TextRules,
) -> Result<End, ModelError> {
    Ok(match (ending, sequence.mark.take()) {
        (Ending::StopString, Some(mark)) => End::There(taken_back(model, slot, sequence, mark, rules)?),
        (Ending::Length | Ending::Interrupted, Some(mark)) => End::There(Kept {
            snapshot: Snapshot {
                state: mark.state,
                read: mark.read,
                pending: mark.tokens,
                history: mark.history,
                sampler: sequence.sampler.state(),
                answer: sequence.answer(true),
            },
            lies_in_slot: false,
        }),
        (Ending::Length | Ending::Interrupted, None) => in_slot(sequence, true),
        // Its last token is a part of the text, and nothing is held back any more.
        (Ending::Grammar, _) => in_slot(sequence, false),
        (Ending::Eos(_) | Ending::StopToken(_) | Ending::StopString, _) => {
            // What ended the text is the pending token, and is no part of it.
            if let Some(token) = sequence.pending_token.take() {
                sequence.sampler.take_back(token);
            }
            in_slot(sequence, false)
        }
    })
}

/// The slot's state is wanted, where anything has been read into it.
fn in_slot(sequence: &Sequence, open: bool) -> End {
    if sequence.read == 0 { End::There(whole(Vec::new(), sequence, open)) } else { End::InSlot(open) }
}

/// What the slot holds, which is `state`, and the pending token where there is one.
pub(super) fn whole(state: Vec<f32>, sequence: &Sequence, open: bool) -> Kept {
    let snapshot = Snapshot {
        state,
        read: sequence.read,
        pending: sequence.pending_token.into_iter().collect(),
        history: sequence.history,
        sampler: sequence.sampler.state(),
        answer: sequence.answer(open),
    };
    Kept { snapshot, lies_in_slot: sequence.read > 0 }
}

/// The text without the stop string: back to the mark before it, then on through what was shown since.
fn taken_back<M: LanguageModel>(
    model: &mut M,
    slot: usize,
    sequence: &mut Sequence,
    mark: Mark,
    rules: &TextRules,
) -> Result<Kept, ModelError> {
    let Mark { mut state, mut read, mut history, tokens, shown } = mark;
    for token in tokens {
        sequence.sampler.take_back(token);
    }
    // A token may end in the stop string's beginning: what it showed before is read as tokens of its own.
    let rest = if shown.is_empty() { Vec::new() } else { (rules.encode)(&shown) };
    if !rest.is_empty() {
        if read == 0 {
            model.reset(slot)?;
        } else {
            model.import(slot, &state, read)?;
        }
        model.absorb(&rest, slot)?;
        state = model.export(slot)?;
        read += rest.len() as u64;
        history = history.extended(&rest);
        sequence.sampler.observe_prompt(&rest);
    }
    let sampler = sequence.sampler.state();
    let snapshot = Snapshot { state, read, pending: Vec::new(), history, sampler, answer: sequence.answer(false) };
    Ok(Kept { snapshot, lies_in_slot: !rest.is_empty() })
}
