//! Attention to a state that does not change: the sums of random feature attention, or cached keys and values. Cross
//! attention uses it for a source, and the encoder for its own tokens.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::compute::{Compute, run_heads, sized};
use crate::error::{ModelError, Result, SlotError};
use crate::feature_map::{FeatureRows, Features};
use crate::kernels::Isa;
use crate::kernels::parts::Parts;
use crate::kernels::readout::{self, Readable};
use crate::kernels::softmax::{self, Cached};
use crate::mixers::matrices::Matrices;
use crate::mixers::rfa::recurrent::time_first;
use crate::mixers::rfa::sums::{Sums, SumsShape};
use crate::mixers::softmax::cache::{Blocks, Cache, CacheShape};

/// Number of queries that are computed together.
const QUERIES: usize = 24;

/// The name of the operation in errors.
const OP: &str = "cross attention";

/// Queries of each row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queries<'a> {
    /// (rows, time, stride): the query of a token is its first heads d elements
    pub(crate) q: &'a [f32],
    /// Elements from one token to the next, at least heads d.
    pub(crate) stride: usize,
    /// One slot per row.
    pub(crate) slots: &'a [usize],
}

impl Queries<'_> {
    /// Returns the number of tokens per row if the sizes fit.
    fn time(&self, inner: usize, out: usize, slots: usize) -> Result<usize> {
        let rows = self.slots.len();
        let time = self.q.len().checked_div(rows * self.stride).unwrap_or(0);
        if time == 0 || self.stride < inner || self.q.len() != rows * time * self.stride || out != rows * time * inner {
            let found = (rows, self.q.len(), self.stride, out);
            return Err(ModelError::shape(OP, "slots, queries, stride and out", ("rows", inner), found));
        }
        self.slots.iter().try_for_each(|&slot| ModelError::check_slot(slot, slots))?;
        Ok(time)
    }

    /// Returns the query of one head for a row's token.
    fn of(&self, (row, t): (usize, usize), time: usize, head: usize, d: usize) -> &[f32] {
        &self.q[(row * time + t) * self.stride + head * d..][..d]
    }
}

thread_local! {
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Computes the sums of a source's keys and values: S, z and c of each head, as [`Sums::read_head`] returns them.
///
/// kv: (tokens, 2 heads d), k then v of each token -> (heads, S (F, d) then z (F) then c)
///
/// # Errors
/// When the shapes do not fit, or the features have a maximum.
pub(crate) fn sums(features: &Features, kv: &[f32], cx: &mut Compute) -> Result<Vec<f32>> {
    let (heads, f, d) = features.dims();
    let inner = heads * d;
    if features.has_maximum() || kv.is_empty() || !kv.len().is_multiple_of(2 * inner) {
        return Err(ModelError::shape(
            OP,
            "k and v",
            (2 * inner, "maximum: false"),
            (kv.len(), features.has_maximum()),
        ));
    }
    let (isa, numbers) = (cx.isa, f * (d + 1) + 1);
    let mut out = vec![0.0; heads * numbers];
    let parts = Parts::new(&mut out, numbers, &mut cx.marks[0]);
    cx.threads.run(heads, &|head| {
        // Each head is computed once, so no other thread has its part.
        let Some(own) = parts.take(head) else { return };
        let (s, rest) = own.split_at_mut(f * d);
        SCRATCH.with_borrow_mut(|scratch| {
            let mut rows = Rows::new(features, QUERIES, scratch);
            for block in kv.chunks(QUERIES * 2 * inner) {
                let keys = block.chunks_exact(2 * inner).map(|kv| &kv[head * d..][..d]);
                let phi = rows.features(isa, head, keys);
                for (phi, kv) in phi.chunks_exact(f).zip(block.chunks_exact(2 * inner)) {
                    readout::add(isa, s, rest, phi, &kv[inner + head * d..][..d]);
                }
            }
        });
    });
    Ok(out)
}

/// Buffers for the features of rows of one head.
struct Rows<'a> {
    map: &'a Features,
    x: &'a mut [f32],       // (rows, d)
    phi: &'a mut [f32],     // (rows, F)
    maxima: &'a mut [f32],  // (rows)
    scratch: &'a mut [f32], // (rows, Features::scratch)
}

impl<'a> Rows<'a> {
    /// Creates buffers for `rows` rows.
    fn new(map: &'a Features, rows: usize, room: &'a mut Vec<f32>) -> Self {
        let (_, f, d) = map.dims();
        let room = sized(room, rows * (d + map.scratch() + f + 1));
        let (x, room) = room.split_at_mut(rows * d);
        let (phi, room) = room.split_at_mut(rows * f);
        let (maxima, scratch) = room.split_at_mut(rows);
        Self { map, x, phi, maxima, scratch }
    }

    /// Computes the features (rows, F) of one head's vectors, which must fit into the buffers.
    fn features<'b>(&mut self, isa: Isa, head: usize, vectors: impl Iterator<Item = &'b [f32]>) -> &[f32] {
        let (_, f, d) = self.map.dims();
        let mut len = 0;
        for (x, vector) in self.x.chunks_exact_mut(d).zip(vectors) {
            x.copy_from_slice(vector);
            len += 1;
        }
        let (x, scratch) = (&mut self.x[..len * d], &mut self.scratch[..len * self.map.scratch()]);
        let (phi, maxima) = (&mut self.phi[..len * f], &mut self.maxima[..len]);
        self.map.rows(isa, head, FeatureRows { x, scratch, phi, maxima });
        &self.phi[..len * f]
    }
}

/// Computes attention of the queries to the sums in their slots -> the number of denominators clamped to their floor,
/// `eps` c.
/// out: (rows, time, heads d)
///
/// # Errors
/// When the shapes do not fit, or a slot is out of range.
pub(crate) fn read_sums(
    features: &Features,
    eps: f64,
    sums: &Sums,
    queries: Queries<'_>,
    (cx, buffer): (&mut Compute, &mut Vec<f32>),
    out: &mut [f32],
) -> Result<u64> {
    let ((heads, f, d), (slots, of)) = (features.dims(), sums.dims());
    let expected = SumsShape { heads, features: f, head_dim: d, maximum: false };
    if of != expected || features.has_maximum() {
        return Err(ModelError::shape(OP, "sums and features", expected, (of, features.has_maximum())));
    }
    let time = queries.time(heads * d, out.len(), slots)?;
    let clamped = AtomicU64::new(0);
    let isa = cx.isa;
    let piece = |row: usize, head: usize, out: &mut [f32]| {
        let at = queries.slots[row] * heads + head;
        let rest = &sums.rest[at * of.rest_len()..][..of.rest_len()];
        let clamped_in_head = match &sums.s {
            Matrices::F32(s) => {
                head_of_sums((isa, features, eps), queries, (row, head, time), (&s[at * f * d..][..f * d], rest), out)
            }
            Matrices::Bf16(s) => {
                head_of_sums((isa, features, eps), queries, (row, head, time), (&s[at * f * d..][..f * d], rest), out)
            }
        };
        clamped.fetch_add(clamped_in_head, Ordering::Relaxed);
    };
    each_head((queries.slots.len(), heads, time, d), f * (d + 1), (cx, buffer), out, &piece);
    Ok(clamped.into_inner())
}

/// Computes all tokens of one head from S, z and c. out: (time, d) -> the number of clamped denominators
fn head_of_sums<S: Readable>(
    (isa, features, eps): (Isa, &Features, f64),
    queries: Queries<'_>,
    (row, head, time): (usize, usize, usize),
    (s, rest): (&[S], &[f32]),
    out: &mut [f32],
) -> u64 {
    let (_, f, d) = features.dims();
    let block = QUERIES.min(time);
    let mut clamped = 0;
    SCRATCH.with_borrow_mut(|scratch| {
        let mut rows = Rows::new(features, block, scratch);
        for (first, out) in (0..time).step_by(block).zip(out.chunks_mut(block * d)) {
            let q = (first..first + out.len() / d).map(|t| queries.of((row, t), time, head, d));
            let phi = rows.features(isa, head, q);
            for (phi, out) in phi.chunks_exact(f).zip(out.chunks_exact_mut(d)) {
                S::read(isa, s, rest, phi, eps as f32, out, &mut clamped);
            }
        }
    });
    clamped
}

/// Computes softmax attention of the queries to the cached keys and values in their slots. out: (rows, time, heads d)
///
/// # Errors
/// When the shapes do not fit, or a slot is out of range or empty.
pub(crate) fn read_cache(
    cache: &Cache,
    queries: Queries<'_>,
    (cx, buffer): (&mut Compute, &mut Vec<f32>),
    out: &mut [f32],
) -> Result<()> {
    let ring = cache.shape();
    let (heads, d) = (ring.heads, ring.block.d);
    let time = queries.time(heads * d, out.len(), ring.slots)?;
    if let Some(&slot) = queries.slots.iter().find(|&&slot| cache.used(slot) == 0) {
        return Err(ModelError::Slot { slot, reason: SlotError::NoSource });
    }
    let isa = cx.isa;
    let most = queries.slots.iter().map(|&slot| cache.used(slot)).max().unwrap_or(0);
    let piece = |row: usize, head: usize, out: &mut [f32]| {
        let slot = queries.slots[row];
        let at = (slot, cache.used(slot));
        match &cache.blocks {
            Blocks::F32(all) => head_of_cache(isa, (ring, all.all()), at, queries, (row, head, time), out),
            Blocks::Bf16(all) => head_of_cache(isa, (ring, all.all()), at, queries, (row, head, time), out),
        }
    };
    each_head((queries.slots.len(), heads, time, d), most * 2 * d, (cx, buffer), out, &piece);
    Ok(())
}

/// Computes all tokens of one head from the blocks of its slot. out: (time, d)
fn head_of_cache<S: Cached>(
    isa: Isa,
    (ring, all): (CacheShape, &[S]),
    (slot, used): (usize, usize),
    queries: Queries<'_>,
    (row, head, time): (usize, usize, usize),
    out: &mut [f32],
) {
    let shape = ring.block;
    let (d, stride, group) = (shape.d, shape.partial_len(), QUERIES.min(time));
    let scale = 1.0 / (d as f32).sqrt();
    SCRATCH.with_borrow_mut(|scratch| {
        let room = sized(scratch, group * (d + 2 * stride));
        let (q, room) = room.split_at_mut(group * d);
        let (sums, next) = room.split_at_mut(group * stride);
        for (first, out) in (0..time).step_by(group).zip(out.chunks_mut(group * d)) {
            let len = out.len() / d;
            for (t, to) in q.chunks_exact_mut(d).take(len).enumerate() {
                let from = queries.of((row, first + t), time, head, d);
                to.iter_mut().zip(from).for_each(|(to, q)| *to = q * scale);
            }
            let (q, sums, next) = (&q[..len * d], &mut sums[..len * stride], &mut next[..len * stride]);
            for block in 0..used.div_ceil(shape.places) {
                let filled = (used - block * shape.places).min(shape.places);
                let numbers = &all[ring.at(slot, block, head) * shape.numbers()..][..shape.numbers()];
                if block == 0 {
                    softmax::attend_block(isa, numbers, shape, filled, q, sums);
                    continue;
                }
                softmax::attend_block(isa, numbers, shape, filled, q, next);
                for (sum, next) in sums.chunks_exact_mut(stride).zip(next.chunks_exact(stride)) {
                    softmax::add(isa, sum, next);
                }
            }
            for (sum, out) in sums.chunks_exact(stride).zip(out.chunks_exact_mut(d)) {
                softmax::mean(sum, out);
            }
        }
    });
}

/// Calls `piece(row, head, out (time, d))` for every head of every row, on several threads if there is enough work.
/// memory: elements that a head reads per token; out: (rows, time, heads d)
fn each_head(
    (rows, heads, time, d): (usize, usize, usize, usize),
    memory: usize,
    (cx, buffer): (&mut Compute, &mut Vec<f32>),
    out: &mut [f32],
    piece: &(dyn Fn(usize, usize, &mut [f32]) + Sync),
) {
    let Compute { marks: [marks, ..], threads, .. } = cx;
    let mut run = |target: &mut [f32]| {
        let outs = Parts::new(target, time * d, marks);
        // The order is head by head, because the rows of a head share its random matrix.
        let run = |i: usize| {
            let (head, row) = (i / rows, i % rows);
            // Each piece runs once, so no other thread has its part.
            if let Some(out) = outs.take(row * heads + head) {
                piece(row, head, out);
            }
        };
        run_heads(threads, rows * heads, rows * heads * time * memory, &run);
    };
    if time == 1 {
        // With one token, (heads, time) and (time, heads) have the same order.
        return run(out);
    }
    let target = sized(buffer, rows * heads * time * d);
    run(target);
    time_first(target, heads, time, d, out);
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
