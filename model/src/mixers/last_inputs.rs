//! The last inputs of what looks back a fixed number of tokens: a convolution, or a token shift.

use super::layer::{Kept, SlotState};
use crate::error::{ModelError, Result};

/// The last inputs of every slot: (slots, len), zeros before the start of a text; nothing if `len` is 0
#[derive(Debug)]
pub(crate) struct LastInputs {
    numbers: Vec<f32>,
    len: usize,
    /// The inputs of the last step of drafts: (rows, time, inputs of a token)
    drafts: Vec<f32>,
    /// The last inputs before it: (rows, len)
    before: Vec<f32>,
}

impl LastInputs {
    /// The inputs of `slots` empty texts.
    pub(super) fn zeros(slots: usize, len: usize) -> Self {
        Self { numbers: vec![0.0; slots * len], len, drafts: Vec::new(), before: Vec::new() }
    }

    /// The inputs of a slot: (len)
    pub(super) fn of(&mut self, slot: usize) -> Result<&mut [f32]> {
        ModelError::check_slot(slot, self.numbers.len() / self.len.max(1))?;
        Ok(&mut self.numbers[slot * self.len..][..self.len])
    }

    /// Runs a step of drafts, and takes the slots back to where they were. inputs: (rows, time, inputs of a token)
    pub(super) fn draft(
        &mut self,
        slots: &[usize],
        inputs: &[f32],
        step: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.drafts.clear();
        self.drafts.extend_from_slice(inputs);
        self.before.clear();
        for &slot in slots {
            ModelError::check_slot(slot, self.numbers.len() / self.len.max(1))?;
            self.before.extend_from_slice(&self.numbers[slot * self.len..][..self.len]);
        }
        step(self)?;
        for (&slot, before) in slots.iter().zip(self.before.chunks_exact(self.len.max(1))) {
            self.numbers[slot * self.len..][..self.len].copy_from_slice(before);
        }
        Ok(())
    }

    /// Advances a slot by the drafts that it keeps.
    pub(super) fn keep(&mut self, kept: Kept) -> Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        let Kept { row, time, count, .. } = kept;
        let drafts = std::mem::take(&mut self.drafts);
        let of_row = drafts.len() * self.len / self.before.len().max(1);
        let new = &drafts[row * of_row..][..of_row / time * count];
        let last = self.of(kept.slot)?;
        if new.len() >= last.len() {
            last.copy_from_slice(&new[new.len() - last.len()..]);
        } else {
            last.copy_within(new.len().., 0);
            let at = last.len() - new.len();
            last[at..].copy_from_slice(new);
        }
        self.drafts = drafts;
        Ok(())
    }
}

impl SlotState for LastInputs {
    fn bytes(&self) -> usize {
        self.len * size_of::<f32>()
    }

    fn reset(&mut self, slot: usize) {
        self.numbers[slot * self.len..][..self.len].fill(0.0);
    }

    fn read(&self, slot: usize, out: &mut Vec<f32>) {
        out.extend_from_slice(&self.numbers[slot * self.len..][..self.len]);
    }

    fn write(&mut self, slot: usize, numbers: &[f32], _: u64) {
        self.numbers[slot * self.len..][..self.len].copy_from_slice(numbers);
    }
}
