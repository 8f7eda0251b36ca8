//! The hybrid's state: keys, values and gates of the last tokens of each slot, and the sums over all older tokens.

use crate::memory::StateType;
use crate::mixers::layer::SlotState;
use crate::mixers::rfa::sums::{Sums, SumsShape};
use crate::mixers::softmax::cache::Cache;

/// The sizes of one layer's head states.
#[derive(Clone, Copy, Debug)]
pub struct HybridShape {
    /// The shape of the sums over tokens that have left the window; they have no maximum.
    pub sums: SumsShape,
    /// Number of tokens in the window (W), at least 1.
    pub window: usize,
    /// Whether each token's gate logit is stored until the token leaves the window.
    pub gate: bool,
}

impl HybridShape {
    /// Gate logits per head.
    fn logits(self) -> usize {
        if self.gate { self.window } else { 0 }
    }

    /// Elements per head of a slot.
    pub(crate) fn head_numbers(self) -> usize {
        self.sums.head_numbers() + 2 * self.window * self.sums.head_dim + self.logits()
    }
}

/// The states of one layer's heads: S, z and c over tokens that have left the window, and the window's ring buffer.
#[derive(Debug)]
pub struct HybridMemory {
    pub(crate) sums: Sums,
    pub(crate) cache: Cache,
    /// Gate logits by place in the ring: (slots, heads, window); empty without a gate
    pub(crate) gates: Vec<f32>,
    shape: HybridShape,
}

impl HybridMemory {
    /// The states of empty texts. In bfloat16, keys and values are rounded to nearest, S stochastically.
    pub fn zeros(slots: usize, shape: HybridShape, state: StateType) -> Self {
        let HybridShape { sums: sums @ SumsShape { heads, head_dim, .. }, window, .. } = shape;
        Self {
            sums: Sums::zeros(slots, sums, state),
            cache: Cache::zeros(slots, heads, window, head_dim, state),
            gates: vec![0.0; slots * heads * shape.logits()],
            shape,
        }
    }

    /// Gate logits per head: one per place in the window, or 0 without a gate.
    pub(crate) fn logits(&self) -> usize {
        self.shape.logits()
    }

    /// The gate logits of one head of a slot.
    fn gates_mut(&mut self, slot: usize, head: usize) -> &mut [f32] {
        let logits = self.logits();
        &mut self.gates[(slot * self.shape.sums.heads + head) * logits..][..logits]
    }
}

impl SlotState for HybridMemory {
    fn bytes(&self) -> usize {
        self.sums.bytes() + self.cache.bytes() + self.shape.sums.heads * self.logits() * size_of::<f32>()
    }

    fn reset(&mut self, slot: usize) {
        self.sums.reset(slot);
        self.cache.reset(slot);
        (0..self.shape.sums.heads).for_each(|head| self.gates_mut(slot, head).fill(0.0));
    }

    /// For each head: S row by row, z, c, then the keys (window, d), the values (window, d) and the gate logits
    /// (window), by place in the ring.
    fn read(&self, slot: usize, out: &mut Vec<f32>) {
        for head in 0..self.shape.sums.heads {
            self.sums.read_head(slot, head, out);
            self.cache.read_head(slot, head, out);
            let at = (slot * self.shape.sums.heads + head) * self.logits();
            out.extend_from_slice(&self.gates[at..][..self.logits()]);
        }
    }

    /// Writes only the places of the ring that a text of `tokens` tokens has filled.
    fn write(&mut self, slot: usize, numbers: &[f32], tokens: u64) {
        self.cache.hold(slot, tokens);
        let used = self.cache.shape().filled(tokens).min(self.logits());
        for (head, numbers) in numbers.chunks_exact(self.shape.head_numbers()).enumerate() {
            let (sums, numbers) = numbers.split_at(self.shape.sums.head_numbers());
            let (ring, gates) = numbers.split_at(numbers.len() - self.logits());
            self.sums.write_head(slot, head, sums);
            self.cache.write_head(slot, head, ring);
            let own = self.gates_mut(slot, head);
            own[..used].copy_from_slice(&gates[..used]);
            own[used..].fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_written_read_and_reset() {
        for (kind, gate) in [(StateType::F32, true), (StateType::F32, false), (StateType::Bf16, true)] {
            let sums = SumsShape { heads: 2, features: 6, head_dim: 5, maximum: false };
            let shape = HybridShape { sums, window: 70, gate };
            let (sums, ring) = (6 * 6 + 1, 2 * 70 * 5);
            let head = sums + ring + if gate { 70 } else { 0 };
            let mut memory = HybridMemory::zeros(3, shape, kind);
            let numbers: Vec<f32> = (0..2 * head).map(|i| (i % 61) as f32 + 1.0).collect();
            memory.write(1, &numbers, 1000);
            let mut read = Vec::new();
            memory.read(1, &mut read);
            assert_eq!(read, numbers);
            // A shorter text fills fewer places.
            memory.write(1, &numbers, 7);
            read.clear();
            memory.read(1, &mut read);
            for (i, (read, number)) in read.iter().zip(&numbers).enumerate() {
                let place = match i % head {
                    at if at < sums => 0,
                    at if at < sums + ring => (at - sums) / 5 % 70,
                    at => at - sums - ring,
                };
                assert_eq!(*read, if place < 7 { *number } else { 0.0 }, "{i}");
            }
            memory.reset(1);
            for slot in 0..3 {
                read.clear();
                memory.cache.reach(slot, 70);
                memory.read(slot, &mut read);
                assert!(read.iter().all(|&v| v == 0.0), "{kind:?}: slot {slot}");
            }
        }
    }
}
