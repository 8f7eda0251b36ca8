//! The last inputs of operations that look back a fixed number of tokens: a convolution, or token shifts.

use std::ops::Range;

use super::layer::{Kept, Rows, SlotState};
use crate::error::{ModelError, Result};

/// The last inputs of every slot: (slots, count, taps, width), oldest first, zeros before the start of a text
#[derive(Debug)]
pub(crate) struct LastInputs {
    numbers: Vec<f32>,
    /// Inputs per slot: one for a convolution, one for each token shift.
    count: usize,
    /// Elements per input: taps x width
    len: usize,
    width: usize,
    /// The tokens of each input in the last draft step: (rows, time, width)
    drafts: Vec<Vec<f32>>,
    /// The previous contents of an input for the rows of a draft step: (rows, taps, width)
    before: Vec<f32>,
}

impl LastInputs {
    /// The inputs of `slots` empty texts: `count` inputs that keep their last `taps` tokens; empty if `taps` is 0.
    pub(super) fn zeros(slots: usize, count: usize, (taps, width): (usize, usize)) -> Self {
        let len = taps * width;
        Self {
            numbers: vec![0.0; slots * count * len],
            count,
            len,
            width,
            drafts: vec![Vec::new(); count],
            before: Vec::new(),
        }
    }

    /// Elements per slot.
    fn of_slot(&self) -> usize {
        self.count * self.len
    }

    fn place(&self, slot: usize, input: usize) -> Result<Range<usize>> {
        ModelError::check_slot(slot, self.numbers.len() / self.of_slot().max(1))?;
        let start = (slot * self.count + input) * self.len;
        Ok(start..start + self.len)
    }

    /// An input of a slot: (taps, width)
    pub(super) fn of(&mut self, slot: usize, input: usize) -> Result<&mut [f32]> {
        let place = self.place(slot, input)?;
        Ok(&mut self.numbers[place])
    }

    /// Runs a step of an input. If its tokens are drafts, records them and restores the slots afterwards.
    ///
    /// tokens: each (width)
    pub(super) fn step<'a>(
        &mut self,
        input: usize,
        rows: Rows<'_>,
        tokens: impl Iterator<Item = &'a [f32]>,
        step: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if !rows.drafts {
            return step(self);
        }
        let drafts = &mut self.drafts[input];
        drafts.clear();
        tokens.for_each(|token| drafts.extend_from_slice(token));
        self.before.clear();
        for &slot in rows.slots {
            let place = self.place(slot, input)?;
            self.before.extend_from_slice(&self.numbers[place]);
        }
        step(self)?;
        for (&slot, before) in rows.slots.iter().zip(self.before.chunks_exact(self.len.max(1))) {
            let place = self.place(slot, input)?;
            self.numbers[place].copy_from_slice(before);
        }
        Ok(())
    }

    /// Advances a slot by the drafts that it keeps.
    pub(super) fn keep(&mut self, kept: Kept) -> Result<()> {
        let Kept { slot, row, time, count, .. } = kept;
        if self.len == 0 {
            return Ok(());
        }
        for input in 0..self.count {
            let place = self.place(slot, input)?;
            let drafts = &self.drafts[input][row * time * self.width..][..count * self.width];
            push(&mut self.numbers[place], drafts);
        }
        Ok(())
    }
}

/// Appends new inputs and drops the oldest, so that the length stays the same.
fn push(last: &mut [f32], new: &[f32]) {
    if new.len() >= last.len() {
        last.copy_from_slice(&new[new.len() - last.len()..]);
    } else {
        last.copy_within(new.len().., 0);
        let at = last.len() - new.len();
        last[at..].copy_from_slice(new);
    }
}

impl SlotState for LastInputs {
    fn bytes(&self) -> usize {
        self.of_slot() * size_of::<f32>()
    }

    fn reset(&mut self, slot: usize) {
        let len = self.of_slot();
        self.numbers[slot * len..][..len].fill(0.0);
    }

    fn read(&self, slot: usize, out: &mut Vec<f32>) {
        out.extend_from_slice(&self.numbers[slot * self.of_slot()..][..self.of_slot()]);
    }

    fn write(&mut self, slot: usize, numbers: &[f32], _: u64) {
        let len = self.of_slot();
        self.numbers[slot * len..][..len].copy_from_slice(numbers);
    }
}
