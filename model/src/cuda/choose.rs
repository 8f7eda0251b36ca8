//! Sampling on the device (model/cuda/choose.cuh): the rows' plans are sent there, and the outcomes come back.

use super::device::{Buffer, CudaDevice};
use super::gpu::{Arg, Pinned, Result};
use super::ops::launch;
use super::plan::{CHOICE_BYTES, choice_words};
use crate::sampling::{NOBODY, Plans, ROW_WORDS, Sampled};

/// Threads per block, and buckets for the logits; as in model/cuda/choose.cuh.
const THREADS: usize = 1024;
const BUCKETS: usize = 2048;
/// log2 of the threads of a warp.
const WARP: u32 = 5;

/// The sampling plans of a step's rows, and the memory through which they reach the device.
#[derive(Debug)]
pub(super) struct Choices {
    pub(super) plans: Plans,
    vocab: usize,
    host: Box<dyn Pinned>,
    device: Buffer, // (rows, ROW_WORDS), then lists
}

/// The addresses of a step's logits and sampled tokens on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) logits: u64, // (rows, vocab)
    pub(super) chosen: u64, // (rows, 2)
}

impl Choices {
    pub(super) fn new(device: &CudaDevice, vocab: usize, rows: usize) -> Result<Self> {
        let lists = choice_words(vocab, rows);
        let bytes = (rows * ROW_WORDS + lists) * size_of::<u32>();
        Ok(Self {
            plans: Plans::new(vocab, lists),
            vocab,
            host: device.0.pinned(bytes)?,
            device: device.buffer("the choice of tokens", bytes)?,
        })
    }

    /// Samples the tokens of the rows in [`Self::plans`].
    pub(super) fn forward(&mut self, device: &CudaDevice, at: Rows) -> Result<()> {
        let (rows, words) = (self.plans.len(), self.plans.words());
        let mut to = self.host.bytes()?;
        for words in words {
            let (here, rest) = to.split_at_mut(size_of_val(words));
            for (to, word) in here.as_chunks_mut().0.iter_mut().zip(words) {
                *to = word.to_le_bytes();
            }
            to = rest;
        }
        self.host.send(0, self.device.at, words.map(size_of_val).iter().sum())?;
        let args = [
            Arg::Pointer(at.logits),
            Arg::Pointer(self.device.at),
            Arg::Pointer(self.device.at + (rows * ROW_WORDS * size_of::<u32>()) as u64),
            Arg::Pointer(at.chosen),
            Arg::Number(self.vocab as u32),
            // A sum of weights, each at most 1, stays below 2^63.
            Arg::Real(2f32.powi(62 - log2(self.vocab) as i32)),
            // A bucket holds the tokens of at least one warp.
            Arg::Number(log2(self.vocab.div_ceil(BUCKETS)).max(WARP)),
        ];
        launch(device, "choose", [rows, 1, 1], THREADS, 0, &args)
    }

    /// Returns the outcome of a row, from the device's `chosen` (rows, 2).
    pub(super) fn sampled(&self, row: usize, chosen: &[u8]) -> Sampled {
        let word = |at: usize| chosen[at..].first_chunk().map_or(NOBODY, |&word| u32::from_le_bytes(word));
        let (token, possible) = (word(row * CHOICE_BYTES), word(row * CHOICE_BYTES + size_of::<u32>()));
        match token {
            _ if self.plans.wants_logits(row) => Sampled::Logits,
            NOBODY => Sampled::Nothing { possible: possible > 0 },
            token => Sampled::Token(token),
        }
    }

    /// Returns the runs of rows whose logits are needed: the first row and the length of each.
    pub(super) fn wanted(&self) -> impl Iterator<Item = (usize, usize)> {
        let mut next = 0;
        std::iter::from_fn(move || {
            let first = (next..self.plans.len()).find(|&row| self.plans.wants_logits(row))?;
            let is_not = |&row: &usize| !self.plans.wants_logits(row);
            next = (first..self.plans.len()).find(is_not).unwrap_or(self.plans.len());
            Some((first, next - first))
        })
    }
}

/// Returns log2, rounded up.
fn log2(of: usize) -> u32 {
    of.next_power_of_two().trailing_zeros()
}
