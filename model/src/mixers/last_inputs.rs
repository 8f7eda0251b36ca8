//! The last inputs of what looks back a fixed number of tokens: a convolution, or a token shift.

use super::layer::SlotState;
use crate::error::{ModelError, Result};

/// The last inputs of every slot: (slots, len), zeros before the start of a text; nothing if `len` is 0
#[derive(Debug)]
pub(crate) struct LastInputs {
    numbers: Vec<f32>,
    len: usize,
}

impl LastInputs {
    /// The inputs of `slots` empty texts.
    pub(super) fn zeros(slots: usize, len: usize) -> Self {
        Self { numbers: vec![0.0; slots * len], len }
    }

    /// The inputs of a slot: (len)
    pub(super) fn of(&mut self, slot: usize) -> Result<&mut [f32]> {
        ModelError::check_slot(slot, self.numbers.len() / self.len.max(1))?;
        Ok(&mut self.numbers[slot * self.len..][..self.len])
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
