//! The recurrence token by token for some slots of a pool, changed where it lies: serving.
//!
//! A prompt's tokens go through the very kernel that decoding uses, one after the other, a head's memory staying in
//! the nearest cache: so a state is the same bits however its text came in, as prompt or as answer, cut anywhere.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Result, bail};

use crate::compute::{Compute, sized};
use crate::feature_map::{Block, Features};
use crate::kernels::parts::Parts;
use crate::kernels::recurrence::{self, Number, Token};
use crate::kernels::{Isa, threads::Threads};
use super::sums::Matrices;
pub use super::{HeadSums, Memory};
pub use crate::memory::StateType;

/// Tokens whose features are made together: two rows each for a tile of the product with W, few enough to leave room
/// for S in the nearest cache.
pub(in crate::mixers) const BLOCK: usize = 12;

/// Numbers of state under which a step is not shared among threads.
const SERIAL: usize = 1 << 15;

/// The heads' shape and the constants of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Heads.
    pub heads: usize,
    /// Length of a head's q, k and v (d).
    pub head_dim: usize,
    /// Features of a head (F).
    pub features: usize,
    /// The denominator is held at or above this share of c; 0 where no feature is negative.
    pub eps: f64,
}

/// What some slots take in.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// (rows, time, 3 heads d): q then k then v of each token
    pub qkv: &'a [f32],
    /// Logits (rows, time, heads), or none without a gate.
    pub gate: Option<&'a [f32]>,
    /// One slot for each row, all different.
    pub slots: &'a [usize],
    /// The place of each row's first token in its text.
    pub positions: &'a [u64],
    /// The layer, which the rounding of a 16-bit state depends on besides place and head.
    pub layer: usize,
}

impl Inputs<'_> {
    /// What the rounding of a token's 16-bit state begins from: its place in its text, layer and head alone.
    pub(in crate::mixers) fn seed(&self, place: u64, head: usize, heads: usize) -> u64 {
        place ^ ((self.layer * heads + head) as u64) << 40
    }
}

/// q and k of some tokens of a head, the rows of one product with W; what their map needs on the way; their features.
pub(in crate::mixers) struct Pairs<'a> {
    /// (tokens, 2, d)
    pub(in crate::mixers) x: &'a mut [f32],
    scratch: &'a mut [f32], // (tokens, 2, Features::scratch)
    phi: &'a mut [f32],     // (tokens, 2, F)
    maxima: &'a mut [f32],  // (tokens, 2)
}

impl<'a> Pairs<'a> {
    /// Numbers that a token takes.
    pub(in crate::mixers) fn numbers(map: &Features) -> usize {
        let (_, features, d) = map.dims();
        2 * (d + map.scratch() + features + 1)
    }

    /// room: (tokens, [`Self::numbers`])
    pub(in crate::mixers) fn new(map: &Features, tokens: usize, room: &'a mut [f32]) -> Self {
        let (_, features, d) = map.dims();
        let (x, room) = room.split_at_mut(tokens * 2 * d);
        let (scratch, room) = room.split_at_mut(tokens * 2 * map.scratch());
        let (phi, maxima) = room.split_at_mut(tokens * 2 * features);
        Self { x, scratch, phi, maxima }
    }

    /// The features (tokens, 2, F) and maxima (tokens, 2) of the first tokens, whose `x` is there.
    pub(in crate::mixers) fn features(&mut self, map: &Features, (isa, head): (Isa, usize), tokens: usize) -> (&[f32], &[f32]) {
        let (_, features, d) = map.dims();
        let (x, scratch) = (&mut self.x[..tokens * 2 * d], &mut self.scratch[..tokens * 2 * map.scratch()]);
        let (phi, maxima) = (&mut self.phi[..tokens * 2 * features], &mut self.maxima[..tokens * 2]);
        map.rows(isa, head, Block { x, scratch, phi, maxima });
        (&self.phi[..tokens * 2 * features], &self.maxima[..tokens * 2])
    }
}

/// Buffers of [`scan`], kept from step to step.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    heads_first: Vec<f32>, // (rows, heads, time, d)
}

/// A layer's scan, on the threads of the process.
///
/// # Errors
/// As for the layer's own: when the shapes do not fit, or a slot is out of range or named twice.
pub fn scan_alone(
    shape: Shape,
    features: &Features,
    memory: &mut Memory,
    inputs: Inputs<'_>,
    out: &mut [f32],
) -> Result<u64> {
    let mut cx = Compute::new(Threads::global().clone());
    scan(shape, features, memory, inputs, (&mut cx, &mut Buffers::default()), out)
}

/// Takes the given slots some tokens further -> how many of the `rows x time x heads` denominators were held at their
/// floor. out: (rows, time, heads d)
///
/// # Errors
/// When the shapes do not fit, or a slot is out of range or named twice.
pub(crate) fn scan(
    shape: Shape,
    features: &Features,
    memory: &mut Memory,
    inputs: Inputs<'_>,
    (cx, buffers): (&mut Compute, &mut Buffers),
    out: &mut [f32],
) -> Result<u64> {
    let Shape { heads, head_dim: d, .. } = shape;
    let (rows, inner) = (inputs.slots.len(), heads * d);
    let time = inputs.qkv.len().checked_div(rows * 3 * inner).unwrap_or(0);
    let fits = inputs.qkv.len() == rows * time * 3 * inner
        && out.len() == rows * time * inner
        && inputs.positions.len() == rows
        && inputs.gate.is_none_or(|gate| gate.len() == rows * time * heads);
    if !fits || rows == 0 || features.dims() != (heads, shape.features, d) {
        bail!("recurrence: {rows} slots, qkv of {} and features of {:?} do not fit", inputs.qkv.len(), features.dims());
    }
    let (slots, sums) = memory.dims();
    if sums != (HeadSums { heads, features: shape.features, head_dim: d, maximum: features.has_maximum() }) {
        bail!("recurrence: the memory does not fit {shape:?}");
    }
    if let Some(slot) = inputs.slots.iter().find(|&&slot| slot >= slots) {
        bail!("recurrence: slot {slot} is out of range (the pool has {slots})");
    }
    let scan = Scan { shape, features, sums, inputs, time, isa: cx.isa };
    let mut run = |target: &mut [f32]| match &mut memory.s {
        Matrices::F32(s) => scan.run(s, &mut memory.sums, target, cx, recurrence::step),
        Matrices::Bf16(s) => scan.run(s, &mut memory.sums, target, cx, recurrence::step),
    };
    if time == 1 {
        // Heads first and tokens first are the same.
        return run(out);
    }
    let target = sized(&mut buffers.heads_first, out.len());
    let clamped = run(target)?;
    time_first(target, heads, time, d, out);
    Ok(clamped)
}

/// (rows, heads, time, d) -> (rows, time, heads, d)
pub(in crate::mixers) fn time_first(from: &[f32], heads: usize, time: usize, d: usize, out: &mut [f32]) {
    let rows = from.chunks_exact(heads * time * d).zip(out.chunks_exact_mut(heads * time * d));
    for (from, out) in rows {
        for (head, from) in from.chunks_exact(time * d).enumerate() {
            for (from, out) in from.chunks_exact(d).zip(out.chunks_exact_mut(heads * d)) {
                out[head * d..][..d].copy_from_slice(from);
            }
        }
    }
}

/// One step of the recurrence on an S of `S`.
type Step<S> = fn(Isa, &mut [S], &mut [f32], &Token<'_>, &mut [f32], &mut u64);

struct Scan<'a> {
    shape: Shape,
    features: &'a Features,
    sums: HeadSums,
    inputs: Inputs<'a>,
    time: usize,
    isa: Isa,
}

/// One head of one row.
struct Head<'a, S> {
    row: usize,
    index: usize,
    s: &'a mut [S],      // (F, d)
    sums: &'a mut [f32], // z (F), c, and the maximum where there is one
    out: &'a mut [f32],  // (time, d)
}

impl Scan<'_> {
    fn run<S: Number>(
        &self,
        s: &mut [S],
        sums: &mut [f32],
        out: &mut [f32],
        cx: &mut Compute,
        step: Step<S>,
    ) -> Result<u64> {
        let Shape { heads, head_dim: d, .. } = self.shape;
        let (rows, matrix) = (self.inputs.slots.len(), self.sums.matrix());
        let [a, b, c] = &mut cx.marks;
        let matrices = Parts::new(s, matrix, a);
        let sums = Parts::new(sums, self.sums.beside(), b);
        let outs = Parts::new(out, self.time * d, c);
        let (clamped, done) = (AtomicU64::new(0), AtomicU64::new(0));
        // A head after the other, all rows of each: the rows of a head share its random matrix.
        let piece = |i: usize| {
            let (index, row) = (i / rows, i % rows);
            let part = self.inputs.slots[row] * heads + index;
            let parts = (matrices.take(part), sums.take(part), outs.take(row * heads + index));
            if let (Some(s), Some(sums), Some(out)) = parts {
                clamped.fetch_add(self.head(Head { row, index, s, sums, out }, step), Ordering::Relaxed);
                done.fetch_add(1, Ordering::Relaxed);
            }
        };
        let pieces = rows * heads;
        if pieces * self.time * matrix < SERIAL {
            (0..pieces).for_each(piece);
        } else {
            cx.threads.run(pieces, &piece);
        }
        if done.into_inner() != pieces as u64 {
            bail!("recurrence: a slot is named twice in {:?}", self.inputs.slots);
        }
        Ok(clamped.into_inner())
    }

    /// All tokens of one head -> how many denominators were held.
    fn head<S: Number>(&self, head: Head<'_, S>, step: Step<S>) -> u64 {
        thread_local! {
            static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
        }
        let Shape { heads, head_dim: d, features, eps } = self.shape;
        let Head { row, index, s, sums, out } = head;
        let (block, inner) = (BLOCK.min(self.time), heads * d);
        let qkv = &self.inputs.qkv[row * self.time * 3 * inner..];
        let of = |t: usize, which: usize| &qkv[(t * 3 + which) * inner + index * d..][..d];
        SCRATCH.with_borrow_mut(|scratch| {
            let mut pairs = Pairs::new(self.features, block, sized(scratch, block * Pairs::numbers(self.features)));
            let mut clamped = 0;
            for (first, outs) in (0..self.time).step_by(block).zip(out.chunks_mut(block * d)) {
                let len = outs.len() / d;
                for (t, pair) in pairs.x.chunks_exact_mut(2 * d).take(len).enumerate() {
                    pair[..d].copy_from_slice(of(first + t, 0));
                    pair[d..].copy_from_slice(of(first + t, 1));
                }
                let (phi, maxima) = pairs.features(self.features, (self.isa, index), len);
                for ((t, out), phi) in outs.chunks_exact_mut(d).enumerate().zip(phi.chunks_exact(2 * features)) {
                    let (phi_q, phi_k) = phi.split_at(features);
                    let gate = self.inputs.gate.map(|gate| gate[(row * self.time + first + t) * heads + index]);
                    let counted = recurrence::gate_weights(gate);
                    let weights = match &mut sums[features..] {
                        [c, maximum] => recurrence::raise(maximum, *c, maxima[2 * t + 1], counted),
                        _ => counted,
                    };
                    let place = self.inputs.positions[row] + (first + t) as u64;
                    let token = Token {
                        phi_q,
                        phi_k,
                        v: of(first + t, 2),
                        weights,
                        counted,
                        eps: eps as f32,
                        seed: self.inputs.seed(place, index, heads),
                    };
                    step(self.isa, s, sums, &token, out, &mut clamped);
                }
            }
            clamped
        })
    }
}
