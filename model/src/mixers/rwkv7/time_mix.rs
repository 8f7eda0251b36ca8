//! The time mix: the projections of a token's input and the previous one, the recurrence, and the output projection.

use super::low_rank::{Activation, LowRank};
use super::scan::Inputs;
use super::shift::Shift;
use crate::compute::{Compute, sized};
use crate::config::DecoderConfig;
use crate::error;
use crate::kernels::elementwise::{self, Bonus};
use crate::kernels::products::Product;
use crate::memory::StateType;
use crate::mixers::head_memory::{HeadBuffers, HeadMemory, Noted};
use crate::mixers::last_inputs::LastInputs;
use crate::mixers::layer::{Kept, Step};
use crate::nn::{LayerNorm, Linear};
use crate::weights::{LoadError, TensorList, Weights};

/// The index of the time mix's input among those that a layer keeps.
const INPUT: usize = 0;

/// The previous token's shares in the inputs of r, w, k, v, a and the gate: (hidden) each.
const MIXES: [&str; 6] = ["x_r", "x_w", "x_k", "x_v", "x_a", "x_g"];

/// The weights of a time mix.
#[derive(Debug)]
pub(super) struct TimeMix {
    heads: usize,
    head_dim: usize,
    mixes: Vec<Vec<f32>>, // as in `MIXES`
    r: Linear,            // (hidden, hidden)
    k: Linear,            // (hidden, hidden)
    v: Linear,            // (hidden, hidden)
    decay: LowRank,
    rate: LowRank,
    first_values: Option<LowRank>, // none in the first layer
    gate: LowRank,
    directions: Vec<f32>, // k_k: (hidden)
    keys: Vec<f32>,       // k_a: (hidden)
    bonus: Vec<f32>,      // r_k: (heads, d)
    norm: LayerNorm,      // (hidden), over each head
    out: Linear,          // (hidden, hidden)
}

/// Intermediate results, each (rows, time, hidden) unless noted.
#[derive(Debug, Default)]
pub(super) struct TimeBuffers {
    before: Vec<f32>,               // (rows, hidden)
    mixed: [Vec<f32>; MIXES.len()], // as in `MIXES`
    inner: [Vec<f32>; 4],           // (rows, time, rank) of w, a, the gate and the first values
    normed: Vec<f32>,
    r: Vec<f32>,
    w: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    a: Vec<f32>,
    gate: Vec<f32>,
    kappa: Vec<f32>,
    /// The first layer's values, which the other layers read.
    first_values: Vec<f32>,
    share: Vec<f32>,
    read: Vec<f32>,
    heads: HeadBuffers,
}

impl TimeMix {
    /// The tensors that [`Self::load`] reads.
    pub(super) fn tensors(config: &DecoderConfig, layer: usize, list: &mut TensorList) {
        let (hidden, ranks) = (config.hidden_size, config.low_ranks.unwrap_or_default());
        for name in MIXES {
            list.floats(name, &[1, 1, hidden]);
        }
        for name in ["r_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"] {
            list.matrix(name, hidden, hidden);
        }
        LowRank::tensors(list, "w", (hidden, ranks.decay), true);
        LowRank::tensors(list, "a", (hidden, ranks.a), true);
        LowRank::tensors(list, "g", (hidden, ranks.gate), false);
        if layer > 0 {
            LowRank::tensors(list, "v", (hidden, ranks.v), true);
        }
        list.floats("k_k", &[hidden]);
        list.floats("k_a", &[hidden]);
        list.floats("r_k", &[config.num_attention_heads, config.head_dim]);
        LayerNorm::tensors(list, "g_norm", hidden);
    }

    /// Loads the tensors of one layer.
    pub(super) fn load(config: &DecoderConfig, layer: usize, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let (hidden, heads, head_dim) = (config.hidden_size, config.num_attention_heads, config.head_dim);
        let ranks = config.low_ranks.unwrap_or_default();
        let mix = |name: &str| weights.numbers(name, &[1, 1, hidden]);
        let linear = |name: &str| Linear::new(&weights.matrix(name, hidden, hidden)?, None);
        let map = |name: &str, rank: usize, activation: Option<Activation>, bias: bool| {
            LowRank::load(weights, name, (hidden, rank), (activation, bias))
        };
        // A head's readout is a sum over its keys, so its variance grows with their length, and the epsilon must too.
        let eps = config.rms_norm_eps * head_dim as f64;
        Ok(Self {
            heads,
            head_dim,
            mixes: MIXES.into_iter().map(mix).collect::<Result<_, _>>()?,
            r: linear("r_proj.weight")?,
            k: linear("k_proj.weight")?,
            v: linear("v_proj.weight")?,
            decay: map("w", ranks.decay, Some(elementwise::tanh), true)?,
            rate: map("a", ranks.a, None, true)?,
            first_values: (layer > 0).then(|| map("v", ranks.v, None, true)).transpose()?,
            gate: map("g", ranks.gate, Some(elementwise::sigmoid), false)?,
            directions: weights.numbers("k_k", &[hidden])?,
            keys: weights.numbers("k_a", &[hidden])?,
            bonus: weights.numbers("r_k", &[heads, head_dim])?,
            norm: LayerNorm::load(weights, "g_norm", hidden, eps)?.of_groups(head_dim),
            out: linear("o_proj.weight")?,
        })
    }

    /// Bytes of the matrices.
    pub(super) fn bytes(&self) -> usize {
        let matrices = [&self.r, &self.k, &self.v, &self.out].into_iter().map(Linear::bytes).sum::<usize>();
        let maps = [&self.decay, &self.rate, &self.gate].into_iter().chain(&self.first_values);
        matrices + maps.map(LowRank::bytes).sum::<usize>()
    }

    /// A placeholder for a product that the first layer lacks: the product of no tokens.
    fn nothing(&self) -> Product<'_> {
        self.v.product(&[], &mut [])
    }

    /// The memories of empty texts.
    pub(super) fn new_memory(&self, slots: usize, state: StateType) -> HeadMemory {
        HeadMemory::zeros(slots, self.heads, self.head_dim * self.head_dim, state)
    }

    /// x: (rows, time, hidden) -> out: the same shape
    pub(super) fn forward(
        &self,
        step: &mut Step<'_>,
        x: &[f32],
        (heads, inputs, drafts): (&mut HeadMemory, &mut LastInputs, &mut Noted<5>),
        buffers: &mut TimeBuffers,
        out: &mut [f32],
    ) -> error::Result<()> {
        let (rows, cx) = (step.rows, &mut *step.cx);
        let (isa, len, d) = (cx.isa, x.len(), self.head_dim);
        let width = self.heads * d;
        let own = |row: usize, len: usize| row * width..row * width + len;
        let TimeBuffers {
            before,
            mixed,
            inner,
            normed,
            r,
            w,
            k,
            v,
            a,
            gate,
            kappa,
            first_values,
            share,
            read,
            heads: head_buffers,
        } = buffers;
        let [normed, r, w, k, v, a, gate, kappa, first_values, share, read] =
            [normed, r, w, k, v, a, gate, kappa, first_values, share, read].map(|buffer| sized(buffer, len));
        let mut mixed = mixed.each_mut().map(|buffer| sized(buffer, len));
        let shift = Shift::new((inputs, INPUT), rows, x, width, before)?;
        for (by, mixed) in self.mixes.iter().zip(&mut mixed) {
            shift.mix(cx, by, mixed);
        }
        let [mixed_r, mixed_w, mixed_k, mixed_v, mixed_a, mixed_g] = mixed.map(|mixed| &*mixed);

        let tokens = len / width;
        let [inner_w, inner_a, inner_g, inner_v] = inner;
        let inner_w = self.decay.inner(inner_w, tokens);
        let inner_a = self.rate.inner(inner_a, tokens);
        let inner_g = self.gate.inner(inner_g, tokens);
        let mut values = self.first_values.as_ref().map(|map| (map, map.inner(inner_v, tokens)));
        // The f32 matrices come first: they are the longest pieces, which should not be the last that a thread takes.
        cx.products(&[
            self.gate.down(mixed_g, inner_g),
            self.decay.down(mixed_w, inner_w),
            self.rate.down(mixed_a, inner_a),
            values.as_mut().map_or_else(|| self.nothing(), |(map, inner)| map.down(mixed_v, inner)),
            self.r.product(mixed_r, r),
            self.k.product(mixed_k, k),
            self.v.product(mixed_v, v),
        ]);
        self.gate.activate(cx, inner_g);
        self.decay.activate(cx, inner_w);
        self.rate.activate(cx, inner_a);
        if let Some((map, inner)) = &mut values {
            map.activate(cx, inner);
        }
        cx.products(&[
            self.gate.up(inner_g, gate),
            self.decay.up(inner_w, w),
            self.rate.up(inner_a, a),
            values.as_ref().map_or_else(|| self.nothing(), |(map, inner)| map.up(inner, share)),
        ]);

        cx.each(w, width, &|_, w| elementwise::decay(isa, w));
        cx.each(a, width, &|_, a| elementwise::sigmoid(isa, a));
        cx.each(kappa, width, &|row, kappa| {
            elementwise::directions(isa, &k[own(row, kappa.len())], &self.directions, d, kappa);
        });
        cx.each(k, width, &|row, k| elementwise::scale_keys(isa, &a[own(row, k.len())], &self.keys, k));
        if self.first_values.is_some() {
            cx.each(share, width, &|_, share| elementwise::sigmoid(isa, share));
            cx.each(v, width, &|row, v| {
                let own = own(row, v.len());
                elementwise::approach(isa, &first_values[own.clone()], &share[own], v);
            });
        } else {
            first_values.copy_from_slice(v);
        }

        let [r, w, k, v, a, gate, kappa] = [r, w, k, v, a, gate, kappa].map(|part| &*part);
        drafts.note(rows, [w, k, v, kappa, a]);
        heads.advance(rows, &Inputs { r, w, k, v, kappa, a, width }, (cx, head_buffers), read)?;
        self.norm.forward(cx, read, normed);
        cx.each(normed, width, &|row, normed| {
            let own = own(row, normed.len());
            let [r, k, v, gate] = [r, k, v, gate].map(|part| &part[own.clone()]);
            elementwise::bonus(isa, Bonus { r, k, v, gate }, &self.bonus, d, normed);
        });
        self.out.forward(cx, normed, out);
        Ok(())
    }

    /// Advances a slot by the drafts that it keeps.
    pub(super) fn keep(
        &self,
        cx: &mut Compute,
        (heads, drafts): (&mut HeadMemory, &Noted<5>),
        kept: Kept,
    ) -> error::Result<()> {
        let [w, k, v, kappa, a] = drafts.of(kept);
        // The output is not needed, so anything will do as r.
        let inputs = Inputs { r: k, w, k, v, kappa, a, width: self.heads * self.head_dim };
        heads.keep(kept, &inputs, cx, self.head_dim)
    }
}
