//! Cross attention: the decoder's queries attend to a source that the encoder has read.
//!
//! With random features the source is kept as two sums, and every token reads them at the same cost (Peng et al., ICLR
//! 2021, equation 5). Softmax keeps keys and values. Each variant is a [`SourceReader`], paired by type with its state.

pub(crate) mod read;

use std::fmt::Debug;

use super::layer::{SlotState, Step};
use super::rfa::features;
use super::rfa::sums::{Sums, SumsShape};
use super::softmax::cache::Cache;
use crate::compute::{Compute, sized};
use crate::config::{ConfigError, DecoderConfig, FeatureMap, SourceConfig};
use crate::error::{self, ModelError};
use crate::feature_map::Features;
use crate::memory::StateType;
use crate::nn::Linear;
use crate::weights::{LoadError, TensorList, Weights};
use read::Queries;

/// Keeps a source and answers queries on it.
pub(crate) trait SourceReader: Debug + Send + Sync + Sized + 'static {
    /// What is kept of the sources in a pool's slots.
    type State: SlotState + 'static;

    /// Checks the config bounds of an encoder-decoder that depend on the reader.
    fn validate(config: &DecoderConfig) -> Result<(), ConfigError>;

    /// Elements kept per head.
    fn head_numbers(config: &DecoderConfig, source: SourceConfig) -> usize;

    /// The tensors that [`Self::load`] reads, below `cross_attn`.
    fn tensors(config: &DecoderConfig, list: &mut TensorList);

    /// Reads the tensors of one layer.
    fn load(config: &DecoderConfig, source: SourceConfig, weights: &Weights<'_>) -> Result<Self, LoadError>;

    /// Bytes of the matrices that a token reads.
    fn bytes(&self) -> usize;

    /// The state of `slots` empty slots.
    fn new_state(&self, slots: usize, state: StateType) -> Self::State;

    /// Stores the keys and values of a source in a slot. kv: (tokens, 2 heads d), k then v of each token
    fn keep(&self, cx: &mut Compute, kv: &[f32], state: &mut Self::State, slot: usize) -> error::Result<()>;

    /// Computes attention of the queries to the sources in their slots. out: (rows, time, heads d)
    fn read(
        &self,
        step: &mut Step<'_>,
        queries: Queries<'_>,
        state: &Self::State,
        heads_first: &mut Vec<f32>,
        out: &mut [f32],
    ) -> error::Result<()>;
}

/// Keeps the source as sums of random features.
#[derive(Debug)]
pub(crate) struct SumsReader {
    features: Features,
    eps: f64,
}

/// Sums over a source; each of its tokens has weight 1.
#[derive(Debug)]
pub(crate) struct SourceSums(Sums);

impl SlotState for SourceSums {
    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn reset(&mut self, slot: usize) {
        self.0.reset(slot);
    }

    fn read(&self, slot: usize, out: &mut Vec<f32>) {
        self.0.read(slot, out);
    }

    /// c, the total weight, must equal the number of tokens: the floor of the denominator is a share of it.
    fn check(&self, layer: usize, numbers: &[f32], tokens: u64) -> error::Result<()> {
        let heads = numbers.chunks_exact(self.0.dims().1.head_numbers()).map(|head| head[head.len() - 1]);
        // f32 represents counts up to 65,536 exactly.
        match heads.enumerate().find(|&(_, c)| c != tokens as f32) {
            Some((head, found)) => {
                let parameter = format!("c of the source in layer {layer}, head {head}");
                Err(ModelError::argument(parameter, format!("its {tokens} tokens"), found))
            }
            None => Ok(()),
        }
    }

    fn write(&mut self, slot: usize, numbers: &[f32], tokens: u64) {
        self.0.write(slot, numbers, tokens);
    }
}

impl SourceReader for SumsReader {
    type State = SourceSums;

    fn validate(config: &DecoderConfig) -> Result<(), ConfigError> {
        let allowed = [FeatureMap::Gaussian, FeatureMap::ArcCosine, FeatureMap::Elu];
        features::require(
            &allowed,
            config,
            format!("gaussian, arc_cosine or elu where model_type is {}", config.model_type),
        )
    }

    fn head_numbers(config: &DecoderConfig, _: SourceConfig) -> usize {
        let features = config.feature_map.features(config.cross_vectors(), config.head_dim);
        SumsShape { features, ..SumsShape::of(config, false) }.head_numbers()
    }

    fn tensors(config: &DecoderConfig, list: &mut TensorList) {
        features::tensors(config, config.cross_vectors(), list);
    }

    fn load(config: &DecoderConfig, _: SourceConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let features = features::load(config, config.cross_vectors(), weights)?;
        Ok(Self { features, eps: config.denominator_floor() })
    }

    fn bytes(&self) -> usize {
        self.features.bytes()
    }

    fn new_state(&self, slots: usize, state: StateType) -> SourceSums {
        SourceSums(Sums::of_features(slots, &self.features, state))
    }

    fn keep(&self, cx: &mut Compute, kv: &[f32], state: &mut SourceSums, slot: usize) -> error::Result<()> {
        state.0.write(slot, &read::sums(&self.features, kv, cx)?, 0);
        Ok(())
    }

    fn read(
        &self,
        step: &mut Step<'_>,
        queries: Queries<'_>,
        state: &SourceSums,
        heads_first: &mut Vec<f32>,
        out: &mut [f32],
    ) -> error::Result<()> {
        let clamped = read::read_sums(&self.features, self.eps, &state.0, queries, (step.cx, heads_first), out)?;
        if step.probe.is_none() {
            step.denominators.note(out.len() / self.features.dims().2, clamped);
        }
        Ok(())
    }
}

/// Keeps the source as cached keys and values.
#[derive(Debug)]
pub(crate) struct CacheReader {
    heads: usize,
    head_dim: usize,
    max_positions: usize,
}

impl SourceReader for CacheReader {
    type State = Cache;

    fn validate(_: &DecoderConfig) -> Result<(), ConfigError> {
        Ok(())
    }

    fn head_numbers(config: &DecoderConfig, source: SourceConfig) -> usize {
        2 * source.max_positions * config.head_dim
    }

    fn tensors(_: &DecoderConfig, _: &mut TensorList) {}

    fn load(config: &DecoderConfig, source: SourceConfig, _: &Weights<'_>) -> Result<Self, LoadError> {
        let (heads, head_dim) = (config.num_attention_heads, config.head_dim);
        Ok(Self { heads, head_dim, max_positions: source.max_positions })
    }

    fn bytes(&self) -> usize {
        0
    }

    fn new_state(&self, slots: usize, state: StateType) -> Cache {
        Cache::zeros(slots, self.heads, self.max_positions, self.head_dim, state)
    }

    fn keep(&self, _: &mut Compute, kv: &[f32], cache: &mut Cache, slot: usize) -> error::Result<()> {
        cache.fill(slot, kv, 2 * self.heads * self.head_dim, 0);
        Ok(())
    }

    fn read(
        &self,
        step: &mut Step<'_>,
        queries: Queries<'_>,
        cache: &Cache,
        heads_first: &mut Vec<f32>,
        out: &mut [f32],
    ) -> error::Result<()> {
        read::read_cache(cache, queries, (step.cx, heads_first), out)
    }
}

/// The projections around a reader.
#[derive(Debug)]
pub(crate) struct CrossAttention<R> {
    inner: usize,  // heads d
    query: Linear, // (heads d, hidden)
    kv: Linear,    // (2 heads d, hidden)
    out: Linear,   // (hidden, heads d)
    pub(crate) reader: R,
}

/// Intermediate results of cross attention.
#[derive(Debug, Default)]
pub(crate) struct CrossBuffers {
    q: Vec<f32>,           // (rows, time, heads d)
    heads_first: Vec<f32>, // (rows, heads, time, d)
    h: Vec<f32>,           // (rows, time, heads d)
}

impl<R: SourceReader> CrossAttention<R> {
    /// The tensors that [`Self::load`] reads.
    pub(crate) fn tensors(config: &DecoderConfig, list: &mut TensorList) {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        list.matrix("q_proj.weight", inner, hidden);
        list.stack(&["k_proj.weight", "v_proj.weight"], inner, hidden);
        list.matrix("o_proj.weight", hidden, inner);
        R::tensors(config, list);
    }

    /// Loads `{q,k,v,o}_proj` of one layer, and the tensors of the reader.
    pub(crate) fn load(config: &DecoderConfig, source: SourceConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        let projection = |name: &str| weights.matrix(&format!("{name}_proj.weight"), inner, hidden);
        Ok(Self {
            inner,
            query: Linear::new(&projection("q")?, None)?,
            kv: Linear::stack(&[projection("k")?, projection("v")?])?,
            out: Linear::new(&weights.matrix("o_proj.weight", hidden, inner)?, None)?,
            reader: R::load(config, source, weights)?,
        })
    }

    /// Bytes of the matrices that a token reads.
    pub(crate) fn bytes(&self) -> usize {
        self.query.bytes() + self.out.bytes() + self.reader.bytes()
    }

    /// Stores a source in a slot. source: (tokens, hidden), the output of the encoder
    pub(crate) fn keep(
        &self,
        cx: &mut Compute,
        source: &[f32],
        state: &mut R::State,
        slot: usize,
    ) -> error::Result<()> {
        let mut kv = vec![0.0; source.len() / self.out.width() * 2 * self.inner];
        self.kv.forward(cx, source, &mut kv);
        self.reader.keep(cx, &kv, state, slot)
    }

    /// x: (rows, time, hidden) -> out: the same shape; `state` holds the source of each row's slot.
    pub(crate) fn forward(
        &self,
        step: &mut Step<'_>,
        x: &[f32],
        state: &R::State,
        CrossBuffers { q, heads_first, h }: &mut CrossBuffers,
        out: &mut [f32],
    ) -> error::Result<()> {
        let len = x.len() / self.out.width() * self.inner;
        let (q, h) = (sized(q, len), sized(h, len));
        self.query.forward(step.cx, x, q);
        let queries = Queries { q, stride: self.inner, slots: step.rows.slots };
        self.reader.read(step, queries, state, heads_first, h)?;
        self.out.forward(step.cx, h, out);
        Ok(())
    }
}
