//! What the attention heads of one layer remember, for all slots of a pool: S in f32 or bf16, z, c and FAVOR+'s maximum
//! in f32; for softmax attention the last keys and values; for the hybrid both.

mod cache;
mod hybrid;

use half::bf16;
use half::vec::HalfBitsVecExt;

use crate::config::{Attention, DecoderConfig};
use crate::kernels::{element::Element, nearest};

pub use cache::Cache;
pub(crate) use cache::{Blocks, Places};
pub use hybrid::{Hybrid, HybridShape};

/// How S is held in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateType {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16, rounded by chance (of the text alone): half the bytes of each step of many conversations. Keys and
    /// values, which are written once, are rounded to the nearest.
    Bf16,
}

/// What one layer remembers, whatever its attention is.
#[derive(Debug)]
pub(crate) enum LayerMemory {
    /// Random feature attention.
    Sums(Memory),
    /// Softmax attention.
    Cache(Cache),
    /// Softmax attention to the last tokens, random feature attention to all older ones.
    Hybrid(Hybrid),
}

impl LayerMemory {
    /// The empty memories of one layer.
    pub(crate) fn zeros(config: &DecoderConfig, slots: usize, state: StateType) -> Self {
        let (heads, d) = (config.num_attention_heads, config.head_dim);
        match config.attention {
            Attention::Rfa => Self::Sums(Memory::zeros(slots, HeadSums::of(config), state)),
            Attention::Softmax => Self::Cache(Cache::zeros(slots, heads, config.window(), d, state)),
            Attention::Hybrid => {
                let shape = HybridShape { sums: HeadSums::of(config), window: config.window(), gate: config.gate };
                Self::Hybrid(Hybrid::zeros(slots, shape, state))
            }
        }
    }

    /// The empty memories of one layer's cross attention, whose sums have no maximum; none where there is no source.
    pub(crate) fn of_source(config: &DecoderConfig, slots: usize, state: StateType) -> Option<Self> {
        let (heads, d) = (config.num_attention_heads, config.head_dim);
        config.source().map(|source| match config.attention {
            Attention::Softmax => Self::Cache(Cache::zeros(slots, heads, source.max_positions, d, state)),
            Attention::Rfa | Attention::Hybrid => Self::Sums(Memory::zeros(slots, HeadSums::of(config), state)),
        })
    }

    /// Bytes of one slot.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Sums(memory) => memory.bytes(),
            Self::Cache(cache) => cache.bytes(),
            Self::Hybrid(memory) => memory.bytes(),
        }
    }

    /// Makes a slot empty.
    pub(crate) fn reset(&mut self, slot: usize) {
        match self {
            Self::Sums(memory) => memory.reset(slot),
            Self::Cache(cache) => cache.reset(slot),
            Self::Hybrid(memory) => memory.reset(slot),
        }
    }

    /// Adds a slot's numbers to `out`, head by head.
    pub(crate) fn read(&self, slot: usize, out: &mut Vec<f32>) {
        match self {
            Self::Sums(memory) => memory.read(slot, out),
            Self::Cache(cache) => cache.read(slot, out),
            Self::Hybrid(memory) => memory.read(slot, out),
        }
    }

    /// Puts back the numbers of a slot whose text has so many tokens.
    pub(crate) fn write(&mut self, slot: usize, numbers: &[f32], tokens: u64) {
        match self {
            Self::Sums(memory) => memory.write(slot, numbers),
            Self::Cache(cache) => cache.write(slot, numbers, tokens),
            Self::Hybrid(memory) => memory.write(slot, numbers, tokens),
        }
    }
}

/// One layer's part of the pool.
#[derive(Debug)]
pub(crate) struct LayerState {
    /// What every head remembers.
    pub(crate) memory: LayerMemory,
    /// The last inputs of the convolutions of q, k and v, oldest first: (slots, conv_kernel - 1, 3 heads d); empty
    /// without convolutions
    pub(crate) conv: Vec<f32>,
    /// What cross attention keeps of the source, where there is one.
    pub(crate) cross: Option<LayerMemory>,
    pub(crate) denominators: Denominators,
}

impl Denominators {
    pub(crate) fn note(&mut self, all: usize, clamped: u64) {
        self.all += all as u64;
        self.clamped += clamped;
    }
}

/// Denominators (`phi_q . z`) that were divided by while texts were read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Denominators {
    /// One for each token, layer and head, and of an encoder-decoder another for cross attention.
    pub all: u64,
    /// Those of them that were below their floor, and were held there.
    pub clamped: u64,
}

/// How many numbers the sums of a layer's heads have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSums {
    /// Heads.
    pub heads: usize,
    /// Features of a head (F).
    pub features: usize,
    /// Length of its values (d).
    pub head_dim: usize,
    /// Whether S and z are relative to the greatest feature of the head's keys, whose logarithm is then remembered too.
    pub maximum: bool,
}

impl HeadSums {
    /// Those of one layer.
    pub(crate) fn of(config: &DecoderConfig) -> Self {
        Self {
            heads: config.num_attention_heads,
            features: config.features(),
            head_dim: config.head_dim,
            maximum: config.attention == Attention::Rfa && config.feature_map.has_maximum(),
        }
    }

    /// Numbers of S: (F, d).
    pub(crate) fn matrix(self) -> usize {
        self.features * self.head_dim
    }

    /// Numbers beside it: z (F), c, and the maximum.
    pub(crate) fn beside(self) -> usize {
        self.features + 1 + usize::from(self.maximum)
    }
}

/// All S of a layer: (slots, heads, F, d)
#[derive(Debug)]
pub(crate) enum Matrices {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// The memories of one layer's heads.
#[derive(Debug)]
pub struct Memory {
    pub(crate) s: Matrices,
    /// z (F), c and where there is one the maximum of every head: (slots, heads, [`HeadSums::beside`])
    pub(crate) sums: Vec<f32>,
    slots: usize,
    of: HeadSums,
}

impl Memory {
    /// Empty memories.
    pub fn zeros(slots: usize, of: HeadSums, kind: StateType) -> Self {
        let len = slots * of.heads * of.matrix();
        let s = match kind {
            StateType::F32 => Matrices::F32(vec![0.0; len]),
            // Plain integers come zeroed from the system, page by page as they are touched.
            StateType::Bf16 => Matrices::Bf16(vec![0u16; len].reinterpret_into()),
        };
        Self { s, sums: vec![0.0; slots * of.heads * of.beside()], slots, of }
    }

    /// Slots, and what each head of them has.
    pub(crate) fn dims(&self) -> (usize, HeadSums) {
        (self.slots, self.of)
    }

    /// Bytes of one slot.
    pub(crate) fn bytes(&self) -> usize {
        let width = if matches!(self.s, Matrices::F32(_)) { size_of::<f32>() } else { size_of::<bf16>() };
        self.of.heads * (self.of.matrix() * width + self.of.beside() * size_of::<f32>())
    }

    /// Numbers of one slot.
    pub(crate) fn numbers(&self) -> usize {
        self.of.heads * self.head_numbers()
    }

    /// Numbers of one head of a slot.
    pub(crate) fn head_numbers(&self) -> usize {
        self.of.matrix() + self.of.beside()
    }

    /// Makes a slot empty.
    pub(crate) fn reset(&mut self, slot: usize) {
        let (own, sums) = (self.of.heads * self.of.matrix(), self.of.heads * self.of.beside());
        match &mut self.s {
            Matrices::F32(s) => s[slot * own..][..own].fill(0.0),
            Matrices::Bf16(s) => s[slot * own..][..own].fill(bf16::ZERO),
        }
        self.sums[slot * sums..][..sums].fill(0.0);
    }

    /// Adds a slot's numbers to `out`, head by head.
    pub fn read(&self, slot: usize, out: &mut Vec<f32>) {
        (0..self.of.heads).for_each(|head| self.read_head(slot, head, out));
    }

    /// Adds the numbers of one head to `out`: S row by row, z, c, and the maximum.
    pub(crate) fn read_head(&self, slot: usize, head: usize, out: &mut Vec<f32>) {
        let (matrix, beside, head) = (self.of.matrix(), self.of.beside(), slot * self.of.heads + head);
        let own = head * matrix..(head + 1) * matrix;
        match &self.s {
            Matrices::F32(s) => out.extend_from_slice(&s[own]),
            Matrices::Bf16(s) => out.extend(s[own].iter().map(|v| v.widen())),
        }
        out.extend_from_slice(&self.sums[head * beside..][..beside]);
    }

    /// Puts a slot's numbers back.
    pub(crate) fn write(&mut self, slot: usize, numbers: &[f32]) {
        for (head, numbers) in numbers.chunks_exact(self.head_numbers()).enumerate() {
            self.write_head(slot, head, numbers);
        }
    }

    /// Puts the numbers of one head back; an S of bf16 takes the nearest, which for its own numbers are they.
    pub(crate) fn write_head(&mut self, slot: usize, head: usize, numbers: &[f32]) {
        let (matrix, beside, head) = (self.of.matrix(), self.of.beside(), slot * self.of.heads + head);
        let (from, sums) = numbers.split_at(matrix);
        let own = head * matrix..(head + 1) * matrix;
        match &mut self.s {
            Matrices::F32(s) => s[own].copy_from_slice(from),
            Matrices::Bf16(s) => {
                s[own].iter_mut().zip(from).for_each(|(s, &number)| *s = nearest(number));
            }
        }
        self.sums[head * beside..][..beside].copy_from_slice(sums);
    }
}
