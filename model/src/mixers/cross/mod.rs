//! Cross attention: queries of the decoder over what the encoder made of the source.
//!
//! By random features the source is two sums, read by every token at the same cost (Peng et al., ICLR 2021, equation
//! 5); by softmax it is its keys and values.

pub(crate) mod read;

use candle_core::{Result, bail};

use crate::mixers::LayerMemory;
use crate::mixers::rfa::features;
use crate::compute::{Compute, sized};
use crate::config::{Attention, DecoderConfig};
use crate::feature_map::Features;
use crate::memory::Denominators;
use crate::nn::Linear;
use read::{self as cross, Queries};
use crate::weights::{LoadError, Weights};

/// Projections around what reads the source.
#[derive(Debug)]
pub(crate) struct CrossAttention {
    head_dim: usize,
    inner: usize,  // heads d
    query: Linear, // (heads d, hidden)
    kv: Linear,    // (2 heads d, hidden)
    out: Linear,   // (hidden, heads d)
    /// The feature map, and the floor of denominators; none for softmax.
    features: Option<(Features, f64)>,
}

/// What a layer holds on the way.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    q: Vec<f32>,           // (rows, time, heads d)
    heads_first: Vec<f32>, // (rows, heads, time, d)
    h: Vec<f32>,           // (rows, time, heads d)
}

impl CrossAttention {
    /// Reads `{q,k,v,o}_proj` of one layer, and with random features `sigma` and `random_matrices`.
    pub(crate) fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        let projection = |name: &str| weights.matrix(&format!("{name}_proj.weight"), inner, hidden);
        let features = match config.attention {
            Attention::Softmax => None,
            Attention::Rfa | Attention::Hybrid => Some((features::of(config, weights)?, config.denominator_eps)),
        };
        Ok(Self {
            head_dim: config.head_dim,
            inner,
            query: Linear::new(&projection("q")?, None)?,
            kv: Linear::stack(&[projection("k")?, projection("v")?])?,
            out: Linear::new(&weights.matrix("o_proj.weight", hidden, inner)?, None)?,
            features,
        })
    }

    /// Puts what is kept of a source into a slot. source: (tokens, hidden), the encoder's
    pub(crate) fn keep(&self, cx: &mut Compute, source: &[f32], memory: &mut LayerMemory, slot: usize) -> Result<()> {
        let mut kv = vec![0.0; source.len() / self.out.width() * 2 * self.inner];
        self.kv.forward(cx, source, &mut kv);
        match (memory, &self.features) {
            (LayerMemory::Sums(memory), Some((features, _))) => memory.write(slot, &cross::sums(features, &kv, cx)?),
            (LayerMemory::Cache(cache), None) => cache.fill(slot, &kv, 2 * self.inner, 0),
            _ => bail!("cross attention: the memory is of another kind"),
        }
        Ok(())
    }

    /// x: (rows, time, hidden) -> out: the same shape; `memory` has each row's source in its slot.
    pub(crate) fn forward(
        &self,
        cx: &mut Compute,
        x: &[f32],
        memory: &LayerMemory,
        slots: &[usize],
        Buffers { q, heads_first, h }: &mut Buffers,
        out: &mut [f32],
    ) -> Result<Denominators> {
        let len = x.len() / self.out.width() * self.inner;
        let (q, h) = (sized(q, len), sized(h, len));
        self.query.forward(cx, x, q);
        let queries = Queries { q, stride: self.inner, slots };
        let mut denominators = Denominators::default();
        match (memory, &self.features) {
            (LayerMemory::Sums(memory), Some((features, eps))) => {
                let clamped = cross::read_sums(features, *eps, memory, queries, (cx, heads_first), h)?;
                denominators.note(len / self.head_dim, clamped);
            }
            (LayerMemory::Cache(cache), None) => cross::read_cache(cache, queries, (cx, heads_first), h)?,
            _ => bail!("cross attention: the memory is of another kind"),
        }
        self.out.forward(cx, h, out);
        Ok(denominators)
    }

    /// Bytes of the matrices that a token reads.
    pub(crate) fn bytes(&self) -> usize {
        self.query.bytes() + self.out.bytes() + self.features.as_ref().map_or(0, |(features, _)| features.bytes())
    }
}
