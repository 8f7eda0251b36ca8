//! What the hybrid remembers: the keys, values and gates of the last tokens of each slot, and the sums of all older
//! ones.

use crate::memory::StateType;
use crate::mixers::rfa::{HeadSums, Memory};
use crate::mixers::softmax::Cache;

/// How the memories of one layer's heads lie.
#[derive(Clone, Copy, Debug)]
pub struct HybridShape {
    /// The sums of what has left the window, without a maximum.
    pub sums: HeadSums,
    /// Tokens of the window (W), at least 1.
    pub window: usize,
    /// Whether a gate's logit is kept with each of the window's tokens, for when it leaves.
    pub gate: bool,
}

/// The memories of one layer's heads: S, z and c of what has left the window, and the window's ring.
#[derive(Debug)]
pub struct Hybrid {
    pub(crate) sums: Memory,
    pub(crate) cache: Cache,
    /// Gate logits by place of the ring: (slots, heads, window); empty without a gate
    pub(crate) gates: Vec<f32>,
    /// Logits of a head: window, or 0 without a gate.
    logits: usize,
    heads: usize,
}

impl Hybrid {
    /// Empty memories. In bfloat16 keys and values are rounded to the nearest, S by chance.
    pub fn zeros(slots: usize, shape: HybridShape, kind: StateType) -> Self {
        let HybridShape { sums: sums @ HeadSums { heads, head_dim, .. }, window, gate } = shape;
        let logits = if gate { window } else { 0 };
        Self {
            sums: Memory::zeros(slots, sums, kind),
            cache: Cache::zeros(slots, heads, window, head_dim, kind),
            gates: vec![0.0; slots * heads * logits],
            logits,
            heads,
        }
    }

    /// Gate logits of a head: one for each place of the window, or none without a gate.
    pub(crate) fn logits(&self) -> usize {
        self.logits
    }

    /// Bytes of one slot.
    pub(crate) fn bytes(&self) -> usize {
        self.sums.bytes() + self.cache.bytes() + self.heads * self.logits * size_of::<f32>()
    }

    /// Makes a slot empty.
    pub(crate) fn reset(&mut self, slot: usize) {
        self.sums.reset(slot);
        self.cache.reset(slot);
        let own = self.heads * self.logits;
        self.gates[slot * own..][..own].fill(0.0);
    }

    /// Adds a slot's numbers to `out`: of each head S row by row, z, c, then the keys (window, d), the values
    /// (window, d) and the gates' logits (window), by place.
    pub fn read(&self, slot: usize, out: &mut Vec<f32>) {
        for head in 0..self.heads {
            self.sums.read_head(slot, head, out);
            self.cache.read_head(slot, head, out);
            out.extend_from_slice(&self.gates[(slot * self.heads + head) * self.logits..][..self.logits]);
        }
    }

    /// Puts back the numbers of a slot whose text has so many tokens: of the ring those of the places that they have
    /// reached.
    pub fn write(&mut self, slot: usize, numbers: &[f32], tokens: u64) {
        self.cache.hold(slot, tokens);
        let used = self.cache.places().held(tokens).min(self.logits);
        for (head, numbers) in numbers.chunks_exact(numbers.len() / self.heads).enumerate() {
            let (sums, numbers) = numbers.split_at(self.sums.head_numbers());
            let (ring, gates) = numbers.split_at(numbers.len() - self.logits);
            self.sums.write_head(slot, head, sums);
            self.cache.write_head(slot, head, ring);
            let own = &mut self.gates[(slot * self.heads + head) * self.logits..][..self.logits];
            own[..used].copy_from_slice(&gates[..used]);
            own[used..].fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slots_numbers_go_and_come_and_leave_nothing() {
        for (kind, gate) in [(StateType::F32, true), (StateType::F32, false), (StateType::Bf16, true)] {
            let sums = HeadSums { heads: 2, features: 6, head_dim: 5, maximum: false };
            let shape = HybridShape { sums, window: 70, gate };
            let (sums, ring) = (6 * 6 + 1, 2 * 70 * 5);
            let head = sums + ring + if gate { 70 } else { 0 };
            let mut memory = Hybrid::zeros(3, shape, kind);
            let numbers: Vec<f32> = (0..2 * head).map(|i| (i % 61) as f32 + 1.0).collect();
            memory.write(1, &numbers, 1000);
            let mut read = Vec::new();
            memory.read(1, &mut read);
            assert_eq!(read, numbers);
            // A shorter text has its own places alone.
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
