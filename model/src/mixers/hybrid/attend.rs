//! The hybrid's serving form: softmax attention over the last tokens of each slot and gated random feature attention
//! over all older ones, with a joint normalizer.
//!
//! A token that enters the window replaces the one that leaves it. The leaving token's key, value and gate update S, z
//! and c, and the newest query reads them in the same pass. The result is one more partial sum besides those of the
//! window's blocks, with the learned bias as its largest score. Summing the partial sums therefore gives the joint
//! normalizer, and a text has the same bits however it is divided into calls.

use std::cell::RefCell;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

use super::memory::HybridMemory;
use crate::compute::{Compute, sized};
use crate::error::{ModelError, Result};
use crate::feature_map::Features;
use crate::kernels::parts::{Marks, Parts};
use crate::kernels::recurrence::{self, Number, Token};
use crate::kernels::softmax::Cached;
use crate::kernels::{Isa, threads::Threads};
use crate::mixers::matrices::Matrices;
use crate::mixers::rfa::recurrent::{BLOCK, Pairs};
use crate::mixers::rfa::sums::SumsShape;
use crate::mixers::softmax::attend::{self as softmax, AttendBuffers, Entering, Older};

pub use crate::mixers::rfa::recurrent::{Inputs, Shape};

/// The parameters of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Params<'a> {
    /// The shape of the heads, and the floor of the denominator over older tokens (the far denominator).
    pub shape: Shape,
    /// The feature map of the older tokens; it must have no maximum.
    pub features: &'a Features,
    /// The log weight of all older tokens relative to a score in the window: (heads)
    pub far_bias: &'a [f32],
}

/// Intermediate results of [`attend`], reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct HybridAttendBuffers {
    window: AttendBuffers,
    marks: [Marks; 3],
    /// Far denominators clamped to their floor in the last step: (heads)
    clamped: Vec<AtomicU64>,
}

impl HybridAttendBuffers {
    /// Far denominators clamped to their floor in the last step, per head.
    pub(crate) fn clamped(&self) -> impl ExactSizeIterator<Item = u64> {
        self.clamped.iter().map(|count| count.load(Ordering::Relaxed))
    }
}

/// Runs `attend` outside of a decoder, on the process's threads -> the number of clamped far denominators.
///
/// # Errors
/// [`ModelError`] when the shapes do not fit, or a slot is out of range or named twice.
pub fn attend_alone(params: Params<'_>, memory: &mut HybridMemory, inputs: Inputs<'_>, out: &mut [f32]) -> Result<u64> {
    let mut cx = Compute::new(Threads::global().clone());
    let mut buffers = HybridAttendBuffers::default();
    attend(params, memory, inputs, (&mut cx, &mut buffers), out)?;
    Ok(buffers.clamped().sum())
}

/// Number of tokens in a step whose query reads a far denominator, because an older token has left the window.
pub(crate) fn far(inputs: &Inputs<'_>, time: usize, window: usize) -> usize {
    inputs.positions.iter().map(|&position| time - fresh(position, window).min(time)).sum()
}

/// Number of tokens from `position` on that enter unused places of the ring buffer.
fn fresh(position: u64, window: usize) -> usize {
    (window as u64).saturating_sub(position) as usize
}

/// Advances the given slots by some tokens. out: (rows, time, heads d)
///
/// # Errors
/// When the shapes do not fit, or a slot is out of range or named twice.
pub(crate) fn attend(
    params: Params<'_>,
    memory: &mut HybridMemory,
    inputs: Inputs<'_>,
    (cx, buffers): (&mut Compute, &mut HybridAttendBuffers),
    out: &mut [f32],
) -> Result<()> {
    let Shape { heads, head_dim: d, features, .. } = params.shape;
    let (rows, inner) = (inputs.slots.len(), heads * d);
    let time = inputs.qkv.len().checked_div(rows * 3 * inner).unwrap_or(0);
    let (logits, window) = (memory.logits(), memory.cache.shape().window);
    let gates_fit = match inputs.gate {
        Some(gate) => gate.len() == rows * time * heads && logits == window,
        None => logits == 0,
    };
    let refused = |what, expected: &dyn Debug, found: &dyn Debug| {
        Err(ModelError::shape("hybrid attention", what, expected, found))
    };
    if !gates_fit {
        return refused("gates", &(rows * time * heads, window), &(inputs.gate.map(<[f32]>::len), logits));
    }
    let (_, own) = memory.sums.dims();
    let expected = SumsShape { heads, features, head_dim: d, maximum: false };
    if own != expected {
        return refused("sums", &expected, &own);
    }
    let found = (params.features.dims(), params.features.has_maximum(), params.far_bias.len());
    if found != ((heads, features, d), false, heads) {
        return refused("features and bias", &expected, &found);
    }
    let HybridAttendBuffers { window: near_buffers, marks: [a, b, c], clamped } = buffers;
    clamped.clear();
    clamped.resize_with(heads, AtomicU64::default);
    let HybridMemory { sums: memory, cache, gates, .. } = memory;
    let (sums, gates) = (Parts::new(&mut memory.rest, own.rest_len(), b), Parts::new(gates, logits, c));
    let step = Step { params, inputs, window, time, isa: cx.isa, clamped };
    let shape = softmax::Shape { heads, head_dim: d };
    let near = softmax::Inputs { qkv: inputs.qkv, slots: inputs.slots, positions: inputs.positions };
    match &mut memory.s {
        Matrices::F32(s) => {
            let far = Far { step, s: Parts::new(s, own.matrix(), a), sums, gates };
            softmax::attend_with(shape, cache, near, far, (cx, near_buffers), out)
        }
        Matrices::Bf16(s) => {
            let far = Far { step, s: Parts::new(s, own.matrix(), a), sums, gates };
            softmax::attend_with(shape, cache, near, far, (cx, near_buffers), out)
        }
    }
}

#[derive(Clone, Copy)]
struct Step<'a> {
    params: Params<'a>,
    inputs: Inputs<'a>,
    window: usize,
    time: usize,
    isa: Isa,
    clamped: &'a [AtomicU64],
}

impl Step<'_> {
    /// The query of one head for a row's token.
    fn query(&self, row: usize, t: usize, head: usize) -> &[f32] {
        let Shape { heads, head_dim: d, .. } = self.params.shape;
        &self.inputs.qkv[((row * self.time + t) * 3 * heads + head) * d..][..d]
    }

    /// The gate logit of a token.
    fn gate(&self, row: usize, t: usize, head: usize) -> Option<f32> {
        self.inputs.gate.map(|gate| gate[(row * self.time + t) * self.params.shape.heads + head])
    }
}

/// The sums over tokens that have left their windows.
struct Far<'a, S> {
    step: Step<'a>,
    s: Parts<'a, S>,
    sums: Parts<'a, f32>,
    gates: Parts<'a, f32>,
}

/// The sums of one head in one slot.
struct Own<'a, S> {
    s: &'a mut [S],       // (F, d)
    sums: &'a mut [f32],  // z (F), c
    gates: &'a mut [f32], // logits by place of the ring: (window), or empty without a gate
}

impl<'a, N: Number> Older for Far<'a, N> {
    type Head = Own<'a, N>;

    fn numbers(&self) -> usize {
        self.step.params.shape.features * self.step.params.shape.head_dim
    }

    fn head(&self, row: usize, head: usize) -> Option<Own<'a, N>> {
        let part = self.step.inputs.slots[row] * self.step.params.shape.heads + head;
        let gates = if self.step.inputs.gate.is_some() { self.gates.take(part)? } else { &mut [] };
        Some(Own { s: self.s.take(part)?, sums: self.sums.take(part)?, gates })
    }

    fn add<S: Cached>(&self, own: &mut Own<'a, N>, entering: Entering<'_, S>, out: &mut [f32]) {
        thread_local! {
            static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
        }
        let Entering { row, head, first, place, shape, .. } = entering;
        let Shape { head_dim: d, features, .. } = self.step.params.shape;
        let (map, stride) = (self.step.params.features, shape.partial_len());
        let position = self.step.inputs.positions[row] + first as u64;
        let fresh = fresh(position, self.step.window).min(out.len() / stride);
        let (none, out) = out.split_at_mut(fresh * stride);
        none.chunks_exact_mut(stride).for_each(|partial| absent(shape.columns(), partial));
        let block = BLOCK.min(self.step.time);
        let clamped = SCRATCH.with_borrow_mut(|scratch| {
            let (values, scratch) = sized(scratch, block * (d + Pairs::numbers(map))).split_at_mut(block * d);
            let mut pairs = Pairs::new(map, block, scratch);
            let mut clamped = 0;
            for (i, out) in out.chunks_mut(block * stride).enumerate() {
                let (from, len) = (fresh + i * block, out.len() / stride);
                let places = place % shape.places + from..;
                let rows = pairs.x.chunks_exact_mut(2 * d).zip(values.chunks_exact_mut(d));
                for ((t, place), (pair, value)) in (first + from..first + from + len).zip(places).zip(rows) {
                    let (q, k) = pair.split_at_mut(d);
                    q.copy_from_slice(self.step.query(row, t, head));
                    k.iter_mut().zip(shape.key(entering.block, place)).for_each(|(to, v)| *to = v);
                    value.iter_mut().zip(shape.value(entering.block, place)).for_each(|(to, v)| *to = v);
                }
                let (phi, _) = pairs.features(map, (self.step.isa, head), len);
                let tokens = phi.chunks_exact(2 * features).zip(values.chunks_exact(d));
                for ((t, (phi, v)), partial) in (from..).zip(tokens).zip(out.chunks_exact_mut(stride)) {
                    let (phi_q, phi_k) = phi.split_at(features);
                    let gate = own.gates.get(place + t).copied();
                    let left = position + t as u64 - self.step.window as u64;
                    let token = self.token((phi_q, phi_k, v), gate, left, head);
                    clamped += self.read(own, &token, head, partial);
                }
            }
            clamped
        });
        self.step.clamped[head].fetch_add(clamped, Ordering::Relaxed);
        for (t, logit) in (first..self.step.time).zip(own.gates.iter_mut().skip(place)).take(fresh + out.len() / stride)
        {
            *logit = self.step.gate(row, t, head).unwrap_or(0.0);
        }
    }
}

impl<N: Number> Far<'_, N> {
    /// Combines a query with the token that has left the window. left: the position of that token in its text
    fn token<'t>(
        &self,
        (phi_q, phi_k, v): (&'t [f32], &'t [f32], &'t [f32]),
        gate: Option<f32>,
        left: u64,
        head: usize,
    ) -> Token<'t> {
        let Shape { heads, eps, .. } = self.step.params.shape;
        let seed = self.step.inputs.seed(left, head, heads);
        let weights = recurrence::gate_weights(gate);
        Token { phi_q, phi_k, v, weights, counted: weights, eps: eps as f32, seed }
    }

    /// Adds a token to the sums and reads them for its query -> the number of clamped denominators.
    fn read(&self, own: &mut Own<'_, N>, token: &Token<'_>, head: usize, partial: &mut [f32]) -> u64 {
        let (columns, d) = (partial.len() - 2, token.v.len());
        let mut clamped = 0;
        partial[d..columns].fill(0.0);
        let denominator = recurrence::advance(self.step.isa, own.s, own.sums, token, &mut partial[..d], &mut clamped);
        // After a token has left the window, a text's c is above 0, because the gate's exponential is never 0. An
        // imported state may have any c; if it is 0 or less, the sums get no weight.
        if own.sums[token.phi_q.len()] <= 0.0 {
            absent(columns, partial);
            return 0;
        }
        partial[columns] = self.step.params.far_bias[head];
        partial[columns + 1] = denominator;
        clamped
    }
}

/// Sets a partial sum to have no weight.
fn absent(columns: usize, partial: &mut [f32]) {
    partial.fill(0.0);
    partial[columns] = f32::NEG_INFINITY;
}
