//! The states of a pool's slots in the memory of the host, every slot of the same constant size, and what a step on the
//! CPU works in.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::block::Buffers;
use crate::compute::Compute;
use crate::config::DecoderConfig;
use crate::error::ModelError;
use crate::kernels::threads::Threads;
use crate::layout::StateLayout;
use crate::memory::{Denominators, LayerMemory, LayerState, StateType};
use crate::pool::{Pool, SlotStates, TextLength};

type Result<T> = std::result::Result<T, ModelError>;

/// The settings of a pool.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    /// Conversations that can be held at once.
    pub slots: usize,
    /// The threads that compute its steps.
    pub threads: Arc<Threads>,
    /// The number format of its states.
    pub state: StateType,
}

impl PoolOptions {
    /// So many slots with states in f32, computed by the process's threads.
    pub fn new(slots: usize) -> Self {
        Self { slots, threads: Arc::clone(Threads::global()), state: StateType::F32 }
    }
}

/// The buffers of a step. They belong to the pool, which makes one step at a time.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) cx: Compute,
    /// The residual stream: (rows, hidden)
    pub(crate) x: Vec<f32>,
    /// The rows whose logits are computed: (rows, hidden)
    pub(crate) last: Vec<f32>,
    pub(crate) positions: Vec<u64>,
    pub(crate) blocks: Buffers,
    pub(crate) angles: crate::attention::rotary::Angles,
}

/// Slots for conversations in the memory of the host.
pub type StatePool = Pool<HostStates>;

/// The states of a pool's slots in the memory of the host.
#[derive(Debug)]
pub struct HostStates {
    layers: Vec<LayerState>,
    workspace: Workspace,
    /// The most tokens a source can have; 0 for a decoder without an encoder.
    most_source: usize,
    layout: StateLayout,
    /// The greatest maximum that a head's keys can have: (layers, heads), or empty where heads keep no maximum.
    greatest: Vec<f32>,
}

impl Pool<HostStates> {
    /// A pool of empty texts. greatest: as [`crate::Decoder::greatest_maxima`].
    ///
    /// # Errors
    /// `slots` is 0, or the system does not have the memory for them.
    pub(crate) fn new(config: &DecoderConfig, greatest: Vec<f32>, options: PoolOptions) -> Result<Self> {
        let PoolOptions { slots, threads, state } = options;
        // A lower bound: a bf16 state keeps some numbers as f32.
        let least = match state {
            StateType::F32 => config.state_bytes(),
            StateType::Bf16 => config.state_bytes() / 2,
        };
        if slots == 0 || !slots.checked_mul(least).is_some_and(could_be_had) {
            let bound = format!("at least 1 and fit into memory at {} bytes each", config.state_bytes());
            return Err(ModelError::argument("slots", bound, slots));
        }
        let layout = config.state_layout();
        let layer = |_| LayerState {
            memory: LayerMemory::zeros(config, slots, state),
            conv: vec![0.0; slots * layout.taps * layout.channels],
            cross: LayerMemory::of_source(config, slots, state),
            denominators: Denominators::default(),
        };
        let layers = (0..config.num_hidden_layers).map(layer).collect();
        let workspace = Workspace {
            cx: Compute::new(threads),
            x: Vec::new(),
            last: Vec::new(),
            positions: Vec::new(),
            blocks: Buffers::default(),
            angles: crate::attention::rotary::Angles::new(config.head_dim, config.rope_theta),
        };
        let most_source = config.source().map_or(0, |source| source.max_positions);
        let states = HostStates { layers, workspace, most_source, layout, greatest };
        Ok(Self::of(states, slots, most_source > 0))
    }

    /// A copy of one layer of a slot: memory (heads, [`StateLayout::head`]) and the convolution's inputs.
    ///
    /// # Errors
    /// There is no such slot or layer, or a failed step left the slot's state incomplete.
    pub fn layer(&self, layer: usize, slot: usize) -> Result<(Tensor, Option<Tensor>)> {
        self.check_ready(slot)?;
        let Some(state) = self.states.layers.get(layer) else {
            return Err(ModelError::argument("layer", format!("below {}", self.states.layers.len()), layer));
        };
        let StateLayout { heads, head, taps, channels, .. } = self.states.layout;
        let mut numbers = Vec::with_capacity(heads * head);
        state.memory.read(slot, &mut numbers);
        let conv = (taps > 0).then(|| {
            Tensor::from_slice(&state.conv[slot * taps * channels..][..taps * channels], (taps, channels), &Device::Cpu)
        });
        Ok((Tensor::from_vec(numbers, (heads, head), &Device::Cpu)?, conv.transpose()?))
    }

    /// The layers in order, each for its own block, and the buffers of a step.
    pub(crate) fn parts(&mut self) -> (&mut [LayerState], &mut Workspace) {
        (&mut self.states.layers, &mut self.states.workspace)
    }

    /// Sets the positions of the step's rows, one for each of these slots.
    pub(crate) fn place(&mut self, slots: &[usize]) {
        let mut positions = std::mem::take(&mut self.states.workspace.positions);
        positions.clear();
        positions.extend(self.positions(slots));
        self.states.workspace.positions = positions;
    }
}

impl SlotStates for HostStates {
    fn layout(&self) -> StateLayout {
        self.layout
    }

    /// The system provides the memory of a cache only as it fills.
    fn slot_bytes(&self) -> usize {
        let of = |layer: &LayerState| layer.memory.bytes() + layer.cross.as_ref().map_or(0, LayerMemory::bytes);
        let memories: usize = self.layers.iter().map(of).sum();
        memories + self.layout.conv() * size_of::<f32>()
    }

    fn denominators(&self) -> Denominators {
        self.layers.iter().fold(Denominators::default(), |sum, LayerState { denominators: of, .. }| Denominators {
            all: sum.all + of.all,
            clamped: sum.clamped + of.clamped,
        })
    }

    fn clear(&mut self, slot: usize) -> Result<()> {
        let conv = self.layout.taps * self.layout.channels;
        for layer in &mut self.layers {
            layer.memory.reset(slot);
            layer.conv[slot * conv..][..conv].fill(0.0);
            if let Some(cross) = &mut layer.cross {
                cross.reset(slot);
            }
        }
        Ok(())
    }

    /// Memory (layers, heads, [`StateLayout::head`]), then the convolutions' inputs (layers, kernel - 1, 3 heads d), then
    /// for an encoder-decoder what cross attention keeps of the source (layers, heads, [`StateLayout::cross`]) and the
    /// number of its tokens.
    fn read(&self, slot: usize, length: TextLength) -> Result<Vec<f32>> {
        let mut numbers = Vec::with_capacity(self.layout.numbers());
        self.layers.iter().for_each(|layer| layer.memory.read(slot, &mut numbers));
        let conv = self.layout.taps * self.layout.channels;
        self.layers.iter().for_each(|layer| numbers.extend_from_slice(&layer.conv[slot * conv..][..conv]));
        let sources = self.layers.iter().filter_map(|layer| layer.cross.as_ref());
        sources.for_each(|cross| cross.read(slot, &mut numbers));
        if self.most_source > 0 {
            // At most 65,536: exact.
            numbers.push(length.source as f32);
        }
        Ok(numbers)
    }

    fn length_of(&self, numbers: &[f32], tokens: u64) -> Result<TextLength> {
        let (memories, rest) = numbers.split_at(self.layout.memory());
        let sources = &rest[self.layout.conv()..];
        let source = self.source_tokens(sources.last().copied(), tokens)?;
        self.check_counts(sources, source)?;
        let heads = memories.chunks_exact(self.layout.head).zip(&self.greatest);
        for (head, (maximum, &greatest)) in heads.map(|(head, most)| (head[head.len() - 1], most)).enumerate() {
            if maximum > greatest {
                let (layer, head) = (head / self.layout.heads, head % self.layout.heads);
                let parameter = format!("the maximum of layer {layer}, head {head}");
                return Err(ModelError::argument(parameter, format!("at most {greatest}"), maximum));
            }
        }
        Ok(TextLength { tokens, source })
    }

    fn write(&mut self, slot: usize, numbers: &[f32], length: TextLength) -> Result<()> {
        let (memories, rest) = numbers.split_at(self.layout.memory());
        let (tails, sources) = rest.split_at(self.layout.conv());
        let (memory, conv) = (self.layout.heads * self.layout.head, self.layout.taps * self.layout.channels);
        let cross = self.layout.heads * self.layout.cross;
        for (i, layer) in self.layers.iter_mut().enumerate() {
            layer.memory.write(slot, &memories[i * memory..][..memory], length.tokens - length.source);
            layer.conv[slot * conv..][..conv].copy_from_slice(&tails[i * conv..][..conv]);
            if let Some(memory) = &mut layer.cross {
                memory.write(slot, &sources[i * cross..][..cross], length.source);
            }
        }
        Ok(())
    }
}

impl HostStates {
    /// The number of tokens of the source, which an exported state ends with, in a text of `tokens` tokens.
    fn source_tokens(&self, found: Option<f32>, tokens: u64) -> Result<u64> {
        let Some(found) = found else { return Ok(0) };
        let most = (self.most_source as u64).min(tokens);
        // The cast saturates: only a whole number in range equals its own count.
        let (count, least) = (found as u64, u64::from(tokens > 0));
        if count as f32 != found || count < least || count > most {
            return Err(ModelError::argument("the length of the source", format!("{least} to {most} tokens"), found));
        }
        Ok(count)
    }

    /// Refuses sums of a source whose c, the total weight of its tokens, is not their number: floors are a share of it.
    fn check_counts(&self, sources: &[f32], tokens: u64) -> Result<()> {
        let sums = matches!(self.layers.first(), Some(LayerState { cross: Some(LayerMemory::Sums(_)), .. }));
        let heads = sources.chunks_exact(self.layout.cross.max(1)).filter(|_| sums).enumerate();
        // Counts up to 65,536 are exact.
        match heads.map(|(head, own)| (head, own[own.len() - 1])).find(|&(_, c)| c != tokens as f32) {
            None => Ok(()),
            Some((head, c)) => {
                let (layer, head) = (head / self.layout.heads, head % self.layout.heads);
                let parameter = format!("c of the source in layer {layer}, head {head}");
                Err(ModelError::argument(parameter, format!("its {tokens} tokens"), c))
            }
        }
    }
}

/// Whether the system would allocate so many bytes. A failed allocation ends the process, and zeroed memory is provided
/// only as it is used: so this tries first, and frees it again.
pub(crate) fn could_be_had(bytes: usize) -> bool {
    let mut probe = Vec::<u8>::new();
    let there = probe.try_reserve_exact(bytes).is_ok();
    // The compiler may remove an allocation that is not used.
    std::hint::black_box(probe.as_ptr());
    there
}
