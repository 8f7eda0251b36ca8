//! The serving form of the recurrence: token by token, in place.
//!
//! Prompts and generated tokens go through the same kernel, one token after another, while a head's sums stay in the L1
//! cache. A state therefore has the same bits whether its text was a prompt or an answer, and however it was divided
//! into calls.
//!
//! Draft tokens advance a copy of the sums, head by head, and each token's update is recorded. The updates of accepted
//! tokens are then applied to the sums by the same kernel in the same order.

use std::cell::RefCell;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

use super::sums::{Sums, SumsShape};
use super::update::Update;
use crate::compute::{Compute, run_heads, sized};
use crate::error::{ModelError, Result};
use crate::feature_map::{FeatureRows, Features};
use crate::kernels::parts::Parts;
use crate::kernels::recurrence::{self, Number};
use crate::kernels::{Isa, threads::Threads};
use crate::mixers::matrices::{self, Copies, Matrices};

/// Number of tokens whose features are computed together: their q and k, two rows each, fill a tile of the product with
/// W, and S still fits into the L1 cache.
pub(in crate::mixers) const BLOCK: usize = 12;

/// The shape of the heads, and the constants of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Heads.
    pub heads: usize,
    /// Length of a head's q, k and v (d).
    pub head_dim: usize,
    /// Features of a head (F).
    pub features: usize,
    /// The lower bound of the denominator, as a share of c; 0 if no feature is negative.
    pub eps: f64,
}

/// The inputs of a step for some slots.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// (rows, time, 3 heads d): q, then k, then v of each token
    pub qkv: &'a [f32],
    /// Logits (rows, time, heads); `None` without a gate.
    pub gate: Option<&'a [f32]>,
    /// One slot per row, all different.
    pub slots: &'a [usize],
    /// The position of each row's first token in its text.
    pub positions: &'a [u64],
    /// The index of the layer, which, with the position and the head, seeds the rounding of a 16-bit state.
    pub layer: usize,
}

impl Inputs<'_> {
    /// See [`matrices::seed`].
    pub(in crate::mixers) fn seed(&self, position: u64, head: usize, heads: usize) -> u64 {
        matrices::seed(position, self.layer, head, heads)
    }
}

/// q and k of some tokens of one head, as the rows of one product with W, and their features.
pub(in crate::mixers) struct Pairs<'a> {
    /// (tokens, 2, d)
    pub(in crate::mixers) x: &'a mut [f32],
    scratch: &'a mut [f32], // (tokens, 2, Features::scratch)
    phi: &'a mut [f32],     // (tokens, 2, F)
    maxima: &'a mut [f32],  // (tokens, 2)
}

impl<'a> Pairs<'a> {
    /// Elements per token.
    pub(in crate::mixers) fn numbers(map: &Features) -> usize {
        let (_, features, d) = map.dims();
        2 * (d + map.scratch() + features + 1)
    }

    /// buffer: (tokens, [`Self::numbers`])
    pub(in crate::mixers) fn new(map: &Features, tokens: usize, buffer: &'a mut [f32]) -> Self {
        let (_, features, d) = map.dims();
        let (x, buffer) = buffer.split_at_mut(tokens * 2 * d);
        let (scratch, buffer) = buffer.split_at_mut(tokens * 2 * map.scratch());
        let (phi, maxima) = buffer.split_at_mut(tokens * 2 * features);
        Self { x, scratch, phi, maxima }
    }

    /// Computes the features (tokens, 2, F) and maxima (tokens, 2) of the first `tokens` tokens, whose `x` must be set.
    pub(in crate::mixers) fn features(
        &mut self,
        map: &Features,
        (isa, head): (Isa, usize),
        tokens: usize,
    ) -> (&[f32], &[f32]) {
        let (_, features, d) = map.dims();
        let (x, scratch) = (&mut self.x[..tokens * 2 * d], &mut self.scratch[..tokens * 2 * map.scratch()]);
        let (phi, maxima) = (&mut self.phi[..tokens * 2 * features], &mut self.maxima[..tokens * 2]);
        map.rows(isa, head, FeatureRows { x, scratch, phi, maxima });
        (&self.phi[..tokens * 2 * features], &self.maxima[..tokens * 2])
    }
}

/// Runs `scan` outside of a decoder, on the process's threads.
///
/// # Errors
/// [`ModelError`] when the shapes do not fit, or a slot is out of range or named twice.
pub fn scan_alone(
    shape: Shape,
    features: &Features,
    sums: &mut Sums,
    inputs: Inputs<'_>,
    out: &mut [f32],
) -> Result<u64> {
    let mut cx = Compute::new(Threads::global().clone());
    scan(shape, features, sums, inputs, (&mut cx, &mut Vec::new()), out)
}

/// Advances the given slots by some tokens -> how many of the `rows x time x heads` denominators were clamped to their
/// floor. out: (rows, time, heads d)
///
/// # Errors
/// When the shapes do not fit, or a slot is out of range or named twice.
pub(crate) fn scan(
    shape: Shape,
    features: &Features,
    sums: &mut Sums,
    inputs: Inputs<'_>,
    (cx, heads_first): (&mut Compute, &mut Vec<f32>),
    out: &mut [f32],
) -> Result<u64> {
    let scan = Scan::new(shape, features, sums, inputs, (cx.isa, out.len()))?;
    scan.with_heads_first(heads_first, out, |target| match &mut sums.s {
        Matrices::F32(s) => scan.run(s, &mut sums.rest, target, cx),
        Matrices::Bf16(s) => scan.run(s, &mut sums.rest, target, cx),
    })
}

/// Like [`scan`], but leaves the sums unchanged until [`super::update::keep`]. The slots are all different.
///
/// # Errors
/// When the shapes do not fit, or a slot is out of range.
pub(in crate::mixers) fn scan_drafts(
    shape: Shape,
    features: &Features,
    sums: &mut Sums,
    inputs: Inputs<'_>,
    (cx, heads_first, copies): (&mut Compute, &mut Vec<f32>, &mut Copies),
    out: &mut [f32],
) -> Result<u64> {
    let scan = Scan::new(shape, features, sums, inputs, (cx.isa, out.len()))?;
    let Sums { s, rest, drafts, .. } = sums;
    let heads = inputs.slots.len() * shape.heads;
    let (drafted, copied) = (heads * scan.drafted(), heads * scan.own.matrix());
    drafts.resize(drafted.max(drafts.len()), 0.0);
    let drafts = &mut drafts[..drafted];
    scan.with_heads_first(heads_first, out, |target| match s {
        Matrices::F32(s) => scan.run_drafts((s, rest), (sized(&mut copies.f32, copied), drafts), target, cx),
        Matrices::Bf16(s) => scan.run_drafts((s, rest), (sized(&mut copies.bf16, copied), drafts), target, cx),
    })
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

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

struct Scan<'a> {
    shape: Shape,
    features: &'a Features,
    own: SumsShape,
    inputs: Inputs<'a>,
    time: usize,
    isa: Isa,
}

/// One head of one row.
struct Head<'a, S> {
    row: usize,
    index: usize,
    s: &'a mut [S],      // (F, d)
    sums: &'a mut [f32], // z (F), c, and for FAVOR+ the maximum
    out: &'a mut [f32],  // (time, d)
    /// Where the updates are recorded: (time, [`Update::numbers`]), or empty
    updates: &'a mut [f32],
}

impl<'a> Scan<'a> {
    /// outs: the length of the output.
    fn new(
        shape: Shape,
        features: &'a Features,
        sums: &Sums,
        inputs: Inputs<'a>,
        (isa, outs): (Isa, usize),
    ) -> Result<Self> {
        let Shape { heads, head_dim: d, .. } = shape;
        let (rows, inner) = (inputs.slots.len(), heads * d);
        let time = inputs.qkv.len().checked_div(rows * 3 * inner).unwrap_or(0);
        let refused =
            |what, expected: &dyn Debug, found: &dyn Debug| Err(ModelError::shape("recurrence", what, expected, found));
        let fits = inputs.qkv.len() == rows * time * 3 * inner
            && outs == rows * time * inner
            && inputs.positions.len() == rows
            && inputs.gate.is_none_or(|gate| gate.len() == rows * time * heads);
        if !fits || rows == 0 {
            return refused("slots and qkv", &"a slot and a position for each row", &(rows, inputs.qkv.len()));
        }
        let own = SumsShape { heads, features: shape.features, head_dim: d, maximum: features.has_maximum() };
        if features.dims() != (heads, own.features, d) {
            return refused("features", &(heads, own.features, d), &features.dims());
        }
        let (slots, found) = sums.dims();
        if found != own {
            return refused("sums", &own, &found);
        }
        inputs.slots.iter().try_for_each(|&slot| ModelError::check_slot(slot, slots))?;
        Ok(Self { shape, features, own, inputs, time, isa })
    }

    /// Elements that a head of a draft row needs besides its copy of S: its own z, c and maximum, and its updates.
    fn drafted(&self) -> usize {
        self.own.rest_len() + self.time * Update::numbers(self.own)
    }

    /// Has `run` compute (rows, heads, time, d), and transposes the result. out: (rows, time, heads d)
    fn with_heads_first(
        &self,
        buffer: &mut Vec<f32>,
        out: &mut [f32],
        run: impl FnOnce(&mut [f32]) -> Result<u64>,
    ) -> Result<u64> {
        if self.time == 1 {
            // With one token, (heads, time) and (time, heads) have the same order.
            return run(out);
        }
        let target = sized(buffer, out.len());
        let clamped = run(target)?;
        time_first(target, self.shape.heads, self.time, self.shape.head_dim, out);
        Ok(clamped)
    }

    fn run<S: Number>(&self, s: &mut [S], sums: &mut [f32], out: &mut [f32], cx: &mut Compute) -> Result<u64> {
        let Shape { heads, head_dim: d, .. } = self.shape;
        let [a, b, c] = &mut cx.marks;
        let matrices = Parts::new(s, self.own.matrix(), a);
        let sums = Parts::new(sums, self.own.rest_len(), b);
        let outs = Parts::new(out, self.time * d, c);
        self.run_pieces(&cx.threads, |row, index| {
            let part = self.inputs.slots[row] * heads + index;
            let (s, sums, out) = (matrices.take(part)?, sums.take(part)?, outs.take(row * heads + index)?);
            Some(self.head(Head { row, index, s, sums, out, updates: &mut [] }))
        })
    }

    /// s, sums: those of the slots; copies: (rows, heads, F, d); drafts: (rows, heads, [`Self::drafted`])
    fn run_drafts<S: Number>(
        &self,
        (s, sums): (&[S], &[f32]),
        (copies, drafts): (&mut [S], &mut [f32]),
        out: &mut [f32],
        cx: &mut Compute,
    ) -> Result<u64> {
        let Shape { heads, head_dim: d, .. } = self.shape;
        let (matrix, rest) = (self.own.matrix(), self.own.rest_len());
        let [a, b, c] = &mut cx.marks;
        let copies = Parts::new(copies, matrix, a);
        let drafts = Parts::new(drafts, self.drafted(), b);
        let outs = Parts::new(out, self.time * d, c);
        self.run_pieces(&cx.threads, |row, index| {
            let (part, own) = (row * heads + index, self.inputs.slots[row] * heads + index);
            let (copy, drafts, out) = (copies.take(part)?, drafts.take(part)?, outs.take(part)?);
            let (own_sums, updates) = drafts.split_at_mut(rest);
            copy.copy_from_slice(&s[own * matrix..][..matrix]);
            own_sums.copy_from_slice(&sums[own * rest..][..rest]);
            Some(self.head(Head { row, index, s: copy, sums: own_sums, out, updates }))
        })
    }

    /// Runs `piece(row, head)` for all heads of all rows, and adds up the results.
    fn run_pieces(&self, threads: &Threads, piece: impl Fn(usize, usize) -> Option<u64> + Sync) -> Result<u64> {
        let rows = self.inputs.slots.len();
        let pieces = rows * self.shape.heads;
        let (clamped, done) = (AtomicU64::new(0), AtomicU64::new(0));
        // The order is head by head, because the rows of a head share its random matrix.
        let run = |i: usize| {
            if let Some(count) = piece(i % rows, i / rows) {
                clamped.fetch_add(count, Ordering::Relaxed);
                done.fetch_add(1, Ordering::Relaxed);
            }
        };
        run_heads(threads, pieces, pieces * self.time * self.own.matrix(), &run);
        if done.into_inner() != pieces as u64 {
            return Err(ModelError::repeated(self.inputs.slots));
        }
        Ok(clamped.into_inner())
    }

    /// Computes all tokens of one head -> the number of clamped denominators.
    fn head<S: Number>(&self, head: Head<'_, S>) -> u64 {
        let Shape { heads, head_dim: d, features, eps } = self.shape;
        let Head { row, index, s, sums, out, updates } = head;
        let (block, inner) = (BLOCK.min(self.time), heads * d);
        let qkv = &self.inputs.qkv[row * self.time * 3 * inner..];
        let of = |t: usize, which: usize| &qkv[(t * 3 + which) * inner + index * d..][..d];
        let mut updates = updates.chunks_exact_mut(Update::numbers(self.own));
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
                    let weights = recurrence::gate_weights(gate);
                    let update = Update { phi_k, v: of(first + t, 2), weights, maximum: maxima[2 * t + 1] };
                    if let Some(noted) = updates.next() {
                        update.write(noted);
                    }
                    let position = self.inputs.positions[row] + (first + t) as u64;
                    let seed = self.inputs.seed(position, index, heads);
                    update.apply((self.isa, eps, seed), (s, sums), phi_q, out, &mut clamped);
                }
            }
            clamped
        })
    }
}
