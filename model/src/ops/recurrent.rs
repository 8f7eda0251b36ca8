//! The recurrence token by token for some slots of a pool, changed where it lies: serving.
//!
//! A prompt's tokens go through the very kernel that decoding uses, one after the other, a head's memory staying in
//! the nearest cache: so a state is the same bits however its text came in, as prompt or as answer, cut anywhere.

use std::sync::Mutex;

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Storage, Tensor, bail};
use rayon::prelude::*;

use crate::feature_map::{GaussianFeatures, gaussian_rows};
use crate::kernels::{Isa, recurrence};
use crate::nn::floats;

/// Tokens whose features are made together: enough for a product of matrices, few enough for the nearest cache.
const BLOCK: usize = 32;

/// Numbers of state under which a step is not shared among threads.
const SERIAL: usize = 1 << 18;

/// What [`scan`] gives.
#[derive(Debug)]
pub struct Scanned {
    /// What each head has read out: (rows, time, heads d)
    pub h: Tensor,
    /// How many of the `rows x time x heads` denominators were held at their floor.
    pub clamped: u64,
}

/// The heads' shape and the constants of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Heads.
    pub heads: usize,
    /// Length of a head's q, k and v (d).
    pub head_dim: usize,
    /// Random vectors of a head (D).
    pub proj_dim: usize,
    /// The denominator is held at or above this share of c.
    pub eps: f64,
}

impl Shape {
    /// Numbers that one head remembers: S (2D, d), z (2D), c.
    fn memory(self) -> usize {
        2 * self.proj_dim * (self.head_dim + 1) + 1
    }
}

/// Takes the given slots some tokens further.
///
/// memory: (slots, heads, 2D (d + 1) + 1), changed in place; qkv: (rows, time, 3 heads d), q then k then v of each
/// token; gate: logits (rows, time, heads), or none without a gate; slots: one for each row, all different.
///
/// # Errors
/// When the shapes do not fit, or a slot is out of range or named twice.
pub fn scan(
    shape: Shape,
    features: &GaussianFeatures,
    memory: &Tensor,
    qkv: &Tensor,
    gate: Option<&Tensor>,
    slots: &[usize],
) -> Result<Scanned> {
    let (rows, time, _) = qkv.dims3()?;
    let inner = shape.heads * shape.head_dim;
    let gate = gate.map(|g| g.flatten_all()?.to_vec1::<f32>()).transpose()?;
    let gates = rows * time * shape.heads;
    if qkv.dims() != [slots.len(), time, 3 * inner] || gate.as_ref().is_some_and(|g| g.len() != gates) {
        bail!("recurrence: {} slots need qkv of {0} x time x {}, found {:?}", slots.len(), 3 * inner, qkv.dims());
    }
    let (_, heads, len) = memory.dims3()?;
    let w = features.w().dims();
    if (heads, len) != (shape.heads, shape.memory()) || w != [shape.heads, shape.proj_dim, shape.head_dim] {
        bail!("recurrence: a memory of {:?} and random matrices of {w:?} do not fit {shape:?}", memory.dims());
    }
    let op = Scan { shape, time, w: features.w(), gate: gate.as_deref(), slots, out: Mutex::default() };
    memory.inplace_op2(&qkv.contiguous()?, &op)?;
    let (out, clamped) = op.out.into_inner().map_err(|_| candle_core::Error::msg("recurrence: a worker panicked"))?;
    Ok(Scanned { h: Tensor::from_vec(out, (rows, time, inner), qkv.device())?, clamped })
}

struct Scan<'a> {
    shape: Shape,
    time: usize,
    w: &'a Tensor, // (heads, D, d), sigma in it
    gate: Option<&'a [f32]>,
    slots: &'a [usize],
    out: Mutex<(Vec<f32>, u64)>, // an in-place op returns nothing: the outputs and the count leave by here
}

/// What the tokens of one block need on the way.
struct Scratch {
    block: usize,
    /// q and k of each token: the rows of one product with W. (block, 2, d)
    pairs: Vec<f32>,
    angles: Vec<f32>, // (block, 2, D)
    phi: Vec<f32>,    // (block, 2, 2D)
}

impl Scratch {
    fn new(shape: Shape, time: usize) -> Self {
        let block = BLOCK.min(time);
        let of = |numbers: usize| vec![0.0; block * 2 * numbers];
        Self { block, pairs: of(shape.head_dim), angles: of(shape.proj_dim), phi: of(2 * shape.proj_dim) }
    }
}

/// One head of one row.
struct Head<'a> {
    row: usize,
    index: usize,
    memory: &'a mut [f32], // (2D (d + 1) + 1)
    out: &'a mut [f32],    // (time, d)
    /// Denominators that were held at their floor.
    clamped: u64,
}

impl InplaceOp2 for Scan<'_> {
    fn name(&self) -> &'static str {
        "rfa-scan"
    }

    fn cpu_fwd(&self, memory: &mut CpuStorage, ml: &Layout, qkv: &CpuStorage, ql: &Layout) -> Result<()> {
        let CpuStorage::F32(memory) = memory else { bail!("recurrence: the state must be f32") };
        let Some((start, end)) = ml.contiguous_offsets() else { bail!("recurrence: the state must be contiguous") };
        let qkv = floats(qkv, ql, "recurrence: qkv")?;
        let (w_guard, wl) = self.w.storage_and_layout();
        let Storage::Cpu(w) = &*w_guard else { bail!("recurrence: random matrices must be on the CPU") };
        let w = floats(w, wl, "recurrence: random matrices")?;

        let Shape { heads, head_dim: d, .. } = self.shape;
        let rows = self.slots.len();
        let mut out = vec![0.0; rows * self.time * heads * d]; // (rows, heads, time, d)
        let mut parts = self.split(&mut memory[start..end], &mut out)?;
        let scratch = || Scratch::new(self.shape, self.time);
        let work = |scratch: &mut Scratch, part: &mut Head<'_>| {
            self.head(part, &qkv[part.row * self.time * 3 * heads * d..], w, scratch);
        };
        if parts.len() * self.time * self.shape.memory() < SERIAL || rayon::current_num_threads() == 1 {
            let mut scratch = scratch();
            for part in &mut parts {
                work(&mut scratch, part);
            }
        } else {
            parts.par_iter_mut().for_each_init(scratch, work);
        }
        let clamped = parts.iter().map(|part| part.clamped).sum();
        if self.time > 1 {
            out = time_first(&out, heads, self.time, d);
        }
        *self.out.lock().map_err(|_| candle_core::Error::msg("recurrence: a worker panicked"))? = (out, clamped);
        Ok(())
    }
}

/// (rows, heads, time, d) -> (rows, time, heads, d)
fn time_first(out: &[f32], heads: usize, time: usize, d: usize) -> Vec<f32> {
    let mut turned = Vec::with_capacity(out.len());
    for row in out.chunks_exact(heads * time * d) {
        for t in 0..time {
            for head in row.chunks_exact(time * d) {
                turned.extend_from_slice(&head[t * d..][..d]);
            }
        }
    }
    turned
}

impl Scan<'_> {
    /// The disjoint parts of the pool, each with its output. out: (rows, heads, time, d)
    fn split<'a>(&self, mut memory: &'a mut [f32], out: &'a mut [f32]) -> Result<Vec<Head<'a>>> {
        let Shape { heads, head_dim: d, .. } = self.shape;
        let (head_len, slot_len) = (self.shape.memory(), heads * self.shape.memory());
        let (count, row_len) = (memory.len() / slot_len, heads * self.time * d);
        let mut order: Vec<(usize, usize, &mut [f32])> = Vec::with_capacity(self.slots.len());
        order
            .extend(self.slots.iter().zip(out.chunks_exact_mut(row_len)).enumerate().map(|(i, (&s, out))| (s, i, out)));
        order.sort_unstable_by_key(|entry| entry.0);
        let (mut parts, mut passed) = (Vec::with_capacity(self.slots.len() * heads), 0);
        for (slot, row, out) in order {
            if slot >= count || slot < passed {
                bail!("recurrence: slot {slot} is out of range (the pool has {count}) or named twice");
            }
            let (_, rest) = memory.split_at_mut((slot - passed) * slot_len);
            let (own, rest) = rest.split_at_mut(slot_len);
            let pairs = own.chunks_exact_mut(head_len).zip(out.chunks_exact_mut(self.time * d));
            parts.extend(pairs.enumerate().map(|(index, (memory, out))| Head { row, index, memory, out, clamped: 0 }));
            (memory, passed) = (rest, slot + 1);
        }
        Ok(parts)
    }

    /// All tokens of one head. qkv: the row's (time, 3, heads, d)
    fn head(&self, part: &mut Head<'_>, qkv: &[f32], w: &[f32], scratch: &mut Scratch) {
        let Shape { heads, head_dim: d, proj_dim, eps } = self.shape;
        let (isa, inner) = (Isa::detect(), heads * d);
        let w = &w[part.index * proj_dim * d..][..proj_dim * d];
        let Scratch { block, pairs, angles, phi } = scratch;
        let block = *block;
        for (first, outs) in (0..self.time).step_by(block).zip(part.out.chunks_mut(block * d)) {
            let token = |t: usize| &qkv[(first + t) * 3 * inner..][..3 * inner];
            let of = |t: usize, which: usize| &token(t)[which * inner + part.index * d..][..d];
            let len = outs.len() / d;
            for (t, pair) in pairs.chunks_exact_mut(2 * d).take(len).enumerate() {
                pair[..d].copy_from_slice(of(t, 0));
                pair[d..].copy_from_slice(of(t, 1));
            }
            let (angles, phi) = (&mut angles[..len * 2 * proj_dim], &mut phi[..len * 4 * proj_dim]);
            gaussian_rows(&mut pairs[..len * 2 * d], w, d, angles, phi);
            for ((t, out), phi) in outs.chunks_exact_mut(d).enumerate().zip(phi.chunks_exact(4 * proj_dim)) {
                let (phi_q, phi_k) = phi.split_at(2 * proj_dim);
                let gate = self.gate.map(|gate| gate[(part.row * self.time + first + t) * heads + part.index]);
                let weights = recurrence::gate_weights(gate);
                let (v, held) = (of(t, 2), &mut part.clamped);
                recurrence::step(isa, part.memory, phi_q, phi_k, v, weights, eps as f32, out, held);
            }
        }
    }
}
