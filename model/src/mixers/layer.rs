//! The interface between a decoder and its layers: a layer's state for each slot, the context of a step, and how layers
//! of any family are stacked.
//!
//! A layer and its state are paired by type ([`Layer::State`]). [`Stack`] and [`States`] hide the types from the
//! decoder and the pool; they are joined again in one place, [`Stack::forward`].

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;

use super::rotary::Angles;
use crate::compute::Compute;
use crate::config::{ConfigError, DecoderConfig, GivenKeys};
use crate::error::{ModelError, Result};
use crate::layout::StateLayout;
use crate::memory::{Denominators, StateType};
use crate::nn::{Norm, NormKind};
use crate::probe::{LayerProbe, Probe};
use crate::weights::{Entry, LoadError, TensorList, Weights};

/// The rows of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    /// One slot per row, all different.
    pub(crate) slots: &'a [usize],
    /// The position of each row's first new token.
    pub(crate) positions: &'a [u64],
    /// Number of new tokens per row.
    pub(crate) time: usize,
    /// The rotary angles of the new tokens, if the config uses them.
    pub(crate) angles: Option<&'a Angles>,
    /// The index of the layer.
    pub(crate) layer: usize,
    /// Whether the tokens are drafts, which leave the states unchanged until [`Layer::keep`].
    pub(crate) drafts: bool,
}

/// The draft tokens of a row that its slot keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    pub(crate) slot: usize,
    /// The row of the slot in the last draft step, in which each row had `time` tokens.
    pub(crate) row: usize,
    pub(crate) time: usize,
    /// Number of kept tokens, starting with the row's first.
    pub(crate) count: usize,
    /// The position of the first kept token.
    pub(crate) position: u64,
    /// The index of the layer.
    pub(crate) layer: usize,
}

/// The context of one step.
#[derive(Debug)]
pub(crate) struct Step<'a> {
    pub(crate) cx: &'a mut Compute,
    pub(crate) rows: Rows<'a>,
    pub(crate) denominators: &'a mut Denominators,
    /// If set, collects denominators and gates instead of `denominators`; for evaluation.
    pub(crate) probe: Option<&'a mut Probe>,
}

impl Step<'_> {
    /// The probe of the current layer.
    pub(crate) fn layer_probe(&mut self) -> Option<&mut LayerProbe> {
        self.probe.as_deref_mut().map(|probe| &mut probe[self.rows.layer])
    }
}

/// One part of a layer's state, for all slots of a pool.
pub trait SlotState: Debug + Send + Sync {
    /// Bytes per slot.
    fn bytes(&self) -> usize;

    /// Resets a slot to an empty text.
    fn reset(&mut self, slot: usize);

    /// Appends a slot's elements to `out`, in the order of [`StateLayout`].
    fn read(&self, slot: usize, out: &mut Vec<f32>);

    /// Checks external data before [`Self::write`] puts it into a slot whose text has `tokens` tokens.
    ///
    /// # Errors
    /// [`ModelError::Argument`] for elements that no text of this model can produce.
    fn check(&self, _layer: usize, _numbers: &[f32], _tokens: u64) -> Result<()> {
        Ok(())
    }

    /// Sets the elements of a slot whose text has `tokens` tokens.
    fn write(&mut self, slot: usize, numbers: &[f32], tokens: u64);
}

/// A layer's state, in the three parts of a [`StateLayout`]: memory, last inputs, source.
pub(crate) trait LayerState: Debug + Send + Sync {
    /// Returns the parts that exist.
    fn parts(&self) -> [Option<&dyn SlotState>; 3];

    /// Returns the parts that exist, mutably.
    fn parts_mut(&mut self) -> [Option<&mut dyn SlotState>; 3];
}

/// What surrounds a family's layers, and the names it uses in checkpoints.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    /// The `model_type` of a decoder.
    pub(crate) model_type: &'static str,
    /// The `hidden_act` of the feed-forward part.
    pub(crate) hidden_act: &'static str,
    /// The prefix of all tensor names except the output head's.
    pub(crate) body: &'static str,
    /// The name of the embedding, below `body`.
    pub(crate) embedding: &'static str,
    /// The kind of the norm after the last layer, and its name below `body`.
    pub(crate) norm: NormKind,
    pub(crate) norm_name: &'static str,
    /// A key of `config.json` that only this family accepts.
    pub(crate) own_key: Option<&'static str>,
}

impl Frame {
    /// The frame of Llama, with our `model_type`.
    pub(crate) const OURS: Self = Self {
        model_type: "rfa_gate",
        hidden_act: "silu",
        body: "model",
        embedding: "embed_tokens.weight",
        norm: NormKind::Rms,
        norm_name: "norm",
        own_key: None,
    };

    /// The tensors below `body`, except for those of the layers.
    pub(crate) fn tensors(&self, config: &DecoderConfig, list: &mut TensorList) {
        list.matrix(self.embedding, config.vocab_size, config.hidden_size);
        Norm::tensors(self.norm, list, self.norm_name, config.hidden_size);
    }
}

/// One decoder layer, including its residual connections. Each model family implements it once.
pub(crate) trait Layer: Debug + Send + Sync + Sized + 'static {
    /// The layer's state for the slots of a pool.
    type State: LayerState + 'static;
    /// Intermediate results, reused from step to step and shared by all layers of a decoder.
    type Buffers: Debug + Default + Send + Sync + 'static;

    /// What surrounds the layers.
    const FRAME: Frame = Frame::OURS;

    /// Whether [`Self::forward`] supports draft tokens and [`Self::keep`].
    const SPECULATES: bool = false;

    /// The name of the mixer in reports.
    fn name(config: &DecoderConfig) -> &'static str;

    /// Sets the defaults that depend on the family.
    fn complete(config: &mut DecoderConfig, given: &GivenKeys) -> std::result::Result<(), ConfigError>;

    /// Checks the bounds that depend on the family.
    fn validate(config: &DecoderConfig) -> std::result::Result<(), ConfigError>;

    /// Number of features per head (F); 0 without a feature map.
    fn features(config: &DecoderConfig) -> usize;

    /// The layout of one slot's state.
    fn layout(config: &DecoderConfig) -> StateLayout;

    /// Elements that a head caches per token of the `sliding_window`; 0 without a cache.
    fn cached_numbers(config: &DecoderConfig) -> usize;

    /// Gives tensors that are published in another form the names and shapes of [`Self::tensors`].
    fn unpack(_config: &DecoderConfig, _entries: &mut BTreeMap<String, Entry>) {}

    /// The tensors that [`Self::load`] reads.
    fn tensors(config: &DecoderConfig, layer: usize, list: &mut TensorList);

    /// Loads the tensors of one layer.
    fn load(config: &DecoderConfig, layer: usize, weights: &Weights<'_>) -> std::result::Result<Self, LoadError>;

    /// Bytes of the matrices that a token reads.
    fn bytes(&self) -> usize;

    /// The upper bound of each head's key maximum: (heads), or empty if the state has no maxima.
    fn greatest_maxima(&self) -> &[f32] {
        &[]
    }

    /// The state of `slots` empty texts.
    fn new_state(&self, slots: usize, state: StateType) -> Self::State;

    /// Runs the rows of a step through the layer. x: (rows, time, hidden), changed in place
    fn forward(
        &self,
        step: &mut Step<'_>,
        x: &mut [f32],
        state: &mut Self::State,
        buffers: &mut Self::Buffers,
    ) -> Result<()>;

    /// Advances a slot by the first tokens of its row in the last draft step, with the same result as a step of these
    /// tokens.
    fn keep(&self, _cx: &mut Compute, _state: &mut Self::State, _kept: Kept) -> Result<()> {
        Err(ModelError::NoSpeculation)
    }

    /// Stores what cross attention needs of a source. source: (tokens, hidden), the output of the encoder
    fn keep_source(&self, _cx: &mut Compute, _source: &[f32], _state: &mut Self::State, _slot: usize) -> Result<()> {
        Err(ModelError::NoEncoder)
    }
}

/// All layers of a decoder, of any family.
pub(crate) trait Layers: Debug + Send + Sync {
    /// [`Layer::bytes`] of all layers.
    fn bytes(&self) -> usize;

    /// [`Layer::greatest_maxima`] of all layers: (layers, heads), or empty.
    fn greatest_maxima(&self) -> Vec<f32>;

    /// The states of `slots` empty texts.
    fn new_states(&self, slots: usize, state: StateType) -> Box<dyn LayerStates>;

    /// Runs [`Layer::forward`] for one layer after another.
    fn forward(&self, step: &mut Step<'_>, x: &mut [f32], states: &mut dyn LayerStates) -> Result<()>;

    /// Returns [`Layer::SPECULATES`].
    fn speculate(&self) -> bool;

    /// Runs [`Layer::keep`] for every layer.
    fn keep(&self, cx: &mut Compute, states: &mut dyn LayerStates, kept: Kept) -> Result<()>;

    /// Runs [`Layer::keep_source`] for every layer.
    fn keep_source(&self, cx: &mut Compute, source: &[f32], states: &mut dyn LayerStates, slot: usize) -> Result<()>;
}

/// The states of all layers.
pub(crate) trait LayerStates: Any + Debug + Send + Sync {
    /// Number of layers.
    fn len(&self) -> usize;

    /// The state of one layer.
    fn layer(&self, layer: usize) -> &dyn LayerState;

    /// The state of one layer, mutably.
    fn layer_mut(&mut self, layer: usize) -> &mut dyn LayerState;
}

/// Layers of one family.
#[derive(Debug)]
struct Stack<L>(Vec<L>);

/// The states of one family's layers, and their buffers.
#[derive(Debug)]
struct States<L: Layer> {
    layers: Vec<L::State>,
    buffers: L::Buffers,
}

impl<L: Layer> LayerStates for States<L> {
    fn len(&self) -> usize {
        self.layers.len()
    }

    fn layer(&self, layer: usize) -> &dyn LayerState {
        &self.layers[layer]
    }

    fn layer_mut(&mut self, layer: usize) -> &mut dyn LayerState {
        &mut self.layers[layer]
    }
}

impl<L: Layer> Stack<L> {
    /// Downcasts the states if they belong to layers of this family.
    fn own(states: &mut dyn LayerStates) -> Result<&mut States<L>> {
        (states as &mut dyn Any).downcast_mut().ok_or(ModelError::ForeignFamily)
    }
}

impl<L: Layer> Layers for Stack<L> {
    fn bytes(&self) -> usize {
        self.0.iter().map(L::bytes).sum()
    }

    fn greatest_maxima(&self) -> Vec<f32> {
        self.0.iter().flat_map(L::greatest_maxima).copied().collect()
    }

    fn new_states(&self, slots: usize, state: StateType) -> Box<dyn LayerStates> {
        let layers = self.0.iter().map(|layer| layer.new_state(slots, state)).collect();
        Box::new(States::<L> { layers, buffers: L::Buffers::default() })
    }

    fn forward(&self, step: &mut Step<'_>, x: &mut [f32], states: &mut dyn LayerStates) -> Result<()> {
        let States { layers, buffers } = Self::own(states)?;
        for (i, (layer, state)) in self.0.iter().zip(layers).enumerate() {
            step.rows.layer = i;
            layer.forward(step, x, state, buffers)?;
        }
        Ok(())
    }

    fn speculate(&self) -> bool {
        L::SPECULATES
    }

    fn keep(&self, cx: &mut Compute, states: &mut dyn LayerStates, kept: Kept) -> Result<()> {
        let states = Self::own(states)?;
        let mut layers = self.0.iter().zip(&mut states.layers).enumerate();
        layers.try_for_each(|(i, (layer, state))| layer.keep(cx, state, Kept { layer: i, ..kept }))
    }

    fn keep_source(&self, cx: &mut Compute, source: &[f32], states: &mut dyn LayerStates, slot: usize) -> Result<()> {
        let states = Self::own(states)?;
        self.0.iter().zip(&mut states.layers).try_for_each(|(layer, state)| layer.keep_source(cx, source, state, slot))
    }
}

/// Loads all layers of a decoder.
type Load = fn(&DecoderConfig, &Weights<'_>) -> std::result::Result<Box<dyn Layers>, LoadError>;

/// A family's functions that apply before any weights are loaded: the associated functions of a [`Layer`].
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) frame: Frame,
    pub(crate) name: fn(&DecoderConfig) -> &'static str,
    pub(crate) complete: fn(&mut DecoderConfig, &GivenKeys) -> std::result::Result<(), ConfigError>,
    pub(crate) validate: fn(&DecoderConfig) -> std::result::Result<(), ConfigError>,
    pub(crate) features: fn(&DecoderConfig) -> usize,
    pub(crate) layout: fn(&DecoderConfig) -> StateLayout,
    pub(crate) cached_numbers: fn(&DecoderConfig) -> usize,
    pub(crate) unpack: fn(&DecoderConfig, &mut BTreeMap<String, Entry>),
    pub(crate) tensors: fn(&DecoderConfig, usize, &mut TensorList),
    pub(crate) load: Load,
}

impl Family {
    /// The family whose layers are `L`.
    pub(crate) const fn of<L: Layer>() -> Self {
        Self {
            frame: L::FRAME,
            name: L::name,
            complete: L::complete,
            validate: L::validate,
            features: L::features,
            layout: L::layout,
            cached_numbers: L::cached_numbers,
            unpack: L::unpack,
            tensors: L::tensors,
            load: |config, weights| {
                let layer = |i| L::load(config, i, &weights.pp(&format!("layers.{i}")));
                let layers = (0..config.num_hidden_layers).map(layer).collect::<std::result::Result<_, _>>()?;
                Ok(Box::new(Stack::<L>(layers)))
            },
        }
    }
}
