//! RWKV-7 "Goose" (Peng et al., 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution"): layers with a time mix,
//! which is the generalized delta rule, and a channel mix. Both also read the previous token. `naive` has the formulas.
//!
//! Tensors are named as in Hugging Face's layout (`RWKV7ForCausalLM` of flash-linear-attention).

mod channel_mix;
pub(super) mod gguf;
mod low_rank;
pub mod naive;
pub(crate) mod native;
pub(super) mod published;
mod scan;
mod shift;
mod time_mix;

use std::collections::BTreeMap;

use super::head_memory::{HeadMemory, Noted};
use super::last_inputs::LastInputs;
use super::layer::{Frame, Kept, Layer, LayerState, SlotState, Step};
use crate::compute::{Compute, sized};
use crate::config::{ConfigError, DecoderConfig, GivenKeys, within};
use crate::error::Result;
use crate::kernels::{LANES, norm};
use crate::layout::StateLayout;
use crate::memory::StateType;
use crate::nn::{LayerNorm, NormKind};
use crate::weights::{Entry, LoadError, TensorList, Weights};
use channel_mix::{ChannelBuffers, ChannelMix};
use published::HIDDEN_ACT;
use time_mix::{TimeBuffers, TimeMix};

/// The `model_type` in `config.json`.
pub(super) const MODEL_TYPE: &str = "rwkv7";
/// Inputs that a layer keeps: the last one of the time mix, then that of the channel mix.
const INPUTS: usize = 2;

/// An RWKV-7 layer.
#[derive(Debug)]
pub(crate) struct Rwkv7 {
    embedding_norm: Option<LayerNorm>, // (hidden), in the first layer
    time_norm: LayerNorm,              // (hidden)
    time: TimeMix,
    channel_norm: LayerNorm, // (hidden)
    channel: ChannelMix,
}

/// The state of a layer.
#[derive(Debug)]
pub(crate) struct Rwkv7State {
    heads: HeadMemory,
    inputs: LastInputs, // (slots, 2, hidden)
    drafts: Noted<5>,   // as `TimeMix` notes them
}

/// Intermediate results.
#[derive(Debug, Default)]
pub(crate) struct Rwkv7Buffers {
    normed: Vec<f32>, // (rows, time, hidden)
    delta: Vec<f32>,  // (rows, time, hidden)
    time: TimeBuffers,
    channel: ChannelBuffers,
}

impl LayerState for Rwkv7State {
    fn parts(&self) -> [Option<&dyn SlotState>; 3] {
        [Some(&self.heads), Some(&self.inputs), None]
    }

    fn parts_mut(&mut self) -> [Option<&mut dyn SlotState>; 3] {
        [Some(&mut self.heads), Some(&mut self.inputs), None]
    }
}

impl Layer for Rwkv7 {
    type State = Rwkv7State;
    type Buffers = Rwkv7Buffers;

    const FRAME: Frame = Frame {
        model_type: MODEL_TYPE,
        hidden_act: HIDDEN_ACT,
        embedding: "embeddings.weight",
        norm: NormKind::Layer,
        own_key: Some("low_ranks"),
        ..Frame::OURS
    };
    const SPECULATES: bool = true;

    fn name(_: &DecoderConfig) -> &'static str {
        MODEL_TYPE
    }

    fn complete(config: &mut DecoderConfig, _: &GivenKeys) -> std::result::Result<(), ConfigError> {
        (config.gate, config.proj_dim) = (false, 0);
        Ok(())
    }

    fn validate(config: &DecoderConfig) -> std::result::Result<(), ConfigError> {
        let refused = |field, bound: &str, found: &dyn std::fmt::Display| {
            Err(ConfigError::bound(field, format!("{bound} where model_type is {MODEL_TYPE}"), found))
        };
        let Some(ranks) = config.low_ranks else { return refused("low_ranks", "given", &"none") };
        for (field, rank) in [
            ("decay_low_rank_dim", ranks.decay),
            ("a_low_rank_dim", ranks.a),
            ("v_low_rank_dim", ranks.v),
            ("gate_low_rank_dim", ranks.gate),
        ] {
            within(field, rank, 1, 1 << 16)?;
        }
        if !config.head_dim.is_multiple_of(LANES) {
            return refused("head_dim", &format!("a multiple of {LANES}"), &config.head_dim);
        }
        if config.inner_size() != config.hidden_size {
            return refused("head_dim", "hidden_size / num_heads", &config.head_dim);
        }
        if config.conv_kernel > 0 {
            return refused("conv_kernel", "0", &config.conv_kernel);
        }
        config.check_without_attention()
    }

    fn features(_: &DecoderConfig) -> usize {
        0
    }

    fn layout(config: &DecoderConfig) -> StateLayout {
        StateLayout {
            layers: config.num_hidden_layers,
            heads: config.num_attention_heads,
            head: config.head_dim * config.head_dim,
            taps: INPUTS,
            channels: config.hidden_size,
            cross: 0,
        }
    }

    fn cached_numbers(_: &DecoderConfig) -> usize {
        0
    }

    fn unpack(_: &DecoderConfig, entries: &mut BTreeMap<String, Entry>) {
        published::unpack(entries);
    }

    fn tensors(config: &DecoderConfig, layer: usize, list: &mut TensorList) {
        let hidden = config.hidden_size;
        if layer == 0 {
            LayerNorm::tensors(list, "pre_norm", hidden);
        }
        LayerNorm::tensors(list, "attn_norm", hidden);
        list.at("attn", |list| TimeMix::tensors(config, layer, list));
        LayerNorm::tensors(list, "ffn_norm", hidden);
        list.at("ffn", |list| ChannelMix::tensors(config, list));
    }

    fn load(config: &DecoderConfig, layer: usize, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let norm = |name: &str| LayerNorm::load(weights, name, config.hidden_size, config.rms_norm_eps);
        Ok(Self {
            embedding_norm: (layer == 0).then(|| norm("pre_norm")).transpose()?,
            time_norm: norm("attn_norm")?,
            time: TimeMix::load(config, layer, &weights.pp("attn"))?,
            channel_norm: norm("ffn_norm")?,
            channel: ChannelMix::load(config, &weights.pp("ffn"))?,
        })
    }

    fn bytes(&self) -> usize {
        self.time.bytes() + self.channel.bytes()
    }

    fn new_state(&self, slots: usize, state: StateType) -> Rwkv7State {
        let (heads, width) = (self.time.new_memory(slots, state), self.channel.width());
        Rwkv7State { heads, inputs: LastInputs::zeros(slots, INPUTS, (1, width)), drafts: Noted::default() }
    }

    fn forward(
        &self,
        step: &mut Step<'_>,
        x: &mut [f32],
        state: &mut Rwkv7State,
        buffers: &mut Rwkv7Buffers,
    ) -> Result<()> {
        let Rwkv7Buffers { normed, delta, time, channel } = buffers;
        let (normed, delta) = (sized(normed, x.len()), sized(delta, x.len()));
        if let Some(norm) = &self.embedding_norm {
            norm.forward(step.cx, x, normed);
            x.copy_from_slice(normed);
        }
        self.time_norm.forward(step.cx, x, normed);
        let Rwkv7State { heads, inputs, drafts } = state;
        self.time.forward(step, normed, (heads, inputs, drafts), time, delta)?;
        norm::add(step.cx.isa, x, delta);
        self.channel_norm.forward(step.cx, x, normed);
        self.channel.forward(step, normed, inputs, channel, delta)?;
        norm::add(step.cx.isa, x, delta);
        Ok(())
    }

    fn keep(&self, cx: &mut Compute, state: &mut Rwkv7State, kept: Kept) -> Result<()> {
        state.inputs.keep(kept)?;
        self.time.keep(cx, (&mut state.heads, &state.drafts), kept)
    }
}
