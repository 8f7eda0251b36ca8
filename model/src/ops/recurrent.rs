//! The recurrence one token further for some slots of a pool: decoding. The state is changed where it lies.

use std::sync::Mutex;

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Storage, Tensor, bail};
use rayon::prelude::*;

use crate::feature_map::{GaussianFeatures, gaussian_rows};
use crate::kernels::{Isa, recurrence};
use crate::nn::floats;

/// Numbers of state under which a step is not shared among threads.
const SERIAL: usize = 1 << 18;

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

/// Takes the given slots one token further.
///
/// memory: (slots, heads, 2D (d + 1) + 1), changed in place; qkv: (rows, 3 heads d), q then k then v of each row;
/// gate: logits (rows, heads), or none without a gate; slots: one for each row, all different.
/// -> h (rows, heads d)
///
/// # Errors
/// When the shapes do not fit, or a slot is out of range or named twice.
pub fn step(
    shape: Shape,
    features: &GaussianFeatures,
    memory: &Tensor,
    qkv: &Tensor,
    gate: Option<&Tensor>,
    slots: &[usize],
) -> Result<Tensor> {
    let rows = slots.len();
    let inner = shape.heads * shape.head_dim;
    let gate = gate.map(|g| g.flatten_all()?.to_vec1::<f32>()).transpose()?;
    if qkv.dims() != [rows, 3 * inner] || gate.as_ref().is_some_and(|g| g.len() != rows * shape.heads) {
        bail!("recurrence: {rows} slots need qkv of {rows} x {}, found {:?}", 3 * inner, qkv.dims());
    }
    let (_, heads, len) = memory.dims3()?;
    let w = features.w().dims();
    if (heads, len) != (shape.heads, shape.memory()) || w != [shape.heads, shape.proj_dim, shape.head_dim] {
        bail!("recurrence: a memory of {:?} and random matrices of {w:?} do not fit {shape:?}", memory.dims());
    }
    let op = Step { shape, w: features.w(), gate: gate.as_deref(), slots, out: Mutex::default() };
    memory.inplace_op2(&qkv.contiguous()?, &op)?;
    let out = op.out.into_inner().map_err(|_| candle_core::Error::msg("recurrence: a worker panicked"))?;
    Tensor::from_vec(out, (rows, inner), qkv.device())
}

struct Step<'a> {
    shape: Shape,
    w: &'a Tensor, // (heads, D, d), sigma in it
    gate: Option<&'a [f32]>,
    slots: &'a [usize],
    out: Mutex<Vec<f32>>, // an in-place op returns nothing: the outputs leave by here
}

/// One row's part of the pool, its input and its output.
struct Row<'a> {
    index: usize,
    memory: &'a mut [f32], // (heads, 2D (d + 1) + 1)
    out: &'a mut [f32],    // (heads, d)
}

impl InplaceOp2 for Step<'_> {
    fn name(&self) -> &'static str {
        "rfa-step"
    }

    fn cpu_fwd(&self, memory: &mut CpuStorage, ml: &Layout, qkv: &CpuStorage, ql: &Layout) -> Result<()> {
        let CpuStorage::F32(memory) = memory else { bail!("recurrence: the state must be f32") };
        let (Some((start, end)), len) = (ml.contiguous_offsets(), self.shape.heads * self.shape.memory()) else {
            bail!("recurrence: the state must be contiguous");
        };
        let qkv = floats(qkv, ql, "recurrence: qkv")?;
        let (w_guard, wl) = self.w.storage_and_layout();
        let Storage::Cpu(w) = &*w_guard else { bail!("recurrence: random matrices must be on the CPU") };
        let w = floats(w, wl, "recurrence: random matrices")?;

        let inner = self.shape.heads * self.shape.head_dim;
        let mut out = vec![0.0; self.slots.len() * inner];
        let mut rows = split(&mut memory[start..end], len, self.slots, &mut out, inner)?;
        let work = |row: &mut Row<'_>| self.row(row, &qkv[row.index * 3 * inner..][..3 * inner], w);
        if rows.len() * len < SERIAL || rayon::current_num_threads() == 1 {
            rows.iter_mut().for_each(work);
        } else {
            rows.par_iter_mut().for_each(work);
        }
        *self.out.lock().map_err(|_| candle_core::Error::msg("recurrence: a worker panicked"))? = out;
        Ok(())
    }
}

/// The rows' disjoint parts of the pool, each with its output.
fn split<'a>(
    mut memory: &'a mut [f32],
    len: usize,
    slots: &[usize],
    out: &'a mut [f32],
    inner: usize,
) -> Result<Vec<Row<'a>>> {
    let count = memory.len() / len;
    let mut order: Vec<(usize, usize, &mut [f32])> =
        slots.iter().zip(out.chunks_exact_mut(inner)).enumerate().map(|(i, (&slot, out))| (slot, i, out)).collect();
    order.sort_unstable_by_key(|entry| entry.0);
    let (mut rows, mut passed) = (Vec::with_capacity(slots.len()), 0);
    for (slot, index, out) in order {
        if slot >= count || slot < passed {
            bail!("recurrence: slot {slot} is out of range (the pool has {count}) or named twice");
        }
        let (_, rest) = memory.split_at_mut((slot - passed) * len);
        let (own, rest) = rest.split_at_mut(len);
        rows.push(Row { index, memory: own, out });
        (memory, passed) = (rest, slot + 1);
    }
    Ok(rows)
}

impl Step<'_> {
    /// All heads of one row. qkv: (3, heads, d)
    fn row(&self, row: &mut Row<'_>, qkv: &[f32], w: &[f32]) {
        let Shape { heads, head_dim: d, proj_dim, eps } = self.shape;
        let isa = Isa::detect();
        let (q, kv) = qkv.split_at(heads * d);
        let (k, v) = kv.split_at(heads * d);
        // q and k of a head are two rows of one product with W.
        let mut pair = vec![0.0; 2 * d];
        let mut angles = vec![0.0; 2 * proj_dim];
        let mut phi = vec![0.0; 4 * proj_dim];
        let outs = row.out.chunks_exact_mut(d);
        for (head, (memory, out)) in row.memory.chunks_exact_mut(self.shape.memory()).zip(outs).enumerate() {
            let at = head * d..(head + 1) * d;
            pair[..d].copy_from_slice(&q[at.clone()]);
            pair[d..].copy_from_slice(&k[at.clone()]);
            gaussian_rows(&mut pair, &w[head * proj_dim * d..][..proj_dim * d], d, &mut angles, &mut phi);
            let (phi_q, phi_k) = phi.split_at(2 * proj_dim);
            let weights = recurrence::gate_weights(self.gate.map(|g| g[row.index * heads + head]));
            recurrence::step(isa, memory, phi_q, phi_k, &v[at], weights, eps as f32, out);
        }
    }
}
