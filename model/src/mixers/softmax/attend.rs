//! The serving form of softmax attention over the last tokens of each slot, whose keys and values are in a ring buffer.
//!
//! Each query has a partial sum over each block of the ring, and the partial sums are added in ring order. Threads can
//! therefore share the blocks of one query, all queries of a prompt can read a block together, and a text has the same
//! bits however it is divided into calls.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::cache::{Blocks, Cache, CacheShape};
use crate::compute::{Compute, run_heads, sized};
use crate::error::{ModelError, Result};
use crate::kernels::parts::Parts;
use crate::kernels::softmax::{self, BLOCK, Block, Cached};
use crate::kernels::{Isa, threads::Threads};
use crate::mixers::rfa::recurrent::time_first;

/// Number of queries that read a block together: a few tiles of the kernel.
const QUERIES: usize = 24;

/// The shape of the heads.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Heads.
    pub heads: usize,
    /// Length of a head's q, k and v (d).
    pub head_dim: usize,
}

/// The inputs of a step for some slots.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// (rows, time, 3 heads d): q, then k, then v of each token
    pub qkv: &'a [f32],
    /// One slot per row, all different.
    pub slots: &'a [usize],
    /// The position of each row's first token in its text.
    pub positions: &'a [u64],
}

/// What a query reads in addition to its window: nothing, or sums over the tokens that have left it.
pub(in crate::mixers) trait Older: Sync {
    /// The part for one head of one row.
    type Head;

    /// Elements that one token reads; 0 for nothing.
    fn numbers(&self) -> usize;

    /// Returns the part for one head of one row, to the first caller only.
    fn head(&self, row: usize, head: usize) -> Option<Self::Head>;

    /// Adds each token that leaves the window, before the entering token's query reads. A partial sum whose largest
    /// score is minus infinity has no weight. out: (tokens, [`Block::partial_len`])
    fn add<S: Cached>(&self, own: &mut Self::Head, entering: Entering<'_, S>, out: &mut [f32]);
}

/// Tokens of a head that are about to enter adjacent places of one block.
#[derive(Clone, Copy)]
pub(in crate::mixers) struct Entering<'a, S> {
    pub(in crate::mixers) row: usize,
    pub(in crate::mixers) head: usize,
    /// The index of the first token in the step.
    pub(in crate::mixers) first: usize,
    /// The place in the ring that the first token enters.
    pub(in crate::mixers) place: usize,
    /// The block before the tokens enter. If the ring is full, it still holds the tokens that leave.
    pub(in crate::mixers) block: &'a [S],
    pub(in crate::mixers) shape: Block,
}

/// Softmax attention drops the tokens that leave.
impl Older for () {
    type Head = ();

    fn numbers(&self) -> usize {
        0
    }

    fn head(&self, _: usize, _: usize) -> Option<()> {
        Some(())
    }

    fn add<S: Cached>(&self, (): &mut (), _: Entering<'_, S>, _: &mut [f32]) {}
}

/// Intermediate results of [`attend`], reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct AttendBuffers {
    /// Partial sums of each query over each block: (rows, blocks, heads, partials), followed by those over older
    /// tokens: (rows, heads, partials)
    partials: Vec<f32>,
    heads_first: Vec<f32>, // (rows, heads, time, d)
}

/// Runs `attend` outside of a decoder, on the process's threads.
///
/// # Errors
/// [`ModelError`] when the shapes do not fit, or a slot is out of range or named twice.
pub fn attend_alone(shape: Shape, cache: &mut Cache, inputs: Inputs<'_>, out: &mut [f32]) -> Result<()> {
    let mut cx = Compute::new(Threads::global().clone());
    attend(shape, cache, inputs, (&mut cx, &mut AttendBuffers::default()), out)
}

/// Advances the given slots by some tokens: each token's key and value enter the cache, then its query reads it.
/// out: (rows, time, heads d)
///
/// # Errors
/// When the shapes do not fit, or a slot is out of range or named twice.
pub(crate) fn attend(
    shape: Shape,
    cache: &mut Cache,
    inputs: Inputs<'_>,
    with: (&mut Compute, &mut AttendBuffers),
    out: &mut [f32],
) -> Result<()> {
    attend_with(shape, cache, inputs, (), with, out)
}

/// Like [`attend`], with each query also reading older tokens.
///
/// # Errors
/// As for [`attend`].
pub(in crate::mixers) fn attend_with<O: Older>(
    shape: Shape,
    cache: &mut Cache,
    inputs: Inputs<'_>,
    older: O,
    (cx, buffers): (&mut Compute, &mut AttendBuffers),
    out: &mut [f32],
) -> Result<()> {
    let (rows, inner) = (inputs.slots.len(), shape.heads * shape.head_dim);
    let time = inputs.qkv.len().checked_div(rows * 3 * inner).unwrap_or(0);
    let fits = inputs.qkv.len() == rows * time * 3 * inner
        && out.len() == rows * time * inner
        && inputs.positions.len() == rows;
    let ring = cache.shape();
    let found = (ring.heads, ring.block.d, rows, inputs.qkv.len());
    if !fits || time == 0 || (ring.heads, ring.block.d) != (shape.heads, shape.head_dim) {
        return Err(ModelError::shape("softmax attention", "heads, d, slots and qkv", shape, found));
    }
    inputs.slots.iter().try_for_each(|&slot| ModelError::check_slot(slot, ring.slots))?;
    for (&slot, &position) in inputs.slots.iter().zip(inputs.positions) {
        cache.reach(slot, position + time as u64);
    }
    let step = Step { ring, inputs, older, time, isa: cx.isa };
    match &mut cache.blocks {
        Blocks::F32(all) => step.run(all.all_mut(), (cx, buffers), out),
        Blocks::Bf16(all) => step.run(all.all_mut(), (cx, buffers), out),
    }
}

struct Step<'a, O> {
    ring: CacheShape,
    inputs: Inputs<'a>,
    older: O,
    time: usize,
    isa: Isa,
}

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

impl<O: Older> Step<'_, O> {
    fn run<S: Cached>(
        &self,
        all: &mut [S],
        (cx, buffers): (&mut Compute, &mut AttendBuffers),
        out: &mut [f32],
    ) -> Result<()> {
        let whole = if self.time == 1 {
            self.one(all, (cx, &mut buffers.partials), out)
        } else {
            let target = sized(&mut buffers.heads_first, out.len());
            let whole = self.many(all, cx, target);
            time_first(target, self.ring.heads, self.time, self.ring.block.d, out);
            whole
        };
        if !whole {
            return Err(ModelError::repeated(self.inputs.slots));
        }
        Ok(())
    }

    /// q, k or v of one head for a row's token.
    fn part(&self, row: usize, t: usize, which: usize, head: usize) -> &[f32] {
        let CacheShape { heads, block: Block { d, .. }, .. } = self.ring;
        &self.inputs.qkv[(((row * self.time + t) * 3 + which) * heads + head) * d..][..d]
    }

    /// A query, scaled by 1 / sqrt(d).
    fn query(&self, row: usize, t: usize, head: usize, out: &mut [f32]) {
        let scale = 1.0 / (self.ring.block.d as f32).sqrt();
        out.iter_mut().zip(self.part(row, t, 0, head)).for_each(|(out, q)| *out = q * scale);
    }

    /// The place in the ring of a row's token.
    fn place(&self, row: usize, t: usize) -> usize {
        ((self.inputs.positions[row] + t as u64) % self.ring.window as u64) as usize
    }

    /// Number of places in a block that hold a token once a row's token has entered.
    fn filled(&self, row: usize, t: usize, block: usize) -> usize {
        let filled = self.ring.filled(self.inputs.positions[row] + t as u64 + 1);
        filled.saturating_sub(block * self.ring.block.places).min(self.ring.block.places)
    }

    /// Finishes a query: adds the sum over older tokens, and divides by the normalizer. out: (d)
    fn finish(&self, sum: &mut [f32], older: Option<&[f32]>, out: &mut [f32]) {
        if let Some(older) = older.filter(|older| older[self.ring.block.columns()] != f32::NEG_INFINITY) {
            softmax::add(self.isa, sum, older);
        }
        softmax::mean(sum, out);
    }

    /// Computes one token per row. A piece of work is one block of one head. -> whether no slot was named twice
    fn one<S: Cached>(&self, all: &mut [S], (cx, partials): (&mut Compute, &mut Vec<f32>), out: &mut [f32]) -> bool {
        let CacheShape { heads, block: shape @ Block { d, .. }, .. } = self.ring;
        let (rows, stride, older) = (self.inputs.slots.len(), shape.partial_len(), self.older.numbers());
        let used = |row: usize| self.ring.filled(self.inputs.positions[row] + 1).div_ceil(shape.places);
        let most = (0..rows).map(used).max().unwrap_or(0);
        let pieces = rows * most * heads;
        let partials = sized(partials, (pieces + if older > 0 { rows * heads } else { 0 }) * stride);
        let [a, b, _] = &mut cx.marks;
        let blocks = Parts::new(all, shape.numbers(), a);
        let parts = Parts::new(partials, stride, b);
        let missed = AtomicUsize::new(0);
        let piece = |i: usize| {
            let (row, block, head) = (i / heads / most, i / heads % most, i % heads);
            if block >= used(row) {
                return;
            }
            let part = blocks.take(self.ring.at(self.inputs.slots[row], block, head));
            let (Some(numbers), Some(out)) = (part, parts.take(i)) else {
                missed.fetch_add(1, Ordering::Relaxed);
                return;
            };
            let place = self.place(row, 0);
            if place / shape.places == block {
                let part = self.older.head(row, head).zip(parts.take(pieces + row * heads + head));
                if let Some((mut own, out)) = part {
                    let entering = Entering { row, head, first: 0, place, block: numbers, shape };
                    self.older.add(&mut own, entering, out);
                } else if older > 0 {
                    missed.fetch_add(1, Ordering::Relaxed);
                }
                let (k, v) = (self.part(row, 0, 1, head), self.part(row, 0, 2, head));
                shape.write(numbers, place % shape.places, k, v);
            }
            SCRATCH.with_borrow_mut(|scratch| {
                let q = sized(scratch, d);
                self.query(row, 0, head, q);
                softmax::attend_block(self.isa, numbers, shape, self.filled(row, 0, block), q, out);
            });
        };
        run_heads(&cx.threads, pieces, pieces * shape.numbers() + rows * heads * older, &piece);
        let (partials, far) = partials.split_at_mut(pieces * stride);
        for (row, partials) in partials.chunks_exact_mut(most * heads * stride).enumerate() {
            let (sums, rest) = partials.split_at_mut(heads * stride);
            for next in rest.chunks_exact(heads * stride).take(used(row) - 1) {
                for (sum, next) in sums.chunks_exact_mut(stride).zip(next.chunks_exact(stride)) {
                    softmax::add(self.isa, sum, next);
                }
            }
            for (head, sum) in sums.chunks_exact_mut(stride).enumerate() {
                let at = row * heads + head;
                self.finish(sum, far.get(at * stride..(at + 1) * stride), &mut out[at * d..][..d]);
            }
        }
        missed.into_inner() == 0
    }

    /// Computes many tokens per row. A piece of work is one head of one row. out: (rows, heads, time, d)
    /// -> whether no slot was named twice
    fn many<S: Cached>(&self, all: &mut [S], cx: &mut Compute, out: &mut [f32]) -> bool {
        let CacheShape { heads, block: shape, .. } = self.ring;
        let rows = self.inputs.slots.len();
        let [a, b, _] = &mut cx.marks;
        let blocks = Parts::new(all, shape.numbers(), a);
        let outs = Parts::new(out, self.time * shape.d, b);
        let missed = AtomicUsize::new(0);
        let piece = |i: usize| {
            let (row, head) = (i / heads, i % heads);
            let used = self.ring.filled(self.inputs.positions[row] + self.time as u64).div_ceil(shape.places);
            let own = (0..used).map_while(|block| blocks.take(self.ring.at(self.inputs.slots[row], block, head)));
            let mut own: Vec<&mut [S]> = own.collect();
            match outs.take(i).zip(self.older.head(row, head)) {
                Some((out, mut older)) if own.len() == used => self.head((row, head), &mut own, &mut older, out),
                _ => drop(missed.fetch_add(1, Ordering::Relaxed)),
            }
        };
        let numbers = rows * heads * self.time * (shape.numbers() + self.older.numbers());
        run_heads(&cx.threads, rows * heads, numbers, &piece);
        missed.into_inner() == 0
    }

    /// Computes all tokens of one head, in groups that enter the same block. The other blocks do not change meanwhile,
    /// so the queries of a group read them together.
    fn head<S: Cached>(
        &self,
        (row, head): (usize, usize),
        blocks: &mut [&mut [S]],
        older: &mut O::Head,
        out: &mut [f32],
    ) {
        let shape @ Block { d, places, .. } = self.ring.block;
        let stride = shape.partial_len();
        SCRATCH.with_borrow_mut(|scratch| {
            let far = if self.older.numbers() > 0 { BLOCK * stride } else { 0 };
            let scratch = sized(scratch, BLOCK * (d + stride) + far + QUERIES * stride);
            let (queries, scratch) = scratch.split_at_mut(BLOCK * d);
            let (sums, scratch) = scratch.split_at_mut(BLOCK * stride);
            let (far, next) = scratch.split_at_mut(far);
            let mut first = 0;
            while first < self.time {
                let place = self.place(row, first);
                let (entered, within) = (place / places, place % places);
                let room = (places - within).min(self.ring.window - place);
                let len = room.min(self.time - first);
                for (t, q) in queries.chunks_exact_mut(d).take(len).enumerate() {
                    self.query(row, first + t, head, q);
                }
                if let Some(far) = far.get_mut(..len * stride) {
                    let entering = Entering { row, head, first, place, block: &*blocks[entered], shape };
                    self.older.add(older, entering, far);
                }
                let used = self.ring.filled(self.inputs.positions[row] + first as u64 + 1).div_ceil(places);
                for (at, block) in blocks.iter_mut().take(used).enumerate() {
                    // Queries read a block together, unless it is the block that their own tokens enter.
                    let group = if at == entered { 1 } else { QUERIES };
                    let groups = queries[..len * d].chunks(group * d).zip(sums.chunks_mut(group * stride));
                    for (i, (q, sums)) in groups.enumerate() {
                        let t = first + i * group;
                        if at == entered {
                            let (k, v) = (self.part(row, t, 1, head), self.part(row, t, 2, head));
                            shape.write(block, within + i, k, v);
                        }
                        let filled = self.filled(row, t, at);
                        let all = &mut sums[..q.len() / d * stride];
                        if at == 0 {
                            softmax::attend_block(self.isa, block, shape, filled, q, all);
                            continue;
                        }
                        let next = &mut next[..all.len()];
                        softmax::attend_block(self.isa, block, shape, filled, q, next);
                        for (all, next) in all.chunks_exact_mut(stride).zip(next.chunks_exact(stride)) {
                            softmax::add(self.isa, all, next);
                        }
                    }
                }
                let outs = out[first * d..].chunks_exact_mut(d).zip(sums.chunks_exact_mut(stride));
                for (i, (out, sum)) in outs.take(len).enumerate() {
                    self.finish(sum, far.get(i * stride..(i + 1) * stride), out);
                }
                first += len;
            }
        });
    }
}
