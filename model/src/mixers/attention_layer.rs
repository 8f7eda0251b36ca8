//! A pre-norm layer around a [`Mixer`]: `x + mixer(norm(x))`, in an encoder-decoder `x + cross(norm(x))`, then
//! `x + mlp(norm(x))`.

use super::cross::{CrossAttention, CrossBuffers, SourceReader};
use super::last_inputs::LastInputs;
use super::layer::{Kept, Layer, LayerState, SlotState, Step};
use super::mixer::{Mixer, Projected};
use super::projections::{ProjectionBuffers, Projections};
use crate::compute::{Compute, sized};
use crate::config::{ConfigError, DecoderConfig, GivenKeys};
use crate::error::{ModelError, Result};
use crate::kernels::norm;
use crate::layout::StateLayout;
use crate::memory::StateType;
use crate::nn::{Mlp, MlpBuffers, RmsNorm};
use crate::weights::{LoadError, TensorList, Weights};

/// A layer around a mixer.
#[derive(Debug)]
pub(crate) struct AttentionLayer<M: Mixer> {
    input_norm: RmsNorm, // (hidden)
    projections: Projections,
    mixer: M,
    cross: Option<(RmsNorm, CrossAttention<M::Source>)>, // (hidden)
    mlp_norm: RmsNorm,                                   // (hidden)
    mlp: Mlp,
}

/// The state of a layer.
#[derive(Debug)]
pub(crate) struct AttentionState<M: Mixer> {
    heads: M::State,
    conv: LastInputs,
    source: Option<<M::Source as SourceReader>::State>,
}

/// Intermediate results of a layer.
#[derive(Debug)]
pub(crate) struct AttentionBuffers<M: Mixer> {
    normed: Vec<f32>, // (rows, time, hidden)
    delta: Vec<f32>,  // (rows, time, hidden)
    h: Vec<f32>,      // (rows, time, heads d)
    projections: ProjectionBuffers,
    mixer: M::Buffers,
    cross: CrossBuffers,
    mlp: MlpBuffers,
}

impl<M: Mixer> Default for AttentionBuffers<M> {
    fn default() -> Self {
        let (normed, delta, h) = (Vec::new(), Vec::new(), Vec::new());
        let (projections, mixer) = (ProjectionBuffers::default(), M::Buffers::default());
        Self { normed, delta, h, projections, mixer, cross: CrossBuffers::default(), mlp: MlpBuffers::default() }
    }
}

impl<M: Mixer> LayerState for AttentionState<M> {
    fn parts(&self) -> [Option<&dyn SlotState>; 3] {
        [Some(&self.heads), Some(&self.conv), self.source.as_ref().map(|source| source as _)]
    }

    fn parts_mut(&mut self) -> [Option<&mut dyn SlotState>; 3] {
        [Some(&mut self.heads), Some(&mut self.conv), self.source.as_mut().map(|source| source as _)]
    }
}

impl<M: Mixer> Layer for AttentionLayer<M> {
    type State = AttentionState<M>;
    type Buffers = AttentionBuffers<M>;

    const SPECULATES: bool = M::SPECULATES;

    fn name(config: &DecoderConfig) -> &'static str {
        M::name(config)
    }

    fn complete(config: &mut DecoderConfig, given: &GivenKeys) -> std::result::Result<(), ConfigError> {
        M::complete(config, given)
    }

    fn validate(config: &DecoderConfig) -> std::result::Result<(), ConfigError> {
        M::validate(config)?;
        config.source().map_or(Ok(()), |_| M::Source::validate(config))
    }

    fn features(config: &DecoderConfig) -> usize {
        M::features(config)
    }

    fn layout(config: &DecoderConfig) -> StateLayout {
        StateLayout {
            layers: config.num_hidden_layers,
            heads: config.num_attention_heads,
            head: M::head_numbers(config),
            taps: config.conv_kernel.saturating_sub(1),
            channels: if config.conv_kernel > 1 { 3 * config.inner_size() } else { 0 },
            cross: config.source().map_or(0, |source| M::Source::head_numbers(config, source)),
        }
    }

    fn cached_numbers(config: &DecoderConfig) -> usize {
        M::cached_numbers(config)
    }

    fn tensors(config: &DecoderConfig, _: usize, list: &mut TensorList) {
        let hidden = config.hidden_size;
        list.floats("input_layernorm.weight", &[hidden]);
        list.at("self_attn", |list| {
            Projections::tensors(config, list);
            M::tensors(config, list);
        });
        if config.source().is_some() {
            list.floats("cross_attn_layernorm.weight", &[hidden]);
            list.at("cross_attn", |list| CrossAttention::<M::Source>::tensors(config, list));
        }
        list.floats("post_attention_layernorm.weight", &[hidden]);
        list.at("mlp", |list| Mlp::tensors(list, hidden, config.intermediate_size));
    }

    fn load(config: &DecoderConfig, _: usize, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let norm = |name: &str| RmsNorm::load(weights, name, config.hidden_size, config.rms_norm_eps);
        let attention = weights.pp("self_attn");
        let cross = config.source().map(|source| -> std::result::Result<_, LoadError> {
            let cross = CrossAttention::load(config, source, &weights.pp("cross_attn"))?;
            Ok((norm("cross_attn_layernorm")?, cross))
        });
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            projections: Projections::load(config, &attention)?,
            mixer: M::load(config, &attention)?,
            cross: cross.transpose()?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(&weights.pp("mlp"), config.hidden_size, config.intermediate_size)?,
        })
    }

    fn bytes(&self) -> usize {
        let cross = self.cross.as_ref().map_or(0, |(_, cross)| cross.bytes());
        self.projections.bytes() + self.mixer.bytes() + cross + self.mlp.bytes()
    }

    fn greatest_maxima(&self) -> &[f32] {
        self.mixer.greatest_maxima()
    }

    fn new_state(&self, slots: usize, state: StateType) -> AttentionState<M> {
        AttentionState {
            heads: self.mixer.new_state(slots, state),
            conv: self.projections.new_tails(slots),
            source: self.cross.as_ref().map(|(_, cross)| cross.reader.new_state(slots, state)),
        }
    }

    fn forward(
        &self,
        step: &mut Step<'_>,
        x: &mut [f32],
        state: &mut AttentionState<M>,
        buffers: &mut AttentionBuffers<M>,
    ) -> Result<()> {
        let AttentionBuffers { normed, delta, h, projections, mixer, cross, mlp } = buffers;
        let (normed, delta) = (sized(normed, x.len()), sized(delta, x.len()));
        self.input_norm.forward(step.cx, x, normed);
        let qkv = self.projections.enter(step, normed, &mut state.conv, projections)?;
        let h = sized(h, qkv.len() / 3);
        self.mixer.mix(step, Projected { x: normed, qkv }, &mut state.heads, mixer, h)?;
        self.projections.leave(step.cx, h, projections, delta);
        norm::add(step.cx.isa, x, delta);
        if let (Some((norm, attention)), Some(source)) = (&self.cross, &state.source) {
            norm.forward(step.cx, x, normed);
            attention.forward(step, normed, source, cross, delta)?;
            norm::add(step.cx.isa, x, delta);
        }
        self.mlp_norm.forward(step.cx, x, normed);
        self.mlp.forward(step.cx, normed, mlp, delta);
        norm::add(step.cx.isa, x, delta);
        Ok(())
    }

    fn keep(&self, cx: &mut Compute, state: &mut AttentionState<M>, kept: Kept) -> Result<()> {
        state.conv.keep(kept)?;
        self.mixer.keep(cx, &mut state.heads, kept)
    }

    fn keep_source(&self, cx: &mut Compute, source: &[f32], state: &mut AttentionState<M>, slot: usize) -> Result<()> {
        match (&self.cross, &mut state.source) {
            (Some((_, cross)), Some(state)) => cross.keep(cx, source, state, slot),
            _ => Err(ModelError::NoEncoder),
        }
    }
}
