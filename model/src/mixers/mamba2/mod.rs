//! Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured
//! State Space Duality"): layers with a short convolution, a recurrence with one decay per head and token, and a gated
//! norm. `naive` has the formulas.
//!
//! Tensors are named as in Hugging Face's `Mamba2ForCausalLM`.

pub(super) mod gguf;
pub mod naive;
pub(super) mod published;
mod scan;

use std::collections::BTreeMap;

use super::conv::Conv;
use super::head_memory::{HeadBuffers, HeadMemory, Noted};
use super::last_inputs::LastInputs;
use super::layer::{Frame, Kept, Layer, LayerState, SlotState, Step};
use crate::compute::{Compute, sized};
use crate::config::{ConfigError, DecoderConfig, GivenKeys, StateSpace, within};
use crate::error::Result;
use crate::kernels::activation::exp_lane;
use crate::kernels::norm;
use crate::kernels::state_space::{self, Gated, StepShape};
use crate::layout::StateLayout;
use crate::memory::StateType;
use crate::nn::{Linear, RmsNorm};
use crate::weights::{Entry, LoadError, TensorList, Weights};
use published::MODEL_TYPE;
use scan::{Inputs, Shape};

/// A Mamba-2 layer.
#[derive(Debug)]
pub(crate) struct Mamba2 {
    shape: Shape,
    norm: RmsNorm,     // (hidden)
    in_proj: Linear,   // (inner + channels + heads, hidden): the gate, then x, B and C, then dt
    conv: Conv,        // (kernel, channels): x, B and C
    dt_bias: Vec<f32>, // (heads)
    a: Vec<f32>,       // (heads), negative
    skip: Vec<f32>,    // D of each channel's head: (inner)
    gated: Vec<f32>,   // the gated norm's weight: (inner)
    out_proj: Linear,  // (hidden, inner)
}

/// The state of a layer.
#[derive(Debug)]
pub(crate) struct Mamba2State {
    heads: HeadMemory,  // (slots, heads, N, d)
    inputs: LastInputs, // (slots, kernel - 1, channels)
    drafts: Noted<3>,   // convolved, dt and keep
}

/// Intermediate results.
#[derive(Debug, Default)]
pub(crate) struct Mamba2Buffers {
    hidden: Vec<f32>,    // (rows, time, hidden)
    projected: Vec<f32>, // (rows, time, inner + channels + heads)
    convolved: Vec<f32>, // (rows, time, channels)
    dt: Vec<f32>,        // (rows, time, heads)
    keep: Vec<f32>,      // (rows, time, heads)
    read: Vec<f32>,      // (rows, time, inner)
    heads: HeadBuffers,
}

impl LayerState for Mamba2State {
    fn parts(&self) -> [Option<&dyn SlotState>; 3] {
        [Some(&self.heads), Some(&self.inputs), None]
    }

    fn parts_mut(&mut self) -> [Option<&mut dyn SlotState>; 3] {
        [Some(&mut self.heads), Some(&mut self.inputs), None]
    }
}

/// Checks the bounds of the shape of a layer with `heads` heads and `inner` channels.
fn check(space: &StateSpace, heads: usize, inner: usize) -> std::result::Result<(), ConfigError> {
    within("state_size", space.state_size, 1, 1024)?;
    for (field, groups, of, whole) in
        [("n_groups", space.n_groups, "num_heads", heads), ("norm_groups", space.norm_groups, "all channels", inner)]
    {
        if groups == 0 || !whole.is_multiple_of(groups) {
            return Err(ConfigError::bound(field, format!("a divisor of {of} ({whole})"), groups));
        }
    }
    let (least, most) = (space.time_step_limit.0, space.greatest_step());
    if !(least >= 0.0 && least.is_finite() && most >= least) {
        return Err(ConfigError::bound(
            "time_step_limit",
            "two ascending numbers from 0",
            format!("[{least}, {most}]"),
        ));
    }
    Ok(())
}

impl Layer for Mamba2 {
    type State = Mamba2State;
    type Buffers = Mamba2Buffers;

    const FRAME: Frame = Frame {
        model_type: MODEL_TYPE,
        body: "backbone",
        embedding: "embeddings.weight",
        norm_name: "norm_f",
        own_key: Some("state_space"),
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
        let Some(space) = config.state_space else { return refused("state_space", "given", &"none") };
        check(&space, config.num_attention_heads, config.inner_size())?;
        if config.intermediate_size != config.inner_size() {
            return refused("intermediate_size", "num_heads * head_dim", &config.intermediate_size);
        }
        if config.conv_kernel == 0 {
            return refused("conv_kernel", "between 2 and 16", &config.conv_kernel);
        }
        config.check_without_attention()
    }

    fn features(_: &DecoderConfig) -> usize {
        0
    }

    fn layout(config: &DecoderConfig) -> StateLayout {
        let space = config.state_space.unwrap_or_default();
        StateLayout {
            layers: config.num_hidden_layers,
            heads: config.num_attention_heads,
            head: space.state_size * config.head_dim,
            taps: config.conv_kernel.saturating_sub(1),
            channels: space.channels(config.inner_size()),
            cross: 0,
        }
    }

    fn cached_numbers(_: &DecoderConfig) -> usize {
        0
    }

    fn unpack(config: &DecoderConfig, entries: &mut BTreeMap<String, Entry>) {
        published::unpack(config, entries);
    }

    fn tensors(config: &DecoderConfig, _: usize, list: &mut TensorList) {
        let (hidden, inner, heads, space) = (
            config.hidden_size,
            config.inner_size(),
            config.num_attention_heads,
            config.state_space.unwrap_or_default(),
        );
        let channels = space.channels(inner);
        list.floats("norm.weight", &[hidden]);
        list.at("mixer", |list| {
            list.matrix("in_proj.weight", inner + channels + heads, hidden);
            list.matrix("out_proj.weight", hidden, inner);
            if space.use_bias {
                list.floats("in_proj.bias", &[inner + channels + heads]);
                list.floats("out_proj.bias", &[hidden]);
            }
            list.floats("conv1d.weight", &[channels, 1, config.conv_kernel]);
            if space.use_conv_bias {
                list.floats("conv1d.bias", &[channels]);
            }
            for name in ["dt_bias", "A_log", "D"] {
                list.floats(name, &[heads]);
            }
            list.floats("norm.weight", &[inner]);
        });
    }

    fn load(config: &DecoderConfig, _: usize, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (hidden, inner, heads, space) = (
            config.hidden_size,
            config.inner_size(),
            config.num_attention_heads,
            config.state_space.unwrap_or_default(),
        );
        let (channels, kernel) = (space.channels(inner), config.conv_kernel);
        let norm = RmsNorm::load(weights, "norm", hidden, config.rms_norm_eps)?;
        let weights = weights.pp("mixer");
        let bias = |name: &str, given: bool, len: usize| given.then(|| weights.numbers(name, &[len])).transpose();
        let linear = |name: &str, rows: usize, columns: usize| {
            let matrix = weights.matrix(&format!("{name}.weight"), rows, columns)?;
            Linear::new(&matrix, bias(&format!("{name}.bias"), space.use_bias, rows)?)
        };
        let taps = weights.numbers("conv1d.weight", &[channels, 1, kernel])?;
        let conv_bias = bias("conv1d.bias", space.use_conv_bias, channels)?.unwrap_or_default();
        let skip = weights.numbers("D", &[heads])?;
        Ok(Self {
            shape: Shape {
                heads,
                head_dim: config.head_dim,
                state_size: space.state_size,
                groups: space.n_groups,
                norm_group: inner / space.norm_groups,
                limits: (space.time_step_limit.0 as f32, space.greatest_step() as f32),
                eps: config.rms_norm_eps as f32,
            },
            norm,
            in_proj: linear("in_proj", inner + channels + heads, hidden)?,
            conv: Conv::new(&taps, conv_bias, kernel),
            dt_bias: weights.numbers("dt_bias", &[heads])?,
            a: weights.numbers("A_log", &[heads])?.into_iter().map(|log| -exp_lane(log)).collect(),
            skip: skip.iter().flat_map(|&skip| std::iter::repeat_n(skip, config.head_dim)).collect(),
            gated: weights.numbers("norm.weight", &[inner])?,
            out_proj: linear("out_proj", hidden, inner)?,
        })
    }

    fn bytes(&self) -> usize {
        self.in_proj.bytes() + self.conv.bytes() + self.out_proj.bytes()
    }

    fn new_state(&self, slots: usize, state: StateType) -> Mamba2State {
        let Shape { heads, head_dim, state_size, .. } = self.shape;
        Mamba2State {
            heads: HeadMemory::zeros(slots, heads, state_size * head_dim, state),
            inputs: Conv::new_tails(Some(&self.conv), slots),
            drafts: Noted::default(),
        }
    }

    fn forward(
        &self,
        step: &mut Step<'_>,
        x: &mut [f32],
        state: &mut Mamba2State,
        buffers: &mut Mamba2Buffers,
    ) -> Result<()> {
        let (shape, rows, cx) = (self.shape, step.rows, &mut *step.cx);
        let (isa, inner, channels, width) = (cx.isa, shape.inner(), self.conv.channels(), self.in_proj.width());
        let tokens = rows.slots.len() * rows.time;
        let Mamba2Buffers { hidden, projected, convolved, dt, keep, read, heads } = buffers;
        let (hidden, projected) = (sized(hidden, x.len()), sized(projected, tokens * width));
        let (convolved, read) = (sized(convolved, tokens * channels), sized(read, tokens * inner));
        let (dt, keep) = (sized(dt, tokens * shape.heads), sized(keep, tokens * shape.heads));

        self.norm.forward(cx, x, hidden);
        self.in_proj.forward(cx, hidden, projected);
        self.conv.forward((projected, inner, width), &mut state.inputs, rows, convolved)?;
        let steps = StepShape { bias: &self.dt_bias, a: &self.a, limits: shape.limits };
        state_space::time_steps(isa, (&projected[inner + channels..], width), steps, (dt, keep));
        let inputs = Inputs { shape, convolved, channels, dt, keep };
        state.drafts.note(rows, [convolved, dt, keep]);
        state.heads.advance(rows, &inputs, (cx, heads), read)?;
        let (convolved, projected) = (&*convolved, &*projected);
        cx.each(read, inner, &|first, read| {
            let gated = Gated {
                x: (&convolved[first * channels..], channels),
                gate: (&projected[first * width..], width),
                skip: &self.skip,
                weight: &self.gated,
                group: shape.norm_group,
                eps: shape.eps,
            };
            state_space::gated_rms(isa, gated, read);
        });
        self.out_proj.forward(cx, read, hidden);
        norm::add(isa, x, hidden);
        Ok(())
    }

    fn keep(&self, cx: &mut Compute, state: &mut Mamba2State, kept: Kept) -> Result<()> {
        state.inputs.keep(kept)?;
        let [convolved, dt, keep] = state.drafts.of(kept);
        let inputs = Inputs { shape: self.shape, convolved, channels: self.conv.channels(), dt, keep };
        state.heads.keep(kept, &inputs, cx, self.shape.head_dim)
    }
}
