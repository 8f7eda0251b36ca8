//! The last inputs of what looks back a fixed number of tokens: a convolution, or token shifts.

use super::layer::{Kept, SlotState};
use crate::error::{ModelError, Result};

/// The last inputs of every slot: (slots, parts, taps, width), oldest first, zeros before the start of a text
#[derive(Debug)]
pub(crate) struct LastInputs {
    numbers: Vec<f32>,
    /// taps x width
    part: usize,
    width: usize,
    /// The inputs of each part in the last step of drafts: (rows, time, width)
    drafts: Vec<Vec<f32>>,
    /// The last inputs of a part before it: (rows, taps, width)
    before: Vec<f32>,
}

impl LastInputs {
    /// The inputs of `slots` empty texts: `parts` that remember the last `taps` tokens each; nothing if `taps` is 0.
    pub(super) fn zeros(slots: usize, parts: usize, (taps, width): (usize, usize)) -> Self {
        let part = taps * width;
        Self {
            numbers: vec![0.0; slots * parts * part],
            part,
            width,
            drafts: vec![Vec::new(); parts],
            before: Vec::new(),
        }
    }

    /// Numbers of a slot.
    fn len(&self) -> usize {
        self.drafts.len() * self.part
    }

    /// The inputs of a part of a slot: (taps, width)
    pub(super) fn of(&mut self, slot: usize, part: usize) -> Result<&mut [f32]> {
        ModelError::check_slot(slot, self.numbers.len() / self.len().max(1))?;
        Ok(&mut self.numbers[(slot * self.drafts.len() + part) * self.part..][..self.part])
    }

    /// Runs a step of a part; if its tokens are drafts, notes them and takes the slots back to where they were.
    ///
    /// inputs: those of each token, (width)
    pub(super) fn step<'a>(
        &mut self,
        part: usize,
        (slots, drafts): (&[usize], bool),
        inputs: impl Iterator<Item = &'a [f32]>,
        step: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if !drafts {
            return step(self);
        }
        let noted = &mut self.drafts[part];
        noted.clear();
        inputs.for_each(|token| noted.extend_from_slice(token));
        let mut before = std::mem::take(&mut self.before);
        before.clear();
        for &slot in slots {
            before.extend_from_slice(self.of(slot, part)?);
        }
        step(self)?;
        for (&slot, before) in slots.iter().zip(before.chunks_exact(self.part.max(1))) {
            self.of(slot, part)?.copy_from_slice(before);
        }
        self.before = before;
        Ok(())
    }

    /// Advances a slot by the drafts that it keeps.
    pub(super) fn keep(&mut self, kept: Kept) -> Result<()> {
        if self.part == 0 {
            return Ok(());
        }
        let (Kept { slot, row, time, count, .. }, width) = (kept, self.width);
        for part in 0..self.drafts.len() {
            let drafts = std::mem::take(&mut self.drafts[part]);
            push(self.of(slot, part)?, &drafts[row * time * width..][..count * width]);
            self.drafts[part] = drafts;
        }
        Ok(())
    }
}

/// Moves new inputs in behind the last, as many as there is room for.
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
        self.len() * size_of::<f32>()
    }

    fn reset(&mut self, slot: usize) {
        let len = self.len();
        self.numbers[slot * len..][..len].fill(0.0);
    }

    fn read(&self, slot: usize, out: &mut Vec<f32>) {
        out.extend_from_slice(&self.numbers[slot * self.len()..][..self.len()]);
    }

    fn write(&mut self, slot: usize, numbers: &[f32], _: u64) {
        let len = self.len();
        self.numbers[slot * len..][..len].copy_from_slice(numbers);
    }
}
