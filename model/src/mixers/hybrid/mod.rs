//! The hybrid: softmax attention over the last `sliding_window` tokens and gated random feature attention over all
//! older ones, with a joint normalizer and a learned bias. A token's gate applies when the token leaves the window.

pub mod attend;
pub(crate) mod memory;
pub mod naive;

use super::cross::SumsReader;
use super::layer::Step;
use super::mixer::{Mixer, Projected};
use super::rfa::features::{self, Gate};
use super::rfa::sums::SumsShape;
use crate::config::{ConfigError, DecoderConfig, FeatureMap, GivenKeys, PositionEmbedding};
use crate::error;
use crate::feature_map::Features;
use crate::memory::StateType;
use crate::weights::{LoadError, TensorList, Weights};

pub use memory::{HybridMemory, HybridShape};

/// The hybrid mixer of a layer: its window, feature map, gate and recurrence.
#[derive(Debug)]
pub(crate) struct Hybrid {
    shape: attend::Shape,
    state: HybridShape,
    gate: Gate,
    features: Features,
    far_bias: Vec<f32>, // (heads)
}

/// Intermediate results of the mixer.
#[derive(Debug, Default)]
pub(crate) struct HybridBuffers {
    gate: Vec<f32>, // (rows, time, heads)
    attend: attend::HybridAttendBuffers,
}

impl Hybrid {
    fn state_shape(config: &DecoderConfig) -> HybridShape {
        HybridShape { sums: SumsShape::of(config, false), window: config.window(), gate: config.gate }
    }
}

impl Mixer for Hybrid {
    type State = HybridMemory;
    type Buffers = HybridBuffers;
    type Source = SumsReader;

    fn name(config: &DecoderConfig) -> &'static str {
        if config.gate { "hybrid" } else { "hybrid-no-gate" }
    }

    fn complete(config: &mut DecoderConfig, given: &GivenKeys) -> Result<(), ConfigError> {
        if given.position_embedding.is_none() {
            config.position_embedding = PositionEmbedding::Rope;
        }
        features::require_proj_dim(config, given)
    }

    fn validate(config: &DecoderConfig) -> Result<(), ConfigError> {
        config.check_window()?;
        features::require(&[FeatureMap::Gaussian], config, "gaussian where attention is hybrid".into())?;
        if config.source().is_some() {
            let bound = format!("rfa or softmax where model_type is {}", config.model_type);
            return Err(ConfigError::bound("attention", bound, "hybrid"));
        }
        features::validate(config)
    }

    fn features(config: &DecoderConfig) -> usize {
        features::count(config)
    }

    fn head_numbers(config: &DecoderConfig) -> usize {
        Self::state_shape(config).head_numbers()
    }

    /// A key, a value and, with a gate, its logit.
    fn cached_numbers(config: &DecoderConfig) -> usize {
        2 * config.head_dim + usize::from(config.gate)
    }

    fn tensors(config: &DecoderConfig, list: &mut TensorList) {
        features::tensors(config, config.proj_dim, list);
        Gate::tensors(config, list);
        list.floats("far_bias", &[config.num_attention_heads]);
    }

    fn load(config: &DecoderConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let (heads, head_dim) = (config.num_attention_heads, config.head_dim);
        let (features, eps) = (features::count(config), config.denominator_eps);
        Ok(Self {
            shape: attend::Shape { heads, head_dim, features, eps },
            state: Self::state_shape(config),
            gate: Gate::load(config, weights)?,
            features: features::load(config, config.proj_dim, weights)?,
            far_bias: weights.finite("far_bias", &[heads])?,
        })
    }

    fn bytes(&self) -> usize {
        self.gate.bytes() + self.features.bytes() + size_of_val(&*self.far_bias)
    }

    fn new_state(&self, slots: usize, state: StateType) -> HybridMemory {
        HybridMemory::zeros(slots, self.state, state)
    }

    fn mix(
        &self,
        step: &mut Step<'_>,
        Projected { x, qkv }: Projected<'_>,
        memory: &mut HybridMemory,
        buffers: &mut HybridBuffers,
        h: &mut [f32],
    ) -> error::Result<()> {
        let (rows, heads) = (step.rows, self.shape.heads);
        let tokens = rows.slots.len() * rows.time;
        let gate = self.gate.logits(step.cx, x, tokens, &mut buffers.gate);
        let inputs = attend::Inputs { qkv, gate, slots: rows.slots, positions: rows.positions, layer: rows.layer };
        let params = attend::Params { shape: self.shape, features: &self.features, far_bias: &self.far_bias };
        attend::attend(params, memory, inputs, (step.cx, &mut buffers.attend), h)?;
        let (far, clamped) = (attend::far(&inputs, rows.time, self.state.window), buffers.attend.clamped());
        match step.layer_probe() {
            None => step.denominators.note(far * heads, clamped.sum()),
            Some(probe) => probe.count((tokens, far), clamped, gate),
        }
        Ok(())
    }
}
