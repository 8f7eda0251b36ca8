//! The state of softmax attention: keys and values of the last tokens of each slot.
//!
//! Each slot has a ring of `window` places; the token at position p is in place p mod window. Places are grouped into
//! blocks; a block holds the keys and values of one head, and the blocks of all heads for the same places are adjacent.
//! Memory that no token has reached is never touched, so the system does not have to provide it.

use half::bf16;

use crate::kernels::advise_huge;
use crate::kernels::softmax::{BLOCK, Block, Cached, PANEL};
use crate::memory::StateType;
use crate::mixers::layer::SlotState;

/// Blocks are aligned to this many bytes, which is a cache line.
const ALIGNMENT: usize = 64;

/// A zeroed buffer that starts at a cache line.
#[derive(Debug)]
pub(crate) struct Aligned<S> {
    numbers: Vec<S>,
    start: usize,
    len: usize,
}

impl<S: Cached> Aligned<S> {
    fn zeroed(len: usize) -> Self {
        let spare = ALIGNMENT / size_of::<S>();
        // The system provides zeroed memory for integers without touching it.
        let mut numbers = vec![S::default(); len + spare];
        let start = numbers.as_ptr().align_offset(ALIGNMENT).min(spare);
        advise_huge(&mut numbers[start..start + len]);
        Self { numbers, start, len }
    }

    /// All elements.
    pub(crate) fn all(&self) -> &[S] {
        &self.numbers[self.start..][..self.len]
    }

    /// All elements, mutably.
    pub(crate) fn all_mut(&mut self) -> &mut [S] {
        &mut self.numbers[self.start..][..self.len]
    }
}

/// All blocks of a layer: (slots, blocks, heads, [`Block::numbers`])
#[derive(Debug)]
pub(crate) enum Blocks {
    F32(Aligned<f32>),
    Bf16(Aligned<u16>),
}

/// The layout of a layer's ring of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheShape {
    pub(crate) slots: usize,
    pub(crate) heads: usize,
    /// Number of tokens per slot.
    pub(crate) window: usize,
    pub(crate) block: Block,
}

impl CacheShape {
    /// Number of blocks per slot, each with all heads.
    pub(crate) fn blocks(self) -> usize {
        self.window.div_ceil(self.block.places)
    }

    /// The index of a head's block among all blocks of the layer.
    pub(crate) fn at(self, slot: usize, block: usize, head: usize) -> usize {
        (slot * self.blocks() + block) * self.heads + head
    }

    /// Number of places that hold a token after `tokens` tokens.
    pub(crate) fn filled(self, tokens: u64) -> usize {
        usize::try_from(tokens).unwrap_or(usize::MAX).min(self.window)
    }

    fn of<S>(self, all: &[S], slot: usize, place: usize, head: usize) -> &[S] {
        &all[self.at(slot, place / self.block.places, head) * self.block.numbers()..][..self.block.numbers()]
    }

    fn read<S: Cached>(self, all: &[S], slot: usize, head: usize, used: usize, out: &mut Vec<f32>) {
        let unused = (self.window - used) * self.block.d;
        for place in 0..used {
            out.extend(self.block.key(self.of(all, slot, place, head), place % self.block.places));
        }
        out.resize(out.len() + unused, 0.0);
        for place in 0..used {
            out.extend(self.block.value(self.of(all, slot, place, head), place % self.block.places));
        }
        out.resize(out.len() + unused, 0.0);
    }

    fn write<S: Cached>(self, all: &mut [S], slot: usize, head: usize, used: usize, numbers: &[f32]) {
        let d = self.block.d;
        let (keys, values) = numbers.split_at(self.window * d);
        for (place, (k, v)) in keys.chunks_exact(d).zip(values.chunks_exact(d)).take(used).enumerate() {
            let at = self.at(slot, place / self.block.places, head) * self.block.numbers();
            self.block.write(&mut all[at..at + self.block.numbers()], place % self.block.places, k, v);
        }
    }

    fn fill<S: Cached>(self, all: &mut [S], slot: usize, (kv, stride, at): (&[f32], usize, usize)) {
        let d = self.block.d;
        for (place, kv) in kv.chunks_exact(stride).take(self.window).enumerate() {
            for head in 0..self.heads {
                let of = |which: usize| &kv[at + (which * self.heads + head) * d..][..d];
                let start = self.at(slot, place / self.block.places, head) * self.block.numbers();
                let block = &mut all[start..start + self.block.numbers()];
                self.block.write(block, place % self.block.places, of(0), of(1));
            }
        }
    }

    fn clear<S: Cached>(self, all: &mut [S], slot: usize, used: usize) {
        let block = self.heads * self.block.numbers();
        let start = slot * self.blocks() * block;
        all[start..start + used.div_ceil(self.block.places) * block].fill(S::default());
    }
}

/// The caches of one layer's heads.
#[derive(Debug)]
pub struct Cache {
    pub(crate) blocks: Blocks,
    shape: CacheShape,
    /// Number of places in each slot that a token has reached.
    used: Vec<usize>,
}

impl Cache {
    /// Empty caches for the last `window` tokens. bfloat16 is rounded to nearest.
    pub fn zeros(slots: usize, heads: usize, window: usize, head_dim: usize, kind: StateType) -> Self {
        let block = Block { d: head_dim, places: BLOCK.min(window.next_multiple_of(PANEL)) };
        let shape = CacheShape { slots, heads, window, block };
        let len = slots * shape.blocks() * heads * block.numbers();
        let blocks = match kind {
            StateType::F32 => Blocks::F32(Aligned::zeroed(len)),
            StateType::Bf16 => Blocks::Bf16(Aligned::zeroed(len)),
        };
        Self { blocks, shape, used: vec![0; slots] }
    }

    /// The layout of the blocks.
    pub(crate) fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Number of places in a slot that hold a token.
    pub(crate) fn used(&self, slot: usize) -> usize {
        self.used[slot]
    }

    /// Records that a slot's text has `tokens` tokens.
    pub(crate) fn reach(&mut self, slot: usize, tokens: u64) {
        self.used[slot] = self.shape.filled(tokens);
    }

    /// Appends the elements of one head: its keys (window, d) and its values (window, d), by place.
    pub(crate) fn read_head(&self, slot: usize, head: usize, out: &mut Vec<f32>) {
        match &self.blocks {
            Blocks::F32(all) => self.shape.read(all.all(), slot, head, self.used[slot], out),
            Blocks::Bf16(all) => self.shape.read(all.all(), slot, head, self.used[slot], out),
        }
    }

    /// Fills a slot with the keys and values of a source of at most `window` tokens.
    ///
    /// kv: (tokens, stride); in each token the keys of all heads start at element `at`, and their values follow
    pub(crate) fn fill(&mut self, slot: usize, kv: &[f32], stride: usize, at: usize) {
        self.reset(slot);
        let (shape, tokens) = (self.shape, kv.len() / stride);
        self.used[slot] = shape.filled(tokens as u64);
        match &mut self.blocks {
            Blocks::F32(all) => shape.fill(all.all_mut(), slot, (kv, stride, at)),
            Blocks::Bf16(all) => shape.fill(all.all_mut(), slot, (kv, stride, at)),
        }
    }

    /// Sets the places in use to those that `tokens` tokens reach, before their contents are written.
    pub(crate) fn hold(&mut self, slot: usize, tokens: u64) {
        let used = self.shape.filled(tokens);
        if used < self.used[slot] {
            self.reset(slot);
        }
        self.used[slot] = used;
    }

    /// Sets the elements of one head of a slot, in the places in use.
    pub(crate) fn write_head(&mut self, slot: usize, head: usize, numbers: &[f32]) {
        let used = self.used[slot];
        match &mut self.blocks {
            Blocks::F32(all) => self.shape.write(all.all_mut(), slot, head, used, numbers),
            Blocks::Bf16(all) => self.shape.write(all.all_mut(), slot, head, used, numbers),
        }
    }
}

impl SlotState for Cache {
    fn bytes(&self) -> usize {
        let width = if matches!(self.blocks, Blocks::F32(_)) { size_of::<f32>() } else { size_of::<bf16>() };
        self.shape.blocks() * self.shape.heads * self.shape.block.numbers() * width
    }

    /// Leaves memory that no token has reached untouched.
    fn reset(&mut self, slot: usize) {
        match &mut self.blocks {
            Blocks::F32(all) => self.shape.clear(all.all_mut(), slot, self.used[slot]),
            Blocks::Bf16(all) => self.shape.clear(all.all_mut(), slot, self.used[slot]),
        }
        self.used[slot] = 0;
    }

    fn read(&self, slot: usize, out: &mut Vec<f32>) {
        (0..self.shape.heads).for_each(|head| self.read_head(slot, head, out));
    }

    /// Writes the places that a text of `tokens` tokens has filled.
    fn write(&mut self, slot: usize, numbers: &[f32], tokens: u64) {
        self.hold(slot, tokens);
        for (head, numbers) in numbers.chunks_exact(numbers.len() / self.shape.heads).enumerate() {
            self.write_head(slot, head, numbers);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_written_read_and_reset() {
        for kind in [StateType::F32, StateType::Bf16] {
            let (heads, window, d) = (2, 300, 5);
            let mut cache = Cache::zeros(3, heads, window, d, kind);
            let numbers: Vec<f32> = (0..heads * 2 * window * d).map(|i| (i % 61) as f32 + 1.0).collect();
            cache.write(1, &numbers, 1000);
            let mut read = Vec::new();
            cache.read(1, &mut read);
            assert_eq!(read, numbers);
            // A shorter text fills fewer places.
            cache.write(1, &numbers, 7);
            read.clear();
            cache.read(1, &mut read);
            for (i, (read, number)) in read.iter().zip(&numbers).enumerate() {
                assert_eq!(*read, if i / d % window < 7 { *number } else { 0.0 }, "{i}");
            }
            cache.reset(1);
            for slot in 0..3 {
                read.clear();
                cache.reach(slot, 300);
                cache.read(slot, &mut read);
                assert!(read.iter().all(|&v| v == 0.0), "{kind:?}: slot {slot}");
            }
        }
    }

    #[test]
    fn a_block_begins_at_a_cache_line() {
        let cache = Cache::zeros(1, 1, 64, 4, StateType::F32);
        let Blocks::F32(all) = &cache.blocks else { panic!("another type") };
        assert_eq!(all.all().as_ptr().addr() % ALIGNMENT, 0);
    }
}
